"""Garbage on the port, vanishing clients, floods: the server keeps serving and leaks nothing."""

import os
import random
import signal
import socket
import subprocess
import time
import unittest

import numpy as np

import harness

PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
SETTINGS = b"\0\0\0\x04\0\0\0\0\0"


def frame(kind, flags, stream, payload):
    return len(payload).to_bytes(3, "big") + bytes([kind, flags]) + stream.to_bytes(4, "big") + payload


class HostileTest(unittest.TestCase):
    def assert_serves(self, server):
        with server.channel() as channel:
            harness.stub(channel).Attend(harness.small_request(), timeout=30)

    def assert_all_returned(self, server):
        """Waits until requests, memory and connections of clients that are gone are released."""
        end = time.monotonic() + 30
        while time.monotonic() < end:
            left = (server.metric("flashcore_inflight_requests"),
                    server.metric("flashcore_queue_depth"),
                    server.metric('flashcore_staging_bytes{state="used"}'))
            if left == (0, 0, 0):
                return
            time.sleep(0.05)
        self.fail(f"inflight, queued, staging bytes: {left}")

    def test_garbage_on_the_port(self):
        seed = int(os.environ.get("FLASHCORE_TEST_SEED", random.randrange(1 << 30)))
        print("FLASHCORE_TEST_SEED", seed)
        rng = random.Random(seed)
        garbage = [
            b"GET / HTTP/1.1\r\nHost: x\r\n\r\n", b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03",
            b"\0" * 100_000, PREFACE[:10], PREFACE, PREFACE + SETTINGS,
            PREFACE + b"\xff" * 1000,
            PREFACE + SETTINGS + frame(0, 0, 1, b"data on a stream that is not open"),
            PREFACE + SETTINGS + frame(1, 4, 1, b"\xff\xff\xff headers that are no HPACK"),
            PREFACE + SETTINGS + frame(8, 0, 0, b"\x7f\xff\xff\xff") * 100,
        ]
        garbage += [rng.randbytes(rng.randrange(1, 5000)) for _ in range(50)]
        garbage += [PREFACE + SETTINGS + rng.randbytes(rng.randrange(1, 5000)) for _ in range(50)]
        with harness.Server() as server:
            for bytes_ in garbage:
                with socket.create_connection(("127.0.0.1", server.port)) as connection:
                    connection.sendall(bytes_)
            self.assert_serves(server)
            self.assertEqual(server.stop(), 0)

    def test_clients_killed_in_the_middle(self):
        with harness.Server("--cpu_threads=1") as server:
            self.assert_serves(server)
            fds = len(os.listdir(f"/proc/{server.process.pid}/fd"))
            for i in range(10):
                client = subprocess.Popen(
                    [harness.CLI, "bench", f"--target={server.target}", "--shape=1x8x512x64",
                     "--concurrency=8", "--duration=30s", *(["--stream"] if i % 2 else [])],
                    stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
                time.sleep(0.3)
                client.send_signal(signal.SIGKILL)
                client.wait()
            self.assert_all_returned(server)
            self.assert_serves(server)
            end = time.monotonic() + 20
            while len(os.listdir(f"/proc/{server.process.pid}/fd")) > fds + 1:
                self.assertLess(time.monotonic(), end, "connections of dead clients stay open")
                time.sleep(0.05)
            self.assertEqual(server.stop(), 0)

    def test_a_full_queue_refuses_and_recovers(self):
        rng = np.random.default_rng(4)
        with harness.Server("--max_queue_requests=4", *harness.SLOW) as server, \
                server.channel() as channel:
            mission = harness.mission_request(rng)
            calls = [harness.stub(channel).Attend.future(mission) for _ in range(64)]
            codes = [call.code().name for call in calls]
            self.assertEqual(set(codes), {"OK", "RESOURCE_EXHAUSTED"})
            refused = calls[codes.index("RESOURCE_EXHAUSTED")]
            self.assertIn("queue is full: 4", refused.details())
            self.assertEqual(
                server.metric('flashcore_rejected_requests_total{reason="resource_exhausted"}'),
                codes.count("RESOURCE_EXHAUSTED"))
            self.assert_all_returned(server)
            self.assert_serves(server)

    def test_full_staging_memory_refuses_and_recovers(self):
        rng = np.random.default_rng(5)
        with harness.Server("--staging_memory_bytes=5000000", "--staging_wait_ms=0",
                            *harness.SLOW) as server, \
                server.channel() as channel:
            mission = harness.mission_request(rng)  # takes 2 MiB
            calls = [harness.stub(channel).Attend.future(mission) for _ in range(32)]
            codes = {call.code().name for call in calls}
            self.assertEqual(codes, {"OK", "RESOURCE_EXHAUSTED"})
            self.assert_all_returned(server)
            self.assert_serves(server)

    def test_a_slow_reader_does_not_block_others(self):
        rng = np.random.default_rng(6)
        with harness.Server() as server, server.channel() as slow:
            # Nobody reads the answers of this stream: flow control must stop it, and no other.
            mission = [harness.mission_request(rng, str(i)) for i in range(8)] * 40
            replies = harness.stub(slow).AttendStream(iter(mission))
            time.sleep(2)
            self.assert_serves(server)
            # The limit of a stream is 64; the request above may still be ending.
            self.assertLessEqual(server.metric("flashcore_inflight_requests"), 65)
            replies.cancel()
            self.assert_all_returned(server)


if __name__ == "__main__":
    unittest.main()
