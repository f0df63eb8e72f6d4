"""A server on two GPUs: both serve requests, and results are right on either."""

import sys

import grpc
import numpy as np
from flashcore.v1 import attention_pb2 as pb

import harness

DEVICES = ("cuda:0", "cuda:1")
HEADS, DIM = 2, 64

if not harness.ON_FAKE_GPU and (_why := harness.why_no_gpu(1)):
    print(f"skipped: no cuda:1: {_why}")
    sys.exit(harness.NO_DEVICE)


class FleetTest(harness.ServerTest):
    flags = ("--device=" + ",".join(DEVICES), f"--kv_memory_bytes={64 * harness.MIB}",
             f"--staging_memory_bytes={64 * harness.MIB}")

    def tearDown(self):
        for info in self.stub.ListSequences(pb.ListSequencesRequest(page_size=1000)).sequences:
            self.stub.DeleteSequence(pb.DeleteSequenceRequest(sequence_id=info.sequence_id))
        for device in self.stub.GetServerInfo(pb.GetServerInfoRequest()).devices:
            self.assertEqual(device.kv_used_bytes, 0)

    def create(self, device_id=""):
        return harness.create(self.stub, num_kv_heads=HEADS, head_dim=DIM, device_id=device_id).sequence

    def launches(self):
        """Launches of each device so far."""
        return [self.server.metric(f'flashcore_batch_requests_count{{device="{device}"}}')
                for device in DEVICES]

    def attend(self, sequences=()):
        """Attends to new rows, appended to each of the sequences, or inline. Checks the results."""
        q, k, v = (harness.random_tensor(self.rng, rows, HEADS, DIM) for rows in (3, 200, 200))
        request = harness.request(q, k, v)
        if sequences:
            span = request.spans[0]
            del request.spans[:]
            for sequence in sequences:
                request.spans.add().CopyFrom(span)
                request.spans[-1].sequence_id = sequence
            for field in ("query", "key", "value"):
                setattr(request, field, getattr(request, field) * len(sequences))
        output = np.frombuffer(self.stub.Attend(request).output, np.float16)
        want = harness.reference(q, k, v)[0]
        for got in output.reshape(-1, *want.shape):
            np.testing.assert_allclose(got, want, atol=2e-3)

    def test_tells_of_both(self):
        info = self.stub.GetServerInfo(pb.GetServerInfoRequest())
        self.assertEqual(tuple(device.id for device in info.devices), DEVICES)

    def test_inline_requests_go_to_both(self):
        before = self.launches()
        for _ in range(8):
            self.attend()
        self.assertEqual([now - then for now, then in zip(self.launches(), before)], [4, 4])

    def test_sequences_stay_where_they_were_created(self):
        for i, device in enumerate(DEVICES):
            sequences = [self.create(device) for _ in range(3)]
            self.assertEqual({sequence.device_id for sequence in sequences}, {device})
            before = self.launches()
            self.attend([sequence.sequence_id for sequence in sequences])
            self.assertEqual([now - then for now, then in zip(self.launches(), before)],
                             [1 - i, i])

    def test_the_server_spreads_what_may_be_anywhere(self):
        self.assertEqual({self.create().device_id for _ in range(16)}, set(DEVICES))

    def test_a_request_is_on_one_device(self):
        sequences = [self.create(device).sequence_id for device in DEVICES]
        error = harness.failure(grpc.StatusCode.INVALID_ARGUMENT, self.attend, sequences)
        self.assertIn("names a sequence of cuda:1, spans[0] one of cuda:0", error.details())

    def test_the_bench_keeps_the_sequences_of_a_request_beside_each_other(self):
        result = harness.bench(
            f"--target={self.server.target}", "--mode=decode", "--shape=1x2x128x64",
            "--concurrency=4", "--sequences=12")
        self.assertEqual((result["failed"], result["wrong_replies"]), (0, 0))


if __name__ == "__main__":
    harness.main()
