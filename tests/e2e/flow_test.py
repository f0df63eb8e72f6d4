"""Full staging memory: requests wait, memory stays bounded, memory of dead clients is freed."""

import signal
import subprocess
import unittest

import harness
from harness import MIB, wait_until

STAGING = 16 * MIB    # 8 mission requests
TRANSPORT = 64 * MIB  # --transport_memory_bytes
FLAGS = (f"--staging_memory_bytes={STAGING}", "--staging_wait_ms=60000",
         "--max_message_bytes=16777216", *harness.SLOW)

# Memory for 128 connections, gRPC beyond the bytes of messages, and free heap.
SLACK = 64 * MIB


class FlowTest(unittest.TestCase):
    def load(self, server, clients, duration):
        """Sends mission requests from `clients` clients, each with a connection of its own."""
        return subprocess.Popen(
            [harness.CLI, "bench", f"--target={server.target}", "--shape=1x8x512x64",
             f"--concurrency={clients}", f"--connections={clients}", f"--duration={duration}",
             "--warmup=0s"],
            stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)

    def test_clients_that_need_ten_times_the_memory_are_all_served(self):
        mission = harness.mission_request(harness.numpy_rng())
        with harness.Server(*FLAGS) as server:
            channels = [server.channel() for _ in range(80)]
            calls = [harness.stub(c).Attend.future(mission) for c in channels]
            self.assertEqual({call.code().name for call in calls}, {"OK"})
            self.assertGreater(max(c.result().timing.staging_wait_ns for c in calls), 0)
            waited = server.metric('flashcore_request_phase_seconds_count{phase="staging_wait"}')
            self.assertGreater(waited, 0)
            self.assertEqual(server.metric("flashcore_staging_waiting_requests"), 0)
            for channel in channels:
                channel.close()

    def test_memory_does_not_grow_with_the_clients(self):
        with harness.Server(f"--transport_memory_bytes={TRANSPORT}", *FLAGS) as server:
            with server.channel() as channel:
                harness.stub(channel).Attend(harness.small_request())
            before = server.status_bytes("VmRSS")
            grown = {}
            for clients in (8, 128):
                output = self.load(server, clients, "5s").communicate(timeout=300)[0]
                grown[clients] = server.status_bytes("VmHWM") - before
                print(f"{clients} clients: grown by {grown[clients] / MIB:.0f} MiB\n{output}")
            # 128 requests are 256 MiB.
            self.assertLessEqual(grown[128], STAGING + TRANSPORT + SLACK)

    def test_clients_that_die_while_they_wait_leave_the_line(self):
        with harness.Server(*FLAGS) as server:
            for _ in range(3):
                client = self.load(server, 32, "1h")
                wait_until(lambda: server.metric("flashcore_staging_waiting_requests") >= 8,
                           "requests wait")
                client.send_signal(signal.SIGKILL)
                client.communicate()
                series = ("flashcore_inflight_requests", "flashcore_staging_waiting_requests",
                          'flashcore_staging_bytes{state="used"}')
                wait_until(lambda: not any(server.metric(name) for name in series),
                           "all is released")
            self.assertEqual(server.stop(), 0)


if __name__ == "__main__":
    harness.main()
