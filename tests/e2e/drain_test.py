"""Signals: a drain loses no request, a second signal ends the server at once."""

import collections
import functools
import signal
import subprocess
import threading
import time
import unittest

import grpc

import harness
from harness import wait_until
from silent_client import SilentClient

OK, UNAVAILABLE = grpc.StatusCode.OK, grpc.StatusCode.UNAVAILABLE
# The drain waits longer than any test: a server that ends before has not waited for it.
PATIENT = ("--drain_timeout_s=600",)


def slow_request(request_id=""):
    """Takes one thread of a CPU some ten milliseconds."""
    rng = harness.numpy_rng()
    return harness.request(*(harness.random_tensor(rng, 1024, 2, 64) for _ in range(3)), request_id)


@functools.cache
def very_slow_request():
    """Takes one thread of a CPU about a second. Made once: several are to be in flight at once, and a
    GPU holds the first for a second only."""
    rng = harness.numpy_rng()
    return harness.request(*(harness.random_tensor(rng, 4096, 8, 128) for _ in range(3)))


def received(server, rpc):
    """How many requests the server has received: answered, and in flight."""
    answered = server.metric(
        f'flashcore_request_duration_seconds_count{{rpc="{rpc}",transport="grpc"}}')
    return answered + server.metric("flashcore_inflight_requests")


class DrainTest(unittest.TestCase):
    def test_every_request_received_before_the_signal_is_answered(self):
        for sig in (signal.SIGTERM, signal.SIGINT):
            with self.subTest(sig), harness.Server(*PATIENT, *harness.SLOW) as server, \
                    server.channel() as channel:
                stub = harness.stub(channel)
                before = [stub.Attend.future(slow_request()) for _ in range(60)]
                before.append(stub.Attend.future(very_slow_request()))  # alone at the end
                wait_until(lambda: received(server, "Attend") >= len(before), "requests are missing")
                server.process.send_signal(sig)
                server.wait_for_record("draining")
                self.assertTrue([f for f in before if not f.done()], "there was nothing to wait for")
                wait_until(lambda: stub.Attend.future(harness.small_request()).code() == UNAVAILABLE,
                           "it takes new requests")
                after = [stub.Attend.future(slow_request()) for _ in range(10)]
                self.assertEqual(collections.Counter(f.code() for f in before), {OK: len(before)})
                self.assertEqual(collections.Counter(f.code() for f in after), {UNAVAILABLE: 10})
                self.assertEqual(server.process.wait(harness.PATIENCE), 0)
                self.assertEqual(server.records()[-1]["msg"], "drained")

    def test_every_request_of_a_stream_received_before_the_signal_is_answered(self):
        ids = {str(i) for i in range(30)}
        with harness.Server(*PATIENT, *harness.SLOW) as server, server.channel() as channel:
            def requests():
                yield from (slow_request(i) for i in ids)
                server.process.wait()  # the server ends the stream

            replies = harness.stub(channel).AttendStream(requests())
            wait_until(lambda: received(server, "AttendStream") >= len(ids), "requests are missing")
            server.process.send_signal(signal.SIGTERM)
            answered = []
            with self.assertRaises(grpc.RpcError) as caught:
                answered += ((reply.request_id, reply.status.code) for reply in replies)
            self.assertEqual(caught.exception.code(), UNAVAILABLE)
            self.assertEqual(sorted(answered), sorted((i, 0) for i in ids))
            self.assertEqual(server.process.wait(harness.PATIENCE), 0)

    def test_clients_that_send_all_through_a_drain_get_an_answer_to_every_request(self):
        sent, codes = collections.Counter(), collections.defaultdict(list)

        def client(number):
            request = slow_request()
            with server.channel() as channel:
                while not codes[number] or codes[number][-1] == OK:
                    sent[number] += 1
                    call = harness.stub(channel).Attend.future(request, timeout=harness.PATIENCE)
                    codes[number].append(call.code())

        with harness.Server(*PATIENT, *harness.SLOW) as server:
            clients = [threading.Thread(target=client, args=(number,)) for number in range(8)]
            for thread in clients:
                thread.start()
            wait_until(lambda: len(codes) == 8 and all(len(of_one) > 1 for of_one in codes.values()),
                       "clients without an answer")
            server.process.send_signal(signal.SIGTERM)
            for thread in clients:
                thread.join()
            self.assertEqual(server.process.wait(harness.PATIENCE), 0)
        for number, of_one in codes.items():
            self.assertEqual(collections.Counter(of_one), {OK: sent[number] - 1, UNAVAILABLE: 1})

    def test_clients_that_do_not_stop_do_not_hold_it(self):
        with harness.Server(*PATIENT) as server:
            load = subprocess.Popen(
                [harness.CLI, "bench", f"--target={server.target}", "--concurrency=8",
                 "--shape=1x1x16x32", "--duration=1h", "--allow_errors"],
                stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
            try:
                wait_until(lambda: received(server, "Attend") > 100, "no load")
                self.assertEqual(server.stop(), 0)
            finally:
                load.kill()
                load.wait()

    def test_an_open_stream_is_answered_and_ended(self):
        with harness.Server() as server, server.channel() as channel:
            waiting = iter([harness.small_request("a")])

            def requests():
                yield next(waiting)
                server.process.wait()  # the server ends the stream

            replies = harness.stub(channel).AttendStream(requests())
            self.assertEqual(next(replies).request_id, "a")
            self.assertEqual(server.stop(), 0)
            with self.assertRaises(grpc.RpcError) as caught:
                next(replies)
            self.assertEqual(caught.exception.code(), grpc.StatusCode.UNAVAILABLE)

    def test_slow_readers_and_open_streams_end_in_time(self):
        self.check_end_in_time(long_requests=0, timeout=8)

    def check_end_in_time(self, long_requests, timeout):
        """A drain with slow readers, open streams, and requests of which each takes a thread of a CPU a
        second. `timeout` in seconds."""
        ids = {str(i) for i in range(20)}
        attend = "/flashcore.v1.AttentionService/Attend"
        small = harness.request(*(harness.random_tensor(harness.numpy_rng(), 100, 1, 64)
                                  for _ in range(3)), "unread").SerializeToString()
        ended = threading.Event()

        def forever(*requests):
            yield from requests
            ended.wait()

        with harness.Server(f"--drain_timeout_s={timeout}", f"--client_staging_bytes={1 << 30}",
                            "--max_request_gflop=4000",
                            *harness.SLOW) as server, SilentClient(server.port) as silent, \
                server.channel() as channel:
            stub = harness.stub(channel)
            for _ in range(5):
                silent.call(attend, small)
            silent.send(silent.open(attend + "Stream"), small)
            wait_until(lambda: server.metric("flashcore_inflight_requests") == 6, "unread replies")
            idle, load = stub.AttendStream(forever()), stub.LoadSequence.future(forever())
            long = [stub.Attend.future(very_slow_request()) for _ in range(long_requests)]
            replies = stub.AttendStream(forever(*(slow_request(i) for i in ids)))
            wait_until(lambda: received(server, "AttendStream") >= len(ids) + 1 and
                       received(server, "Attend") >= len(long) + 5, "requests are missing")
            begin = time.monotonic()
            server.process.send_signal(signal.SIGTERM)
            answers = {}
            with self.assertRaises(grpc.RpcError) as caught:
                answers.update((reply.request_id, reply.status.code) for reply in replies)
            self.assertEqual(caught.exception.code(), UNAVAILABLE)
            self.assertEqual(server.process.wait(harness.PATIENCE), 0)
            self.assertLess(time.monotonic() - begin, timeout)
            ended.set()
            self.assertEqual(answers.keys(), ids)
            self.assertLessEqual(set(answers.values()), {0, UNAVAILABLE.value[0]})
            codes = collections.Counter(future.code() for future in long)
            self.assertEqual(codes[OK] + codes[UNAVAILABLE], len(long), codes)
            self.assertEqual((idle.code(), load.code()), (UNAVAILABLE, UNAVAILABLE))

    def test_an_idle_server_stops_at_once(self):
        with harness.Server(*PATIENT) as server:
            self.assertEqual(server.stop(), 0)

    def test_readyz_says_not_ready_while_it_drains(self):
        with harness.Server(*PATIENT, *harness.SLOW) as server, server.channel() as channel:
            self.assertEqual((server.probe("/healthz"), server.probe("/readyz")), (200, 200))
            futures = [harness.stub(channel).Attend.future(very_slow_request()) for _ in range(2)]
            wait_until(lambda: server.metric("flashcore_inflight_requests") == 2, "no requests")
            server.process.send_signal(signal.SIGTERM)
            wait_until(lambda: server.probe("/readyz") == 503, "it is ready")
            self.assertEqual(server.probe("/healthz"), 200)
            self.assertEqual(server.metric("flashcore_serving"), 0)
            self.assertEqual({future.code() for future in futures}, {OK})

    def test_a_second_signal_exits_at_once(self):
        with harness.Server(*PATIENT, *harness.SLOW) as server, server.channel() as channel:
            futures = [harness.stub(channel).Attend.future(very_slow_request()) for _ in range(6)]
            wait_until(lambda: server.metric("flashcore_inflight_requests") >= 3, "no requests")
            server.process.send_signal(signal.SIGTERM)
            server.wait_for_record("draining")
            # A server that waits for the drain after all exits with 0.
            self.assertEqual(server.stop(signal.SIGTERM), 128 + signal.SIGTERM)
            codes = [future.code() for future in futures]
            self.assertIn(UNAVAILABLE, codes)
            self.assertLessEqual(set(codes), {OK, UNAVAILABLE})

    @unittest.skipIf(harness.ON_GPU, "a GPU's launches are too short")
    def test_a_drain_that_times_out_exits_1(self):
        # Launches that are not cut.
        with harness.Server("--drain_timeout_s=0.2", "--max_launch_ms=60000",
                            *harness.SLOW) as server, server.channel() as channel:
            futures = [harness.stub(channel).Attend.future(very_slow_request()) for _ in range(6)]
            wait_until(lambda: server.metric("flashcore_inflight_requests") >= 3, "no requests")
            self.assertEqual(server.stop(), 1)
            self.assertIn("drain timed out", server.records()[-1]["msg"])
            codes = [future.code() for future in futures]
            self.assertNotEqual(set(codes), {OK})


if __name__ == "__main__":
    harness.main()
