"""Resident sequences whose K/V is stored in 8 bits: everything that sequences do, on the stored rows."""

import grpc
import numpy as np
from flashcore.v1 import attention_pb2 as pb

import harness
import sequences_test
from sequences_test import DIM, HEADS, KV_HEADS

Code = grpc.StatusCode


def e4m3_steps(numbers):
    """How far FP8 E4M3 numbers are apart where `numbers`, up to 448, are."""
    exponent = np.maximum(np.frexp(numbers)[1] - 1, -6)
    return np.ldexp(np.float32(1), exponent - 3)


def nearest_e4m3(numbers):
    """The nearest FP8 E4M3 numbers, ties to even, of numbers up to 448."""
    steps = e4m3_steps(numbers)
    return np.rint(numbers / steps) * steps


class Kv8BitTests:
    """The tests of a type of 8 bits."""

    page_bytes = 2 * KV_HEADS * 64 * (DIM + 2)

    def stored(self, rows):
        """Rows of [rows, heads, head_dim] as the contract says that they are read."""
        rows = rows.astype(np.float32)
        wanted = np.abs(rows).max(axis=-1, keepdims=True) / np.float32(self.largest_code)
        bits = wanted.view(np.uint32)
        scale = ((bits + np.uint32(0xffff)) & np.uint32(0xffff0000)).view(np.float32)  # up to BF16
        scale = np.minimum(scale, np.float32(self.largest_scale))
        with np.errstate(invalid="ignore"):
            codes = self.nearest(np.clip(rows / scale, -self.largest_code, self.largest_code))
        return np.where(scale > 0, codes * scale, 0).astype(np.float32)

    def assert_attends(self, got, q, k, v):
        super().assert_attends(got, q, self.stored(k), self.stored(v))

    def create_16_bit(self):
        return harness.create(self.stub, num_kv_heads=KV_HEADS, head_dim=DIM).sequence_id

    def assert_close(self, got, want, largest=4):
        """Within the roundings of the kernel: far less than the error of 8 bits. A GPU rounds the weights
        of codes to float16: to 2^-11 of themselves, or 2^-25 of the largest. largest: of |V|."""
        atol = max(1e-4, 2**-26 * largest) if harness.ON_GPU else 2e-5
        np.testing.assert_allclose(got, want, rtol=2e-3, atol=atol)

    def test_resident_and_inline_give_the_same_bits(self):
        """Instead: the error of the result is that of the stored rows, and not nothing."""
        k, v, q = self.tensor(700, KV_HEADS), self.tensor(700, KV_HEADS), self.tensor(3, HEADS)
        sequence = self.create()
        self.load(sequence, (k[:300], v[:300]), (k[300:], v[300:]))
        reply = self.stub.Attend(self.attend_request([sequence], [q]))
        got = self.outputs(reply, [q])[0].astype(np.float64)
        self.assert_close(got, harness.reference(q, self.stored(k), self.stored(v), causal=True)[0])
        exact = harness.reference(q, k, v, causal=True)[0]
        error = np.linalg.norm(got - exact) / np.linalg.norm(exact)
        self.assertGreater(error, self.error / 3)
        self.assertLess(error, self.error * 3)

    def test_inline_and_resident_spans_in_one_request(self):
        """Inline K/V is not 8-bit, and neither is that of other sequences."""
        sequence, other = self.create(), self.create_16_bit()
        own = self.tensor(10, KV_HEADS), self.tensor(10, KV_HEADS)
        for name in (sequence, other):
            self.load(name, own)
        q = [self.tensor(2, HEADS), self.tensor(1, HEADS)]
        nothing = self.tensor(0, KV_HEADS)
        self.assert_fails(
            Code.INVALID_ARGUMENT,
            f"spans[0]: inline K/V beside a sequence whose kv_dtype is {self.name}",
            self.stub.Attend,
            self.attend_request([b"", sequence], q, [own, (nothing, nothing)]))
        self.assert_fails(
            Code.INVALID_ARGUMENT,
            f"spans[1].sequence_id: its kv_dtype is {self.name}; that of the sequence of spans[0] is same_as",
            self.stub.Attend, self.attend_request([other, sequence], q, [own, own]))
        for name in (sequence, other):
            self.assertEqual(list(self.get(name).layer_lengths), [10])

    def test_what_is_stored_does_not_depend_on_chunks_forks_or_truncation(self):
        k, v, q = self.tensor(200, KV_HEADS), self.tensor(200, KV_HEADS), self.tensor(1, HEADS)
        whole, pieces, detour = self.create(), self.create(), self.create()
        self.load(whole, (k, v))
        self.load(pieces, *((k[i:i + 13], v[i:i + 13]) for i in range(0, 200, 13)))
        self.load(detour, (k[:150], v[:150]), (self.tensor(50, KV_HEADS), self.tensor(50, KV_HEADS)))
        fork = self.stub.ForkSequence(pb.ForkSequenceRequest(sequence_id=detour, length=100)).sequence
        self.assertEqual(fork.kv_dtype, self.kv_dtype)
        self.load(fork.sequence_id, (k[100:], v[100:]))
        self.stub.TruncateSequence(pb.TruncateSequenceRequest(sequence_id=detour, length=150))
        self.load(detour, (k[150:], v[150:]))
        outputs = {self.stub.Attend(self.attend_request([sequence], [q])).output
                   for sequence in (whole, pieces, detour, fork.sequence_id)}
        self.assertEqual(len(outputs), 1)

    def test_twice_as_many_rows_fit(self):
        def rows_that_fit(create):
            sequence, rows, loaded = create(), 64 * 64, 0
            chunk = self.tensor(rows, KV_HEADS), self.tensor(rows, KV_HEADS)
            with self.assertRaises(grpc.RpcError) as caught:
                while True:
                    self.load(sequence, chunk)
                    loaded += rows
            self.assertEqual(caught.exception.code(), Code.RESOURCE_EXHAUSTED)
            used = self.server.metric('flashcore_kv_bytes{segment="cold",state="used"}')
            self.assertGreater(used, 0)
            self.stub.DeleteSequence(pb.DeleteSequenceRequest(sequence_id=sequence))
            return loaded

        ratio = rows_that_fit(self.create) / rows_that_fit(self.create_16_bit)
        self.assertGreater(ratio, 1.85)

    def test_magnitudes_from_the_smallest_to_the_largest(self):
        k, v, q = self.tensor(70, KV_HEADS), self.tensor(70, KV_HEADS), self.tensor(1, HEADS)
        k[3], v[3] = 0, 0
        v[5, 0, 7], v[6, 0, 8] = 65504, -65504
        v[9] = 6e-8  # the smallest number of float16
        sequence = self.create()
        self.load(sequence, (k, v))
        reply = self.stub.Attend(self.attend_request([sequence], [q]))
        want = harness.reference(q, self.stored(k), self.stored(v), causal=True)[0]
        self.assert_close(self.outputs(reply, [q])[0], want, largest=65504)

    def test_what_is_finite_stays_finite(self):
        for largest in (65504, -65504):
            k, v, q = self.tensor(70, KV_HEADS), self.tensor(70, KV_HEADS), self.tensor(1, HEADS)
            v[:] = largest
            sequence = self.create()
            self.load(sequence, (k, v))
            got = self.outputs(self.stub.Attend(self.attend_request([sequence], [q])), [q])[0]
            np.testing.assert_allclose(got.astype(np.float64), largest, rtol=1 / 128)

    def test_a_row_with_nan_or_infinity_is_nan_for_those_that_attend_to_it(self):
        for bad in (np.nan, np.inf):
            k, v, q = self.tensor(70, KV_HEADS), self.tensor(70, KV_HEADS), self.tensor(3, HEADS)
            v[69, 1, 5] = bad  # the last row: only the last query row attends to it
            sequence, other = self.create(), self.create()
            self.load(sequence, (k, v))
            self.load(other, (k[:69], v[:69]))
            reply = self.stub.Attend(self.attend_request([sequence, other], [q, q]))
            got, of_other = self.outputs(reply, [q, q])
            heads_of_row = slice(HEADS // KV_HEADS, None)
            self.assertTrue(np.isnan(got[2, heads_of_row]).all())
            self.assert_attends(of_other, q, k[:69], v[:69])

    def precisions(self):
        """Those of the products that the server has kernels for, over this K/V."""
        kernels = self.stub.GetServerInfo(pb.GetServerInfoRequest()).kernels
        return {kernel.precision for kernel in kernels
                if (kernel.kv_dtype, kernel.dtype, kernel.head_dim) == (self.kv_dtype, pb.DTYPE_FLOAT16, DIM)}

    def test_the_precision_that_a_request_accepts(self):
        """Without kernels for it, the bits are those of 16-bit products, with them others, except on the fake
        GPU."""
        k, v, q = self.tensor(700, KV_HEADS), self.tensor(700, KV_HEADS), self.tensor(40, HEADS)
        sequence, plain = self.create(), self.create_16_bit()
        self.load(sequence, (k, v))
        self.load(plain, (k, v))

        def attend(name, precision):
            request = self.attend_request([name], [q])
            request.precision = precision
            return self.stub.Attend(request)

        usual = attend(sequence, pb.PRECISION_16BIT)
        self.assertEqual(usual.output, self.stub.Attend(self.attend_request([sequence], [q])).output)
        want = harness.reference(q, self.stored(k), self.stored(v), causal=True)[0]
        has = self.precisions()
        self.assertIn(pb.PRECISION_16BIT, has)
        for precision in pb.Precision.values():
            with self.subTest(pb.Precision.Name(precision)):
                self.assertEqual(attend(plain, precision).output, attend(plain, pb.PRECISION_16BIT).output)
                reply = attend(sequence, precision)
                is_usual = (precision == pb.PRECISION_16BIT or precision not in has
                            or harness.ON_FAKE_GPU)
                self.assertEqual(reply.output == usual.output, is_usual)
                got = self.outputs(reply, [q])[0].astype(np.float64)
                error = np.linalg.norm(got - want) / np.linalg.norm(want)
                self.assertLess(error, 0.02)  # products of codes cost about as much as INT8 K/V: 0.006
        self.assert_fails(Code.INVALID_ARGUMENT, "precision: 3 is not PRECISION_16BIT (0), ",
                          attend, sequence, 3)

    def test_bench_and_verify_know_it(self):
        for flags in (("--mode=decode", "--sequences=4", "--fork_from_prefix=130"),
                      ("--mode=prefill", "--query_rows=70"), *self.bench_flags):
            report = harness.bench(f"--target={self.server.target}", "--shape=1x8/2x200x64",
                                   f"--kv_dtype={self.name}", "--duration=50ms", *flags)
            self.assertEqual((report["failed"], report["wrong_replies"]), (0, 0))
        verified = harness.cli("verify", f"--target={self.server.target}", "--cases=20", "--seed=2").stdout
        self.assertIn(f" {self.name} ", verified)
        self.assertIn("verify: 20 of 20 cases", verified)

    def test_says_what_it_is_and_refuses_what_it_does_not_know(self):
        info = self.get(self.create())
        self.assertEqual((info.kv_dtype, info.dtype), (self.kv_dtype, pb.DTYPE_FLOAT16))
        self.assertEqual(self.get(self.create_16_bit()).kv_dtype, pb.KV_DTYPE_SAME_AS_QUERY)
        kernels = self.stub.GetServerInfo(pb.GetServerInfoRequest()).kernels
        self.assertEqual({kernel.kv_dtype for kernel in kernels},
                         set(pb.KvDType.values()))
        for kernel in kernels:
            self.assertTrue(kernel.precision == pb.PRECISION_16BIT or kernel.kv_dtype == pb.KV_DTYPE_INT8)
        self.kv_dtype = 7
        self.assert_fails(Code.INVALID_ARGUMENT, "kv_dtype: 7 is not KV_DTYPE_SAME_AS_QUERY (0), ",
                          self.create)


class Int8Test(Kv8BitTests, sequences_test.SequencesTest):
    kv_dtype, name = pb.KV_DTYPE_INT8, "int8"
    largest_code, largest_scale, nearest = 127, 512, staticmethod(np.rint)
    error = 0.006  # of O, relative
    bench_flags = (("--mode=decode", "--precision=int8_qk"), ("--mode=prefill", "--precision=int8_qk_pv"))


class Float8E4M3Test(Kv8BitTests, sequences_test.SequencesTest):
    kv_dtype, name = pb.KV_DTYPE_FLOAT8_E4M3, "float8_e4m3"
    largest_code, largest_scale, nearest = 448, 146, staticmethod(nearest_e4m3)
    error = 0.03
    bench_flags = ()


if __name__ == "__main__":
    harness.main()
