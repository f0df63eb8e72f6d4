"""Runs a real flashcore-server process and calls it through the generated client.

Run by ctest, which sets FLASHCORE_SERVER and FLASHCORE_CLI to the binaries, FLASHCORE_TEST_DEVICE to
what servers compute on (cpu or cuda:N; default cpu), and puts the generated modules on PYTHONPATH.
Where that GPU is missing, a test that imports this exits with NO_DEVICE and says why.
FLASHCORE_FAKE_GPU is set if the server's GPUs are those of tests/device/fake_gpu.cc.
"""

import contextlib
import ctypes
import functools
import json
import os
import pathlib
import re
import signal
import socket
import subprocess
import sys
import tempfile
import time
import unittest
import urllib.error
import urllib.parse
import urllib.request

import grpc
import numpy as np
from flashcore.v1 import attention_pb2 as pb
from flashcore.v1 import attention_pb2_grpc

from raw_http2 import ATTEND, SilentClient

SERVER = os.environ["FLASHCORE_SERVER"]
CLI = os.environ["FLASHCORE_CLI"]
DEVICE = os.environ.get("FLASHCORE_TEST_DEVICE", "cpu")
ON_GPU = DEVICE != "cpu"
ON_FAKE_GPU = "FLASHCORE_FAKE_GPU" in os.environ
# A server that loses its device on SIGUSR1.
LOSING_SERVER = SERVER if ON_FAKE_GPU else f"{SERVER}-losing-gpu"
SANITIZED = os.environ.get("FLASHCORE_SANITIZER", "") != ""  # memory is then the sanitizer's, too
MIB = 1 << 20
# Labels that a test may leave out.
SUMMED = {"device", "rpc", "transport", "outcome", "reason", "grpc_type", "grpc_code", "grpc_service",
          "grpc_method"}
LABEL = re.compile(r'\w+="[^"]*"')
COMPUTED = 'flashcore_request_phase_seconds_count{phase="kernel"}'  # counts them
NO_DEVICE = 77  # the exit status that ctest takes for skipped
PATIENCE = 60  # seconds that a condition may take to come true; far more than it needs
SOME_UID = 12345  # of no user

# The seed of every random choice here; processes started here inherit it.
SEED = int(os.environ.setdefault("FLASHCORE_TEST_SEED", "1"))
print(f"FLASHCORE_TEST_SEED={SEED}", flush=True)

# Flags that keep requests in flight for a while. On a CPU, one thread computes large requests slowly. A
# GPU is too fast for that, so its requests wait a second in the queue.
SLOW = ("--max_queue_delay_us=1000000",) if ON_GPU else ("--cpu_threads=1",)
# Flags of a server whose lane held_lane occupies.
HELD = SLOW if ON_GPU else (*SLOW, "--max_request_gflop=8000", "--max_launch_ms=1")
HELD_BYTES = 0 if ON_GPU else 52 * MIB  # of staging memory that held_lane takes


def stress(test):
    """Decorates a test method or class that is about time, load, memory readings or other programs: it is
    left to `tests/run.sh --stress`."""
    test.is_stress = True
    return test


needs_root = unittest.skipUnless(os.getuid() == 0, "only root can be another user")


class _Loader(unittest.TestLoader):
    def __init__(self, of_stress):
        super().__init__()
        self._of_stress = of_stress

    def getTestCaseNames(self, testCaseClass):
        whole = getattr(testCaseClass, "is_stress", False)
        return [name for name in super().getTestCaseNames(testCaseClass)
                if (whole or getattr(getattr(testCaseClass, name), "is_stress", False)) ==
                self._of_stress]


class _TimedResult(unittest.TextTestResult):
    """Prints one line for each test, with its time."""

    def startTest(self, test):
        self._began = time.monotonic()
        super().startTest(test)

    def addSkip(self, test, reason):
        super().addSkip(test, reason)
        print(f"[ skip ] {test.id()}: {reason}", flush=True)

    def stopTest(self, test):
        super().stopTest(test)
        print(f"[ ran ] {test.id()} ({1e3 * (time.monotonic() - self._began):.0f} ms)", flush=True)


def main():
    """Runs the script's tests: those of the gate, or with --stress those marked @stress. Other arguments are
    unittest's."""
    of_stress = "--stress" in sys.argv
    unittest.main(argv=[arg for arg in sys.argv if arg != "--stress"], testLoader=_Loader(of_stress),
                  testRunner=unittest.TextTestRunner(resultclass=_TimedResult, verbosity=0))


def why_no_gpu(ordinal):
    """The reason why GPU `ordinal` cannot be used, from the driver. Empty if it can."""
    try:
        driver = ctypes.CDLL("libcuda.so.1")
    except OSError as error:
        return str(error)
    count = ctypes.c_int()
    status = driver.cuInit(0) or driver.cuDeviceGetCount(ctypes.byref(count))
    if status != 0:
        return f"the driver answers with error {status}"
    return "" if ordinal < count.value else f"the driver has {count.value} GPUs"


def device_flags():
    """Flags of every server. A test takes part of the GPU's memory; the default is nearly all."""
    return [f"--device={DEVICE}", *([f"--kv_memory_bytes={2048 * MIB}"] if ON_GPU else [])]


if ON_GPU and not ON_FAKE_GPU and (_why := why_no_gpu(int(DEVICE.removeprefix("cuda:")))):
    print(f"skipped: no {DEVICE}: {_why}")
    sys.exit(NO_DEVICE)


def by_address(*hosts):
    """The flag of a server to which callers from each of these addresses, such as "127.0.0.2" or "unix", are
    a client of their own, and not the user who runs them."""
    return "--trusted_proxies=" + ",".join(f"host:{host}" for host in hosts)


class Server:
    """A server on DEVICE, on free ports and a Unix socket, and if `local` on a local socket in a folder that
    every user may enter. Use as a context manager."""

    def __init__(self, *flags, local=False, env=None, program=SERVER):
        self.folder = tempfile.TemporaryDirectory()
        self.socket = os.path.join(self.folder.name, "s")
        self.local = os.path.join(self.folder.name, "local")
        if local:
            os.chmod(self.folder.name, 0o755)
            flags = (f"--local_listen={self.local}", *flags)
        self.log_path = pathlib.Path(self.folder.name, "log")
        self._log = open(self.log_path, "wb")
        self.process = subprocess.Popen(
            [program, "--listen=127.0.0.1:0", f"--listen=unix:{self.socket}",
             "--metrics_listen=127.0.0.1:0", "--log_format=json", *device_flags(), *flags],
            stderr=self._log, stdout=self._log, env={**os.environ, **(env or {})})
        self.addresses = self.wait_for_record("serving")["addresses"].split(",")
        self.over_grpc = [address for address in self.addresses if not address.startswith("local:")]
        self.target = self.addresses[0]
        self.port = int(self.target.rsplit(":", 1)[1])
        self.metrics_url = f"http://{self.wait_for_record('metrics')['address']}/metrics"

    def __enter__(self):
        return self

    def __exit__(self, *_):
        if self.process.poll() is None:
            self.process.kill()
            self.process.wait()
        self._log.close()
        self.folder.cleanup()

    def records(self):
        """The log so far, one dict per record. Fails on a line that is not JSON."""
        return [json.loads(line) for line in self.log_path.read_text().splitlines()]

    def wait_for_record(self, message):
        end = time.monotonic() + PATIENCE
        while time.monotonic() < end:
            text = self.log_path.read_text()
            for line in text[:text.rfind("\n") + 1].splitlines():
                record = json.loads(line)
                if record["msg"] == message:
                    return record
            if self.process.poll() is not None:
                break
            time.sleep(0.01)
        raise AssertionError(f"no record '{message}' in the log:\n{self.log_path.read_text()}")

    def stop(self, sig=signal.SIGTERM, seconds=60):
        """Sends the signal; returns the exit status."""
        self.process.send_signal(sig)
        return self.process.wait(seconds)

    def channel(self, target=None):
        return open_channel(target or self.target)

    @contextlib.contextmanager
    def load(self, *flags):
        """A `flashcore bench` that goes on until the context ends. Gives its process."""
        process = subprocess.Popen([CLI, "bench", f"--target={self.target}", "--duration=1h", *flags],
                                   stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        try:
            yield process
        finally:
            process.kill()
            process.wait()

    @contextlib.contextmanager
    def stopped(self):
        """The server does nothing until the context ends."""
        self.process.send_signal(signal.SIGSTOP)
        tasks = self.proc / "task"
        wait_until(lambda: all((task / "stat").read_text().rpartition(")")[2].split()[0] == "T"
                               for task in tasks.iterdir()), "the server stops")
        try:
            yield
        finally:
            self.process.send_signal(signal.SIGCONT)

    @property
    def proc(self):
        return pathlib.Path("/proc", str(self.process.pid))

    def open_files(self):
        return len(list((self.proc / "fd").iterdir()))

    def threads(self):
        return len(list((self.proc / "task").iterdir()))

    def status_bytes(self, field):
        """VmRSS, VmHWM, ... of the process, in bytes."""
        for line in (self.proc / "status").read_text().splitlines():
            if line.startswith(field + ":"):
                return int(line.split()[1]) * 1024
        raise KeyError(field)

    def metrics_text(self):
        with urllib.request.urlopen(self.metrics_url, timeout=10) as response:
            return response.read().decode()

    def probe(self, path):
        """The HTTP status of a path beside /metrics."""
        try:
            with urllib.request.urlopen(urllib.parse.urljoin(self.metrics_url, path),
                                        timeout=10) as response:
                return response.status
        except urllib.error.HTTPError as error:
            return error.code

    def metric(self, series):
        """The value of one series, with its labels in any order. Without some of the labels SUMMED: the sum
        over them."""
        wanted_name, wanted_labels = parse_series(series)
        values = []
        for line in self.metrics_text().splitlines():
            if not line.startswith(wanted_name):
                continue  # most of thousands
            name, labels = parse_series(line.rpartition(" ")[0])
            summed = labels - wanted_labels
            if (name == wanted_name and wanted_labels <= labels
                    and all(label.partition("=")[0] in SUMMED for label in summed)):
                values.append(float(line.rpartition(" ")[2]))
        if not values:
            raise KeyError(series)
        return sum(values)


def refusal(*flags, program=(SERVER,), **options):
    """(exit status, output) of a server that does not start."""
    done = subprocess.run([*program, "--listen=127.0.0.1:0", "--metrics_listen=", *flags], text=True,
                          stdout=subprocess.PIPE, stderr=subprocess.STDOUT, timeout=PATIENCE, **options)
    return done.returncode, done.stdout


@contextlib.contextmanager
def program(begin):
    """A script that runs the server's program behind `begin`, such as "ulimit -n 1024; exec"."""
    with in_temporary_folder() as folder:
        script = folder / "server"
        script.write_text(f'#!/bin/sh\n{begin} "{SERVER}" "$@"\n')
        script.chmod(0o755)
        yield str(script)


def open_server(*flags, **options):
    """A server on all transports, to which every user may connect."""
    flags = ("--unix_socket_mode=0666", *(["--listen=[::1]:0"] if has_ipv6() else []), *flags)
    return Server(*flags, local=True, **options)


@contextlib.contextmanager
def another_user():
    """Connections made in it are those of SOME_UID."""
    os.seteuid(SOME_UID)
    try:
        yield
    finally:
        os.seteuid(0)


def has_ipv6():
    try:
        with socket.create_server(("::1", 0), family=socket.AF_INET6):
            return True
    except OSError:
        return False


def kernel_tells_of_tcp():
    """Whether it lets a process look for sockets; a sandbox may forbid it."""
    try:
        netlink_sock_diag = 4
        socket.socket(socket.AF_NETLINK, socket.SOCK_RAW, netlink_sock_diag).close()
        return True
    except OSError:
        return False


def refused(reason, door=""):
    """The series of connections that were refused or cut off for that reason; of the local socket with the
    door "local_"."""
    return f'flashcore_{door}connections_refused_total{{reason="{reason}"}}'


def parse_series(series):
    """The name and the set of labels of a series in Prometheus's text format."""
    name, _, labels = series.partition("{")
    return name, set(LABEL.findall(labels))


def wait_until(condition, what):
    """Waits until condition() is true; fails with `what`, or what() if it can be called, if it does not
    become so. Returns the value."""
    end = time.monotonic() + PATIENCE
    while True:
        value = condition()
        if value:
            return value
        if time.monotonic() > end:
            raise AssertionError(f"not within {PATIENCE} s: {what() if callable(what) else what}")
        time.sleep(0.01)


def published(pattern, document="server/README.md"):
    """The numbers that the regular expression's groups find in a document, whose line breaks are spaces."""
    text = " ".join((pathlib.Path(__file__).parents[2] / document).read_text().split())
    found = re.findall(pattern, text)
    if len(found) != 1:
        raise AssertionError(f"{document} has {len(found)} places like {pattern!r}, not 1")
    return [float(number) for number in (found[0] if isinstance(found[0], tuple) else found)]


def ways(info, head_dim):
    """dtype, kv_dtype and precision of the kernels that the server has, in the order of the contract."""
    numbers = {(kernel.dtype, kernel.kv_dtype, kernel.precision) for kernel in info.kernels
               if kernel.head_dim == head_dim}
    return [(pb.DType.Name(dtype).removeprefix("DTYPE_").lower(),
             pb.KvDType.Name(kv_dtype).removeprefix("KV_DTYPE_").lower(),
             pb.Precision.Name(precision).removeprefix("PRECISION_").lower())
            for dtype, kv_dtype, precision in sorted(numbers)]


def numpy_rng():
    return np.random.default_rng(SEED)


def free_port():
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        return taken.getsockname()[1]


def open_channel(target):
    """A connection of its own, for messages of any size."""
    return grpc.insecure_channel(target, options=[
        ("grpc.max_receive_message_length", -1), ("grpc.max_send_message_length", -1),
        ("grpc.use_local_subchannel_pool", 1), ("grpc.enable_http_proxy", 0)])


def stub(channel):
    return attention_pb2_grpc.AttentionServiceStub(channel)


class ServerTest(unittest.TestCase):
    """Tests that share a server with these flags, a channel and its stub, and random numbers."""

    flags = ()

    @classmethod
    def setUpClass(cls):
        cls.server = cls.enterClassContext(Server(*cls.flags))
        cls.channel = cls.enterClassContext(cls.server.channel())
        cls.stub = stub(cls.channel)
        cls.rng = numpy_rng()


def failure(code, call, *args, **options):
    """The error of an RPC, which must have this code."""
    try:
        call(*args, **options)
    except grpc.RpcError as error:
        if error.code() == code:
            return error
        raise AssertionError(f"{error.code()}, not {code}: {error.details()}") from error
    raise AssertionError(f"OK, not {code}")


def create_request(**fields):
    """A CreateSequenceRequest of one layer, one KV head and head_dim 32, but for `fields`."""
    return pb.CreateSequenceRequest(**{
        "num_layers": 1, "num_kv_heads": 1, "head_dim": 32, "dtype": pb.DTYPE_FLOAT16, **fields})


def create(stub, metadata=(), **fields):
    """The CreateSequenceResponse."""
    return stub.CreateSequence(create_request(**fields), metadata=metadata, timeout=PATIENCE)


def chunk(sequence, rows, row_bytes=64, **fields):
    """A LoadSequenceRequest of zeros; a row of K, or of V, has `row_bytes` bytes."""
    data = bytes(rows * row_bytes)
    return pb.LoadSequenceRequest(sequence_id=sequence, layout=pb.LAYOUT_NHD, rows=rows, key=data, value=data,
                                  **fields)


def varint(number):
    """A varint of protobuf."""
    low, rest = number & 127, number >> 7
    return bytes([low | 128]) + varint(rest) if rest else bytes([low])


def varint_field(number, value):
    return varint(number << 3) + varint(value)


def bytes_field(number, payload):
    return varint(number << 3 | 2) + varint(len(payload)) + payload


def assert_serves(*channels):
    for channel in channels:
        stub(channel).Attend(small_request(), timeout=PATIENCE)


def watch_health(channel):
    """Yields the health states of the whole server, as text."""
    states = {1: "SERVING", 2: "NOT_SERVING"}
    watch = channel.unary_stream("/grpc.health.v1.Health/Watch")
    return (states[reply[1]] for reply in watch(b""))


def cli(*args, check=True):
    """Runs the command line. Returns the finished process, its output as text."""
    done = subprocess.run([CLI, *map(str, args)], capture_output=True, text=True, timeout=300)
    if check and done.returncode != 0:
        raise AssertionError(f"{args} exited {done.returncode}:\n{done.stdout}\n{done.stderr}")
    return done


def run_together(commands, **options):
    """Runs the commands at the same time. Returns their ends, in order, their output as text."""
    with contextlib.ExitStack() as stack:
        processes = []
        for command in commands:
            processes.append(stack.enter_context(subprocess.Popen(
                [str(part) for part in command], text=True, stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE, stderr=subprocess.PIPE, **options)))
            stack.callback(processes[-1].kill)
        outputs = [process.communicate(timeout=300) for process in processes]
        return [subprocess.CompletedProcess(process.args, process.returncode, *output)
                for process, output in zip(processes, outputs)]


def bench(*args, enough=lambda report: report["ok"] > 0):
    """The report of a `flashcore bench`: its first one with enough(report)."""
    command = [CLI, "bench", "--duration=200ms", "--warmup=0s", "--json", "--rounds_from_stdin",
               *map(str, args)]
    with tempfile.TemporaryFile("w+") as errors, \
            subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=errors,
                             text=True) as process:
        def next_report():
            line = process.stdout.readline()
            if not line:
                errors.seek(0)
                raise AssertionError(f"{command} exited {process.wait()}:\n{errors.read()}")
            return json.loads(line)

        def measure():
            print(file=process.stdin, flush=True)
            reports.append(next_report())
            return enough(reports[-1])

        reports = []
        try:
            next_report()  # it is ready
            wait_until(measure, lambda: f"enough from {command}")
            process.communicate(timeout=PATIENCE)
        finally:
            process.kill()
        if process.returncode != 0 and len(reports) == 1:  # it fails if nothing was done in a round
            errors.seek(0)
            raise AssertionError(f"{command} exited {process.returncode}:\n{errors.read()}")
    return reports[-1]


def random_tensor(rng, *shape):
    return rng.standard_normal(shape).astype(np.float16)


def request(q, k, v, request_id="", **fields):
    """An AttendRequest of one FP16 span; q, k, v are [rows, heads, head_dim]."""
    return pb.AttendRequest(
        request_id=request_id,
        spans=[pb.Span(query_rows=q.shape[0], kv_rows=k.shape[0])],
        dtype=pb.DTYPE_FLOAT16, num_heads=q.shape[1], num_kv_heads=k.shape[1],
        head_dim=q.shape[2], layout=pb.LAYOUT_NHD,
        query=q.tobytes(), key=k.tobytes(), value=v.tobytes(), **fields)


def zeros_request(query_rows, kv_rows, heads=1, head_dim=32, kv_heads=None, sequence=b"", **fields):
    """An AttendRequest of one FP16 span of zeros. `sequence`: the id of the one that it appends to."""
    kv_heads = kv_heads or heads
    kv = bytes(2 * kv_rows * kv_heads * head_dim)
    return pb.AttendRequest(
        spans=[pb.Span(query_rows=query_rows, kv_rows=kv_rows, sequence_id=sequence)],
        dtype=pb.DTYPE_FLOAT16, num_heads=heads, num_kv_heads=kv_heads, head_dim=head_dim,
        layout=pb.LAYOUT_NHD, query=bytes(2 * query_rows * heads * head_dim), key=kv, value=kv, **fields)


def small_request(request_id=""):
    return zeros_request(1, 1, request_id=request_id)


def mission_request(rng, request_id=""):
    """B=1 H=8 S=512 D=64."""
    return request(*(random_tensor(rng, 512, 8, 64) for _ in range(3)), request_id)


@contextlib.contextmanager
def held_lane(server, channel, metadata=()):
    """Occupies the lane of a server with the flags HELD until the context ends, with a call that it
    gives: what the same client then sends waits in the queue. A GPU is not occupied; there requests
    wait for a second."""
    if ON_GPU:
        yield None
        return
    taken = 'flashcore_request_phase_seconds_count{phase="queue"}'
    before = server.metric(taken)
    work = zeros_request(192 * 1024, 192 * 1024)  # for a minute, unless it is cancelled
    call = stub(channel).Attend.future(work, metadata=metadata)
    try:
        wait_until(lambda: server.metric(taken) > before or call.done(), "the lane is not held")
        if call.done():
            raise AssertionError(f"the lane is not held: {call.details()}")
        yield call
    finally:
        call.cancel()


@functools.cache
def window_request():
    """A serialized request of nearly one window of HTTP/2: 84 KiB of staging memory, of which its reply keeps
    20 KiB."""
    rng = numpy_rng()
    return request(*(random_tensor(rng, 150, 1, 64) for _ in range(3)), "r").SerializeToString()


class HeldStaging:
    """All staging memory of a server, with FLAGS among its flags, is in unread replies until `release`:
    requests of window_request's size or more wait for it, however long that takes. Each reply is another
    client's, which has too little to give it back. Use as a context manager."""

    REPLY, REQUEST, STAGING = 20 << 10, 84 << 10, MIB
    REPLIES = (STAGING - REQUEST) // REPLY + 1
    HOSTS = tuple(f"127.0.1.{number + 1}" for number in range(REPLIES))
    FLAGS = (f"--staging_memory_bytes={STAGING}", f"--client_staging_bytes={STAGING}",
             f"--max_message_bytes={MIB}", "--staging_wait_ms=3600000", "--reply_timeout_s=3600",
             by_address(*HOSTS))

    def __init__(self, server):
        self._clients = [SilentClient(server.target, host=host) for host in self.HOSTS]
        before = server.metric(COMPUTED)
        for client in self._clients:
            client.call(ATTEND, window_request())

        def is_held():  # by replies alone; a GPU's memory is one block: its last piece may be too small
            held = server.metric(COMPUTED) - before
            return (held + server.metric("flashcore_staging_waiting_requests") == self.REPLIES and
                    server.metric('flashcore_staging_bytes{state="used"}') == held * self.REPLY)

        wait_until(is_held, "replies hold the memory")

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.release()

    def release(self):
        """Ends the clients like killed processes. May be called again."""
        for client in self._clients:
            client.connection.close()


def reference(q, k, v, causal=False):
    """Attention in float64: (O, LSE) for q, k, v of [rows, heads, head_dim]."""
    q, k, v = (x.astype(np.float64) for x in (q, k, v))
    group = q.shape[1] // k.shape[1]
    k, v = (np.repeat(x, group, axis=1) for x in (k, v))
    scores = np.einsum("ihd,jhd->hij", q, k) / np.sqrt(q.shape[2])
    if causal:
        rows, columns = scores.shape[1:]
        hidden = np.arange(columns)[None, :] > np.arange(rows)[:, None] + columns - rows
        scores = np.where(hidden, -np.inf, scores)
    top = scores.max(axis=-1, keepdims=True)
    weights = np.exp(scores - top)
    total = weights.sum(axis=-1, keepdims=True)
    output = np.einsum("hij,jhd->ihd", weights / total, v)
    return output, (top + np.log(total))[:, :, 0].T


@contextlib.contextmanager
def in_temporary_folder():
    with tempfile.TemporaryDirectory() as folder:
        yield pathlib.Path(folder)
