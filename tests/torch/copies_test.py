"""The cost of a layer on the host beside its request: copies between device and host, waits, operations."""

import unittest
from collections import Counter

from models import causal_model, flashcore, harness
from counted_device import DeviceTensor, counted

import torch

from flashcore._packing import Packing, attend, whole
from flashcore._transformers_attention import attention

LAYERS, HEADS, KV_HEADS, DIM = 3, 4, 2, 32
# Operations that make, look up or compare masks: only a step may do that.
OF_A_STEP = {"ones", "zeros", "any", "all", "sum", "index", "nonzero", "equal", "bitwise_and", "expand"}


class CopiesTest(unittest.TestCase):
    @classmethod
    def setUpClass(cls):
        cls.server = cls.enterClassContext(harness.Server())
        cls.client = cls.enterClassContext(flashcore.connect(cls.server.target))
        cls.addClassCleanup(flashcore.set_default_client, None)
        flashcore.set_default_client(cls.client)
        cls.config = causal_model("Llama", num_hidden_layers=LAYERS).config

    def setUp(self):
        self.enterContext(torch.no_grad())
        self.generator = torch.Generator().manual_seed(harness.SEED)

    def random(self, batch, heads, rows, dtype=torch.bfloat16):
        return torch.randn(batch, rows, heads, DIM, generator=self.generator).to(dtype).transpose(1, 2)

    def step(self, cache, tensors, visible, to=lambda tensor: tensor):
        """All layers of a step. Gives their outputs, and the counts of each. visible: [batch, positions]."""
        rows, outputs, layers = tensors[0][0].shape[2], [], []
        with counted() as counts:
            mask = flashcore.transformers._mask(len(visible), rows, visible.shape[1], attention_mask=visible,
                                                q_offset=cache.get_seq_length())
            for layer, (q, k, v) in enumerate(tensors):
                before = Counter(counts)
                key, value = cache.update(to(k), to(v), layer)
                outputs.append(attention(None, to(q), key, value, mask, scaling=0.2)[0])
                layers.append(Counter(counts) - before)
        return outputs, layers

    def steps(self, lengths, to):
        """A padded prompt, then two tokens: outputs and counts of each step."""
        self.generator.manual_seed(harness.SEED)
        cache = self.enterContext(flashcore.transformers.FlashCoreCache(self.config, self.client))
        visible = torch.arange(max(lengths)) >= max(lengths) - torch.tensor(lengths)[:, None]
        for rows in (max(lengths), 1, 1):
            tensors = [[self.random(len(lengths), heads, rows) for heads in (HEADS, KV_HEADS, KV_HEADS)]
                       for _ in range(LAYERS)]
            yield self.step(cache, tensors, visible.long(), to)
            visible = torch.cat([visible, torch.ones(len(lengths), 1, dtype=torch.bool)], 1)

    def test_a_layer_makes_one_copy_to_the_host_one_back_and_one_wait(self):
        for lengths in ([5], [3, 6]):
            here, there = (list(self.steps(lengths, to)) for to in (lambda tensor: tensor, DeviceTensor))
            for step, ((wanted, _), (found, layers)) in enumerate(zip(here, there)):
                with self.subTest(lengths=lengths, step=step):
                    for output, expected in zip(found, wanted):
                        self.assertIsInstance(output, DeviceTensor)
                        self.assertTrue(torch.equal(output.content, expected))
                    padded = step == 0 and len(set(lengths)) > 1  # then the first layer sends where
                    copies = [(counts["to host"], counts["to device"], counts["waits"]) for counts in layers]
                    self.assertEqual(copies, [(1, 1 + padded, 1)] + [(1, 1, 1)] * (LAYERS - 1))

    def test_masks_are_worked_out_once_a_step(self):
        for lengths in ([5], [3, 6]):
            for step, (_, layers) in enumerate(self.steps(lengths, lambda tensor: tensor)):
                for layer, counts in enumerate(layers[1:], 1):
                    with self.subTest(lengths=lengths, step=step, layer=layer):
                        self.assertGreater(counts["cat"], 0)
                        self.assertEqual(OF_A_STEP.intersection(counts), set())

    def test_layers_without_a_mask_share_their_step(self):
        cache = self.enterContext(flashcore.transformers.FlashCoreCache(self.config, self.client))
        module = torch.nn.Module()
        module.is_causal = True
        with counted() as counts:
            for layer in range(LAYERS):
                before = Counter(counts)
                q, *kv = (self.random(2, heads, 3) for heads in (HEADS, KV_HEADS, KV_HEADS))
                attention(module, q, *cache.update(*kv, layer))
                found = OF_A_STEP.intersection(Counter(counts) - before)
                self.assertEqual(bool(found), layer == 0, found)

    def test_k_and_v_that_go_with_a_call_make_at_most_two_copies(self):
        q, k, v = (self.random(2, heads, 7, torch.float16) for heads in (HEADS, KV_HEADS, KV_HEADS))
        visible = torch.arange(7) < torch.tensor([7, 4])[:, None]
        for keys, copies in ((whole(2, 7), 1), (Packing(visible), 2)):
            wanted = attend(self.client, whole(2, 7), keys, q, k, v, q.dtype)
            with counted() as counts:
                found = attend(self.client, whole(2, 7), keys, *map(DeviceTensor, (q, k, v)), q.dtype)
            self.assertTrue(torch.equal(found.content, wanted))
            # Where there is padding, its places go to the device.
            self.assertEqual([counts[what] for what in ("to host", "to device", "waits")], [copies] * 3)


if __name__ == "__main__":
    harness.main()
