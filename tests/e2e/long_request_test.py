"""Requests of long work: others run in between, deadlines and a drain end them."""

import signal
import time
import unittest

import grpc

import harness
from harness import wait_until
from honest_client import assert_unhurt, timed

HEAD_DIM = 64
WORK = {"flashcore-client": "worker"}


def long_request(flop):
    """One head, as many query as K/V rows. Zeros take as long as other values."""
    rows = int((flop / (4 * HEAD_DIM)) ** 0.5)
    return harness.zeros_request(rows, rows, head_dim=HEAD_DIM)


class LongRequestTest(unittest.TestCase):
    def send(self, channel, request, **options):
        return harness.stub(channel).Attend.future(request, metadata=tuple(WORK.items()), **options)

    def waits(self, stub, count):
        """Seconds of each request of an honest client, one after the other."""
        request = harness.mission_request(harness.numpy_rng())
        return timed(lambda: stub.Attend(request, timeout=harness.PATIENCE), count)

    def test_others_run_between_the_parts_of_a_long_request(self):
        with harness.Server("--insecure_client_names", *harness.HELD) as server, \
                server.channel() as honest, server.channel() as other:
            with harness.held_lane(server, other, metadata=tuple(WORK.items())) as long:
                for _ in range(5):
                    harness.stub(honest).Attend(harness.small_request(), timeout=harness.PATIENCE)
                self.assertFalse(long.done(), "it held nothing")
            # Its launch ends between two parts.
            wait_until(lambda: server.metric("flashcore_inflight_requests") == 0, "it goes on")
            self.assertEqual(server.stop(), 0)

    @harness.stress
    def test_a_small_client_beside_the_longest_requests_waits_for_a_part_only(self):
        with harness.Server("--insecure_client_names") as server, \
                server.channel() as honest, server.channel() as other:
            stub = harness.stub(honest)
            quiet = self.waits(stub, 100)
            info = stub.GetServerInfo(harness.pb.GetServerInfoRequest())
            # Each takes a second or more.
            long = [self.send(other, long_request(info.limits.max_request_flop)) for _ in range(8)]
            wait_until(lambda: server.metric("flashcore_inflight_requests") == 8, "no long requests")
            beside = self.waits(stub, 100)
            self.assertFalse(long[-1].done(), "it has measured something else")
            assert_unhurt(self, quiet, beside, floor=1)
            for call in long:
                call.cancel()
            # Its launch ends between two parts.
            wait_until(lambda: server.metric("flashcore_inflight_requests") == 0, "they go on")
            self.assertEqual(server.stop(), 0)

    def test_the_default_limit_is_about_a_second_of_the_device(self):
        with harness.Server() as server, server.channel() as channel:
            info = harness.stub(channel).GetServerInfo(harness.pb.GetServerInfoRequest())
            self.assertGreater(info.limits.max_request_flop, 10e9)
            call = self.send(channel, long_request(info.limits.max_request_flop * 1.1))
            self.assertEqual(call.code(), grpc.StatusCode.INVALID_ARGUMENT)
            self.assertIn("floating-point operations; at most", call.details())
            self.assertEqual(server.stop(), 0)

    @harness.stress  # a part must end within the drain
    def test_a_drain_ends_long_requests_and_each_has_a_status(self):
        with harness.Server("--max_request_gflop=8000", "--drain_timeout_s=6") as server, \
                server.channel() as channel:
            # More than the drain has time for, in parts and in the queue.
            calls = [self.send(channel, long_request(5e12)) for _ in range(3)]
            wait_until(lambda: server.metric("flashcore_inflight_requests") == 3, "no requests")
            begin = time.monotonic()
            self.assertEqual(server.stop(signal.SIGTERM), 0)
            print(f"the drain took {time.monotonic() - begin:.1f} s", flush=True)
            self.assertEqual([call.code() for call in calls], [grpc.StatusCode.UNAVAILABLE] * 3)
            self.assertIn("the server drains", calls[0].details())


if __name__ == "__main__":
    harness.main()
