"""A generated client works, here in Python."""

import concurrent.futures
import threading
import time
import unittest

import grpc
import numpy as np
from flashcore.v1 import attention_pb2 as pb

import harness
from harness import failure

Code = grpc.StatusCode
HEALTH = "/grpc.health.v1.Health/"
SERVING, NOT_SERVING = b"\x08\x01", b"\x08\x02"


class InteropTest(harness.ServerTest):
    flags = ("--max_message_bytes=8388608", "--enable_reflection")

    def test_attend_matches_float64(self):
        for target in (None, f"unix:{self.server.socket}"):
            with self.server.channel(target) as channel:
                q = harness.random_tensor(self.rng, 5, 6, 64)
                k, v = (harness.random_tensor(self.rng, 77, 2, 64) for _ in range(2))
                reply = harness.stub(channel).Attend(harness.request(
                    q, k, v, mask=pb.Mask(kind=pb.Mask.KIND_CAUSAL), return_lse=True))
                want, want_lse = harness.reference(q, k, v, causal=True)
                got = np.frombuffer(reply.output, np.float16).reshape(q.shape)
                got_lse = np.frombuffer(reply.lse, np.float32).reshape(5, 6)
                np.testing.assert_allclose(got, want, atol=2e-3)
                np.testing.assert_allclose(got_lse, want_lse, atol=1e-4)

    def test_stream_answers_by_request_id(self):
        ids = {str(i) for i in range(100)}
        replies = self.stub.AttendStream(harness.small_request(i) for i in ids)
        self.assertEqual({reply.request_id for reply in replies}, ids)

    def test_errors_carry_code_and_message(self):
        bad = harness.small_request()
        bad.head_dim = 33
        error = failure(Code.INVALID_ARGUMENT, self.stub.Attend, bad)
        self.assertIn("head_dim: 33 is not one of 32, 64, 96, 128, 256", error.details())

    def test_a_message_over_the_limit_names_it(self):
        bad = harness.small_request()
        bad.query = bytes(9 * harness.MIB)
        error = failure(Code.RESOURCE_EXHAUSTED, self.stub.Attend, bad)
        self.assertIn("at most 8388608 are allowed (--max_message_bytes)", error.details())
        good = harness.small_request("good")  # and the stream goes on
        bad.request_id = "bad"
        replies = {reply.request_id: reply for reply in self.stub.AttendStream(iter([bad, good]))}
        self.assertIn("at most 8388608 are allowed", replies["bad"].status.message)
        self.assertEqual(replies["good"].status.code, 0)

    def test_a_field_that_the_server_does_not_know_is_named(self):
        call = self.channel.unary_unary("/flashcore.v1.AttentionService/GetServerInfo")
        error = failure(Code.UNIMPLEMENTED, call, b"\x98\x06\x01")  # field 99
        self.assertIn("field 99 of flashcore.v1.GetServerInfoRequest", error.details())

    def test_reflection_lists_and_describes_the_service(self):
        def describe(name):
            return b"\x22" + bytes([len(name)]) + name

        list_services = b"\x3a\x01*"
        name = b"flashcore.v1.AttentionService"
        answers = []
        for package in ("v1", "v1alpha"):
            itself = f"grpc.reflection.{package}.ServerReflection"
            reflect = self.channel.stream_stream(f"/{itself}/ServerReflectionInfo")
            listed, described, own = reflect(iter([list_services, describe(name),
                                                   describe(itself.encode())]))
            for service in (name, b"grpc.health.v1.Health", itself.encode()):
                self.assertIn(service, listed)
            self.assertIn(b"AttendRequest", described)
            self.assertIn(f"grpc.reflection.{package}".encode(), own)
            answers.append((listed, described))
        self.assertEqual(*answers)

    def test_health_check(self):
        check = self.channel.unary_unary(HEALTH + "Check")
        self.assertEqual(check(b""), SERVING)
        name = b"flashcore.v1.AttentionService"
        self.assertEqual(check(b"\x0a" + bytes([len(name)]) + name), SERVING)
        failure(Code.NOT_FOUND, check, b"\x0a\x04none")

    @harness.stress
    def test_a_request_after_an_idle_second_does_not_wait(self):
        # gRPC's callback threads sleep from 1.0 to 1.1 s after the last event unless kept awake.
        waits = []  # without that each is some 80 ms; with it a busy machine delays some
        while len(waits) < 30 and (len(waits) < 3 or min(waits) >= 0.04):
            for _ in range(20):
                self.stub.Attend(harness.small_request())
            time.sleep(1.02)
            start = time.monotonic()
            self.stub.Attend(harness.small_request())
            waits.append(time.monotonic() - start)
        self.assertLess(min(waits), 0.04)

    def test_concurrent_clients_get_their_own_answers(self):
        failures = []

        def client(seed):
            rng = np.random.default_rng((harness.SEED, seed))
            with self.server.channel() as channel:
                stub = harness.stub(channel)
                for _ in range(10):
                    q, k, v = (harness.random_tensor(rng, 3, 2, 32) for _ in range(3))
                    reply = stub.Attend(harness.request(q, k, v))
                    got = np.frombuffer(reply.output, np.float16).reshape(q.shape)
                    if not np.allclose(got, harness.reference(q, k, v)[0], atol=2e-3):
                        failures.append(seed)

        with concurrent.futures.ThreadPoolExecutor(8) as pool:
            list(pool.map(client, range(8)))
        self.assertEqual(failures, [])


class HealthWatchTest(unittest.TestCase):
    def test_watch_sees_not_serving_before_the_end(self):
        with harness.Server() as server, server.channel() as channel:
            watch = channel.unary_stream(HEALTH + "Watch")(b"")
            self.assertEqual(next(watch), SERVING)
            status = []
            stopper = threading.Thread(target=lambda: status.append(server.stop()))
            stopper.start()
            self.assertEqual(next(watch), NOT_SERVING)
            stopper.join()
            self.assertEqual(status, [0])


if __name__ == "__main__":
    harness.main()
