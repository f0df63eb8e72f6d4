"""Files that a client passes over the server's Unix sockets, whose last close takes as long as the client
wants: no thread that serves others waits for it. Where one waits, the calls of others here never end."""

import array
import contextlib
import os
import signal
import socket
import struct
import tempfile
import unittest

from flashcore.v1 import local_pb2 as local

import harness
import local_raw_client
import raw_http2
from harness import another_user, refused, wait_until
from local_raw_client import RawClient, frame
from silent_file_system import SilentFileSystem

HELLO = frame(1, hello=local_raw_client.HELLO)
FLOOD = refused("flood")
PING = raw_http2.frame(raw_http2.PING, 0, 0, bytes(8))
REGISTER = {"register_memory": local.LocalRegisterMemory(bytes=4096)}
RESOURCE_EXHAUSTED, INVALID_ARGUMENT = 8, 3


def read_reply(connection):
    """The next reply; None: the end of the connection."""
    size = connection.recv(4, socket.MSG_WAITALL)
    if len(size) < 4:
        return None
    return local.LocalReply.FromString(connection.recv(*struct.unpack("<I", size), socket.MSG_WAITALL))


def wait_for_end(connection):
    with contextlib.suppress(ConnectionError):
        while connection.recv(1 << 16):
            pass


def urgent():
    """The flag of urgent bytes, if the kernel has them on Unix sockets."""
    ends = socket.socketpair()
    try:
        ends[0].send(b"x", socket.MSG_OOB)
        return socket.MSG_OOB
    except OSError:
        return 0
    finally:
        for end in ends:
            end.close()


class PassedFilesTest(unittest.TestCase):
    def setUp(self):
        self.stack = contextlib.ExitStack()
        self.addCleanup(self.stack.close)
        self.listener = self.stack.enter_context(socket.create_server(("127.0.0.1", 0)))
        self.listener.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)

    def start(self, *flags):
        self.server = self.stack.enter_context(harness.open_server(*flags))

    def connect(self, path):
        return self.stack.enter_context(raw_http2.connect(f"unix:{path}"))

    def lingering(self):
        """A TCP socket whose last close lasts an hour: the other end has no room for what it has sent."""
        sender = socket.socket()
        sender.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 1 << 16)
        sender.connect(self.listener.getsockname())
        self.stack.enter_context(self.listener.accept()[0])
        sender.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 3600))
        sender.setblocking(False)
        with contextlib.suppress(BlockingIOError):
            while True:
                sender.send(bytes(1 << 16))
        return sender

    def send(self, connection, *pieces, files=1, flags=0):
        """Sends each piece with so many lingering sockets, which then are nowhere but on their way: the
        server may not run meanwhile, lest our own close is the last."""
        for piece in pieces:
            senders = [self.lingering() for _ in range(files)]
            passed = array.array("i", [sender.fileno() for sender in senders])
            connection.sendmsg([piece], [(socket.SOL_SOCKET, socket.SCM_RIGHTS, passed)], flags)
            for sender in senders:
                sender.close()

    def assert_serves(self):
        """Others are served on every thread that clients share, and can register memory."""
        with self.server.channel() as channel:
            harness.assert_serves(channel)
        client = RawClient(self.server.local)
        self.assertLess(local_raw_client.decode(client, steps=1), 2e-3)
        client.socket.close()

    def assert_drains(self):
        """And no thread that has to end is left, for which the drain ends the process."""
        self.assertEqual(self.server.stop(), 0)
        self.assertNotIn("exiting although", self.server.log_path.read_text())

    def test_stray_files_on_the_local_socket(self):
        self.start()
        connections = [self.connect(self.server.local) for _ in range(3)]
        with self.server.stopped():
            self.send(connections[0], HELLO)
            self.send(connections[1], HELLO, *10 * [b"x"])  # more files behind the one that ends it
            self.send(connections[2], b"x")  # never says Hello
        for connection in connections[:2]:
            wait_for_end(connection)
        wait_until(lambda: self.server.metric(refused("protocol", "local_")) == 2, "they broke the protocol")
        connections[2].close()
        self.assert_serves()
        self.assert_drains()

    @harness.needs_root
    def test_many_files_at_once(self):
        self.start()
        connections = [self.connect(self.server.local) for _ in range(2)]
        with self.server.stopped():
            for connection in connections:
                self.send(connection, HELLO, files=30)
        for connection in connections:
            wait_for_end(connection)
        self.connect(self.server.local)
        wait_until(lambda: self.server.metric(refused("banned", "local_")) >= 1, "the user is banned")
        with another_user():
            self.assert_serves()
        self.assert_drains()

    def test_a_socket_as_a_region(self):
        self.start()
        connection = self.connect(self.server.local)
        connection.sendall(HELLO)
        self.assertEqual(read_reply(connection).status.code, 0)
        with self.server.stopped():
            self.send(connection, *(frame(number, **REGISTER) for number in range(2, 8)))
        for number in range(2, 8):
            reply = read_reply(connection)
            self.assertEqual((reply.id, reply.status.code), (number, INVALID_ARGUMENT), reply)
            self.assertIn("not a memfd", reply.status.message)
        self.assert_serves()
        self.assert_drains()

    def test_files_on_connections_that_the_server_ends(self):
        """Before gRPC has them, and before Hello: they make room for new ones."""
        self.start("--max_connections_per_host=2")
        paths = (self.server.socket, self.server.local)
        connections = [self.connect(path) for path in paths for _ in range(2)]
        with self.server.stopped():
            for connection in connections:
                self.send(connection, b"P", b"R")
        for path in paths:
            for _ in range(2):
                self.connect(path)
        for connection in connections:
            wait_for_end(connection)
        self.assert_serves()
        self.assert_drains()

    def test_files_before_the_preface(self):
        self.start()
        connections = [self.connect(self.server.socket) for _ in range(8)]
        with self.server.stopped():
            for connection in connections:
                self.send(connection, b"P", b"R", raw_http2.HANDSHAKE[2:])
        for connection in connections:
            wait_for_end(connection)
        wait_until(lambda: self.server.metric(FLOOD) >= 1, "it counts")
        self.assert_serves()
        self.assert_drains()

    def test_files_after_the_preface(self):
        """On more connections than gRPC has threads, and some files stay in the queue."""
        self.start()
        connections = [self.connect(self.server.socket) for _ in range(16)]
        for connection in connections:
            connection.sendall(raw_http2.HANDSHAKE)
            self.assertNotEqual(connection.recv(1), b"")  # gRPC has it
        with self.server.stopped():
            for connection in connections[1:]:
                self.send(connection, PING, PING)
            self.send(connections[0], PING[:1], flags=urgent())
        for connection in connections:
            wait_for_end(connection)
        wait_until(lambda: self.server.metric(FLOOD) == len(connections), "each was cut off")
        self.assertIn("or a passed file", self.server.log_path.read_text())
        self.assert_serves()
        self.assert_drains()

    def test_connections_that_come_at_the_end_of_the_server(self):
        self.start()
        with self.server.stopped():
            for path in (self.server.socket, self.server.local):
                for _ in range(4):
                    self.send(self.connect(path), b"P")
            self.server.process.send_signal(signal.SIGTERM)
        self.assert_drains()

    @unittest.skipUnless(os.getuid() == 0, "only root can mount, and be another user")
    def test_a_file_system_that_does_not_answer(self):
        with tempfile.TemporaryDirectory() as folder, contextlib.ExitStack() as stack:
            try:
                system = stack.enter_context(SilentFileSystem(folder))
            except OSError as error:
                self.skipTest(f"no FUSE: {error}")
            self.start()
            taken = 0
            for _ in range(8):
                connection = self.connect(self.server.local)
                connection.sendall(HELLO)
                self.assertEqual(read_reply(connection).status.code, 0)
                for number in range(2, 6):
                    with open(system.path, "rb") as file:
                        socket.send_fds(connection, [frame(number, **REGISTER)], [file.fileno()])
                    reply = read_reply(connection)
                    self.assertIn(reply.status.code, (INVALID_ARGUMENT, RESOURCE_EXHAUSTED), reply)
                    taken += reply.status.code == INVALID_ARGUMENT
            self.assertEqual(taken, 16)  # PassedFiles::kMaxOthers
            wait_until(lambda: system.waiting() == 1, "the server closes one of them")
            with another_user():
                self.assert_serves()
            system.answer()
            wait_until(self.can_register, "the server takes files of that user again")
            self.assert_serves()
            self.assert_drains()

    def can_register(self):
        try:
            RawClient(self.server.local).socket.close()
            return True
        except RuntimeError:
            return False


if __name__ == "__main__":
    harness.main()
