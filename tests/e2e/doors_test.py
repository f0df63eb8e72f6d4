"""Connections: who takes many leaves room for others, at every door. Other users are attackers here."""

import contextlib
import os
import resource
import subprocess
import sys
import threading
import time
import types
import unittest

from flashcore.v1 import local_pb2 as local

import harness
from harness import pb
from honest_client import HonestClient, assert_unhurt
from local_raw_client import VERSION, RawClient
from raw_http2 import PREFACE, SETTINGS, frame
from users_test import kernel_tells_of_tcp, open_server

USERS = (20001, 20002, 20003, 20004, 20005)  # nobody's
HTTP2 = PREFACE + frame(SETTINGS, 0, 0, b"")
HELLO = local.LocalRequest(id=1, hello=local.LocalHello(
    min_version=VERSION, max_version=VERSION)).SerializeToString()
HELLO = len(HELLO).to_bytes(4, "little") + HELLO

# Run by another user: holds connections to a target that have sent the first bytes and do nothing else.
# With a source, over TCP and from there. Takes new ones for those that are closed, if it is told to.
IDLER = """
import select, socket, sys
target, source, count, refill = sys.argv[1], sys.argv[2], int(sys.argv[3]), sys.argv[4] == "refill"
first_bytes = bytes.fromhex(sys.argv[5])
def connect():
    try:
        if source:
            host, port = target.rsplit(":", 1)
            one = socket.create_connection((host, int(port)), source_address=(source, 0))
        else:
            one = socket.socket(socket.AF_UNIX)
            one.connect(target)
        one.sendall(first_bytes)
        if one.recv(65536):
            return one
    except OSError:
        pass
held = [connect() for _ in range(count)]
print(sum(one is not None for one in held), flush=True)
while not select.select([sys.stdin], [], [], 1)[0]:
    for i in range(count if refill else 0):
        if held[i] is not None:
            closed = select.poll()
            closed.register(held[i], select.POLLRDHUP)
            if not closed.poll(0):
                continue
            held[i].close()
        held[i] = connect()
"""


@contextlib.contextmanager
def idlers(targets, users, count, refill=False):
    """`count` idle connections of each of the users at each target. Yields how many each has, in all."""
    with contextlib.ExitStack() as stack:
        processes = []
        for number, user in enumerate(users):
            for target in targets:
                is_local = target.startswith("local:")
                is_tcp = not target.startswith(("local:", "unix:"))
                processes.append(stack.enter_context(subprocess.Popen(
                    [sys.executable, "-c", IDLER, target.removeprefix("local:").removeprefix("unix:"),
                     f"127.0.0.{number + 3}" if is_tcp else "", str(count),
                     "refill" if refill else "", (HELLO if is_local else HTTP2).hex()],
                    user=user, cwd="/", stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)))
                stack.callback(processes[-1].kill)
        yield [int(process.stdout.readline()) for process in processes]


@unittest.skipUnless(os.getuid() == 0, "only root can be another user")
@unittest.skipUnless(kernel_tells_of_tcp(), "the kernel does not tell whose a TCP connection is")
class DoorsTest(unittest.TestCase):
    @classmethod
    def setUpClass(cls):
        limits = resource.getrlimit(resource.RLIMIT_NOFILE)
        cls.addClassCleanup(resource.setrlimit, resource.RLIMIT_NOFILE, limits)
        resource.setrlimit(resource.RLIMIT_NOFILE, (min(limits[1], 8192), limits[1]))

    def refused(self, server, transport=""):
        reasons = ("max_connections", "max_connections_per_host", "no_files", "silent", "made_room")
        return {reason: count for reason in reasons if (count := server.metric(
            f'flashcore_{transport}connections_refused_total{{reason="{reason}"}}'))}

    def get_info(self, channel):
        harness.stub(channel).GetServerInfo(pb.GetServerInfoRequest(), timeout=harness.PATIENCE)

    def test_idle_connections_at_every_door_leave_room_for_another_user(self):
        with open_server("--max_connections=54", "--max_connections_per_host=6") as server, \
                contextlib.ExitStack() as stack:
            tcp, unix, local_socket = (next(a for a in server.addresses if a.startswith(start))
                                       for start in ("127.", "unix:", "local:"))
            for target in (tcp, unix, local_socket):
                held = stack.enter_context(idlers([target], USERS[:3], 6))
                self.assertEqual(held, [6] * 3)
            self.assertEqual(server.metric("flashcore_connections"), 36)
            self.assertEqual(server.metric("flashcore_local_connections"), 18)
            self.assertEqual(self.refused(server) | self.refused(server, "local_"), {})

            channels = [stack.enter_context(server.channel(target)) for target in [tcp, unix] * 4]
            for channel in channels:
                self.get_info(channel)
            clients = [RawClient(server.local) for _ in range(4)]
            for _ in range(2):
                for channel in channels:
                    self.get_info(channel)
                for client in clients:
                    client.call("GetServerInfo", pb.GetServerInfoRequest(), pb.GetServerInfoResponse)
            self.assertEqual(self.refused(server), {"made_room": 8})
            self.assertEqual(self.refused(server, "local_"), {"made_room": 4})

    @harness.stress
    def test_idle_connections_do_not_hurt_a_client(self):
        with open_server() as server:
            tcp, unix, local_socket = (next(a for a in server.addresses if a.startswith(start))
                                       for start in ("127.", "unix:", "local:"))
            over_tcp = HonestClient(server)
            over_unix = HonestClient(types.SimpleNamespace(target=unix))
            with over_tcp, over_unix:
                quiet = self.local_calls(server, 1000)
                with idlers([tcp, unix, local_socket], USERS, 256, refill=True) as held:
                    print(f"{self.id()}: attackers hold {held}")
                    attacked = self.local_calls(server, 1000)
                    print(f"{self.id()}: {self.refused(server)}, local {self.refused(server, 'local_')}")
                    over_tcp.check(self, floor=0.05)
                    over_unix.check(self, floor=0.05)
                assert_unhurt(self, quiet, attacked, floor=0.05)

    def local_calls(self, server, count):
        """The times of so many calls, each on a new connection."""
        times = []
        for _ in range(count):
            threading.Event().wait(0.005)
            start = time.monotonic()
            client = RawClient(server.local)
            client.call("GetServerInfo", pb.GetServerInfoRequest(), pb.GetServerInfoResponse)
            times.append(time.monotonic() - start)
            client.socket.close()
        return times


if __name__ == "__main__":
    harness.main()
