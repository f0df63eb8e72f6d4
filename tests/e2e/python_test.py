"""The Python package against a server: blocking and in asyncio, held against float64."""

import asyncio
import concurrent.futures
import contextlib
import subprocess
import sys
import unittest

import flashcore
import numpy as np
from flashcore import _tensors

import harness

HEADS, KV_HEADS, DIM = 4, 2, 64
ATOL = {"float16": 4e-3, "bfloat16": 3e-2}


def values(tensor):
    """float64 of float16, or of bfloat16's bits."""
    bits = "bfloat16" if tensor.dtype == np.uint16 else None
    return _tensors.to_float32(_tensors.to_host("tensor", tensor, bits)).astype(np.float64)


def oracle(q, k, v, causal=False, window=None, scale=None):
    """(O, LSE) in float64 of one span [rows, heads, head_dim]."""
    q, k, v = map(values, (q, k, v))
    group = q.shape[1] // k.shape[1]
    k, v = (np.repeat(x, group, axis=1) for x in (k, v))
    scores = np.einsum("ihd,jhd->ihj", q, k) * (1 / np.sqrt(q.shape[2]) if scale is None else scale)
    away = np.arange(len(k))[None, :] - (np.arange(len(q))[:, None] + len(k) - len(q))
    left, right = window or (None, None)
    hidden = (away > 0) & causal
    for bound, side in ((left, -away), (right, away)):
        if bound is not None:
            hidden = hidden | (side > bound)
    scores = np.where(hidden[:, None, :], -np.inf, scores)
    top = np.maximum(scores.max(axis=-1, initial=-np.inf, keepdims=True), -1e300)
    weights = np.exp(scores - top)
    total = weights.sum(axis=-1, keepdims=True)
    with np.errstate(divide="ignore"):
        lse = (top + np.log(total))[..., 0]
    return np.einsum("ihj,jhd->ihd", weights / np.where(total == 0, 1, total), v), lse


class Foreign:
    """An array of another framework, of which numpy knows no more than DLPack."""

    def __init__(self, array):
        self.array = array

    def __dlpack__(self, **options):
        return self.array.__dlpack__(**options)

    def __dlpack_device__(self):
        return self.array.__dlpack_device__()

    def __array_namespace__(self):
        return Foreign

    @staticmethod
    def asarray(array):
        return Foreign(array)


class PythonTest(unittest.TestCase):
    """Over gRPC, and in LocalPythonTest over the local socket."""

    @classmethod
    def setUpClass(cls):
        cls.server = cls.enterClassContext(harness.Server("--client_kv_bytes=0", local=True))
        cls.client = cls.enterClassContext(flashcore.connect(cls.target()))

    @classmethod
    def target(cls):
        return cls.server.target

    def setUp(self):
        self.rng = harness.numpy_rng()

    def tensor(self, rows, heads, dim=DIM, dtype="float16"):
        return _tensors.from_float32(self.rng.standard_normal((rows, heads, dim), np.float32), dtype)

    def kv(self, rows, dtype="float16"):
        return self.tensor(rows, KV_HEADS, dtype=dtype), self.tensor(rows, KV_HEADS, dtype=dtype)

    def check(self, got, wanted, dtype="float16"):
        np.testing.assert_allclose(values(got[0]), wanted[0], atol=ATOL[dtype])
        np.testing.assert_allclose(got[1], wanted[1], atol=1e-3)

    def test_random_ragged_shapes(self):
        for case in range(16):
            rng = self.rng
            dtype = ("float16", "bfloat16")[case % 2]
            kv_heads, dim = int(rng.integers(1, 4)), int(rng.choice([32, 64, 128]))
            heads = kv_heads * int(rng.integers(1, 4))
            queries = rng.integers(1, 40, size=rng.integers(1, 5))
            keys = rng.integers(0, 150, size=len(queries))
            mask = [{}, dict(causal=True), dict(window=(7, 3)), dict(window=(-1, 2)),
                    dict(window=(5, None), causal=True)][case % 5]
            scale = [None, 0.3][case // 2 % 2]
            q = self.tensor(queries.sum(), heads, dim, dtype)
            k, v = (self.tensor(keys.sum(), kv_heads, dim, dtype) for _ in range(2))
            ends_q, ends_k = ([0, *np.cumsum(rows)] for rows in (queries, keys))
            with self.subTest(dtype=dtype, queries=queries, keys=keys, heads=(heads, kv_heads, dim), **mask):
                o, lse = self.client.attend(
                    q, k, v, **mask, softmax_scale=scale, return_lse=True, cu_seqlens_q=np.array(ends_q),
                    cu_seqlens_k=ends_k, dtype=dtype)
                self.assertEqual((o.shape, o.dtype, lse.dtype), (q.shape, q.dtype, np.float32))
                for a, b, c, d in zip(ends_q, ends_q[1:], ends_k, ends_k[1:]):
                    wanted = oracle(q[a:b], k[c:d], v[c:d], mask.get("causal", False),
                                    [None if x == -1 else x for x in mask.get("window", ())], scale)
                    self.check((o[a:b], lse[a:b]), wanted, dtype)

    def test_layouts_and_strides(self):
        q, (k, v) = self.tensor(9, HEADS), self.kv(20)
        o, lse = self.client.attend(q, k, v, return_lse=True)
        self.check((o, lse), oracle(q, k, v))
        self.assertTrue(o.flags.writeable)
        hnd = [x.swapaxes(0, 1).copy() for x in (q, k, v)]
        o_hnd, lse_hnd = self.client.attend(*hnd, layout="HND", return_lse=True)
        np.testing.assert_array_equal(o_hnd.swapaxes(0, 1), o)
        np.testing.assert_array_equal(lse_hnd.T, lse)
        odd = [np.repeat(x, 2, axis=2)[::-1, :, ::2] for x in (q, k, v)]
        wanted = oracle(q[::-1], k[::-1], v[::-1])
        self.check(self.client.attend(*odd, return_lse=True), wanted)

    def test_results_are_of_the_callers_framework(self):
        tensors = [self.tensor(5, HEADS), *self.kv(8)]
        wanted = self.client.attend(*tensors)
        o, lse = self.client.attend(*map(Foreign, tensors), return_lse=True)
        self.assertEqual((type(o), type(lse)), (Foreign, Foreign))
        np.testing.assert_array_equal(o.array, wanted)

    def test_merge_is_attention_over_both_parts(self):
        q, (k, v) = self.tensor(6, HEADS), self.kv(70)
        parts = [self.client.attend(q, k[rows], v[rows], return_lse=True)
                 for rows in (slice(0, 30), slice(30, None), slice(0, 0))]
        merged = flashcore.merge(*parts[0], *parts[1])
        self.check(merged, oracle(q, k, v))
        np.testing.assert_array_equal(flashcore.merge(*merged, *parts[2])[0], merged[0])

    def test_a_reply_over_grpcs_default_limit(self):
        q, (k, v) = self.tensor(4200, 8), self.kv(1)
        np.testing.assert_allclose(self.client.attend(q, k, v), np.repeat(v, 4, axis=1).repeat(4200, axis=0),
                                   atol=1e-3)

    def test_the_servers_refusals(self):
        q, k = self.tensor(1, HEADS, 33), self.tensor(1, KV_HEADS, 33)
        with self.assertRaises(ValueError) as caught:
            self.client.attend(q, k, k)
        self.assertIn("head_dim: 33 is not one of 32, 64, 96, 128, 256", caught.exception.message)
        with self.assertRaises(flashcore.InvalidArgument):
            self.client.create_sequence(0, KV_HEADS, DIM)
        with self.assertRaises(flashcore.SequenceLost):
            self.client.open_sequence(bytes(16))

    def test_a_sequence_from_load_to_delete(self):
        for dtype in ("float16", "bfloat16"):
            prompt, told = self.kv(100, dtype), []
            with self.client.create_sequence(2, KV_HEADS, DIM, dtype=dtype) as sequence:
                self.assertEqual(sequence.load(1, *prompt, progress=lambda *step: told.append(step)), 100)
                self.assertEqual(told, [(100, 100)])
                k, v = prompt
                for rows in (1, 3):
                    q, (k_new, v_new) = self.tensor(rows, HEADS, dtype=dtype), self.kv(rows, dtype)
                    k, v = np.concatenate([k, k_new]), np.concatenate([v, v_new])
                    got = sequence.attend(1, q, k_new, v_new, causal=True, return_lse=True)
                    self.check(got, oracle(q, k, v, causal=True), dtype)
                self.assertEqual(sequence.lengths, [0, 104])
                self.assertIn("0 to 104 rows, 2 layers, 2 KV heads, head_dim 64, " + dtype, repr(sequence))
                again = self.client.open_sequence(sequence.id)
                self.assertEqual((again.lengths, again.dtype, again.shape), ([0, 104], dtype, sequence.shape))
                self.check(again.attend(1, q, return_lse=True), oracle(q, k, v), dtype)
                again.append(1, k_new, v_new)
                with self.assertRaises(flashcore.LengthMismatch) as caught:
                    sequence.append(1, k_new, v_new)
                self.assertEqual((caught.exception.expected, caught.exception.actual), (104, 107))
                self.assertEqual(sequence.info().layer_lengths, [0, 107])
                self.assertEqual(sequence.append(1, k_new, v_new, layout="NHD"), 110)
            with self.assertRaises(flashcore.SequenceLost):
                sequence.attend(1, q)
            sequence.delete()
        self.assertEqual(self.client.list_sequences(), [])

    def test_fork_and_truncate(self):
        (k, v), q = self.kv(130), self.tensor(2, HEADS)
        with self.client.create_sequence(1, KV_HEADS, DIM) as parent:
            parent.append(0, k, v)
            with parent.fork(70) as child:
                self.assertEqual((parent.lengths, child.lengths), ([130], [70]))
                more = self.kv(5)
                got = child.attend(0, q, *more, return_lse=True)
                joined = [np.concatenate([x[:70], y]) for x, y in zip((k, v), more)]
                self.check(got, oracle(q, *joined))
                child.truncate(66)
                self.check(child.attend(0, q, return_lse=True), oracle(q, k[:66], v[:66]))
            self.check(parent.attend(0, q, return_lse=True), oracle(q, k, v))

    def test_a_batch_of_sequences_is_the_sequences_one_by_one(self):
        sequences = [self.client.create_sequence(1, KV_HEADS, DIM) for _ in range(5)]
        alone = [self.client.create_sequence(1, KV_HEADS, DIM) for _ in range(5)]
        for length, pair in enumerate(zip(sequences, alone)):
            k, v = self.kv(length)
            for sequence in pair if length else ():
                sequence.append(0, k, v)
        q, (k, v) = self.tensor(5, HEADS), self.kv(5)
        together = self.client.attend_batch(sequences, 0, q, k, v)
        for i, sequence in enumerate(alone):
            row = slice(i, i + 1)
            np.testing.assert_array_equal(together[row], sequence.attend(0, q[row], k[row], v[row]))
        q, bounds = self.tensor(9, HEADS), [0, 1, 3, 4, 8, 9]
        o, lse = self.client.attend_batch(sequences, 0, q, causal=True, cu_seqlens_q=bounds, return_lse=True)
        for sequence, begin, end in zip(alone, bounds, bounds[1:]):
            wanted = sequence.attend(0, q[begin:end], causal=True, return_lse=True)
            np.testing.assert_array_equal(o[begin:end], wanted[0])
            np.testing.assert_array_equal(lse[begin:end], wanted[1])
        self.assertEqual([sequence.lengths for sequence in sequences], [[n + 1] for n in range(5)])
        for sequence in sequences + alone:
            sequence.delete()

    def test_threads_share_a_client(self):
        tensors = [self.tensor(8, HEADS), *self.kv(30)]
        wanted = self.client.attend(*tensors)
        with concurrent.futures.ThreadPoolExecutor(8) as pool:
            for got in pool.map(lambda _: self.client.attend(*tensors), range(64)):
                np.testing.assert_array_equal(got, wanted)

    def test_asyncio_with_many_tasks(self):
        async def decode(client, seed):
            q, k, v = tensors[seed]
            async with await client.create_sequence(1, KV_HEADS, DIM) as sequence:
                await sequence.append(0, k[:-1], v[:-1])
                o, inline = await asyncio.gather(sequence.attend(0, q, k[-1:], v[-1:]),
                                                 client.attend(q, k, v))
            np.testing.assert_array_equal(o, inline)
            self.check((o, oracle(q, k, v)[1]), oracle(q, k, v))

        async def run():
            async with flashcore.aio.connect(self.target()) as client:
                await asyncio.gather(*(decode(client, seed) for seed in range(len(tensors))))
                with self.assertRaises(flashcore.SequenceLost):
                    await client.open_sequence(bytes(16))
                return await client.list_sequences()

        tensors = [(self.tensor(1, HEADS), *self.kv(20 + i)) for i in range(24)]
        self.assertEqual(asyncio.run(run()), [])

    def test_versions_and_limits(self):
        info = self.client.server_info()
        self.assertEqual(info.version, flashcore.__version__)
        self.assertIn(DIM, info.limits.head_dims)


class LocalPythonTest(PythonTest):
    @classmethod
    def target(cls):
        return f"local:{cls.server.local}"

    def shared_bytes(self):
        return self.server.metric("flashcore_shared_memory_bytes")

    def test_the_bits_are_those_of_grpc(self):
        tensors = [self.tensor(5, HEADS), *self.kv(70)]
        with flashcore.connect(self.server.target) as client:
            for wanted, got in zip(*(c.attend(*tensors, causal=True, return_lse=True)
                                     for c in (client, self.client))):
                np.testing.assert_array_equal(got, wanted)

    def test_memory_is_reused(self):
        sizes = [1, 40, 700, 3000]
        for _ in range(2):  # the second time, all blocks are there
            before = self.shared_bytes()
            for rows in sizes:
                q, (k, v) = self.tensor(rows, HEADS), self.kv(rows)
                self.client.attend(q, k, v)
                with self.client.create_sequence(1, KV_HEADS, DIM) as sequence:
                    sequence.append(0, k, v)
        self.assertEqual(self.shared_bytes(), before)

    def test_a_request_larger_than_a_slot_goes_through_the_socket(self):
        spans = 2500
        q, (k, v) = self.tensor(spans, HEADS), self.kv(spans)
        got = self.client.attend(q, k, v, cu_seqlens_q=range(spans + 1), cu_seqlens_k=range(spans + 1))
        np.testing.assert_allclose(got, np.repeat(v, HEADS // KV_HEADS, axis=1), atol=1e-3)

    def test_more_tasks_than_slots(self):
        async def run():
            async with flashcore.aio.connect(self.target()) as client:
                return await asyncio.gather(*(client.attend(*tensors) for _ in range(300)))

        tensors = [self.tensor(2, HEADS), *self.kv(3)]
        wanted = self.client.attend(*tensors)
        for got in asyncio.run(run()):
            np.testing.assert_array_equal(got, wanted)

    def test_grpc_protobuf_and_the_c_library_share_a_process(self):
        tensors = [self.tensor(2, HEADS), *self.kv(3)]
        with self.server.channel() as channel:
            request = harness.request(*tensors)
            for _ in range(3):
                reply = harness.stub(channel).Attend(request)
                self.assertEqual(reply.output, self.client.attend(*tensors).tobytes())

    def test_info_and_bench(self):
        for words, printed in ((["info"], f"at {self.target()}\ndevice {harness.DEVICE}: "),
                               (["bench", "--shape=2x8x64", "--iterations=3"], "decode 2x8x64: median ")):
            done = subprocess.run([sys.executable, "-m", "flashcore", f"--target={self.target()}", *words],
                                  capture_output=True, text=True, timeout=harness.PATIENCE)
            self.assertIn(printed, done.stdout, done.stderr)


class HeldLocalServerTest(unittest.TestCase):
    """Calls over the local socket that wait in the server's queue."""

    def setUp(self):
        folder = self.enterContext(harness.in_temporary_folder())
        self.target = f"local:{folder}/l"
        self.server = self.enterContext(harness.Server(*harness.HELD, f"--local_listen={folder}/l"))
        self.x = np.ones((1, 1, 32), np.float16)

    @contextlib.contextmanager
    def held_lane(self):
        """harness.held_lane for what this user sends."""
        if harness.ON_GPU:
            yield
            return
        taken = 'flashcore_request_phase_seconds_count{phase="queue"}'
        before = self.server.metric(taken)
        zeros = np.zeros((192 * 1024, 1, 32), np.float16)
        with concurrent.futures.ThreadPoolExecutor(1) as pool, flashcore.connect(self.target) as holder:
            call = pool.submit(holder.attend, zeros, zeros, zeros, timeout=None)
            harness.wait_until(lambda: self.server.metric(taken) > before or call.done(),
                               "the lane is not held")
            self.assertFalse(call.done())
            yield

    def test_a_timeout_leaves_the_memory_to_the_server(self):
        client = self.enterContext(flashcore.connect(self.target))
        with self.held_lane():
            for _ in range(3):
                with self.assertRaises(TimeoutError):
                    client.attend(self.x, self.x, self.x, timeout=0.05)
            connection = client.core._transport._connection
            self.assertLessEqual(len(connection._calls), 3)
            abandoned = {id(call.block) for call in connection._calls.values()}
            free = {id(block) for blocks in connection._free.values() for block in blocks}
            self.assertTrue(abandoned.isdisjoint(free))
        np.testing.assert_array_equal(client.attend(self.x, self.x, self.x), self.x)
        self.assertEqual(connection._calls, {})

    def test_cancelled_tasks_and_close_with_calls_in_flight(self):
        async def run():
            client = flashcore.aio.connect(self.target)
            await client.server_info()
            tasks = [asyncio.ensure_future(client.attend(self.x, self.x, self.x)) for _ in range(4)]
            connection = client._transport._connection
            while len(connection._calls) < 4:
                await asyncio.sleep(0)
            tasks[0].cancel()
            with self.assertRaises(asyncio.CancelledError):
                await tasks[0]
            self.assertEqual(sum(call.abandoned for call in connection._calls.values()), 1)
            with self.assertRaises(TimeoutError):
                await client.attend(self.x, self.x, self.x, timeout=0.05)
            await client.close()
            for task in tasks[1:]:
                with self.assertRaises(flashcore.Cancelled):
                    await task
            with self.assertRaises(flashcore.FailedPrecondition):
                await client.server_info()

        with self.held_lane():
            asyncio.run(run())

    def test_close_ends_the_calls_of_other_threads(self):
        client = flashcore.connect(self.target)
        client.server_info()
        connection = client.core._transport._connection
        with self.held_lane(), \
                concurrent.futures.ThreadPoolExecutor(3) as pool:
            calls = [pool.submit(client.attend, self.x, self.x, self.x) for _ in range(3)]
            harness.wait_until(lambda: len(connection._calls) == 3, "the calls are in flight")
            client.close()
            for call in calls:
                with self.assertRaises(flashcore.Cancelled):
                    call.result(harness.PATIENCE)

    def test_the_servers_end_is_unavailable(self):
        client = self.enterContext(flashcore.connect(self.target, retry=flashcore.Retry(attempts=1)))
        client.server_info()
        connection = client.core._transport._connection
        with concurrent.futures.ThreadPoolExecutor(2) as pool:
            with self.held_lane():
                calls = [pool.submit(client.attend, self.x, self.x, self.x) for _ in range(2)]
                harness.wait_until(lambda: len(connection._calls) == 2, "the calls are in flight")
                self.server.process.kill()
                for call in calls:
                    with self.assertRaises(flashcore.Unavailable) as caught:
                        call.result(harness.PATIENCE)
                    self.assertFalse(caught.exception.never_sent)
            with self.assertRaises(flashcore.Unavailable) as caught:
                client.server_info()
            self.assertTrue(caught.exception.never_sent)


class LostServerTest(unittest.TestCase):
    def test_a_dead_server_is_unavailable(self):
        client = flashcore.connect("unix:/nonexistent/flashcore.sock",
                                   retry=flashcore.Retry(attempts=3, initial=1e-3))
        with self.assertRaises(flashcore.Unavailable) as caught:
            client.server_info()
        self.assertTrue(caught.exception.never_sent, str(caught.exception))
        self.assertTrue(caught.exception.retryable)
        client.close()
        with self.assertRaises(flashcore.FailedPrecondition):
            client.server_info()

    def test_a_client_finds_the_server_again_and_its_sequences_lost(self):
        retry = flashcore.Retry(attempts=10**6, longest=0.05)
        for scheme, flag in (("unix:", "--listen=unix:"), ("local:", "--local_listen=")):
            with self.subTest(scheme), harness.in_temporary_folder() as folder, \
                    flashcore.connect(f"{scheme}{folder}/s", retry=retry, timeout=harness.PATIENCE) as client:
                with harness.Server(f"{flag}{folder}/s"):
                    sequence = client.create_sequence(1, KV_HEADS, DIM)
                with harness.Server(f"{flag}{folder}/s"), self.assertRaises(flashcore.SequenceLost):
                    sequence.info()

    def test_a_timeout_is_a_timeout_error(self):
        with harness.Server(*harness.HELD) as server, server.channel() as channel, \
                harness.held_lane(server, channel), flashcore.connect(server.target) as client:
            x = np.zeros((1, 1, 32), np.float16)
            with self.assertRaises(TimeoutError):
                client.attend(x, x, x, timeout=0.05)


if __name__ == "__main__":
    harness.main()
