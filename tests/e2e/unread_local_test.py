"""Clients of the local socket that do not read, or send half frames: what they take is bounded, and hurts
nobody else."""

import collections
import contextlib
import os
import pathlib
import socket
import struct
import subprocess
import sys
import tempfile
import threading
import time
import unittest

from flashcore.v1 import attention_pb2 as pb
from flashcore.v1 import local_pb2 as local

import harness
from harness import MIB, wait_until
from honest_client import HonestClient, assert_unhurt
from local_raw_client import VERSION, RawClient

SOME_UID = 12345  # nobody's
HOST = "127.0.0.1"
FRAME_BYTES = MIB  # the largest frame


def refused(reason):
    return f'flashcore_local_connections_refused_total{{reason="{reason}"}}'


UNREAD, MEMORY, BANNED = refused("unread"), refused("memory"), refused("banned")


def frame(**request):
    message = local.LocalRequest(**request).SerializeToString()
    return struct.pack("<I", len(message)) + message


HELLO = frame(id=1, hello=local.LocalHello(min_version=VERSION, max_version=VERSION, client="flood"))
CALLS = b"".join(frame(id=number, call=local.LocalCall(method="GetServerInfo"))
                 for number in range(2, 502))
HALF = struct.pack("<I", FRAME_BYTES) + bytes(FRAME_BYTES - 1)

# Run by another user, for argv[3] seconds: argv[2] connections that send what comes on standard input, again
# and again if argv[5] is 1, and read argv[4] bytes each second. Opens new ones for those that end.
FLOOD = """
import select, socket, sys, time
path, connections, seconds, reading, again = sys.argv[1], *map(int, sys.argv[2:])
data = sys.stdin.buffer.read()
end, open_ones, next_read = time.monotonic() + seconds, {}, 0
def send(connection):
    try:
        sent = connection.send(memoryview(data)[open_ones[connection]:])
        open_ones[connection] += sent
        if open_ones[connection] == len(data) and again:
            open_ones[connection] = int.from_bytes(data[:4], "little") + 4  # behind Hello
    except BlockingIOError:
        pass
    except OSError:
        del open_ones[connection]
while time.monotonic() < end:
    for _ in range(connections - len(open_ones)):
        connection = socket.socket(socket.AF_UNIX)
        try:
            connection.connect(path)
        except OSError:
            break
        connection.setblocking(False)
        open_ones[connection] = 0
    for connection in list(open_ones):
        send(connection)
    if reading and time.monotonic() > next_read:
        next_read = time.monotonic() + 1
        for connection in open_ones:
            try:
                connection.recv(reading)
            except OSError:
                pass
    time.sleep(0.001)
"""


@contextlib.contextmanager
def open_server(*flags):
    """A server whose local socket, server.local, every user may use."""
    with tempfile.TemporaryDirectory() as folder:
        os.chmod(folder, 0o755)
        path = str(pathlib.Path(folder, "local"))
        with harness.Server(f"--local_listen={path}", "--unix_socket_mode=0666", *flags) as server:
            server.local = path
            yield server


@contextlib.contextmanager
def another_user():
    """Connections made in it are those of SOME_UID."""
    os.seteuid(SOME_UID)
    try:
        yield
    finally:
        os.seteuid(0)


def connect(server, data):
    """A connection that has sent some of `data`, and reads nothing."""
    connection = socket.socket(socket.AF_UNIX)
    connection.connect(server.local)
    connection.setblocking(False)
    with contextlib.suppress(BlockingIOError):
        connection.send(data)
    return connection


class UnreadLocalTest(unittest.TestCase):
    """The attacker is a user, the honest client an address."""

    def test_one_that_does_not_read_is_cut_off_and_others_are_served(self):
        with open_server(harness.by_address(HOST), f"--unsent_reply_bytes={MIB}") as server, \
                server.channel() as channel, contextlib.ExitStack() as stack:
            honest = harness.stub(channel)

            def flood():
                stack.enter_context(connect(server, HELLO + CALLS))
                honest.GetServerInfo(pb.GetServerInfoRequest(), timeout=harness.PATIENCE)
                return server.metric(UNREAD) >= 3

            wait_until(flood, "connections are cut off")

    def test_half_frames_are_bounded(self):
        """The share of a user has room for four of the largest frames."""
        with open_server("--max_message_bytes=1048576", "--transport_memory_bytes=2097152") as server, \
                contextlib.ExitStack() as stack:
            greeted = [stack.enter_context(self.greeted(server)) for _ in range(16)]
            for connection in greeted:
                with contextlib.suppress(OSError):  # it may be the one that is ended
                    connection.sendall(HALF)
            wait_until(lambda: server.metric(MEMORY) >= 12
                       and server.metric("flashcore_local_connections") <= 4, "connections are ended")

    @unittest.skipUnless(os.getuid() == 0, "only root can be another user")
    def test_a_user_whose_half_frames_were_cut_off_is_read_later(self):
        with open_server("--max_message_bytes=1048576", "--transport_memory_bytes=2097152") as server:
            with contextlib.ExitStack() as stack:
                def flood():
                    stack.enter_context(connect(server, HELLO + HALF))
                    return server.metric(BANNED) >= 1

                with another_user():
                    wait_until(flood, "a connection is banned")
            with another_user():
                waiting = connect(server, HELLO)
            RawClient(server.local).socket.close()  # accepted behind all of the above, which now are counted
            banned = server.metric(BANNED)
            RawClient(server.local).socket.close()
            self.assertEqual(server.metric(BANNED), banned)
            waiting.settimeout(harness.PATIENCE)
            self.assertNotEqual(waiting.recv(1), b"")  # the ban is over
            waiting.close()

    def greeted(self, server):
        connection = connect(server, HELLO)
        connection.settimeout(harness.PATIENCE)
        self.assertNotEqual(connection.recv(1), b"")
        return connection

    @harness.stress
    @unittest.skipUnless(os.getuid() == 0, "only root can be another user")
    def test_unread_replies_hurt_nobody(self):
        self.check_flood("unread replies", HELLO + CALLS, connections=250, again=1, grows=64 * MIB)

    @harness.stress
    @unittest.skipUnless(os.getuid() == 0, "only root can be another user")
    def test_replies_that_are_hardly_read_hurt_nobody(self):
        self.check_flood("hardly read replies", HELLO + CALLS, connections=110, again=1, reading=8192,
                         grows=64 * MIB)

    @harness.stress
    @unittest.skipUnless(os.getuid() == 0, "only root can be another user")
    def test_half_frames_hurt_nobody(self):
        self.check_flood("half frames", HELLO + HALF, connections=250, grows=64 * MIB)

    @harness.stress
    def test_connections_that_make_room_leave_nothing(self):
        """The oldest of a user end while their frames wait for a turn."""
        with open_server() as server, contextlib.ExitStack() as stack:
            opened = collections.deque(connect(server, HELLO) for _ in range(500))
            stack.callback(lambda: [connection.close() for connection in opened])
            before = server.status_bytes("VmHWM")
            for _ in range(100_000):
                opened.append(connect(server, HELLO))
                opened.popleft().close()
            grown = server.status_bytes("VmHWM") - before
            print(f"connections that make room: {grown / MIB:.0f} MiB more", flush=True)
            if not harness.SANITIZED:
                self.assertLess(grown, 16 * MIB)

    def check_flood(self, what, data, connections, grows, again=0, reading=0, seconds=8):
        with open_server() as server:
            with HonestClient(server) as honest, LocalHonestClient(server) as honest_local:
                before = server.status_bytes("VmRSS")
                subprocess.run([sys.executable, "-c", FLOOD, server.local, str(connections),
                                str(seconds), str(reading), str(again)], input=data, user=SOME_UID,
                               check=True, timeout=harness.PATIENCE)
                grown = server.status_bytes("VmHWM") - before
                print(f"{what}: {grown / MIB:.0f} MiB more, cut off: {server.metric(UNREAD):.0f} unread, "
                      f"{server.metric(MEMORY):.0f} for memory", flush=True)
                honest_local.check(self)
                honest.check(self, floor=0.25)
                if not harness.SANITIZED:
                    self.assertLess(grown, 1.1 * grows)


class LocalHonestClient:
    """Calls over the local socket, in a thread. Quiet until the context begins."""

    def __init__(self, server):
        self._client = RawClient(server.local)
        self._times, self._errors = [], []
        self._ended = threading.Event()

    def __enter__(self):
        while len(self._times) < 200:
            self._call()
        self._quiet, self._times = self._times, []
        self._thread = threading.Thread(target=self._call_until_the_end)
        self._thread.start()
        return self

    def __exit__(self, *_):
        self._ended.set()
        self._thread.join()
        self._client.socket.close()

    def check(self, test):
        self._ended.set()
        self._thread.join()
        test.assertEqual(self._errors, [])
        test.assertGreater(len(self._times), 0)
        assert_unhurt(test, self._quiet, self._times)

    def _call_until_the_end(self):
        while not self._ended.is_set() and not self._errors:
            self._call()

    def _call(self):
        time.sleep(0.005)  # gate: only of --stress; its own calls are no load
        begin = time.monotonic()
        try:
            self._client.call("GetServerInfo", pb.GetServerInfoRequest(), pb.GetServerInfoResponse)
        except (OSError, RuntimeError) as error:
            self._errors.append(str(error))
        self._times.append(time.monotonic() - begin)


if __name__ == "__main__":
    harness.main()
