"""FlashCoreCache, PackedCache and attention functions over tensors on the server's GPU: copies and waits.

The server's GPU and the driver are fakes, as in tests/e2e/python_device_tensors_test.py, and so are the
tensors: counted_device counts what would copy and wait. Work of PyTorch is done at once, so each request is
waited for.
"""

import ctypes
import types
import unittest.mock

from models import causal_model, flashcore, harness
from transformers.masking_utils import sliding_window_causal_mask_function
from counted_device import DeviceTensor, counted

import torch

from flashcore import _device_tensors, _transformers_unread
from flashcore._device_memory import DeviceMemory
from flashcore._packing import Packing, attend, whole
from flashcore._streams import Streams
from flashcore._transformers_attention import attention

LAYERS, HEADS, KV_HEADS, DIM = 3, 4, 2, 32
FLAGS = ("--local_device_tensors", "--device_tensor_bytes=64MiB")
_from_dlpack = torch.from_dlpack


def on_gpu(tensor):
    return DeviceTensor(tensor)


def here(tensor):
    return tensor


class InPlaceTest(unittest.TestCase):
    @classmethod
    def setUpClass(cls):
        cls.server = cls.enterClassContext(harness.Server(*FLAGS, local=True))
        cls.driver = driver = ctypes.CDLL("libcuda.so.1")
        driver.fake_cuda_set_gpus(1, b"fake GPU 0".ljust(16, b"\0"))
        context, cls.stream = ctypes.c_void_p(), ctypes.c_void_p()
        for code in (driver.cuInit(0), driver.cuDevicePrimaryCtxRetain(ctypes.byref(context), 0),
                     driver.cuCtxPushCurrent_v2(context), driver.cuStreamCreate(ctypes.byref(cls.stream), 1)):
            assert code == 0
        stream = types.SimpleNamespace(cuda_stream=cls.stream.value)
        submit = Streams._submit

        def submit_and_wait(*args):
            submit(*args)
            assert driver.cuStreamSynchronize(cls.stream) == 0

        for patch in (unittest.mock.patch.object(torch.cuda, "current_stream", lambda device=None: stream),
                      unittest.mock.patch.object(torch, "from_dlpack", lambda it: on_gpu(_from_dlpack(it))),
                      unittest.mock.patch.object(_device_tensors, "_CUDA", 1),  # kDLCPU
                      unittest.mock.patch.object(_transformers_unread, "later", cls.later),
                      unittest.mock.patch.object(Streams, "_submit", submit_and_wait)):
            cls.enterClassContext(patch)
        cls.client = cls.enterClassContext(flashcore.connect(f"local:{cls.server.local}"))
        cls.addClassCleanup(flashcore.set_default_client, None)
        flashcore.transformers.register(cls.client)
        cls.config = causal_model("Llama", num_hidden_layers=LAYERS).config

    @staticmethod
    def later(value):
        return lambda wait: bool(value.content)

    def setUp(self):
        self.enterContext(torch.no_grad())
        self.generator = torch.Generator().manual_seed(harness.SEED)

    def random(self, batch, heads, rows, dtype):
        return torch.randn(batch, rows, heads, DIM, generator=self.generator).to(dtype).transpose(1, 2)

    def cache(self):
        return self.enterContext(flashcore.transformers.FlashCoreCache(self.config, self.client))

    def step(self, cache, batch, rows, to, visible=None, dtype=torch.float16, window=None):
        """All layers of a step: their outputs and what they counted. visible: [batch, positions]. window: of
        every second layer, as in Gemma 3."""
        length, outputs = cache.get_seq_length(), []
        tensors = [[self.random(batch, heads, rows, dtype) for heads in (HEADS, KV_HEADS, KV_HEADS)]
                   for _ in range(LAYERS)]
        with counted() as counts:
            seen = None if visible is None else to(visible)
            options = dict(attention_mask=seen, q_offset=length, device=to(torch.zeros(1)).device)
            masks = [flashcore.transformers._mask(batch, rows, length + rows, **options)] * 2
            if window is not None:  # made of another tensor
                if seen is not None:
                    options["attention_mask"] = seen.clone()
                masks[1] = flashcore.transformers._mask(
                    batch, rows, length + rows, **options, local_size=window,
                    mask_function=sliding_window_causal_mask_function(window))
            for layer, (q, k, v) in enumerate(tensors):
                key, value = cache.update(to(k), to(v), layer)
                outputs.append(attention(None, to(q), key, value, masks[layer % 2], scaling=0.2)[0])
        return outputs, counts

    def assert_same(self, found, wanted):
        for output, expected in zip(found, wanted, strict=True):
            self.assertIsInstance(output, DeviceTensor)
            self.assertEqual(output.dtype, expected.dtype)
            self.assertTrue(torch.equal(output.content, expected))

    def moved(self, counts):
        return counts["to host"], counts["to device"], counts["waits"]

    def both(self, steps):
        """Runs steps(cache, to), which yields outputs and counts, on the GPU and in host memory."""
        runs = []
        for to in (on_gpu, here):
            self.generator.manual_seed(harness.SEED)
            cache = self.cache()
            runs.append(list(steps(cache, to)))
        for (found, _), (wanted, _) in zip(*runs, strict=True):
            self.assert_same(found, wanted)
        return [counts for _, counts in runs[0]]

    def test_steps_without_padding_copy_nothing_and_wait_for_nothing(self):
        for dtype in (torch.float16, torch.bfloat16):
            for batch in (1, 3):
                counts = self.both(lambda cache, to: [self.step(cache, batch, rows, to, dtype=dtype)
                                                      for rows in (5, 1, 1, 2)])
                self.assertEqual([self.moved(one) for one in counts], [(0, 0, 0)] * 4)
                self.assertEqual([one["cat"] for one in counts], [LAYERS] * 4, "one copy a layer")

    def test_a_padded_prompt_reads_its_mask_and_later_tokens_do_not(self):
        visible = torch.tensor([[0, 0, 1, 1, 1], [1] * 5, [0, 1, 1, 1, 1]], dtype=torch.bool)

        def steps(cache, to):
            mask = visible
            yield self.step(cache, 3, 5, to, mask)
            for _ in range(3):
                mask = torch.cat([mask, torch.ones(3, 1, dtype=torch.bool)], 1)
                yield self.step(cache, 3, 1, to, mask)

        counts = self.both(steps)
        self.assertEqual([self.moved(one) for one in counts], [(1, 1, 1)] + [(0, 0, 0)] * 3)

    def test_masks_of_several_kinds_are_read_once(self):
        visible = torch.tensor([[0, 0, 1, 1, 1], [1] * 5], dtype=torch.bool)

        def steps(cache, to):
            mask = visible
            yield self.step(cache, 2, 5, to, mask, window=3)
            for _ in range(2):
                mask = torch.cat([mask, torch.ones(2, 1, dtype=torch.bool)], 1)
                yield self.step(cache, 2, 1, to, mask, window=3)

        counts = self.both(steps)
        self.assertEqual([one["waits"] for one in counts], [1, 0, 0])

    def test_padding_between_tokens_is_refused_with_a_window_only(self):
        def step(window):
            with self.cache() as cache:
                self.step(cache, 1, 4, on_gpu, torch.tensor([[1, 0, 1, 1]], dtype=torch.bool), window=window)

        step(None)
        with self.assertRaisesRegex(flashcore.InvalidArgument, "padding between tokens"):
            step(2)

    def test_a_mask_that_was_not_what_its_step_took_it_for(self):
        known = torch.ones(2, 4, dtype=torch.bool)
        wrong = ([[1] * 5, [1] * 4 + [0]], [[0] + [1] * 4, [1] * 5])
        for mask in (torch.tensor(rows, dtype=torch.bool) for rows in wrong):
            cache = self.cache()
            self.step(cache, 2, 4, on_gpu, known)
            self.step(cache, 2, 1, on_gpu, mask)
            with self.assertRaisesRegex(flashcore.InvalidArgument, "attention_mask: of a step before.*"):
                self.step(cache, 2, 1, on_gpu, torch.ones(2, 6, dtype=torch.bool))

    def test_steps_after_a_crop_and_of_beams(self):
        def steps(cache, to):
            mask = torch.tensor([[0, 1, 1], [1, 1, 1]], dtype=torch.bool)
            yield self.step(cache, 2, 3, to, mask)
            cache.crop(-1)
            mask = torch.cat([mask[:, :2], torch.ones(2, 1, dtype=torch.bool)], 1)
            yield self.step(cache, 2, 1, to, mask)
            cache.batch_select_indices([1, 0, 0])
            mask = torch.cat([mask[[1, 0, 0]], torch.ones(3, 1, dtype=torch.bool)], 1)
            yield self.step(cache, 3, 1, to, mask)
            mask = torch.cat([mask, torch.ones(3, 1, dtype=torch.bool)], 1)
            yield self.step(cache, 3, 1, to, mask)
            cache.batch_select_indices([2, 1, 0])
            mask = torch.cat([mask[[2, 1, 0]], torch.ones(3, 1, dtype=torch.bool)], 1)
            yield self.step(cache, 3, 1, to, mask)

        counts = self.both(steps)
        self.assertEqual([one["waits"] for one in counts], [1, 1, 1, 0, 1])

    def test_an_error_comes_in_a_later_layer_and_crop_takes_the_step_back(self):
        def steps(cache, to):
            yield self.step(cache, 2, 3, to)
            rows = torch.zeros(1, KV_HEADS, DIM, dtype=torch.float16)
            self.client.open_sequence(cache.sequences[1].id).append(1, rows, rows)
            before = self.generator.get_state()
            with self.assertRaises(flashcore.LengthMismatch):
                self.step(cache, 2, 1, to)
            cache.crop(-1)
            self.assertEqual(cache.get_seq_length(), 3)
            self.generator.set_state(before)
            yield self.step(cache, 2, 1, to)

        self.both(steps)

    def test_another_dtype_is_rounded(self):
        with unittest.mock.patch.object(flashcore.transformers._attention, "rounds_to", torch.bfloat16):
            counts = self.both(lambda cache, to: [self.step(cache, 2, rows, to, dtype=torch.float32)
                                                  for rows in (3, 1)])
        self.assertEqual([self.moved(one) for one in counts], [(0, 0, 0)] * 2)

    def test_tensors_of_another_gpu_go_through_host_memory(self):
        with unittest.mock.patch.object(Streams, "ordinal", lambda *_: 1):
            counts = self.both(lambda cache, to: [self.step(cache, 2, 3, to)])
        self.assertEqual(self.moved(counts[0]), (LAYERS, LAYERS, LAYERS))

    def test_a_pass_over_packed_rows(self):
        rows, layers = [2, 1, 4], []
        for to in (on_gpu, here):
            self.generator.manual_seed(harness.SEED)
            sequences = self.enterContext(self.client.create_sequences(3, LAYERS, KV_HEADS, DIM))
            cache = flashcore.transformers.PackedCache(sequences, rows, self.client)
            layers.append(self.step(cache, 1, sum(rows), to))
        (found, counts), (wanted, _) = layers
        self.assert_same(found, wanted)
        self.assertEqual((self.moved(counts), counts["cat"]), ((0, 0, 0), LAYERS))

    def call(self, function, *tensors, **options):
        """The result of a function, and what it counted; the result is the same in host memory."""
        with counted() as counts:
            found = function(*map(on_gpu, tensors), **options)
        with counted():
            wanted = function(*tensors, **options)
        several = isinstance(wanted, tuple)
        self.assert_same(found[:2] if several else [found], wanted[:2] if several else [wanted])
        return self.moved(counts)

    def test_k_and_v_that_go_with_a_call(self):
        q, *kv = (self.random(2, heads, 7, torch.float16) for heads in (HEADS, KV_HEADS, KV_HEADS))
        visible = torch.arange(7) < torch.tensor([7, 4])[:, None]
        for keys, wanted in ((whole(2, 7), (0, 0, 0)), (Packing(visible), (0, 1, 0))):
            with self.subTest(wanted=wanted):
                self.assertEqual(self.call(
                    lambda q, k, v: attend(self.client, whole(2, 7), keys, q, k, v, q.dtype), q, *kv), wanted)

    def test_scaled_dot_product_attention(self):
        q, k, v = (self.random(2, HEADS, 6, torch.bfloat16) for _ in range(3))
        for causal in (False, True):
            self.assertEqual(self.call(flashcore.torch.scaled_dot_product_attention, q, k, v,
                                       is_causal=causal), (0, 0, 0))

    def test_flash_attn_of_spans(self):
        q, k, v = (torch.randn(9, heads, DIM, generator=self.generator).half()
                   for heads in (HEADS, KV_HEADS, KV_HEADS))
        for bounds in ([0, 4, 9], [0, 4, 4, 9]):  # a span without rows
            moved = self.call(flashcore.flash_attn_varlen_func, q, k, v, cu_seqlens_q=bounds,
                              cu_seqlens_k=bounds, max_seqlen_q=9, max_seqlen_k=9, causal=True,
                              return_attn_probs=True)
            self.assertEqual(moved, (0, 0, 0))

    def test_offsets_on_the_gpu_are_read(self):
        q, k, v = (torch.randn(9, heads, DIM, generator=self.generator).half()
                   for heads in (HEADS, KV_HEADS, KV_HEADS))
        bounds = torch.tensor([0, 4, 9])
        wanted = self.client.attend(q, k, v, cu_seqlens_q=bounds, cu_seqlens_k=bounds)
        with counted() as counts:
            there = on_gpu(bounds)
            found = self.client.attend(*map(on_gpu, (q, k, v)), cu_seqlens_q=there, cu_seqlens_k=there)
        self.assert_same([found], [wanted])
        self.assertEqual(self.moved(counts), (2, 0, 2))

    def test_flash_attn_with_a_cache_on_the_server(self):
        def steps(q, k, v):
            with self.client.create_sequences(2, LAYERS, KV_HEADS, DIM) as batch:
                return flashcore.flash_attn_with_kvcache(q, batch.layer(1), None, k, v, cache_seqlens=0,
                                                         causal=True, return_softmax_lse=True)

        q, k, v = (torch.randn(2, 3, heads, DIM, generator=self.generator).half()
                   for heads in (HEADS, KV_HEADS, KV_HEADS))
        self.assertEqual(self.call(steps, q, k, v), (0, 0, 0))

    def test_flash_attn_with_a_cache_of_the_caller(self):
        q, k, v = (torch.randn(2, 1, heads, DIM, generator=self.generator).half()
                   for heads in (HEADS, KV_HEADS, KV_HEADS))
        caches = [torch.randn(2, 8, KV_HEADS, DIM, generator=self.generator).half() for _ in "kv"]
        results = []
        for to in (on_gpu, here):
            mine = [cache.clone() for cache in caches]
            with counted() as counts:
                results.append(flashcore.flash_attn_with_kvcache(
                    to(q), *map(to, mine), to(k), to(v), cache_seqlens=[3, 5], causal=True))
            self.assertEqual(self.moved(counts), (0, 0, 0))
            self.assertTrue(torch.equal(mine[0][1, 5], k[1, 0]))
        self.assert_same(results[:1], results[1:])

    def test_flash_attn_with_tensors_in_two_places(self):
        q, k, v = (torch.randn(2, 1, HEADS, DIM).half() for _ in range(3))
        with self.client.create_sequences(2, 1, HEADS, DIM) as batch, \
                self.assertRaisesRegex(flashcore.InvalidArgument, "v: is in host memory"):
            flashcore.flash_attn_with_kvcache(on_gpu(q), batch.layer(0), None, on_gpu(k), v)

    def test_steps_for_which_there_is_too_little_memory_go_through_host_memory(self):
        full = unittest.mock.Mock(side_effect=flashcore.ResourceExhausted("full"))

        def steps(cache, to):
            yield self.step(cache, 2, 3, to)
            with unittest.mock.patch.object(DeviceMemory, "lend", full):
                yield self.step(cache, 2, 1, to)

        self.assertEqual(list(map(self.moved, self.both(steps))), [(0, 0, 0), (LAYERS, LAYERS, LAYERS)])
        with unittest.mock.patch.object(DeviceMemory, "lend", full), \
                flashcore.connect(f"local:{self.server.local}") as client, \
                flashcore.transformers.FlashCoreCache(self.config, client) as cache:
            self.assertEqual(self.moved(self.step(cache, 1, 2, on_gpu)[1]), (LAYERS, LAYERS, LAYERS))

    def generate(self, model, ids, to, masked):
        """Logits of a prompt and two tokens, and what they counted."""
        cache, logits = self.cache(), []
        with counted() as counts:
            for module in model.modules():
                for tensors in (module._parameters, module._buffers):
                    tensors.update({name: to(tensor.detach()) for name, tensor in tensors.items()
                                    if tensor is not None})
            for begin, end in ((0, 4), (4, 5), (5, 6)):
                mask = to(torch.ones(2, end, dtype=torch.long)) if masked else None
                logits.append(model(to(ids[:, begin:end]), attention_mask=mask, cache=cache).logits)
        return logits, counts

    def test_a_model_waits_for_its_mask_alone(self):
        ids = torch.randint(2, 200, (2, 6), generator=self.generator)
        for masked, moved in ((False, (0, 0, 0)), (True, (1, 0, 1))):
            model = causal_model("Llama", num_hidden_layers=LAYERS)
            model.set_attn_implementation(flashcore.transformers.NAME)
            wanted, _ = self.generate(model, ids, here, masked)
            found, counts = self.generate(model, ids, on_gpu, masked)
            self.assert_same(found, wanted)
            self.assertEqual(self.moved(counts), moved)

    def test_layers_of_a_server_that_shares_no_gpu(self):
        with harness.Server(local=True) as server, flashcore.connect(f"local:{server.local}") as client, \
                flashcore.transformers.FlashCoreCache(self.config, client) as cache:
            _, counts = self.step(cache, 2, 3, on_gpu)
            self.assertEqual(self.moved(counts), (LAYERS, LAYERS, LAYERS))


if __name__ == "__main__":
    harness.main()
