"""A device is lost under load: requests fail, health turns to NOT_SERVING, the process exits.

The other device still completes what it has in flight.
"""

import signal
import threading
import unittest

import grpc
import numpy as np

import harness
from harness import wait_until

HEADS, DIM = 2, 64
# A GPU's memory and pinned memory are allocated at start.
SMALL = (f"--kv_memory_bytes={64 * harness.MIB}", f"--staging_memory_bytes={64 * harness.MIB}")
OK, INTERNAL, UNAVAILABLE = (grpc.StatusCode.OK, grpc.StatusCode.INTERNAL,
                             grpc.StatusCode.UNAVAILABLE)


class DeviceLostTest(unittest.TestCase):
    def test_requests_fail_health_turns_and_the_process_exits_with_an_error(self):
        codes = []

        def load(target):
            """Sends requests until the server is gone."""
            with server.channel(target) as channel:
                request = harness.zeros_request(64, 64, HEADS, DIM)
                while not codes or codes[-1] != UNAVAILABLE:
                    codes.append(harness.stub(channel).Attend.future(request, timeout=60).code())

        with harness.Server(*SMALL, program=harness.LOSING_SERVER) as server, \
                server.channel() as channel:
            health = harness.watch_health(channel)
            self.assertEqual(next(health), "SERVING")
            clients = [threading.Thread(target=load, args=(server.target,)) for _ in range(4)]
            for client in clients:
                client.start()
            wait_until(lambda: codes.count(OK) >= 10, "requests are served")
            server.process.send_signal(signal.SIGUSR1)
            self.assertEqual(next(health), "NOT_SERVING")
            for client in clients:
                client.join(60)
            self.assertEqual(server.process.wait(60), 1)
            self.assertEqual(set(codes), {OK, INTERNAL, UNAVAILABLE})
            lost = server.wait_for_record("the device is lost")
            self.assertIn("cuda:0", lost["device"])

    @unittest.skipUnless(harness.ON_FAKE_GPU, "a real GPU cannot be held")
    def test_the_other_device_completes_what_it_has_in_flight(self):
        rng = harness.numpy_rng()
        q, k, v = (harness.random_tensor(rng, rows, HEADS, DIM) for rows in (3, 203, 203))
        with harness.Server("--device=cuda:0,cuda:1", "--drain_timeout_s=600", *SMALL,
                            env={"FLASHCORE_LOSE_GPU": "1"},
                            program=harness.LOSING_SERVER) as server, server.channel() as channel:
            stub = harness.stub(channel)
            health = harness.watch_health(channel)
            self.assertEqual(next(health), "SERVING")
            on_0, on_1 = (self.create(stub, device) for device in ("cuda:0", "cuda:1"))
            for sequence in (on_0, on_1):
                self.append(stub, sequence, q, k[:200], v[:200]).result()
            server.process.send_signal(signal.SIGUSR2)
            server.wait_for_record("cuda:0 is held")
            survivor = self.append(stub, on_0, q, k[200:], v[200:])
            wait_until(lambda: server.metric("flashcore_inflight_requests") == 1, "it is sent")

            server.process.send_signal(signal.SIGUSR1)
            code = OK
            while code == OK:
                code = self.append(stub, on_1, q, k[:1], v[:1]).code()
            self.assertEqual(code, INTERNAL)
            self.assertEqual(self.append(stub, on_1, q, k[:1], v[:1]).code(), UNAVAILABLE)
            self.assertEqual(next(health), "NOT_SERVING")
            self.check_probes_and_metrics(server)

            self.assertFalse(survivor.done())
            server.process.send_signal(signal.SIGUSR2)
            np.testing.assert_allclose(
                np.frombuffer(survivor.result().output, np.float16).reshape(q.shape),
                harness.reference(q, k, v)[0], atol=2e-3)
            self.assertEqual(server.process.wait(60), 1)
            lost = [record for record in server.records() if record["msg"] == "the device is lost"]
            self.assertEqual([record["device"] for record in lost], ["cuda:1"])

    def check_probes_and_metrics(self, server):
        """Those of a server that drains, with a sequence on each device."""
        wait_until(lambda: server.probe("/readyz") != 200, "it follows health")
        self.assertEqual((server.probe("/readyz"), server.probe("/healthz")), (503, 200))
        wait_until(lambda: server.metric("flashcore_serving") == 0, "the gauge follows")
        for device in ("cuda:0", "cuda:1"):
            self.assertEqual(server.metric(f'flashcore_sequences{{device="{device}"}}'), 1)
        for reason in ("INTERNAL", "UNAVAILABLE"):
            rejected = f'flashcore_rejected_requests_total{{reason="{reason}"}}'
            wait_until(lambda: server.metric(rejected) >= 1, f"{reason} is counted")

    @staticmethod
    def create(stub, device_id):
        return harness.create(stub, num_kv_heads=HEADS, head_dim=DIM, device_id=device_id).sequence_id

    @staticmethod
    def append(stub, sequence, q, k, v):
        """Appends K/V to the sequence, and attends to all of it."""
        request = harness.request(q, k, v)
        request.spans[0].sequence_id = sequence
        return stub.Attend.future(request, timeout=60)


if __name__ == "__main__":
    harness.main()
