"""Full staging memory: requests wait, memory stays bounded, memory of dead clients is freed."""

import subprocess
import unittest

from flashcore.v1 import attention_pb2 as pb

import harness
from harness import MIB, HeldStaging, wait_until, window_request

STAGING = 16 * MIB    # 8 mission requests
TRANSPORT = 64 * MIB  # --transport_memory_bytes

# Memory for 128 connections, gRPC beyond the bytes of messages, and free heap.
SLACK = 64 * MIB

WAITING = "flashcore_staging_waiting_requests"


class FlowTest(unittest.TestCase):
    def test_clients_that_need_ten_times_the_memory_are_all_served(self):
        request = pb.AttendRequest.FromString(window_request())
        with harness.Server(*HeldStaging.FLAGS) as server, HeldStaging(server) as memory:
            channels = [server.channel() for _ in range(120)]
            calls = [harness.stub(c).Attend.future(request) for c in channels]
            wait_until(lambda: server.metric(WAITING) == len(calls), "all wait")
            memory.release()
            self.assertEqual({call.code().name for call in calls}, {"OK"})
            self.assertGreater(min(c.result().timing.staging_wait_ns for c in calls), 0)
            waited = 'flashcore_request_phase_seconds_count{phase="staging_wait"}'
            wait_until(lambda: server.metric(waited) >= len(calls), "their waits are counted")
            wait_until(lambda: server.metric(WAITING) == 0, "none waits")
            for channel in channels:
                channel.close()

    def test_clients_that_die_while_they_wait_leave_the_line(self):
        used = 'flashcore_staging_bytes{state="used"}'
        with harness.Server(*HeldStaging.FLAGS) as server, HeldStaging(server) as memory:
            held, inflight = server.metric(used), server.metric("flashcore_inflight_requests")
            for _ in range(2):
                with server.load("--shape=1x1x256x64", "--concurrency=16", "--connections=16", "--warmup=0s"):
                    wait_until(lambda: server.metric(WAITING) == 16, "all its requests wait")
                wait_until(lambda: server.metric(WAITING) == 0, "they leave the line")
                wait_until(lambda: server.metric("flashcore_inflight_requests") == inflight,
                           "they have ended")
                self.assertEqual(server.metric(used), held)
            memory.release()
            for series in ("flashcore_inflight_requests", used):
                wait_until(lambda: server.metric(series) == 0, "all is released")
            self.assertEqual(server.stop(), 0)

    @harness.stress
    @unittest.skipIf(harness.SANITIZED, "it would measure the sanitizer's memory")
    def test_memory_does_not_grow_with_the_clients(self):
        flags = (f"--staging_memory_bytes={STAGING}", "--staging_wait_ms=60000",
                 f"--max_message_bytes={16 * MIB}", f"--transport_memory_bytes={TRANSPORT}",
                 *harness.SLOW)
        with harness.Server(*flags) as server:
            with server.channel() as channel:
                harness.stub(channel).Attend(harness.small_request())
            before = server.status_bytes("VmRSS")
            grown = {}
            for clients in (8, 128):
                output = subprocess.run(
                    [harness.CLI, "bench", f"--target={server.target}", "--shape=1x8x512x64",
                     f"--concurrency={clients}", f"--connections={clients}", "--duration=5s", "--warmup=0s"],
                    stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, timeout=300).stdout
                grown[clients] = server.status_bytes("VmHWM") - before
                print(f"{clients} clients: grown by {grown[clients] / MIB:.0f} MiB\n{output}")
            # 128 requests are 256 MiB.
            self.assertLessEqual(grown[128], STAGING + TRANSPORT + SLACK)


if __name__ == "__main__":
    harness.main()
