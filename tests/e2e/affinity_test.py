"""Several servers behind the proxies of deploy/proxy, as shipped: sequences stick to their server.
Losing, draining or adding a server affects only the sequences that the documentation names."""

import collections
import contextlib
import csv
import json
import os
import pathlib
import shutil
import signal
import socket
import string
import subprocess
import sys
import tempfile
import threading
import unittest
import uuid

import grpc
from flashcore.v1 import attention_pb2 as pb

import harness
from harness import wait_until

Code = grpc.StatusCode
PROXIES = pathlib.Path(__file__).parents[2] / "deploy" / "proxy"
RELOAD_CLIENT = os.environ["FLASHCORE_RELOAD_CLIENT"]
SEQUENCES = 32
THREADS = 4

HAPROXY = shutil.which("haproxy", path=os.defpath + ":/usr/sbin")
NGINX = shutil.which("nginx", path=os.defpath + ":/usr/sbin")
if not (HAPROXY and NGINX):
    print("skipped: needs the packages haproxy and nginx")
    sys.exit(harness.NO_DEVICE)


def free_address():
    """An address without a listener, whose port the system does not give out for port 0."""
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        probe.bind(("127.0.0.1", 0))
        probe.listen()
        # Closing a connection on this end first leaves the port in TIME_WAIT, which reserves it.
        with socket.create_connection(probe.getsockname()):
            probe.accept()[0].close()
        return f"127.0.0.1:{probe.getsockname()[1]}"


def server(*flags):
    return harness.Server("--cpu_threads=1", "--kv_memory_bytes=67108864",
                          "--max_request_gflop=400", *flags)


class Proxy:
    """A proxy with its shipped configuration, on a free port. Use as a context manager."""

    def __init__(self, backends):
        self.address = free_address()
        self.variables = {"FLASHCORE_LISTEN": self.address}
        self.variables.update((f"FLASHCORE_{i}", target) for i, target in enumerate(backends))
        self.folder = tempfile.TemporaryDirectory()
        self.variables["FLASHCORE_ADMIN"] = os.path.join(self.folder.name, "admin")
        with open(pathlib.Path(self.folder.name, "log"), "wb") as log:
            self.process = subprocess.Popen(self.command(), env={**os.environ, **self.variables},
                                            stdout=log, stderr=log)
        with harness.open_channel(self.address) as channel:
            harness.stub(channel).GetServerInfo(
                pb.GetServerInfoRequest(), timeout=harness.PATIENCE, wait_for_ready=True)

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.process.terminate()
        self.process.wait(harness.PATIENCE)
        self.folder.cleanup()


class HaProxy(Proxy):
    def command(self):
        return [HAPROXY, "-W", "-f", PROXIES / "haproxy.cfg"]

    def say(self, command):
        with socket.socket(socket.AF_UNIX) as admin:
            admin.connect(self.variables["FLASHCORE_ADMIN"])
            admin.sendall(command.encode() + b"\n")
            return b"".join(iter(lambda: admin.recv(65536), b"")).decode()

    def take_out(self, number):
        self.say(f"disable server flashcore/flashcore-{number}")

    def status(self, number):
        rows = csv.DictReader(self.say("show stat").splitlines())
        return next(r["status"] for r in rows if r["svname"] == f"flashcore-{number}")


class Nginx(Proxy):
    def command(self):
        self.config = pathlib.Path(self.folder.name, "nginx.conf")
        template = string.Template((PROXIES / "nginx.conf.template").read_text())
        self.config.write_text(template.safe_substitute(self.variables))
        # Root's workers would change their user, and own what they create: no direct call would find it.
        user = " user root;" if os.getuid() == 0 else ""
        return [NGINX, "-p", self.folder.name, "-c", self.config, "-g", "daemon off;" + user]

    def take_out(self, number):
        target = self.variables[f"FLASHCORE_{number}"]
        text = self.config.read_text()
        self.config.write_text(text.replace(f"server {target} ", f"server {target} down "))
        before = self.workers()
        self.process.send_signal(signal.SIGHUP)
        wait_until(lambda: self.workers() - before, "nginx reloads")

    def workers(self):
        """The process ids of nginx's workers."""
        pid = self.process.pid
        return set(pathlib.Path(f"/proc/{pid}/task/{pid}/children").read_text().split())


class Sequence:
    """A sequence of a client that does not reload, with the status codes of its steps."""

    def __init__(self, stub):
        self.stub = stub
        self.metadata = [("x-flashcore-sequence", uuid.uuid4().hex)]
        self.length = 0
        self.codes = []
        self.id = harness.create(stub, self.metadata).sequence_id

    def step(self):
        """Appends a row and records the status code."""
        request = harness.zeros_request(1, 1, sequence=self.id)
        request.spans[0].expected_length = self.length
        try:
            reply = self.stub.Attend(request, metadata=self.metadata, timeout=harness.PATIENCE)
            self.length += 1
            assert list(reply.sequence_lengths) == [self.length]
            self.codes.append(Code.OK)
        except grpc.RpcError as error:
            self.codes.append(error.code())

    def ends_with(self, code):
        return self.codes[-1:] == [code]

    def is_on(self, server_stub):
        """Whether the server of `stub` has it, asked without the proxy."""
        try:
            server_stub.GetSequence(pb.GetSequenceRequest(sequence_id=self.id),
                                    timeout=harness.PATIENCE)
            return True
        except grpc.RpcError as error:
            if error.code() not in (Code.NOT_FOUND, Code.UNAVAILABLE):
                raise
            return False


@contextlib.contextmanager
def stepping(sequences):
    """Steps the sequences from several threads until the block ends."""
    stop = threading.Event()

    def run(share):
        while not stop.is_set():
            for sequence in share:
                sequence.step()
            stop.wait(0.01)

    threads = [threading.Thread(target=run, args=(sequences[i::THREADS],)) for i in range(THREADS)]
    for thread in threads:
        thread.start()
    try:
        yield
    finally:
        stop.set()
        for thread in threads:
            thread.join()


@contextlib.contextmanager
def reloading_client(address):
    """A C++ client that reloads its sequences. Its report is in the dict after the block."""
    process = subprocess.Popen([RELOAD_CLIENT, address], stdin=subprocess.PIPE,
                               stdout=subprocess.PIPE, text=True)
    said = {}
    try:
        yield said
    finally:
        said.update(json.loads(process.communicate(timeout=harness.PATIENCE)[0]))


@harness.stress
class AffinityTest(unittest.TestCase):
    def setUp(self):
        self.stack = contextlib.ExitStack()
        self.addCleanup(self.stack.close)
        self.servers = [self.stack.enter_context(server()) for _ in range(3)]
        self.spare = free_address()

    def of(self, number, sequences):
        """The sequences that are on that server."""
        with self.servers[number].channel() as channel:
            stub = harness.stub(channel)
            return [s for s in sequences if s.is_on(stub)]

    def during(self, change, address, sequences, lost=None):
        """Makes the change under load, until the lost sequences (None: any) are not found and every
        sequence has taken some steps more. Returns how often the C++ client reloaded; no call failed."""
        for sequence in sequences:
            sequence.codes.clear()
        with reloading_client(address) as said, stepping(sequences):
            self.wait_for_steps(sequences)
            change()
            if lost is None:
                wait_until(lambda: any(s.ends_with(Code.NOT_FOUND) for s in sequences), "one is lost")
            else:
                self.wait_for_loss(lost)
            self.wait_for_steps(sequences)
        self.assertEqual(said["failures"], 0, said)
        self.assertGreater(said["steps"], 100)
        return said["reloads"]

    @staticmethod
    def wait_for_steps(sequences, steps=30):
        done = {sequence: len(sequence.codes) for sequence in sequences}
        wait_until(lambda: all(len(s.codes) >= n + steps for s, n in done.items()), "no steps")

    @staticmethod
    def wait_for_loss(lost):
        wait_until(lambda: all(s.ends_with(Code.NOT_FOUND) for s in lost),
                   lambda: f"NOT_FOUND: {[s.codes[-3:] for s in lost]}")

    def assert_lost(self, lost, kept):
        """Lost sequences ended with NOT_FOUND, maybe after UNAVAILABLE; the others had no error."""
        self.assertTrue(lost)
        self.assertTrue(kept)
        for sequence in kept:
            self.assertEqual(set(sequence.codes), {Code.OK})
        for sequence in lost:
            answered = sequence.codes.count(Code.OK)
            self.assertLessEqual(set(sequence.codes[:answered]), {Code.OK})
            self.assertLessEqual(set(sequence.codes[answered:]), {Code.UNAVAILABLE, Code.NOT_FOUND})
            self.assertEqual(sequence.codes[-1], Code.NOT_FOUND)

    def check_sticking(self, stub):
        # A key goes to any of the servers: with few keys, one server may have none.
        sequences = [Sequence(stub) for _ in range(SEQUENCES)]
        while not all(self.of(number, sequences) for number in range(3)):
            self.assertLess(len(sequences), 8 * SEQUENCES, "a server gets no sequence")
            sequences.append(Sequence(stub))
        for _ in range(3):
            for sequence in sequences:
                sequence.step()
        self.assertEqual(collections.Counter(c for s in sequences for c in s.codes),
                         {Code.OK: 3 * len(sequences)})
        for sequence in sequences:
            stub.ForkSequence(pb.ForkSequenceRequest(sequence_id=sequence.id),
                              metadata=sequence.metadata)
        held = [s.metric("flashcore_sequences") for s in self.servers]
        self.assertEqual(sum(held), 2 * len(sequences))
        # Calls without a key go to all servers.
        for _ in range(60):
            stub.Attend(harness.small_request(), timeout=harness.PATIENCE)
        attends = 'grpc_server_started_total{grpc_type="unary",' \
            'grpc_service="flashcore.v1.AttentionService",grpc_method="Attend"}'
        for number, backend in enumerate(self.servers):
            own = 3 * len(self.of(number, sequences))
            self.assertGreater(backend.metric(attends), own, f"server {number}")
        return sequences

    def check(self, kind):
        proxy = self.stack.enter_context(kind([s.target for s in self.servers] + [self.spare]))
        address = proxy.address
        stub = harness.stub(self.stack.enter_context(harness.open_channel(address)))
        sequences = self.check_sticking(stub)

        lost = self.of(0, sequences)
        kept = [s for s in sequences if s not in lost]
        reloads = self.during(self.servers[0].process.kill, address, sequences, lost)
        self.assert_lost(lost, kept)
        self.assertGreater(reloads, 0)

        # A drain answers requests in flight. Then the sequences of that server are lost too.
        sequences, lost = kept, self.of(1, kept)
        kept = [s for s in sequences if s not in lost]

        def drain():
            proxy.take_out(1)
            self.wait_for_loss(lost)
            self.servers[1].process.send_signal(signal.SIGTERM)

        reloads = self.during(drain, address, sequences, lost)
        self.assertEqual(self.servers[1].process.wait(harness.PATIENCE), 0)
        self.assert_lost(lost, kept)
        self.assertGreater(reloads, 0)

        # A new server takes over some keys, but does not have their sequences.
        sequences = kept + [Sequence(stub) for _ in range(SEQUENCES)]

        def add():
            self.servers.append(self.stack.enter_context(server(f"--listen={self.spare}")))

        reloads = self.during(add, address, sequences)
        # A health check that fails under load moves keys back, to where their sequences are.
        moved = [s for s in sequences if Code.NOT_FOUND in s.codes]
        self.assertTrue(moved)
        self.assertLess(len(moved), len(sequences))
        for sequence in sequences:
            allowed = {Code.OK, Code.UNAVAILABLE, Code.NOT_FOUND} if sequence in moved else {Code.OK}
            self.assertLessEqual(set(sequence.codes), allowed)
        self.assertGreater(reloads, 0)

    def test_haproxy(self):
        self.check(HaProxy)

    def test_haproxy_sees_that_a_server_drains(self):
        rng = harness.numpy_rng()
        big = harness.request(*(harness.random_tensor(rng, 8192, heads, 128) for heads in (8, 1, 1)))
        with HaProxy([s.target for s in self.servers] + [self.spare]) as proxy, \
                self.servers[0].channel() as channel:
            wait_until(lambda: proxy.status(3) == "DOWN", "every health check has run")
            self.assertEqual([proxy.status(i) for i in range(3)], ["UP"] * 3)
            busy = [harness.stub(channel).Attend.future(big) for _ in range(4)]  # for seconds
            wait_until(lambda: self.servers[0].metric("flashcore_inflight_requests") >= len(busy) / 2,
                       "no requests")
            self.servers[0].process.send_signal(signal.SIGTERM)

            def out():
                self.assertIsNone(self.servers[0].process.poll(), "it is no longer draining")
                return proxy.status(0) == "DOWN"

            wait_until(out, "HAProxy takes it out")
            self.assertEqual([proxy.status(i) for i in (1, 2)], ["UP"] * 2)

    def test_nginx(self):
        self.check(Nginx)


if __name__ == "__main__":
    harness.main()
