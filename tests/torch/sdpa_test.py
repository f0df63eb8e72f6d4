"""flashcore.torch.scaled_dot_product_attention against PyTorch's own, on a real server."""

import unittest

from models import flashcore, harness

import torch
import torch.nn.functional as F

sdpa = flashcore.torch.scaled_dot_product_attention


class SdpaTest(unittest.TestCase):
    @classmethod
    def setUpClass(cls):
        cls.server = cls.enterClassContext(harness.Server())
        cls.client = cls.enterClassContext(flashcore.connect(cls.server.target))
        flashcore.set_default_client(cls.client)
        cls.addClassCleanup(flashcore.set_default_client, None)

    def setUp(self):
        torch.manual_seed(harness.SEED)

    def tensors(self, *shapes, dtype=torch.float16):
        return [torch.randn(shape).to(dtype) for shape in shapes]

    def assert_like_torch(self, q, k, v, **options):
        found = sdpa(q, k, v, **options)
        wanted = F.scaled_dot_product_attention(q.float(), k.float(), v.float(), **options)
        self.assertEqual((found.dtype, found.shape, found.is_contiguous()), (q.dtype, q.shape, True))
        bound = 2e-3 if q.dtype == torch.float16 else 1.6e-2
        torch.testing.assert_close(found.float(), wanted, atol=bound, rtol=bound)

    def test_shapes_dtypes_and_scale(self):
        for dtype in (torch.float16, torch.bfloat16):
            for shape, kv_shape in (((2, 4, 5, 64), (2, 4, 9, 64)), ((3, 7, 32), (3, 7, 32)),
                                    ((2, 3, 2, 6, 32), (2, 3, 2, 4, 32))):
                with self.subTest(dtype=dtype, shape=shape):
                    q, k, v = self.tensors(shape, kv_shape, kv_shape, dtype=dtype)
                    self.assert_like_torch(q, k, v)
                    self.assert_like_torch(q, k, v, scale=0.3)
        q, k, v = (x.transpose(1, 2) for x in self.tensors(*[(2, 5, 4, 32)] * 3))  # strided
        self.assert_like_torch(q, k, v)

    def test_causal_aligns_the_first_rows_as_pytorch_does(self):
        for rows, keys in ((6, 6), (3, 8), (8, 3), (1, 5)):
            with self.subTest(rows=rows, keys=keys):
                q, k, v = self.tensors((2, 2, rows, 32), (2, 2, keys, 32), (2, 2, keys, 32))
                self.assert_like_torch(q, k, v, is_causal=True)

    def test_grouped_heads(self):
        q, k, v = self.tensors((2, 6, 5, 32), (2, 2, 5, 32), (2, 2, 5, 32))
        self.assert_like_torch(q, k, v, enable_gqa=True, is_causal=True)
        with self.assertRaisesRegex(flashcore.InvalidArgument, "key: has shape .* or enable_gqa"):
            sdpa(q, k, v)

    def test_without_keys_the_result_is_zero(self):
        for shape, kv_shape in (((2, 4, 5, 64), (2, 4, 0, 64)), ((3, 5, 32), (3, 0, 32))):
            q, k, v = self.tensors(shape, kv_shape, kv_shape)
            for options in ({}, dict(is_causal=True), dict(attn_mask=torch.ones(1, 0, dtype=torch.bool))):
                self.assertTrue(torch.equal(sdpa(q, k, v, **options), torch.zeros_like(q)))

    def test_what_torch_does_around_a_call_changes_nothing(self):
        class Subclass(torch.Tensor):
            pass

        q, k, v = self.tensors((1, 2, 5, 32), (1, 2, 6, 32), (1, 2, 6, 32), dtype=torch.bfloat16)
        wanted = sdpa(q, k, v, is_causal=True)
        flat = [x[0].transpose(0, 1) for x in (q, k, v)]
        wanted_flat = self.client.attend(*flat)
        arounds = (torch.autocast("cpu", torch.float16), torch.inference_mode(), torch.no_grad(),
                   torch.device("meta"))
        for around in arounds:
            with self.subTest(around=around), around:
                self.assertTrue(torch.equal(sdpa(q, k, v, is_causal=True), wanted))
                self.assertTrue(torch.equal(self.client.attend(*flat), wanted_flat))
        for kind in (lambda x: x.as_subclass(Subclass), lambda x: torch.nn.Parameter(x, requires_grad=False)):
            self.assertTrue(torch.equal(sdpa(*map(kind, (q, k, v)), is_causal=True), wanted))
            found = self.client.attend(*map(kind, flat))
            self.assertEqual((type(found), found.dtype), (torch.Tensor, torch.bfloat16))
            self.assertTrue(torch.equal(found, wanted_flat))
        compiled = torch.compile(lambda *x: sdpa(*x, is_causal=True), backend="eager", fullgraph=True)
        self.assertTrue(torch.equal(compiled(q, k, v), wanted))

    def test_types_that_do_not_fit_are_refused_by_name(self):
        q, k, v = self.tensors(*[(1, 2, 3, 32)] * 3)
        good = dict(query=q, key=k, value=v, attn_mask=None, dropout_p=0.0, is_causal=False, scale=None,
                    enable_gqa=False)
        for name in good:
            for junk in ("x", 1.5, [1], 1j, object(), q.numpy(), q.to_sparse(), q.float(), q.to("meta"),
                         2 ** 70):
                with self.subTest(name=name, junk=type(junk)):
                    if name != "scale" or not isinstance(junk, (int, float)):
                        words = f"(?=.*allowed: ).*({name}|query)\\b"
                        with self.assertRaisesRegex(flashcore.InvalidArgument, words):
                            sdpa(**dict(good, **{name: junk}))

    def test_masks_of_padding(self):
        q, k, v = self.tensors((3, 2, 5, 32), (3, 2, 6, 32), (3, 2, 6, 32))
        mask = torch.arange(6) < torch.tensor([6, 1, 4])[:, None]
        mask[0, 2] = False  # not only at the end
        for shaped in (mask[:, None, None], mask[:, None, None].expand(3, 2, 5, 6), mask[0][None]):
            with self.subTest(shape=shaped.shape):
                self.assert_like_torch(q, k, v, attn_mask=shaped)
        flat = [x[:, 0] for x in (q, k, v)]
        self.assert_like_torch(*flat, attn_mask=mask[:, None])
        self.assertEqual(sdpa(q, k, v, attn_mask=torch.zeros(1, 6, dtype=torch.bool)).abs().max().item(), 0)

    def test_no_rows(self):
        q, k, v = self.tensors((2, 2, 0, 32), (2, 2, 3, 32), (2, 2, 3, 32))
        self.assertEqual(sdpa(q, k, v).shape, (2, 2, 0, 32))

    def test_what_is_refused(self):
        q, k, v = self.tensors(*[(1, 2, 4, 32)] * 3)
        for pattern, args, options in (
                ("query: has dtype torch.float32; allowed: torch.float16, torch.bfloat16",
                 [x.float() for x in (q, k, v)], {}),
                (r"query: has shape \[4, 32\]", (q[0, 0], k[0, 0], v[0, 0]), {}),
                ("key: is of torch.bfloat16", (q, k.bfloat16(), v), {}),
                (r"value: has shape \[1, 2, 3, 32\]", (q, k, v[:, :, :3]), {}),
                ("dropout_p: 0.1; allowed: 0", (q, k, v), {"dropout_p": 0.1}),
                ("attn_mask: has dtype torch.float32; allowed: torch.bool", (q, k, v),
                 {"attn_mask": torch.zeros(4, 4)}),
                ("attn_mask: differs between heads or query rows", (q, k, v),
                 {"attn_mask": torch.ones(4, 4, dtype=torch.bool).tril()}),
                (r"attn_mask: has shape \[5\]", (q, k, v), {"attn_mask": torch.ones(5, dtype=torch.bool)}),
                ("attn_mask: is set with is_causal", (q, k, v),
                 {"attn_mask": torch.ones(4, dtype=torch.bool), "is_causal": True}),
                ("head_dim", [x[..., :24] for x in (q, k, v)], {})):
            with self.subTest(pattern), self.assertRaisesRegex(flashcore.InvalidArgument, pattern):
                sdpa(*args, **options)
        q.requires_grad_()
        with self.assertRaisesRegex(flashcore.InvalidArgument, "gradient is asked for"):
            sdpa(q, k, v).sum().backward()

    def test_the_operator_passes_opcheck(self):
        op = torch.ops.flashcore.sdpa.default
        for shape, kv_shape in (((2, 4, 5, 32), (2, 4, 5, 32)), ((2, 4, 5, 32), (2, 2, 3, 32))):
            q, k, v = self.tensors(shape, kv_shape, kv_shape)
            gqa = shape[1] != kv_shape[1]
            torch.library.opcheck(op, (q, k, v, None, 0.0, True, None, gqa))
            mask = torch.ones(2, 1, 1, k.shape[2], dtype=torch.bool)
            torch.library.opcheck(op, (q, k, v, mask, 0.0, False, 0.5, gqa))


if __name__ == "__main__":
    harness.main()
