"""Signals: a drain loses no request, a later signal ends the server at once."""

import collections
import signal
import threading
import time
import unittest

import grpc
from flashcore.v1 import attention_pb2 as pb

import harness
from harness import HeldStaging, wait_until, window_request
from raw_http2 import ATTEND, SilentClient

OK, UNAVAILABLE = grpc.StatusCode.OK, grpc.StatusCode.UNAVAILABLE
# The drain waits longer than any test: a server that ends before has not waited for it.
PATIENT = ("--drain_timeout_s=600",)


def slow_request(request_id=""):
    """Takes one thread of a CPU some ten milliseconds."""
    rng = harness.numpy_rng()
    return harness.request(*(harness.random_tensor(rng, 1024, 2, 64) for _ in range(3)), request_id)


def endless_request():
    """One launch of ten seconds or more for one thread of any CPU."""
    return harness.zeros_request(1 << 13, 1 << 16, heads=32, kv_heads=1)


def received(server, rpc):
    """How many requests the server has received: answered, and in flight."""
    answered = server.metric(
        f'flashcore_request_duration_seconds_count{{rpc="{rpc}",transport="grpc"}}')
    return answered + server.metric("flashcore_inflight_requests")


def held_requests(server, stub, count):
    """The futures of `count` requests that wait, with HeldStaging, for its memory."""
    waiting = "flashcore_staging_waiting_requests"
    before = server.metric(waiting)
    futures = [stub.Attend.future(pb.AttendRequest.FromString(window_request()))
               for _ in range(count)]
    wait_until(lambda: server.metric(waiting) == before + count, "the requests wait")
    return futures


class DrainTest(unittest.TestCase):
    def test_every_request_received_before_the_signal_is_answered(self):
        with harness.Server(*PATIENT, *HeldStaging.FLAGS) as server, server.channel() as channel, \
                HeldStaging(server) as memory:
            stub = harness.stub(channel)
            before = held_requests(server, stub, 30)
            server.process.send_signal(signal.SIGTERM)
            server.wait_for_record("draining")
            info = pb.GetServerInfoRequest()  # does not wait for memory
            wait_until(lambda: stub.GetServerInfo.future(info).code() == UNAVAILABLE,
                       "it takes new requests")
            after = [stub.Attend.future(harness.small_request()) for _ in range(10)]
            self.assertEqual(collections.Counter(f.code() for f in after), {UNAVAILABLE: 10})
            self.assertFalse([f for f in before if f.done()])
            memory.release()
            self.assertEqual(collections.Counter(f.code() for f in before), {OK: len(before)})
            self.assertEqual(server.process.wait(harness.PATIENCE), 0)
            self.assertEqual(server.records()[-1]["msg"], "drained")

    def test_every_request_of_a_stream_received_before_the_signal_is_answered(self):
        ids = {str(i) for i in range(8)}
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
        self.check_clients_that_send_all_through_a_drain(harness.small_request())

    @harness.stress
    def test_large_requests_that_come_all_through_a_drain_are_answered(self):
        self.check_clients_that_send_all_through_a_drain(slow_request())

    def check_clients_that_send_all_through_a_drain(self, request):
        sent, codes = collections.Counter(), collections.defaultdict(list)

        def client(number):
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

    @harness.stress
    def test_clients_that_do_not_stop_do_not_hold_it(self):
        with harness.Server(*PATIENT) as server:
            with server.load("--concurrency=8", "--shape=1x1x16x32", "--allow_errors"):
                wait_until(lambda: received(server, "Attend") > 100, "no load")
                self.assertEqual(server.stop(), 0)

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

    def test_slow_readers_and_open_streams_end(self):
        with harness.Server("--drain_timeout_s=0.5") as server, SilentClient(server.target) as silent, \
                server.channel() as channel:
            idle, load = self.leave_open(server, silent, harness.stub(channel))
            self.assertEqual(server.stop(), 0)
            self.assertEqual((idle.code(), load.code()), (UNAVAILABLE, UNAVAILABLE))
            self.assertIn("drained", [record["msg"] for record in server.records()])

    def leave_open(self, server, silent, stub):
        """Leaves six unread replies, and two open streams, which it returns."""
        small = harness.small_request("unread").SerializeToString()
        for _ in range(5):
            silent.call(ATTEND, small)
        silent.send(silent.open(ATTEND + "Stream"), small)
        wait_until(lambda: server.metric("flashcore_inflight_requests") == 6, "unread replies")

        def forever():
            server.process.wait()  # the server ends the stream
            yield from ()

        streams = stub.AttendStream(forever()), stub.LoadSequence.future(forever())
        started = 'grpc_server_started_total{grpc_method="%s"}'
        wait_until(lambda: server.metric(started % "AttendStream") == 2 and
                   server.metric(started % "LoadSequence") == 1, "open streams")
        return streams

    @harness.stress
    def test_slow_readers_and_open_streams_end_in_time(self):
        timeout, ids = 8, {str(i) for i in range(20)}

        def requests():
            yield from (slow_request(i) for i in ids)
            server.process.wait()

        with harness.Server(f"--drain_timeout_s={timeout}", f"--client_staging_bytes={1 << 30}",
                            *harness.SLOW) as server, SilentClient(server.target) as silent, \
                server.channel() as channel:
            stub = harness.stub(channel)
            idle, load = self.leave_open(server, silent, stub)
            replies = stub.AttendStream(requests())
            wait_until(lambda: received(server, "AttendStream") >= len(ids) + 6, "requests are missing")
            begin = time.monotonic()
            server.process.send_signal(signal.SIGTERM)
            answers = {}
            with self.assertRaises(grpc.RpcError) as caught:
                answers.update((reply.request_id, reply.status.code) for reply in replies)
            self.assertEqual(caught.exception.code(), UNAVAILABLE)
            self.assertEqual(server.process.wait(harness.PATIENCE), 0)
            self.assertLess(time.monotonic() - begin, timeout)
            self.assertEqual(answers.keys(), ids)
            self.assertLessEqual(set(answers.values()), {0, UNAVAILABLE.value[0]})
            self.assertEqual((idle.code(), load.code()), (UNAVAILABLE, UNAVAILABLE))

    def test_an_idle_server_stops_at_once(self):
        with harness.Server(*PATIENT) as server:
            self.assertEqual(server.stop(), 0)

    def test_readyz_says_not_ready_while_it_drains(self):
        with harness.Server(*PATIENT, *HeldStaging.FLAGS) as server, server.channel() as channel, \
                HeldStaging(server) as memory:
            self.assertEqual((server.probe("/healthz"), server.probe("/readyz")), (200, 200))
            futures = held_requests(server, harness.stub(channel), 2)
            server.process.send_signal(signal.SIGINT)  # the same as SIGTERM
            wait_until(lambda: server.probe("/readyz") == 503, "it is ready")
            self.assertEqual(server.probe("/healthz"), 200)
            wait_until(lambda: server.metric("flashcore_serving") == 0, "it serves")
            memory.release()
            self.assertEqual({future.code() for future in futures}, {OK})
            self.assertEqual(server.process.wait(harness.PATIENCE), 0)
            self.assertEqual(server.records()[-1]["msg"], "drained")

    def test_a_later_signal_exits_at_once(self):
        with harness.Server(*PATIENT, *HeldStaging.FLAGS) as server, server.channel() as channel, \
                HeldStaging(server):
            futures = held_requests(server, harness.stub(channel), 6)
            server.process.send_signal(signal.SIGTERM)
            server.wait_for_record("draining")

            def ends():
                server.process.send_signal(signal.SIGTERM)
                return server.process.poll() is not None

            # For a second they are the first signal again. A server that waits for the drain after all
            # does not end.
            wait_until(ends, "the end")
            self.assertEqual(server.process.returncode, 128 + signal.SIGTERM)
            self.assertEqual({future.code() for future in futures}, {UNAVAILABLE})

    def test_signals_that_come_together_are_one(self):
        with harness.Server(*PATIENT, *HeldStaging.FLAGS) as server, server.channel() as channel, \
                HeldStaging(server) as memory:
            futures = held_requests(server, harness.stub(channel), 2)
            with server.stopped():
                for sig in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
                    server.process.send_signal(sig)
            server.wait_for_record("draining")
            server.process.send_signal(signal.SIGHUP)
            server.wait_for_record("SIGHUP: the server drains")  # what came before it has been taken
            # The kernel's, at the end of the CPU time: it never ends a drain that something else began.
            server.process.send_signal(signal.SIGXCPU)
            wait_until(lambda: "\nShdPnd:\t0000000000000000\n" in (server.proc / "status").read_text(),
                       "it is taken")
            memory.release()
            self.assertEqual({future.code() for future in futures}, {OK})
            self.assertEqual(server.process.wait(harness.PATIENCE), 0)

    def test_sighup_without_credentials_does_nothing(self):
        with harness.Server(*PATIENT) as server:
            server.process.send_signal(signal.SIGHUP)
            server.wait_for_record("SIGHUP: reading the credential files")
            self.assertEqual(server.probe("/readyz"), 200)
            self.assertEqual(server.stop(), 0)

    @unittest.skipIf(harness.ON_GPU, "a GPU's launches are too short")
    def test_a_drain_that_times_out_exits_1(self):
        # Launches that are not cut.
        with harness.Server("--drain_timeout_s=0.2", "--max_launch_ms=60000",
                            "--max_request_gflop=10000", "--cpu_threads=1") as server, \
                server.channel() as channel:
            stub = harness.stub(channel)
            futures = [stub.Attend.future(endless_request())]
            wait_until(lambda: server.metric("flashcore_batch_requests_count") == 1, "a launch runs")
            futures.append(stub.Attend.future(harness.small_request()))
            wait_until(lambda: server.metric("flashcore_inflight_requests") == 2, "another waits")
            self.assertEqual(server.stop(), 1)
            self.assertIn("drain timed out", server.records()[-1]["msg"])
            self.assertEqual({future.code() for future in futures}, {UNAVAILABLE})


if __name__ == "__main__":
    harness.main()
