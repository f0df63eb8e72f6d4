"""Errors of the server as exceptions of the Python package."""

import unittest

import flashcore
import numpy as np

import harness

KV_HEADS, DIM = 2, 64
PAGE_BYTES = 2 * 64 * KV_HEADS * DIM * 2
PAGES = 128
SHAPE = dict(num_layers=1, num_kv_heads=KV_HEADS, head_dim=DIM)


def rows(count):
    return np.ones((count, KV_HEADS, DIM), np.float16)


class ErrorsTest(unittest.TestCase):
    def client(self, *flags, pages=PAGES):
        server = self.enterContext(harness.Server(f"--kv_memory_bytes={pages * PAGE_BYTES}", *flags))
        return self.enterContext(flashcore.connect(server.target))

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

    def test_lost_sequences_of_a_batch(self):
        client = self.client()
        batch = client.create_sequences(8, **SHAPE)
        for i in (1, 4, 5, 6):
            batch[i].delete()
        with self.assertRaises(flashcore.SequenceLost) as caught:
            batch.attend(0, rows(8), rows(8), rows(8))
        self.assertEqual((caught.exception.lost, caught.exception.spans), (4, [1, 4, 5, 6]))
        self.assertEqual(caught.exception.sequence_ids, [batch[i].id for i in (1, 4, 5, 6)])

    def test_more_lost_sequences_than_an_error_names(self):
        restored = []
        client = self.client("--client_sequences=0", "--client_kv_bytes=0", pages=600)
        batch = client.create_sequences(600, **SHAPE)
        flashcore.SequenceBatch([batch[i] for i in range(0, 600, 2)]).delete()
        with self.assertRaises(flashcore.SequenceLost) as caught:
            batch.attend(0, rows(600), rows(600), rows(600))
        self.assertEqual((caught.exception.lost, caught.exception.spans), (300, list(range(0, 256, 2))))
        # on_lost gets all of them all the same.
        with flashcore.connect(client.config.target, on_lost=lambda sequence: (
                restored.append(sequence), sequence.recreate(), True)[-1]) as other:
            again = flashcore.SequenceBatch([other.open_sequence(batch[i].id) for i in range(1, 600, 2)])
            flashcore.SequenceBatch([again[i] for i in range(200)]).delete()
            again.attend(0, rows(300), rows(300), rows(300))
        self.assertEqual(len(restored), 200)

    def test_lengths(self):
        client = self.client()
        with client.create_sequence(**SHAPE) as sequence:
            sequence.append(0, rows(3), rows(3))
            with self.assertRaises(flashcore.LengthMismatch) as caught:
                sequence.append(0, rows(1), rows(1), expected_length=7)
            self.assertEqual((caught.exception.expected, caught.exception.actual), (7, 3))
            self.assertEqual(caught.exception.reason, "LENGTH_MISMATCH")


if __name__ == "__main__":
    harness.main()
