"""Floods of connections, streams and frames, with an honest client beside each."""

import concurrent.futures
import contextlib
import ctypes
import os
import pathlib
import resource
import socket
import threading
import time
import unittest
import urllib.parse

import grpc

import harness
from harness import MIB, wait_until
from honest_client import HonestClient
from raw_http2 import ACK, END_HEADERS, HEADERS, PREFACE, SETTINGS, frame, literal

CONTINUATION = 9
ATTEND = b"/flashcore.v1.AttentionService/Attend"
REFLECTION = b"/grpc.reflection.v1alpha.ServerReflection/ServerReflectionInfo"
HANDSHAKE = PREFACE + frame(SETTINGS, 0, 0, b"")


def headers(path):
    return b"".join(literal(*field) for field in (
        (b":method", b"POST"), (b":scheme", b"http"), (b":path", path), (b":authority", b"test"),
        (b"content-type", b"application/grpc"), (b"te", b"trailers")))


class ConnectionsTest(unittest.TestCase):
    @classmethod
    def setUpClass(cls):
        soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
        cls.addClassCleanup(resource.setrlimit, resource.RLIMIT_NOFILE, (soft, hard))
        resource.setrlimit(resource.RLIMIT_NOFILE, (min(hard, 8192), hard))

    def connect(self, server):
        connection = socket.create_connection(("127.0.0.1", server.port), timeout=harness.PATIENCE)
        self.addCleanup(connection.close)
        return connection

    def refused(self, server, reason):
        return server.metric(f'flashcore_connections_refused_total{{reason="{reason}"}}')

    def assert_connections_return(self, server):
        wait_until(lambda: server.metric("flashcore_connections") <= 3, "connections are closed")

    def test_the_listener_survives_running_out_of_files(self):
        with harness.in_temporary_folder() as folder:
            program = pathlib.Path(folder, "few_files")
            program.write_text(f'#!/bin/sh\nulimit -n 1024\nexec {harness.SERVER} "$@"\n')
            program.chmod(0o755)
            with harness.Server("--max_connections_per_host=2000", program=program) as server:
                reduced = server.wait_for_record(
                    "fewer connections than --max_connections: the process may open too few files")
                self.assertEqual(reduced["max_connections"], (1024 - 256) // 2)
                with HonestClient(server) as honest:
                    idle = [self.connect(server) for _ in range(1064)]
                    wait_until(lambda: self.refused(server, "silent") >= 600, "some make room")
                    for connection in idle:
                        connection.close()
                    self.assert_connections_return(server)
                    honest.check(self)
                self.assertEqual(server.probe("/readyz"), 200)
                self.assertEqual(server.stop(), 0)

    def test_every_one_of_many_short_connections_is_served(self):
        with harness.Server() as server:
            def call():
                for _ in range(1000):
                    with server.channel() as channel:
                        harness.stub(channel).GetServerInfo(harness.pb.GetServerInfoRequest(),
                                                            timeout=harness.PATIENCE)
                return True

            with concurrent.futures.ThreadPoolExecutor() as pool:
                self.assertTrue(all(end.result() for end in [pool.submit(call) for _ in range(2)]))

    def test_half_open_connections_are_closed(self):
        with harness.Server("--handshake_timeout_s=2") as server, HonestClient(server) as honest:
            half = [self.connect(server) for _ in range(800)]
            for connection in half[::2]:
                with contextlib.suppress(OSError):  # it made room for another
                    connection.sendall(PREFACE[:10])
            for connection in half:
                with contextlib.suppress(ConnectionResetError):
                    self.assertEqual(connection.recv(1), b"")
            self.assertEqual(self.refused(server, "silent"), 800)
            self.assert_connections_return(server)
            honest.check(self)

    def test_a_connection_that_does_not_complete_its_handshake_is_closed(self):
        with harness.Server("--handshake_timeout_s=1") as server:
            connection = self.connect(server)
            connection.sendall(PREFACE + b"\0")  # and no SETTINGS
            while connection.recv(65536):
                pass
            self.assert_connections_return(server)

    def test_one_host_has_a_share_of_the_connections(self):
        with harness.Server("--max_connections_per_host=20") as server:
            with server.channel() as channel:
                harness.stub(channel).Attend(harness.small_request(), timeout=harness.PATIENCE)
                held = [self.connect(server) for _ in range(40)]
                for connection in held:
                    with contextlib.suppress(OSError):
                        connection.sendall(HANDSHAKE)
                wait_until(lambda: self.refused(server, "max_connections_per_host") +
                           self.refused(server, "silent") == 21, "21 are refused")
                harness.stub(channel).Attend(harness.small_request(), timeout=harness.PATIENCE)
                with server.channel(f"unix:{server.socket}") as local:  # another host
                    harness.stub(local).Attend(harness.small_request(), timeout=harness.PATIENCE)
            for connection in held:
                connection.close()
            self.assert_connections_return(server)

    def test_an_idle_connection_is_closed(self):
        with harness.Server("--max_connection_idle_s=0.5") as server:
            connection = self.connect(server)
            connection.sendall(HANDSHAKE)
            while connection.recv(65536):
                pass
            self.assert_connections_return(server)

    def test_streams_of_one_connection_are_limited(self):
        with harness.Server() as server, HonestClient(server) as honest:
            before = server.status_bytes("VmHWM")
            connection = self.connect(server)
            connection.sendall(HANDSHAKE)
            self.assertTrue(connection.recv(65536))  # the server's settings
            connection.sendall(frame(SETTINGS, ACK, 0, b""))
            block = headers(ATTEND)
            # A client that acknowledges the limit and does not keep to it is disconnected. gRPC 1.51
            # does not enforce the limit before the acknowledgement.
            with self.assertRaises(OSError):
                for first in range(0, 30_000, 100):
                    connection.sendall(b"".join(frame(HEADERS, END_HEADERS, 2 * (first + i) + 1, block)
                                                for i in range(100)))
                while connection.recv(65536):
                    pass
                raise ConnectionError("closed")
            self.assert_connections_return(server)
            self.assertLess(server.status_bytes("VmHWM") - before, 64 * MIB)
            honest.check(self)

    def test_continuation_floods_are_cut_off(self):
        # The bound of all connections together: what they may send unanswered, four times over, as gRPC
        # keeps about three bytes for one, and the server looks 20 times a second.
        flags = ("--transport_memory_bytes=134217728",)
        with harness.Server(*flags) as server, HonestClient(server) as honest:
            before = server.status_bytes("VmHWM")
            fields = b"".join(literal(b"k%06d" % i, b"v" * 100) for i in range(140))
            flood = frame(CONTINUATION, 0, 1, fields) * 16
            threads = [threading.Thread(target=self.flood, args=(server, flood)) for _ in range(4)]
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join()
            self.assertGreaterEqual(self.refused(server, "flood"), 1)  # or gRPC's own quota
            self.assert_connections_return(server)
            grown = server.status_bytes("VmHWM") - before
            print(f"{self.id()}: {grown / MIB:.0f} MiB")
            if not harness.SANITIZED:
                self.assertLess(grown, 4 * 128 * MIB)
            honest.check(self)

    def flood(self, server, frames):
        """Sends `frames` until the server closes the connection, at most 4 GiB of them."""
        with socket.create_connection(("127.0.0.1", server.port), timeout=harness.PATIENCE) as flooding:
            flooding.sendall(HANDSHAKE + frame(HEADERS, 0, 1, headers(ATTEND)))
            with contextlib.suppress(OSError):
                for _ in range((4 << 30) // len(frames)):
                    flooding.sendall(frames)

    def test_reflection_has_few_threads(self):
        with harness.Server("--enable_reflection") as server, HonestClient(server) as honest:
            before = server.status_bytes("Threads") // 1024
            for _ in range(12):
                connection = self.connect(server)
                connection.sendall(HANDSHAKE + b"".join(
                    frame(HEADERS, END_HEADERS, 2 * i + 1, headers(REFLECTION)) for i in range(250)))
            most = 0
            for _ in range(20):
                most = max(most, server.status_bytes("Threads") // 1024 - before)
                time.sleep(0.05)
            self.assertLess(most, 50)
            honest.check(self)

    def test_there_is_no_reflection_by_default(self):
        with harness.Server() as server, server.channel() as channel:
            call = channel.stream_stream(REFLECTION.decode())(iter([b"\x3a\x01*"]),
                                                              timeout=harness.PATIENCE)
            self.assertEqual(call.code(), grpc.StatusCode.UNIMPLEMENTED)

    def test_half_http_requests_do_not_delay_probes(self):
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
                    self.assertLess(time.monotonic() - start, 5)
                for connection in half:
                    connection.close()
            self.assertEqual(server.probe(f"http://{address}/metrics"), 404)

    def test_a_dead_listener_ends_the_process(self):
        with harness.Server() as server, server.channel() as channel:
            harness.stub(channel).Attend(harness.small_request(), timeout=harness.PATIENCE)
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
        for name in os.listdir(f"/proc/{server.process.pid}/fd"):
            descriptor = libc.syscall(pidfd_getfd, process, int(name), 0)
            if descriptor < 0:
                self.skipTest(f"no access to the server's files: {os.strerror(ctypes.get_errno())}")
            with contextlib.suppress(OSError), socket.socket(fileno=descriptor) as candidate:
                listens = candidate.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN)
                if listens and candidate.getsockname()[1] == server.port:
                    candidate.shutdown(socket.SHUT_RDWR)
                    return
        self.fail("no listening socket")


if __name__ == "__main__":
    harness.main()
