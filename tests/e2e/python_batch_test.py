"""The Python package against a server: batches, plans, attends that travel together, lost sequences, and the
functions of flash-attn, held against float64."""

import asyncio
import subprocess
import sys
import unittest

import flashcore
import numpy as np

import harness
from python_test import ATOL, DIM, HEADS, KV_HEADS, oracle, values

LAYERS = 2


class BatchTestCase(unittest.TestCase):
    @classmethod
    def setUpClass(cls):
        cls.server = cls.enterClassContext(harness.Server("--client_kv_bytes=0"))
        cls.client = cls.enterClassContext(flashcore.connect(cls.server.target))

    def setUp(self):
        self.rng = harness.numpy_rng()

    def tensor(self, *shape):
        return self.rng.standard_normal(shape).astype(np.float16)

    def check(self, got, wanted):
        """got, wanted: (O [rows, heads, head_dim], LSE [rows, heads])."""
        np.testing.assert_allclose(values(got[0]), wanted[0], atol=ATOL["float16"])
        np.testing.assert_allclose(got[1], wanted[1], atol=1e-3)

    def batch(self, lengths, client=None):
        """A batch, and the K/V of its layers: [layer][sequence] -> (k, v)."""
        batch = (client or self.client).create_sequences(len(lengths), LAYERS, KV_HEADS, DIM)
        kv = [[tuple(self.tensor(n, KV_HEADS, DIM) for _ in range(2)) for n in lengths]
              for _ in range(LAYERS)]
        for layer, of_layer in enumerate(kv):
            for sequence, (k, v) in zip(batch, of_layer):
                if len(k):
                    sequence.append(layer, k, v)
        return batch, kv


class SequencesTest(BatchTestCase):
    def test_beam_search_is_search_on_copies(self):
        prompt, kv = self.batch([20])
        with prompt:
            beams = prompt.fork([0] * 4)
        layers = [of_layer * 4 for of_layer in kv]
        for step in range(6):
            parents = [int(parent) for parent in self.rng.integers(0, 4, size=4)]
            beams.reorder(parents)
            for layer in range(LAYERS):
                layers[layer] = [layers[layer][parent] for parent in parents]
                q, k, v = self.tensor(4, HEADS, DIM), *(self.tensor(4, KV_HEADS, DIM) for _ in range(2))
                o, lse = beams.attend(layer, q, k, v, return_lse=True)
                for i in range(4):
                    row = slice(i, i + 1)
                    layers[layer][i] = tuple(np.concatenate([old, new[row]])
                                             for old, new in zip(layers[layer][i], (k, v)))
                    self.check((o[row], lse[row]), oracle(q[row], *layers[layer][i]))
        self.assertEqual(len(self.client.list_sequences()), 4)
        beams.truncate(20)
        self.assertEqual([list(info.layer_lengths) for info in beams.info()], [[20] * LAYERS] * 4)
        beams.delete()
        self.assertEqual(self.client.list_sequences(), [])

    def test_more_sequences_than_one_rpc_takes(self):
        most = self.client.server_info().limits.max_sequence_operations
        with self.client.create_sequences(most + 3, 1, 1, 32) as batch:
            self.assertEqual(len(self.client.list_sequences()), most + 3)
            self.assertEqual(len(batch.info()), most + 3)
        self.assertEqual(self.client.list_sequences(), [])

    def test_a_plan_gives_the_bits_of_attend_batch(self):
        (planned, _), (other, _) = self.batch([3, 40, 0]), self.batch([3, 40, 0])
        for theirs, ours in zip(planned, other):
            ours.truncate(0)
            theirs.truncate(0)
        plan = self.client.plan(planned, num_heads=HEADS, query_rows=[2, 1, 3], causal=True, return_lse=True)
        for layer in (0, 1, 0, 1):
            q, k, v = self.tensor(6, HEADS, DIM), *(self.tensor(6, KV_HEADS, DIM) for _ in range(2))
            wanted = other.attend(layer, q, k, v, causal=True, return_lse=True, cu_seqlens_q=[0, 2, 3, 6],
                                  cu_seqlens_k=[0, 2, 3, 6])
            for mine, theirs in zip(plan.run(layer, q, k, v), wanted):
                np.testing.assert_array_equal(mine, theirs)
        self.assertEqual(planned.lengths, other.lengths)
        planned.delete()
        other.delete()

    def test_tasks_that_travel_together_get_the_bits_of_their_own_requests(self):
        n = 40
        steps = [[(self.tensor(1, HEADS, DIM), self.tensor(1, KV_HEADS, DIM), self.tensor(1, KV_HEADS, DIM))
                  for _ in range(3)] for _ in range(n)]

        async def decode(sequence, own):
            return [await sequence.attend(0, *step, return_lse=True) for step in own]

        async def run():
            async with flashcore.aio.connect(self.server.target) as client:
                async with await client.create_sequences(n + 1, 1, KV_HEADS, DIM) as batch:
                    await batch[n].delete()
                    tasks = [decode(s, own) for s, own in zip(batch, [*steps, steps[0]])]
                    *results, lost = await asyncio.gather(*tasks, return_exceptions=True)
                    self.assertIsInstance(lost, flashcore.SequenceLost)
                    return results

        together = asyncio.run(run())
        alone = self.client.create_sequences(n, 1, KV_HEADS, DIM)
        for sequence, own, results in zip(alone, steps, together):
            for step, (o, lse) in zip(own, results):
                wanted = sequence.attend(0, *step, return_lse=True)
                np.testing.assert_array_equal(o, wanted[0])
                np.testing.assert_array_equal(lse, wanted[1])
        alone.delete()

    def test_a_sequence_lost_with_its_server_is_restored(self):
        k, v, q = self.tensor(9, KV_HEADS, DIM), self.tensor(9, KV_HEADS, DIM), self.tensor(1, HEADS, DIM)

        def restore(sequence):
            sequence.recreate()
            sequence.append(0, k, v)
            return True

        retry = flashcore.Retry(attempts=10**6, longest=0.05)
        with harness.in_temporary_folder() as folder, flashcore.connect(
                f"unix:{folder}/s", retry=retry, timeout=harness.PATIENCE, on_lost=restore) as client:
            with harness.Server(f"--listen=unix:{folder}/s"):
                batch = client.create_sequences(2, 1, KV_HEADS, DIM)
                for sequence in batch:
                    restore(sequence)
            with harness.Server(f"--listen=unix:{folder}/s"):
                o, lse = batch.attend(0, np.concatenate([q, q]), return_lse=True)
                for row in (slice(0, 1), slice(1, 2)):
                    self.check((o[row], lse[row]), oracle(q, k, v))


class FlashAttnTest(BatchTestCase):
    def setUp(self):
        super().setUp()
        flashcore.set_default_client(self.client)
        self.addCleanup(flashcore.set_default_client, None)

    def test_varlen(self):
        for causal, window in ((False, (-1, -1)), (True, (-1, -1)), (False, (7, 3)), (True, (5, -1)),
                               (False, (-1, 0))):
            queries, keys = [5, 1, 0, 17, 3], [9, 0, 4, 64, 2]
            q = self.tensor(sum(queries), HEADS, DIM)
            k, v = (self.tensor(sum(keys), KV_HEADS, DIM) for _ in range(2))
            ends_q, ends_k = (np.cumsum([0, *rows]).astype(np.int32) for rows in (queries, keys))
            with self.subTest(causal=causal, window=window):
                out, lse, probabilities = flashcore.flash_attn_varlen_func(
                    q, k, v, ends_q, ends_k, 17, 64, 0.0, 0.3, causal, window, return_attn_probs=True)
                self.assertIsNone(probabilities)
                self.assertEqual((out.shape, lse.shape), (q.shape, (HEADS, len(q))))
                bounds = [None if rows == -1 else rows for rows in window]
                for a, b, c, d in zip(ends_q, ends_q[1:], ends_k, ends_k[1:]):
                    wanted = oracle(q[a:b], k[c:d], v[c:d], causal, bounds, 0.3)
                    self.check((out[a:b], lse.T[a:b]), wanted)
                alone = flashcore.flash_attn_varlen_func(q, k, v, ends_q, ends_k, 17, 64, softmax_scale=0.3,
                                                         causal=causal, window_size=window)
                np.testing.assert_array_equal(alone, out)

    def test_varlen_without_query_rows(self):
        q, k = self.tensor(0, HEADS, DIM), self.tensor(4, KV_HEADS, DIM)
        out, lse, _ = flashcore.flash_attn_varlen_func(q, k, k, [0, 0], [0, 4], 0, 4, return_attn_probs=True)
        self.assertEqual((out.shape, lse.shape), (q.shape, (HEADS, 0)))

    def test_kvcache_of_tensors_is_appended_in_place(self):
        k_cache, v_cache = (self.tensor(3, 16, KV_HEADS, DIM) for _ in range(2))
        before = k_cache.copy()
        q = self.tensor(2, 2, HEADS, DIM)
        k, v = (self.tensor(2, 2, KV_HEADS, DIM) for _ in range(2))
        out, lse = flashcore.flash_attn_with_kvcache(
            q, k_cache, v_cache, k, v, cache_seqlens=np.array([5, 0], np.int32),
            cache_batch_idx=np.array([2, 0], np.int32), causal=True, return_softmax_lse=True)
        self.assertEqual((out.shape, lse.shape), (q.shape, (2, HEADS, 2)))
        for i, (place, length) in enumerate(((2, 5), (0, 0))):
            np.testing.assert_array_equal(k_cache[place, length:length + 2], k[i])
            np.testing.assert_array_equal(v_cache[place, length:length + 2], v[i])
            rows = slice(0, length + 2)
            self.check((out[i], lse[i].T), oracle(q[i], k_cache[place, rows], v_cache[place, rows], True))
        np.testing.assert_array_equal(k_cache[1], before[1])
        out = flashcore.flash_attn_with_kvcache(q[:1], k_cache, v_cache)
        self.check((out[0], oracle(q[0], k_cache[0], v_cache[0])[1]), oracle(q[0], k_cache[0], v_cache[0]))

    def test_kvcache_of_sequences(self):
        batch, kv = self.batch([5, 0, 70])
        lengths = np.array([5, 0, 70], np.int32)
        for layer in range(LAYERS):
            q = self.tensor(3, 2, HEADS, DIM)
            k, v = (self.tensor(3, 2, KV_HEADS, DIM) for _ in range(2))
            out, lse = flashcore.flash_attn_with_kvcache(
                q, batch.layer(layer), None, k, v, cache_seqlens=lengths, causal=True, window_size=(4, 0),
                return_softmax_lse=True)
            for i in range(3):
                joined = [np.concatenate([old, new[i]]) for old, new in zip(kv[layer][i], (k, v))]
                self.check((out[i], lse[i].T), oracle(q[i], *joined, True, (4, 0)))
                kv[layer][i] = joined
        picked = flashcore.flash_attn_with_kvcache(
            q[:2], batch.layer(1), batch.layer(1), cache_seqlens=[72, 7], cache_batch_idx=[2, 0])
        for i, place in enumerate((2, 0)):
            wanted = oracle(q[i], *kv[1][place])[0]
            np.testing.assert_allclose(values(picked[i]), wanted, atol=ATOL["float16"])
        with self.assertRaises(flashcore.LengthMismatch) as caught:
            flashcore.flash_attn_with_kvcache(q, batch.layer(0), None, k, v, cache_seqlens=7)
        self.assertEqual((caught.exception.expected, caught.exception.actual), (7, 2))
        self.assertEqual([list(info.layer_lengths) for info in batch.info()], [[7, 7], [2, 2], [72, 72]])
        batch.delete()

    def test_what_the_server_lacks_is_named(self):
        q, k = self.tensor(3, HEADS, DIM), self.tensor(3, KV_HEADS, DIM)
        cache, q4 = self.tensor(1, 8, KV_HEADS, DIM), q[None]
        varlen = flashcore.flash_attn_varlen_func
        with_cache = flashcore.flash_attn_with_kvcache
        for call, words in (
                (lambda **o: varlen(q, k, k, [0, 3], [0, 3], 3, 3, **o),
                 dict(dropout_p=0.1, softcap=30.0, alibi_slopes=np.ones(4), block_table=np.ones((1, 1)))),
                (lambda **o: with_cache(q4, cache, cache, **o),
                 dict(rotary_cos=q, rotary_sin=q, cache_leftpad=q, block_table=q, softcap=1.0,
                      alibi_slopes=q))):
            for name, value in words.items():
                with self.assertRaises(flashcore.Unimplemented) as caught:
                    call(**{name: value})
                shown = f"shape {list(value.shape)}" if hasattr(value, "shape") else str(value)
                self.assertIn(f"{name}: {shown}; allowed: ", caught.exception.message)

    def test_arguments_that_do_not_fit_are_named(self):
        q, k = self.tensor(3, HEADS, DIM), self.tensor(3, KV_HEADS, DIM)
        cache = self.tensor(2, 8, KV_HEADS, DIM)
        q4, k4 = self.tensor(2, 1, HEADS, DIM), self.tensor(2, 1, KV_HEADS, DIM)
        frozen = cache.copy()
        frozen.flags.writeable = False
        varlen, cached = flashcore.flash_attn_varlen_func, flashcore.flash_attn_with_kvcache
        before = cache.copy()
        for call, words in (
                (lambda: varlen(q, k, k, [0, 3], [0, 3], 2, 3), ("max_seqlen_q: 2", "3")),
                (lambda: varlen(q, k, k, [0, 3], [0, 4], 3, 4), ("cu_seqlens_k",)),
                (lambda: varlen(q, k, k, [[0, 3]], [0, 3], 3, 3), ("cu_seqlens_q", "a list or an array [n]")),
                (lambda: varlen(q, k, k, [0, 3], [0, 3], 3, 3, window_size=3), ("window_size: 3",)),
                (lambda: cached(q, cache, cache), ("q:", "[batch, seqlen_q, nheads, headdim]")),
                (lambda: cached(q4, cache, cache, k4), ("k, v:",)),
                (lambda: cached(q4, cache, cache, k4, k4), ("cache_seqlens: None",)),
                (lambda: cached(q4, cache, cache, k4, k4, cache_seqlens=8), ("cache_seqlens: 8", "most 8")),
                (lambda: cached(q4, cache, cache, k4, k4, cache_seqlens=[1]), ("cache_seqlens: [1]",)),
                (lambda: cached(q4, cache, cache, k4, k4, cache_seqlens=1, cache_batch_idx=[1, 1]),
                 ("cache_batch_idx: [1, 1]", "different")),
                (lambda: cached(q4, cache, cache[:1]), ("v_cache:", "[1, 8")),
                (lambda: cached(q4, frozen, cache, k4, k4, cache_seqlens=1), ("k_cache:", "read-only"))):
            with self.subTest(words), self.assertRaises(flashcore.InvalidArgument) as caught:
                call()
            for word in words:
                self.assertIn(word, str(caught.exception))
        np.testing.assert_array_equal(cache, before)


LEASING = {
    "blocking": """
import sys, flashcore
client = flashcore.connect(sys.argv[1], lease=True)
batch = client.create_sequences(2, 1, 1, 32)
fork = batch[0].fork()
print("ready", flush=True)
input()
client.close()
""",
    "asyncio": """
import asyncio, sys, flashcore

async def main():
    async with flashcore.aio.connect(sys.argv[1], lease=True) as client:
        batch = await client.create_sequences(2, 1, 1, 32)
        fork = await batch[0].fork()
        print("ready", flush=True)
        await asyncio.get_running_loop().run_in_executor(None, input)

asyncio.run(main())
"""}


class LeaseTest(unittest.TestCase):
    def test_what_a_client_leaves_behind_is_deleted(self):
        deleted = 'flashcore_sequences_evicted_total{reason="lease"}'
        with harness.Server() as server:
            gone = 0
            for kind, end in [(kind, end) for kind in LEASING for end in ("killed", "closed")]:
                with self.subTest(kind, end=end), subprocess.Popen(
                        [sys.executable, "-B", "-c", LEASING[kind], server.target], text=True,
                        stdin=subprocess.PIPE, stdout=subprocess.PIPE) as client:
                    self.assertEqual(client.stdout.readline(), "ready\n")
                    self.assertEqual(server.metric("flashcore_sequences"), 3)
                    if end == "killed":
                        client.kill()
                    else:
                        client.communicate("\n", timeout=harness.PATIENCE)
                        self.assertEqual(client.returncode, 0)
                    gone += 3
                    harness.wait_until(lambda: server.metric(deleted) == gone, "its sequences are deleted")


if __name__ == "__main__":
    harness.main()
