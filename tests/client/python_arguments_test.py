"""Every argument of every call of the Python package, given what no caller should give: it is taken, or it is
an InvalidArgument that names it, and then nothing was sent."""

import inspect
import unittest

import flashcore
import numpy as np
from flashcore import aio

from python_sequences_test import DIM, HEADS, KV_HEADS, LAYERS, FakeServer, random


class Hostile:
    """Fails whatever is asked of it."""

    def __getattr__(self, name):
        raise RuntimeError(name)

    __repr__ = __index__ = __float__ = __iter__ = __len__ = __bool__ = __eq__ = __str__ = \
        lambda self, *_: Hostile.__getattr__(self, "asked")
    __hash__ = object.__hash__


JUNK = [
    None, True, False, np.True_, -1, 0, 1, 2, -2, 2 ** 31, 2 ** 32, 2 ** 63, 2 ** 64, 10 ** 30, -10 ** 30,
    0.0, 1.5, -0.5, 1e300, float("nan"), float("inf"), -float("inf"), 1j, "", "x", "1", "\ud800",
    "a" * 10000, b"", b"x", [], [1], [1.5], ["x"], [None], [True], [-1], [10 ** 30], [[1]], (), (1,),
    (1, 2), (None, 1), (1.5, 0), ("a", "b"), (2 ** 31, 2 ** 40), (float("nan"), 0), {}, {1: 2}, {1},
    range(3), iter([1]), object(), int, len, lambda *_: None, np.int64(1), np.int32(-1),
    np.uint64(2 ** 64 - 1), np.float16(1), np.float64("nan"), np.datetime64(0, "s"), np.array(1),
    np.array(1.5), np.array([1]), np.array([0.5]), np.array([[1]]), np.array(["x"]), np.array([None]),
    np.array([]), np.zeros((0, 0, 0), np.float16), np.zeros((1, 1, 1), np.float16),
    np.zeros((2, 2), np.float16), np.zeros((1, 1, 1, 1, 1), np.float16),
    np.zeros((2, KV_HEADS, DIM), np.complex64), np.zeros((2, KV_HEADS, DIM), object),
    np.zeros((2, KV_HEADS, DIM), ">f2"), np.zeros((2, KV_HEADS, DIM)),
    np.ma.masked_array(np.zeros((2, KV_HEADS, DIM), np.float16)), np.zeros(2, [("a", "f2")]),
    np.dtype("f8"), np.dtype([("a", "f2")]), np.float32, "float64", "NHD", "int8", Hostile(), Hostile,
]


class Server(FakeServer):
    """Answers attention of any kind."""

    def serve(self, method, request, reply):
        if method == "Attend":
            if any(span.sequence_id for span in request.spans):
                super().serve(method, request, reply)
            reply.output = request.query
            if request.return_lse:
                rows = sum(span.query_rows for span in request.spans)
                reply.lse = bytes(4 * rows * request.num_heads)
            return
        super().serve(method, request, reply)

    def find(self, *ids):
        return super().find(*[sequence_id for sequence_id in ids if sequence_id])


class World:
    """The objects of the calls, as good as new."""

    def __init__(self):
        self.server = Server()
        self.client = flashcore.Client(aio.Client(self.server.core().config, self.server))
        self.batch = self.client.create_sequences(2, LAYERS, KV_HEADS, DIM)
        self.client.server_info()  # what later calls know
        self.sequence = self.batch[0]
        self.plan = self.client.plan(self.batch, num_heads=HEADS)
        flashcore.set_default_client(self.client)
        self.server.calls.clear()

    def calls(self):
        """Each function, and arguments that it takes."""
        q, kv = random(2), random(2, KV_HEADS)
        inline = dict(q=q, k=kv, v=kv, causal=True, window=(1, 0), softmax_scale=0.5, return_lse=True,
                      cu_seqlens_q=[0, 1, 2], cu_seqlens_k=[0, 1, 2], layout="NHD", dtype="float16")
        step = dict(layer=1, q=q, k=kv, v=kv, causal=True, window=None, softmax_scale=None, precision="16bit",
                    return_lse=False, layout="NHD")
        split = dict(cu_seqlens_q=[0, 1, 2], cu_seqlens_k=[0, 1, 2])
        made = dict(pin=False, shared=False, group="", idle_timeout=0)
        shape = dict(num_layers=LAYERS, num_kv_heads=KV_HEADS, head_dim=DIM, dtype="float16",
                     kv_dtype="same_as_query", device_id="", **made)
        out, lse = random(2).astype(np.float32), np.zeros((2, HEADS), np.float32)
        batched = random(2).reshape(2, 1, HEADS, DIM), kv.reshape(2, 1, KV_HEADS, DIM)
        cache = np.zeros((2, 4, KV_HEADS, DIM), np.float16)
        masks = dict(softmax_scale=None, causal=True, window_size=(-1, -1))
        yield self.client.attend, inline
        yield self.client.attend_batch, dict(step, sequences=self.batch, **split)
        yield self.client.plan, dict(sequences=self.batch, num_heads=HEADS, query_rows=1, append=True,
                                     causal=True, window=None, softmax_scale=None, precision="16bit",
                                     return_lse=False, layout="NHD")
        yield self.client.create_sequence, shape
        yield self.client.create_sequences, dict(shape, n=2)
        yield self.client.open_sequence, dict(sequence_id=self.sequence.id)
        yield self.sequence.append, dict(layer=0, k=kv, v=kv, expected_length=None, layout="NHD")
        yield self.sequence.load, dict(layer=0, k=kv, v=kv, progress=None, layout="NHD")
        yield self.sequence.attend, step
        yield self.sequence.fork, dict(made, length=None)
        yield self.sequence.recreate, dict(device_id="")
        yield self.sequence.truncate, dict(length=0)
        yield flashcore.SequenceBatch, dict(sequences=[self.sequence])
        yield self.batch.attend, dict(step, **split)
        yield self.batch.fork, dict(made, parents=[0, 1], length=None)
        yield self.batch.fork, dict(counts=[1, 2])
        yield self.batch.reorder, dict(parents=[1, 1])
        yield self.batch.truncate, dict(lengths=[0, 0])
        yield self.batch.layer, dict(layer=1)
        yield self.plan.run, dict(layer=1, q=q, k=kv, v=kv)
        yield flashcore.merge, dict(o_a=out, lse_a=lse, o_b=out, lse_b=lse)
        yield flashcore.set_default_client, dict(client=self.client)
        yield flashcore.flash_attn_varlen_func, dict(
            q=q, k=kv, v=kv, cu_seqlens_q=[0, 1, 2], cu_seqlens_k=[0, 1, 2], max_seqlen_q=1, max_seqlen_k=1,
            dropout_p=0.0, softcap=0.0, alibi_slopes=None, return_attn_probs=True, block_table=None, **masks)
        for k_cache, v_cache in ((cache, cache.copy()), (self.batch.layer(1), None)):
            yield flashcore.flash_attn_with_kvcache, dict(
                q=batched[0], k_cache=k_cache, v_cache=v_cache, k=batched[1], v=batched[1], rotary_cos=None,
                rotary_sin=None, cache_seqlens=[0, 0], cache_batch_idx=[0, 1], cache_leftpad=None,
                block_table=None, softcap=0.0, alibi_slopes=None, return_softmax_lse=True, **masks)


class ArgumentsTest(unittest.TestCase):
    def tearDown(self):
        flashcore.set_default_client(None)

    def test_arguments_of_clients(self):
        self.check(lambda function: "Client" in function.__qualname__)

    def test_arguments_of_sequences(self):
        self.check(lambda function: "Sequence" in function.__qualname__)

    def test_arguments_of_plans_and_functions(self):
        self.check(lambda function: "Client" not in function.__qualname__ and
                   "Sequence" not in function.__qualname__)

    def check(self, chosen):
        numbers = [number for number, (function, _) in enumerate(World().calls()) if chosen(function)]
        self.assertGreater(len(numbers), 4)
        for number in numbers:
            function, arguments = list(World().calls())[number]
            function(**arguments)
            for name in arguments:
                world = None
                for junk in JUNK if name != "progress" else [junk for junk in JUNK if not callable(junk)]:
                    world = world or World()
                    call, good = list(world.calls())[number]
                    with self.subTest(function=function.__qualname__, name=name, junk=type(junk)):
                        if self.is_taken(world, call, dict(good, **{name: junk}), name):
                            world = None

    def is_taken(self, world, call, arguments, name):
        try:
            call(**arguments)
            return True
        except flashcore.Unimplemented as error:  # what flash-attn has and the server does not
            self.assertIn(f"{name}: ", str(error))
        except flashcore.InvalidArgument as error:
            names = rf"\b({name}|{name.replace('cu_seqlens', 'max_seqlen')})\b"
            self.assertRegex(str(error), rf"^INVALID_ARGUMENT: .*{names}")
            self.assertRegex(str(error), r"^INVALID_ARGUMENT: [\w, ]+: .*; allowed: .")
            self.assertLess(len(str(error)), 400)
        except flashcore.Error:
            return True  # of the server
        self.assertEqual(world.server.calls, [])
        return False

    def test_true_and_fractions_are_no_whole_numbers(self):
        world = World()
        for junk in (True, np.True_, 1.0, np.float64(1), "1"):
            for name, call in (("layer", world.batch.layer), ("length", world.sequence.truncate),
                               ("n", lambda n: world.client.create_sequences(n, LAYERS, KV_HEADS, DIM)),
                               ("parents", lambda parent: world.batch.reorder([parent, 0.5]))):
                with self.assertRaisesRegex(flashcore.InvalidArgument, f": {name}: "):
                    call(junk)
        self.assertEqual(world.server.calls, [])

    def test_an_unknown_keyword_is_named_with_its_function(self):
        world = World()
        for function, arguments in world.calls():
            for name in {"casual", "precision"} - set(inspect.signature(function).parameters):
                with self.subTest(function=function.__qualname__, name=name), self.assertRaisesRegex(
                        TypeError, rf"^{function.__qualname__}(\.__init__)?\(\) got an unexpected keyword "
                                   rf"argument '{name}'"):
                    function(**arguments, **{name: None})
        self.assertEqual(world.server.calls, [])

    def test_every_argument_is_in_the_table(self):
        skipped = {"self", "timeout", "options", "deterministic", "num_splits", "rotary_interleaved"}
        for function, arguments in World().calls():
            if "counts" not in arguments:  # of a fork, in place of parents
                wanted = set(inspect.signature(function).parameters) - skipped - {"counts"}
                self.assertEqual(wanted - set(arguments), set(), function)


if __name__ == "__main__":
    unittest.main()
