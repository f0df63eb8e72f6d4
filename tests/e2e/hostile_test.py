"""Garbage on the port, vanishing clients, floods: the server keeps serving and leaks nothing."""

import contextlib
import random
import resource
import unittest

import grpc
import numpy as np
from flashcore.v1 import attention_pb2 as pb

import harness
from harness import assert_serves, wait_until, window_request
from raw_http2 import ATTEND, HANDSHAKE, PREFACE, SilentClient, connect, frame

UNHURRIED = ("--reply_timeout_s=600",)  # replies are read late, or not at all


class HostileTest(unittest.TestCase):
    def assert_serves(self, server):
        with server.channel() as channel:
            assert_serves(channel)

    def assert_all_returned(self, server):
        """Waits until requests, memory and connections of clients that are gone are released."""
        series = ("flashcore_inflight_requests", "flashcore_queue_depth",
                  'flashcore_staging_bytes{state="used"}')
        left = {}

        def nothing_left():
            left.update((name, server.metric(name)) for name in series)
            return not any(left.values())

        wait_until(nothing_left, lambda: f"all is released: {left}")

    def test_garbage_on_the_port(self):
        rng = random.Random(harness.SEED)
        garbage = [
            b"GET / HTTP/1.1\r\nHost: x\r\n\r\n", b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03",
            b"\0" * 100_000, PREFACE[:10], PREFACE, HANDSHAKE,
            PREFACE + b"\xff" * 1000,
            HANDSHAKE + frame(0, 0, 1, b"data on a stream that is not open"),
            HANDSHAKE + frame(1, 4, 1, b"\xff\xff\xff headers that are no HPACK"),
            HANDSHAKE + frame(8, 0, 0, b"\x7f\xff\xff\xff") * 100,
        ]
        garbage += [rng.randbytes(rng.randrange(1, 5000)) for _ in range(50)]
        garbage += [HANDSHAKE + rng.randbytes(rng.randrange(1, 5000)) for _ in range(50)]
        with harness.Server() as server:
            for bytes_ in garbage:
                with connect(server.target) as connection, \
                        contextlib.suppress(ConnectionError):  # it may have seen enough
                    connection.sendall(bytes_)
            self.assert_serves(server)
            self.assertEqual(server.stop(), 0)

    def test_clients_killed_in_the_middle(self):
        with harness.Server("--cpu_threads=1") as server:
            self.assert_serves(server)
            fds = server.open_files()
            received = 'flashcore_request_phase_seconds_count{phase="receive"}'
            for i in range(4):
                before = server.metric(received)
                with server.load("--shape=1x8x512x64", "--concurrency=8", *(["--stream"] if i % 2 else [])):
                    wait_until(lambda n=before: server.metric(received) >= n + 20, "no load")
            self.assert_all_returned(server)
            self.assert_serves(server)
            wait_until(lambda: server.open_files() <= fds + 1, "connections of dead clients are closed")
            self.assertEqual(server.stop(), 0)

    def test_a_full_queue_refuses_and_recovers(self):
        with harness.Server("--max_queue_requests=4", *harness.HELD) as server, \
                server.channel() as channel:
            with harness.held_lane(server, channel):
                calls = [harness.stub(channel).Attend.future(harness.small_request())
                         for _ in range(64)]
                wait_until(lambda: sum(call.done() for call in calls) >= 60, "calls are refused")
            codes = [call.code().name for call in calls]
            self.assertEqual(set(codes), {"OK", "RESOURCE_EXHAUSTED"})
            refused = calls[codes.index("RESOURCE_EXHAUSTED")]
            # The request that holds the lane may have returned to the queue between two launches.
            self.assertRegex(refused.details(), "queue is full: [45]")
            counted = 'flashcore_rejected_requests_total{reason="QUEUE_FULL"}'
            wait_until(lambda: server.metric(counted) == codes.count("RESOURCE_EXHAUSTED"),
                       lambda: f"{server.metric(counted)} of {codes} are counted")
            self.assert_all_returned(server)
            self.assert_serves(server)

    def test_full_staging_memory_refuses_and_recovers(self):
        largest = max(3 * harness.HELD_BYTES // 4, 4 * harness.MIB)
        with harness.Server(f"--staging_memory_bytes={harness.HELD_BYTES + 5_000_000}",
                            f"--max_message_bytes={largest}", "--staging_wait_ms=0",
                            *harness.HELD) as server, \
                server.channel() as channel:
            mission = harness.mission_request(harness.numpy_rng())  # takes 2 MiB
            with harness.held_lane(server, channel):
                calls = [harness.stub(channel).Attend.future(mission) for _ in range(32)]
                wait_until(lambda: sum(call.done() for call in calls) >= 30, "calls are refused")
            codes = {call.code().name for call in calls}
            self.assertEqual(codes, {"OK", "RESOURCE_EXHAUSTED"})
            self.assert_all_returned(server)
            self.assert_serves(server)

    def test_open_files_are_limited_by_the_hard_limit_only(self):
        before = resource.getrlimit(resource.RLIMIT_NOFILE)
        self.addCleanup(resource.setrlimit, resource.RLIMIT_NOFILE, before)
        hard = before[1]
        resource.setrlimit(resource.RLIMIT_NOFILE, (256, hard))  # inherited
        with harness.Server() as server:
            self.assertEqual(resource.prlimit(server.process.pid, resource.RLIMIT_NOFILE),
                             (hard, hard))

    @harness.stress
    def test_a_message_that_grows_when_inflated_takes_no_memory(self):
        bomb = pb.AttendRequest(key=bytes(256 << 20))
        with harness.Server() as server:
            before = server.status_bytes("VmHWM")
            with grpc.insecure_channel(
                    server.target, options=[("grpc.max_send_message_length", -1),
                                            ("grpc.enable_http_proxy", 0)],
                    compression=grpc.Compression.Gzip) as channel:
                harness.failure(grpc.StatusCode.UNIMPLEMENTED, harness.stub(channel).Attend, bomb)
            self.assertLess(server.status_bytes("VmHWM") - before, 16 << 20)
            self.assert_serves(server)

    def test_clients_that_never_read_their_reply(self):
        clients = 40
        with harness.Server(*UNHURRIED) as server, contextlib.ExitStack() as calls:
            self.assert_serves(server)
            self.assert_all_returned(server)
            idle = server.metric('flashcore_staging_bytes{state="used"}')
            for _ in range(clients):
                calls.enter_context(SilentClient(server.target)).call(ATTEND, window_request())
            wait_until(lambda: server.metric(harness.COMPUTED) >= clients + 1, "all requests are computed")
            # The replies keep their memory, and nothing else: others are served.
            wait_until(lambda: server.metric("flashcore_inflight_requests") == clients,
                       lambda: f"{server.metric('flashcore_inflight_requests')} are in flight")
            self.assertGreaterEqual(server.metric('flashcore_staging_bytes{state="used"}'),
                                    idle + clients * len(pb.AttendRequest.FromString(window_request()).query))
            for _ in range(5):
                self.assert_serves(server)
            calls.close()  # as if the clients were killed
            self.assert_all_returned(server)
            self.assert_serves(server)
            self.assertEqual(server.stop(), 0)

    def test_a_client_that_reads_slowly_gets_its_reply(self):
        q, k, v = (harness.random_tensor(harness.numpy_rng(), 150, 1, 64) for _ in range(3))
        with harness.Server(*UNHURRIED) as server, SilentClient(server.target) as client:
            stream = client.call(ATTEND, harness.request(q, k, v).SerializeToString())
            reply = pb.AttendResponse.FromString(client.read_message(stream, step=2000))
            got = np.frombuffer(reply.output, np.float16).reshape(q.shape)
            np.testing.assert_allclose(got, harness.reference(q, k, v)[0], atol=2e-3)
            self.assert_all_returned(server)


if __name__ == "__main__":
    harness.main()
