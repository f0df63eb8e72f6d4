"""Floods of connections and streams, with an honest client beside each: who takes many leaves room for
others, at every door."""

import concurrent.futures
import contextlib
import ctypes
import os
import resource
import socket
import time
import unittest
import urllib.parse

import grpc

import harness
import raw_http2
from attackers import Attacker
from harness import MIB, assert_serves, pb, refused, wait_until
from honest_client import HonestClient
from local_raw_client import RawClient
from raw_http2 import ACK, ATTEND, END_HEADERS, HANDSHAKE, HEADERS, PREFACE, SETTINGS, call_headers, frame

REFLECTION = "/grpc.reflection.v1alpha.ServerReflection/ServerReflectionInfo"
SILENT = refused("silent")
USERS = (20001, 20002, 20003)  # nobody's
REASONS = ("max_connections", "max_connections_per_host", "no_files", "silent", "made_room")


class ConnectionsTest(unittest.TestCase):
    @classmethod
    def setUpClass(cls):
        soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
        cls.addClassCleanup(resource.setrlimit, resource.RLIMIT_NOFILE, (soft, hard))
        resource.setrlimit(resource.RLIMIT_NOFILE, (min(hard, 8192), hard))

    def connect(self, server):
        return self.enterContext(raw_http2.connect(server.target))

    def assert_connections_return(self, server):
        wait_until(lambda: server.metric("flashcore_connections") <= 3, "connections are closed")

    def assert_ends(self, connection):
        """Reads until the server has closed the connection."""
        with contextlib.suppress(ConnectionError):
            while connection.recv(65536):
                pass

    def test_the_listener_survives_running_out_of_files(self):
        with self.server_of_few_files() as server, server.channel() as channel:
            assert_serves(channel)
            idle = [self.connect(server) for _ in range(1064)]
            wait_until(lambda: server.metric(SILENT) >= 600, "some make room")
            with server.channel() as new:
                assert_serves(channel, new)
            for connection in idle:
                connection.close()
            self.assert_connections_return(server)
            assert_serves(channel)
            self.assertEqual(server.probe("/readyz"), 200)
            self.assertEqual(server.stop(), 0)

    @harness.stress
    def test_running_out_of_files_does_not_hurt_a_client(self):
        with self.server_of_few_files() as server:
            with HonestClient(server.target) as honest:
                idle = [self.connect(server) for _ in range(1064)]
                wait_until(lambda: server.metric(SILENT) >= 600, "some make room")
                for connection in idle:
                    connection.close()
                self.assert_connections_return(server)
                honest.check(self, floor=1)

    @contextlib.contextmanager
    def server_of_few_files(self):
        with harness.program("ulimit -n 1024; exec") as program, \
                harness.Server("--max_connections_per_host=2000", program=program) as server:
            reduced = server.wait_for_record(
                "fewer connections than --max_connections: the process may open too few files")
            self.assertEqual(reduced["max_connections"], (1024 - 256) // 2)
            yield server

    def test_short_connections_are_served(self):
        self.check_short_connections(50)

    @harness.stress
    def test_every_one_of_many_short_connections_is_served(self):
        self.check_short_connections(1000)

    def check_short_connections(self, count):
        with harness.Server() as server:
            def call():
                for _ in range(count):
                    with server.channel() as channel:
                        harness.stub(channel).GetServerInfo(pb.GetServerInfoRequest(),
                                                            timeout=harness.PATIENCE)
                return True

            with concurrent.futures.ThreadPoolExecutor() as pool:
                self.assertTrue(all(end.result() for end in [pool.submit(call) for _ in range(2)]))

    def test_half_open_connections_are_closed(self):
        with harness.Server("--handshake_timeout_s=0.5", "--max_connections_per_host=20") as server, \
                server.channel() as channel:
            # Under load, the handshake of this one may take too long, too.
            harness.stub(channel).Attend(harness.small_request(), timeout=harness.PATIENCE,
                                         wait_for_ready=True)
            before = server.metric(SILENT)
            half = [self.connect(server) for _ in range(60)]
            self.send_half_prefaces(half[::2])
            for connection in half:
                self.assert_ends(connection)
            self.assertEqual(server.metric(SILENT), before + len(half))
            self.assert_connections_return(server)
            assert_serves(channel)

    @harness.stress
    def test_half_open_connections_do_not_hurt_a_client(self):
        with harness.Server("--handshake_timeout_s=2") as server, HonestClient(server.target) as honest:
            half = [self.connect(server) for _ in range(800)]
            self.send_half_prefaces(half[::2])
            for connection in half:
                self.assert_ends(connection)
            self.assertEqual(server.metric(SILENT), 800)
            self.assert_connections_return(server)
            honest.check(self, floor=1)

    def send_half_prefaces(self, connections):
        for connection in connections:
            with contextlib.suppress(OSError):  # it made room for another
                connection.sendall(PREFACE[:10])

    def test_a_connection_that_does_not_complete_its_handshake_is_closed(self):
        with harness.Server("--handshake_timeout_s=0.2") as server:
            connection = self.connect(server)
            with contextlib.suppress(ConnectionError):  # its time is over already
                connection.sendall(PREFACE + b"\0")  # and no SETTINGS
            self.assert_ends(connection)
            self.assert_connections_return(server)

    def test_one_host_has_a_share_of_the_connections(self):
        with harness.Server("--max_connections_per_host=20", "--handshake_timeout_s=600") as server:
            with server.channel() as channel:
                assert_serves(channel)
                held = [self.connect(server) for _ in range(40)]
                for connection in held:
                    with contextlib.suppress(OSError):
                        connection.sendall(HANDSHAKE)
                # For each of 21 the server closes it, a silent one, or one that is idle for long enough,
                # such as the channel's.
                wait_until(lambda: sum(server.metric(refused(reason)) for reason in (
                    "max_connections_per_host", "silent", "made_room")) == 21, "21 are closed")
                with server.channel(f"unix:{server.socket}") as local:  # another door
                    assert_serves(local)
            for connection in held:
                connection.close()
            self.assert_connections_return(server)

    def test_streams_of_one_connection_are_limited(self):
        with harness.Server() as server, server.channel() as channel:
            assert_serves(channel)
            self.open_too_many_streams(server)
            self.assert_connections_return(server)
            assert_serves(channel)

    @harness.stress
    def test_too_many_streams_do_not_hurt_a_client(self):
        with harness.Server() as server, HonestClient(server.target) as honest:
            before = server.status_bytes("VmHWM")
            self.open_too_many_streams(server)
            self.assert_connections_return(server)
            if not harness.SANITIZED:
                self.assertLess(server.status_bytes("VmHWM") - before, 64 * MIB)
            honest.check(self, floor=1)

    def open_too_many_streams(self, server):
        """The client acknowledges the limit, does not keep to it, and is disconnected. gRPC 1.51 does not
        enforce the limit before the acknowledgement."""
        connection = self.connect(server)
        connection.sendall(HANDSHAKE)
        self.assertTrue(connection.recv(65536))  # the server's settings
        connection.sendall(frame(SETTINGS, ACK, 0, b""))
        block = call_headers(ATTEND)
        with self.assertRaises(ConnectionError):
            for first in range(0, 30_000, 100):
                connection.sendall(b"".join(frame(HEADERS, END_HEADERS, 2 * (first + i) + 1, block)
                                            for i in range(100)))
            self.assert_ends(connection)
            raise ConnectionError("closed")

    @harness.stress
    def test_reflection_has_few_threads(self):
        with harness.Server("--enable_reflection") as server, HonestClient(server.target) as honest:
            before = server.threads()
            for _ in range(12):
                connection = self.connect(server)
                connection.sendall(HANDSHAKE + b"".join(
                    frame(HEADERS, END_HEADERS, 2 * i + 1, call_headers(REFLECTION)) for i in range(250)))
            most = 0
            for _ in range(20):
                most = max(most, server.threads() - before)
                time.sleep(0.05)
            self.assertLess(most, 50)
            honest.check(self, floor=1)

    def test_there_is_no_reflection_by_default(self):
        with harness.Server() as server, server.channel() as channel:
            call = channel.stream_stream(REFLECTION)(iter([b"\x3a\x01*"]), timeout=harness.PATIENCE)
            self.assertEqual(call.code(), grpc.StatusCode.UNIMPLEMENTED)

    def test_probes_are_answered_beside_half_http_requests(self):
        self.check_probes()

    @harness.stress
    def test_half_http_requests_do_not_delay_probes(self):
        self.check_probes(seconds=5)

    def check_probes(self, seconds=None):
        """Beside 300 half requests, which each probe has to answer within `seconds`, if given."""
        with harness.Server("--probe_listen=127.0.0.1:0") as server:
            address = server.wait_for_record("probes")["address"]
            for url in (server.metrics_url, f"http://{address}/"):
                port = urllib.parse.urlsplit(url).port
                half = [socket.create_connection(("127.0.0.1", port)) for _ in range(300)]
                for connection in half:
                    with contextlib.suppress(OSError):
                        connection.sendall(b"GET /metrics HTTP/1.1\r\nHost: l")
                for path in ("/healthz", "/readyz") * 5:
                    start = time.monotonic()
                    self.assertEqual(server.probe(urllib.parse.urljoin(url, path)), 200)
                    if seconds is not None:
                        self.assertLess(time.monotonic() - start, seconds)
                for connection in half:
                    connection.close()
            self.assertEqual(server.probe(f"http://{address}/metrics"), 404)

    @harness.stress  # the server takes five looks, one every two seconds
    def test_a_dead_listener_ends_the_process(self):
        with harness.Server() as server, server.channel() as channel:
            assert_serves(channel)
            self.kill_listener(server)
            self.assertEqual(server.process.wait(harness.PATIENCE), 1)
            dead = server.wait_for_record("a listener is dead")
            self.assertEqual(dead["address"], server.target)
            self.assertEqual(server.records()[-1]["msg"], "drained")

    def kill_listener(self, server):
        """Makes the server's listening socket fail, through a second descriptor of it."""
        libc = ctypes.CDLL(None, use_errno=True)
        pidfd_open, pidfd_getfd = 434, 438
        process = libc.syscall(pidfd_open, server.process.pid, 0)
        for file in (server.proc / "fd").iterdir():
            descriptor = libc.syscall(pidfd_getfd, process, int(file.name), 0)
            if descriptor < 0:
                self.skipTest(f"no access to the server's files: {os.strerror(ctypes.get_errno())}")
            with contextlib.suppress(OSError), socket.socket(fileno=descriptor) as candidate:
                listens = candidate.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN)
                if listens and candidate.getsockname()[1] == server.port:
                    candidate.shutdown(socket.SHUT_RDWR)
                    return
        self.fail("no listening socket")


@harness.needs_root
@unittest.skipUnless(harness.kernel_tells_of_tcp(), "the kernel does not tell whose a TCP connection is")
class DoorsTest(unittest.TestCase):
    def refusals(self, server, door=""):
        return {reason: count for reason in REASONS if (count := server.metric(refused(reason, door)))}

    def get_info(self, channel):
        harness.stub(channel).GetServerInfo(pb.GetServerInfoRequest(), timeout=harness.PATIENCE)

    def test_idle_connections_at_every_door_leave_room_for_another_user(self):
        with harness.open_server("--max_connections=54", "--max_connections_per_host=6") as server, \
                contextlib.ExitStack() as stack:
            tcp, unix, local = server.target, f"unix:{server.socket}", f"local:{server.local}"
            attackers = [stack.push(Attacker("idle", tcp, unix, local, user=user, count=6,
                                             host=f"127.0.0.{number + 3}"))
                         for number, user in enumerate(USERS)]
            self.assertEqual([attacker.begun() for attacker in attackers], [3 * 6] * len(USERS))
            self.assertEqual(server.metric("flashcore_connections"), 36)
            self.assertEqual(server.metric("flashcore_local_connections"), 18)
            self.assertEqual(self.refusals(server) | self.refusals(server, "local_"), {})

            channels = [stack.enter_context(server.channel(target)) for target in [tcp, unix] * 4]
            for channel in channels:
                self.get_info(channel)
            clients = [RawClient(server.local) for _ in range(4)]
            for _ in range(2):
                for channel in channels:
                    self.get_info(channel)
                for client in clients:
                    client.call("GetServerInfo", pb.GetServerInfoRequest(), pb.GetServerInfoResponse)
            self.assertEqual(self.refusals(server), {"made_room": 8})
            self.assertEqual(self.refusals(server, "local_"), {"made_room": 4})


if __name__ == "__main__":
    harness.main()
