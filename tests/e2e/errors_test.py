"""The details of errors: an ErrorInfo that says why, to gRPC's own clients and to the Python package."""

import unittest

import flashcore
import grpc
import numpy as np
from flashcore.v1 import attention_pb2 as pb

import harness

KV_HEADS, DIM = 2, 64
PAGE_BYTES = 2 * 64 * KV_HEADS * DIM * 2
PAGES = 128
MEMORY = PAGES * PAGE_BYTES
SHAPE = dict(num_layers=1, num_kv_heads=KV_HEADS, head_dim=DIM)


def rows(count):
    return np.ones((count, KV_HEADS, DIM), np.float16)


class ErrorsTest(unittest.TestCase):
    def client(self, *flags):
        server = self.enterContext(harness.Server(f"--kv_memory_bytes={MEMORY}", *flags))
        self.channel = self.enterContext(server.channel())
        return self.enterContext(flashcore.connect(server.target))

    def info(self, call):
        """The ErrorInfo in the trailing metadata of a call of gRPC's own client, which fails."""
        with self.assertRaises(grpc.RpcError) as caught:
            call(harness.stub(self.channel))
        details, = (value for key, value in caught.exception.trailing_metadata()
                    if key == "grpc-status-details-bin")
        status = pb.Status.FromString(details)
        self.assertEqual((status.code, status.message),
                         (caught.exception.code().value[0], caught.exception.details()))
        detail, = status.details
        self.assertEqual(detail.type_url, "type.googleapis.com/google.rpc.ErrorInfo")
        info = pb.ErrorInfo.FromString(detail.value)
        self.assertEqual(info.domain, "flashcore")
        return info.reason, dict(info.metadata)

    def test_full_memory_does_not_count_the_request_itself(self):
        client = self.client("--client_kv_bytes=0")
        with client.create_sequence(**SHAPE) as other, client.create_sequence(**SHAPE) as sequence:
            other.append(0, rows(100), rows(100))  # two pages
            with self.assertRaises(flashcore.KvFull) as caught:
                sequence.append(0, rows(64 * (PAGES - 1)), rows(64 * (PAGES - 1)))
            self.assertEqual(caught.exception.metadata, dict(
                needed_bytes=str((PAGES - 1) * PAGE_BYTES), free_bytes=str((PAGES - 2) * PAGE_BYTES),
                used_bytes=str(2 * PAGE_BYTES)))
            self.assertEqual(sequence.info().layer_lengths, [0])
            sequence.append(0, rows(64 * (PAGES - 2)), rows(64 * (PAGES - 2)))  # it all fits

    def test_a_quota_is_not_full_memory(self):
        client = self.client(f"--client_kv_bytes={3 * PAGE_BYTES}")
        with client.create_sequence(**SHAPE) as sequence:
            sequence.append(0, rows(64), rows(64))
            with self.assertRaises(flashcore.QuotaExceeded) as caught:
                sequence.append(0, rows(64 * 3), rows(64 * 3))
            self.assertEqual(caught.exception.metadata, dict(
                limit="client_kv_bytes", needed=str(3 * PAGE_BYTES), used=str(PAGE_BYTES),
                allowed=str(3 * PAGE_BYTES)))

    def test_all_lost_spans_are_named(self):
        client = self.client()
        batch = client.create_sequences(8, **SHAPE)
        for i in (1, 4, 5, 6):
            batch[i].delete()
        with self.assertRaises(flashcore.SequenceLost) as caught:
            batch.attend(0, rows(8), rows(8), rows(8))
        self.assertEqual(caught.exception.spans, [1, 4, 5, 6])
        self.assertIn("4 spans have no sequence", str(caught.exception))
        unknown = pb.GetSequenceRequest(sequence_id=bytes(16))
        self.assertEqual(self.info(lambda stub: stub.GetSequence(unknown)), ("SEQUENCE_LOST", {}))

    def test_more_lost_spans_than_metadata_holds(self):
        client = self.client("--client_sequences=0")
        batch = client.create_sequences(1200, **SHAPE)
        flashcore.SequenceBatch([batch[i] for i in range(0, 1200, 2)]).delete()
        with self.assertRaises(flashcore.SequenceLost) as caught:
            batch.attend(0, rows(1200), rows(1200), rows(1200))
        self.assertEqual(caught.exception.spans, list(range(0, 1024, 2)))

    def test_lengths(self):
        client = self.client()
        with client.create_sequence(**SHAPE) as sequence:
            sequence.append(0, rows(3), rows(3))
            request = pb.TruncateSequenceRequest(sequence_id=sequence.id, length=1, expected_length=2)
            self.assertEqual(self.info(lambda stub: stub.TruncateSequence(request)),
                             ("LENGTH_MISMATCH", dict(expected="2", actual="3")))
            with self.assertRaises(flashcore.LengthMismatch) as caught:
                sequence.append(0, rows(1), rows(1), expected_length=7)
            self.assertEqual((caught.exception.expected, caught.exception.actual), (7, 3))

    def test_an_operation_of_many(self):
        self.client()
        lost = pb.SequenceOperation(get=pb.GetSequenceRequest(sequence_id=bytes(16)))
        result, = harness.stub(self.channel).ManageSequences(
            pb.ManageSequencesRequest(operations=[lost])).results
        info = pb.ErrorInfo.FromString(result.status.details[0].value)
        self.assertEqual(info.reason, "SEQUENCE_LOST")

    def test_a_request_of_a_stream(self):
        self.client()
        request = harness.small_request("first")
        request.spans[0].sequence_id = bytes(16)
        request.ClearField("key")
        request.ClearField("value")
        request.spans[0].kv_rows = 0
        answer = next(harness.stub(self.channel).AttendStream(iter([request])))
        info = pb.ErrorInfo.FromString(answer.status.details[0].value)
        self.assertEqual((info.reason, dict(info.metadata)), ("SEQUENCE_LOST", dict(spans="0")))


if __name__ == "__main__":
    harness.main()
