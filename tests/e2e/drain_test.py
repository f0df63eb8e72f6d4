"""Signals: a drain loses no request, a second signal ends the server at once."""

import signal
import subprocess
import time
import unittest

import grpc
import numpy as np

import harness


class DrainTest(unittest.TestCase):
    def test_sigterm_under_load_ends_every_request_with_a_status(self):
        rng = np.random.default_rng(1)
        for sig in (signal.SIGTERM, signal.SIGINT):
            with harness.Server() as server, server.channel() as channel:
                stub = harness.stub(channel)
                mission = harness.mission_request(rng)
                stub.Attend(mission)
                # About a second of work is queued when the signal comes; more requests follow it.
                futures = [stub.Attend.future(mission, timeout=60) for _ in range(120)]
                next(f for f in futures if f.code() == grpc.StatusCode.OK)
                server.process.send_signal(sig)
                server.wait_for_record("draining")
                futures += [stub.Attend.future(mission, timeout=60) for _ in range(10)]
                codes = [future.code() for future in futures]
                self.assertEqual(server.process.wait(60), 0)
                self.assertEqual(len(codes), 130)
                self.assertLessEqual(set(codes),
                                     {grpc.StatusCode.OK, grpc.StatusCode.UNAVAILABLE})
                self.assertGreater(codes.count(grpc.StatusCode.OK), 1)
                self.assertGreater(codes.count(grpc.StatusCode.UNAVAILABLE), 0)
                self.assertEqual(server.records()[-1]["msg"], "drained")

    def test_clients_that_do_not_stop_do_not_hold_it(self):
        with harness.Server() as server:
            load = subprocess.Popen(
                [harness.CLI, "bench", f"--target={server.target}", "--concurrency=8",
                 "--shape=1x1x16x32", "--duration=60s"],
                stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
            try:
                while server.metric("flashcore_inflight_requests") == 0:
                    time.sleep(0.01)
                start = time.monotonic()
                self.assertEqual(server.stop(), 0)
                self.assertLess(time.monotonic() - start, 10)
            finally:
                load.kill()
                load.wait()

    def test_an_open_stream_is_answered_and_ended(self):
        with harness.Server() as server, server.channel() as channel:
            waiting = iter([harness.small_request("a")])

            def requests():
                yield next(waiting)
                while server.process.poll() is None:
                    time.sleep(0.01)

            replies = harness.stub(channel).AttendStream(requests())
            self.assertEqual(next(replies).request_id, "a")
            self.assertEqual(server.stop(), 0)
            with self.assertRaises(grpc.RpcError) as caught:
                next(replies)
            self.assertEqual(caught.exception.code(), grpc.StatusCode.UNAVAILABLE)

    def test_an_idle_server_stops_at_once(self):
        with harness.Server() as server:
            start = time.monotonic()
            self.assertEqual(server.stop(), 0)
            self.assertLess(time.monotonic() - start, 2)

    def test_readyz_says_not_ready_while_it_drains(self):
        rng = np.random.default_rng(4)
        with harness.Server(*harness.SLOW) as server, server.channel() as channel:
            self.assertEqual((server.probe("/healthz"), server.probe("/readyz")), (200, 200))
            big = harness.request(*(harness.random_tensor(rng, 4096, 8, 128) for _ in range(3)))
            futures = [harness.stub(channel).Attend.future(big) for _ in range(2)]
            while server.metric("flashcore_inflight_requests") < 2:
                time.sleep(0.01)
            server.process.send_signal(signal.SIGTERM)
            while server.probe("/readyz") == 200:
                time.sleep(0.01)
            self.assertEqual((server.probe("/healthz"), server.probe("/readyz")), (200, 503))
            self.assertEqual(server.metric("flashcore_serving"), 0)
            self.assertEqual({future.code() for future in futures}, {grpc.StatusCode.OK})

    def test_a_second_signal_exits_at_once(self):
        rng = np.random.default_rng(2)
        with harness.Server(*harness.SLOW) as server, server.channel() as channel:
            # Seconds of work on one thread.
            big = harness.request(*(harness.random_tensor(rng, 4096, 8, 128) for _ in range(3)))
            futures = [harness.stub(channel).Attend.future(big) for _ in range(6)]
            while server.metric('flashcore_inflight_requests') < 3:
                time.sleep(0.01)
            server.process.send_signal(signal.SIGTERM)
            server.wait_for_record("draining")
            start = time.monotonic()
            self.assertEqual(server.stop(signal.SIGTERM), 128 + signal.SIGTERM)
            self.assertLess(time.monotonic() - start, 1)
            self.assertEqual(len([f.code() for f in futures]), 6)

    def test_a_drain_that_times_out_exits_1(self):
        rng = np.random.default_rng(3)
        with harness.Server("--drain_timeout_s=0.2", *harness.SLOW) as server, \
                server.channel() as channel:
            big = harness.request(*(harness.random_tensor(rng, 4096, 8, 128) for _ in range(3)))
            futures = [harness.stub(channel).Attend.future(big) for _ in range(6)]
            while server.metric('flashcore_inflight_requests') < 3:
                time.sleep(0.01)
            self.assertEqual(server.stop(), 1)
            self.assertIn("drain timed out", server.records()[-1]["msg"])
            self.assertEqual(len([f.code() for f in futures]), 6)


if __name__ == "__main__":
    unittest.main()
