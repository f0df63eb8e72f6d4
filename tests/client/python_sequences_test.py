"""The Python client on many sequences, without a server: batches, plans, requests that travel together, lost
sequences, leases and the reasons of errors."""

import asyncio
import itertools
import threading
import unittest
from concurrent import futures

import flashcore
import grpc
import numpy as np
from flashcore import _messages, aio, errors
from flashcore._coalesce import Coalescer
from flashcore._transport import Retry
from grpc import StatusCode
from python_fakes import DIM, HEADS, KV_HEADS, NOT_REACHED, UNAVAILABLE, FakeTransport, Refuses, random

LAYERS = 2


def status(code, message, reason="", **metadata):
    """A Status message."""
    result = errors.Status(code=code.value[0], message=message)
    if reason:
        info = _messages.message("ErrorInfo")(reason=reason, domain="flashcore", metadata=metadata)
        result.details.add(type_url="type.googleapis.com/google.rpc.ErrorInfo",
                           value=info.SerializeToString())
    return result


class FakeServer(FakeTransport):
    """A server with sequences. Its answer to Attend is the query."""

    def __init__(self, *faults, max_operations=8, devices=1, details=True):
        super().__init__(faults)
        self.lengths = {}  # id -> rows by layer
        self.leases = {}  # id -> lease
        self.kv_dtypes = {}  # id -> KvDType
        self.full_after = None  # sequences that fit
        self.devices = devices
        self.max_operations = max_operations
        self.details = details
        self.held = None
        self.ids = itertools.count(1)
        self.max_message_bytes = None

    def holds_lease(self):
        return self.held is not None

    def fail(self, code, message, reason="", **metadata):
        if not self.details:
            reason = ""
        raise errors.from_status(status(code, message, reason, **metadata))

    def find(self, *ids):
        lost = [i for i, sequence_id in enumerate(ids) if sequence_id not in self.lengths]
        if lost:
            self.fail(StatusCode.NOT_FOUND, "sequence_id: unknown", "SEQUENCE_LOST",
                      spans=",".join(map(str, lost)), sequence_ids=",".join(ids[i].hex() for i in lost))
        return [self.lengths[sequence_id] for sequence_id in ids]

    def check(self, message, length):
        if message.HasField("expected_length") and message.expected_length != length:
            self.fail(StatusCode.FAILED_PRECONDITION,
                      f"expected_length: {message.expected_length}; the sequence has {length} rows",
                      "LENGTH_MISMATCH", expected=str(message.expected_length), actual=str(length))

    def add(self, lengths, lease_id):
        if self.full_after is not None and len(self.lengths) >= self.full_after:
            self.fail(StatusCode.RESOURCE_EXHAUSTED, "K/V memory is full", "KV_FULL", needed_bytes="1")
        if lease_id and lease_id != self.held:
            self.fail(StatusCode.NOT_FOUND, "lease_id: unknown", "LEASE_LOST")
        new = next(self.ids).to_bytes(16, "big")
        self.lengths[new] = list(lengths)
        self.leases[new] = lease_id
        return new

    def describe(self, sequence_id, info):
        info.sequence_id, info.dtype, info.num_layers = sequence_id, 1, LAYERS
        info.num_kv_heads, info.head_dim = KV_HEADS, DIM
        info.layer_lengths.extend(self.lengths[sequence_id])
        info.kv_dtype = self.kv_dtypes[sequence_id]
        info.device_id = f"cpu:{int.from_bytes(sequence_id, 'big') % self.devices}"

    def serve(self, method, request, reply):
        if method == "GetServerInfo":
            for _ in range(self.devices):
                reply.devices.add()
            reply.limits.max_message_bytes = 1 << 20
            reply.limits.max_sequence_operations = self.max_operations
        elif method == "HoldLease":
            self.held = reply.lease_id = next(self.ids).to_bytes(16, "big")
        elif method == "Attend":
            lengths = self.find(*(span.sequence_id for span in request.spans))
            for span, rows in zip(request.spans, lengths):
                self.check(span, rows[request.layer])
            for span, rows in zip(request.spans, lengths):
                rows[request.layer] += span.kv_rows
                reply.sequence_lengths.append(rows[request.layer])
            reply.output = request.query
        elif method == "ManageSequences":
            failed = set()
            for operation in request.operations:
                kind = operation.WhichOneof("operation")
                one = getattr(operation, kind)
                result = reply.results.add()
                sequence_id = getattr(one, "sequence_id", b"")
                if sequence_id and sequence_id in failed:
                    result.status.CopyFrom(status(StatusCode.ABORTED, "an earlier operation failed"))
                    continue
                try:
                    answer = _messages.METHODS[f"{kind.capitalize()}Sequence"][1]()
                    self.serve(f"{kind.capitalize()}Sequence", one, answer)
                    if kind != "delete":
                        result.sequence.CopyFrom(answer.sequence)
                except flashcore.Error as error:
                    failed.add(sequence_id)
                    result.status.CopyFrom(status(error.code, error.message, error.reason, **error.metadata))
        else:
            if method == "CreateSequence":
                sequence_id = self.add([0] * LAYERS, request.lease_id)
                self.kv_dtypes[sequence_id] = request.kv_dtype
            else:
                sequence_id = request.sequence_id
                lengths, = self.find(sequence_id)
            if method == "ForkSequence":
                parent, sequence_id = sequence_id, self.add(lengths, request.lease_id)
                self.kv_dtypes[sequence_id] = self.kv_dtypes[parent]
            if method == "TruncateSequence":
                self.check(request, lengths[0])
                self.lengths[sequence_id] = [request.length] * LAYERS
            if method == "DeleteSequence":
                del self.lengths[sequence_id]
                return
            if method == "LoadSequence":
                self.check(request, lengths[request.layer])
                lengths[request.layer] += request.rows
            self.describe(sequence_id, reply.sequence)

    def core(self, **options):
        return aio.Client(self.config(retry=Retry(initial=1e-3)), self, **options)

    def client(self, **options):
        return flashcore.Client(self.core(**options))

    def batch(self, n=4, **options):
        """A batch on it, of one row a layer. The faults and calls are those of later calls."""
        faults, self.faults = self.faults, []
        batch = self.client(**options).create_sequences(n, LAYERS, KV_HEADS, DIM)
        for layer in range(LAYERS):
            batch.attend(layer, random(n), random(n, KV_HEADS), random(n, KV_HEADS))
        self.faults, self.calls, self.requests = faults, [], []
        return batch


class BatchTest(Refuses, unittest.TestCase):
    def test_is_a_sequence_of_sequences(self):
        batch = FakeServer().batch()
        self.assertEqual(len(batch), 4)
        self.assertIs(batch[1], list(batch)[1])
        self.assertIs(batch[1], batch[1:3][0])
        self.assertIsInstance(batch[0], flashcore.Sequence)
        self.assertIsInstance(batch[1:3], flashcore.SequenceBatch)
        self.assertEqual(len(batch[4:]), 0)
        self.assertIs(flashcore.SequenceBatch([batch[2], batch[0]])[0], batch[2])
        self.assertIn("batch of 4 sequences: 1 rows, 2 layers, 2 KV heads, head_dim 32", repr(batch))
        batch[3].truncate(0)
        self.assertIn("0 to 1 rows", repr(batch))

    def test_calls_on_all_are_one_rpc(self):
        server = FakeServer()
        batch = server.batch()
        batch.truncate([1, 0, 1, 0])
        self.assertEqual(batch.lengths, [[1, 1], [0, 0], [1, 1], [0, 0]])
        self.assertEqual([list(info.layer_lengths) for info in batch.info()], batch.lengths)
        forks = batch.fork()
        self.assertEqual(forks.lengths, batch.lengths)
        self.assertEqual(batch.fork([2, 2, 1]).lengths, [[1, 1], [1, 1], [0, 0]])
        self.assertEqual(batch.fork(counts=[0, 2, 1, 0]).lengths, [[0, 0], [0, 0], [1, 1]])
        forks.delete()
        forks.delete()  # they are gone: no error
        self.assertEqual(server.calls, ["ManageSequences"] * 7)

    def test_more_than_the_server_takes_at_once_are_several_rpcs(self):
        server = FakeServer(max_operations=3)
        with server.client().create_sequences(8, LAYERS, KV_HEADS, DIM) as batch:
            self.assertEqual(len({sequence.id for sequence in batch}), 8)
            self.assertEqual([len(request.operations) for request in server.requests[1:]], [3, 3, 2])
        self.assertEqual(server.lengths, {})

    def test_sequences_of_a_batch_are_on_one_device(self):
        server = FakeServer(devices=2)
        server.describe = lambda sequence_id, info: (FakeServer.describe(server, sequence_id, info), setattr(
            info, "device_id", asked.pop(0) or "cpu:1"))
        asked = []
        add = server.serve

        def serve(method, request, reply):
            if method == "CreateSequence":
                asked.append(request.device_id)
            add(method, request, reply)

        server.serve = serve
        batch = server.client().create_sequences(3, LAYERS, KV_HEADS, DIM)
        self.assertEqual({sequence.device_id for sequence in batch}, {"cpu:1"})
        self.assertEqual(len(server.lengths), 3)

    def test_a_step_of_beam_search_is_one_rpc(self):
        server = FakeServer()
        batch = server.batch()
        batch.truncate([10, 11, 12, 13])
        old, server.calls = list(batch), []
        batch.reorder([1, 1, 3, 1])
        self.assertEqual(server.calls, ["ManageSequences"])
        kinds = [operation.WhichOneof("operation") for operation in server.requests[-1].operations]
        self.assertEqual(kinds, ["fork", "fork", "delete", "delete"])
        self.assertEqual(batch.lengths, [[11, 11], [11, 11], [13, 13], [11, 11]])
        self.assertIs(batch[1], old[1])
        self.assertIs(batch[2], old[3])
        self.assertEqual(len(server.lengths), 4)
        for sequence in batch:
            self.assertIn(sequence.id, server.lengths)
        server.calls = []
        batch.reorder([3, 2, 1, 0])
        self.assertEqual(server.calls, [])
        batch.reorder([0, 0, 1, 2, 3])
        self.assertEqual(len(batch), 5)

    def test_a_beam_that_cannot_be_forked_is_named_and_nothing_is_lost(self):
        server = FakeServer()
        batch = server.batch()
        server.full_after = 5
        with self.assertRaises(flashcore.BatchError) as caught:
            batch.reorder([0, 0, 1, 1])
        error = caught.exception
        self.assertEqual({i: type(e) for i, e in error.errors.items()}, {3: flashcore.KvFull})
        self.assertIsInstance(error.results[1], flashcore.Sequence)
        self.assertIsNone(error.results[3])
        self.assertIn("1 of 4 items failed: 3: RESOURCE_EXHAUSTED: K/V memory is full", str(error))
        self.assertEqual(list(batch), error.results[:3])
        self.assertEqual({sequence.id for sequence in batch}, set(server.lengths))

    def test_a_beam_that_is_gone_already_can_be_dropped(self):
        server = FakeServer()
        batch = server.batch()
        del server.lengths[batch[3].id]
        kept = list(batch)[:3]
        batch.reorder([0, 1, 2])
        self.assertEqual(list(batch), kept)

    def test_a_beam_that_cannot_be_deleted_is_named_and_in_the_results(self):
        server = FakeServer()
        batch = server.batch()
        kept, stays, serve = list(batch)[:3], batch[3], server.serve

        def busy(method, request, reply):
            if method == "DeleteSequence":
                server.fail(StatusCode.FAILED_PRECONDITION, "busy")
            serve(method, request, reply)

        server.serve = busy
        with self.assertRaises(flashcore.BatchError) as caught:
            batch.reorder([2, 1, 0])
        self.assertEqual(list(caught.exception.errors), [3])
        self.assertEqual(caught.exception.results, [*kept[::-1], stays])
        self.assertEqual(list(batch), kept[::-1])

    def test_what_was_created_is_reachable_when_the_rest_was_refused(self):
        server = FakeServer()
        server.full_after = 2
        with self.assertRaises(flashcore.BatchError) as caught:
            server.client().create_sequences(3, LAYERS, KV_HEADS, DIM)
        made = [sequence for sequence in caught.exception.results if sequence is not None]
        self.assertEqual({sequence.id for sequence in made}, set(server.lengths))
        self.assertEqual(caught.exception.code, StatusCode.RESOURCE_EXHAUSTED)
        flashcore.SequenceBatch(made).delete()
        self.assertEqual(server.lengths, {})

    def test_a_second_rpc_that_fails_leaves_what_the_first_one_made(self):
        server = FakeServer(None, None, (UNAVAILABLE, True), max_operations=2)
        with self.assertRaises(flashcore.BatchError) as caught:
            server.client().create_sequences(5, LAYERS, KV_HEADS, DIM)
        self.assertEqual(set(caught.exception.errors), {2, 3, 4})
        self.assertEqual([type(result) for result in caught.exception.results[:2]], [flashcore.Sequence] * 2)
        self.assertEqual(server.calls, ["GetServerInfo", "ManageSequences", "ManageSequences"])

    def test_forks_are_repeated_only_if_no_server_was_reached(self):
        for error, times in ((UNAVAILABLE, 1), (NOT_REACHED, 2)):
            server = FakeServer((error, False))
            batch = server.batch()
            try:
                batch.fork()
            except flashcore.Unavailable:
                pass
            self.assertEqual(server.calls, ["ManageSequences"] * times)

    def test_a_truncation_whose_reply_is_lost_is_done(self):
        server = FakeServer((UNAVAILABLE, True))
        batch = server.batch()
        batch.truncate(0)
        self.assertEqual(batch.lengths, [[0, 0]] * 4)
        self.assertEqual(server.calls[:2], ["ManageSequences"] * 2)

    def test_one_lost_sequence_does_not_keep_others_from_their_truncation(self):
        server = FakeServer()
        batch = server.batch()
        del server.lengths[batch[2].id]
        with self.assertRaises(flashcore.BatchError) as caught:
            batch.truncate(0)
        self.assertEqual(list(caught.exception.errors), [2])
        self.assertIsInstance(caught.exception.errors[2], flashcore.SequenceLost)
        self.assertEqual([rows for rows, _ in batch.lengths], [0, 0, 1, 0])

    def test_bad_arguments_are_refused_before_anything_is_sent(self):
        server = FakeServer()
        batch = server.batch()
        for call, words in (
                (lambda: batch.fork([4]), ("parents: [4]", "from 0 to 3")),
                (lambda: batch.fork([]), ("parents: []",)),
                (lambda: batch.fork([0], counts=[1, 1, 1, 1]), ("counts",)),
                (lambda: batch.fork(counts=[1, 1]), ("counts: [1, 1]", "4 numbers")),
                (lambda: batch.reorder([0, -1]), ("parents: [0, -1]",)),
                (lambda: batch.truncate([1, 2]), ("lengths: [1, 2]", "4 lengths")),
                (lambda: batch.truncate(-1), ("lengths:",)),
                (lambda: batch.layer(2), ("layer: 2",)),
                (lambda: batch[4:].attend(0, random(1)), ("sequences:", "at least one")),
                (lambda: flashcore.SequenceBatch([batch[0], batch[0]]), ("sequences:", "twice")),
                (lambda: server.client().create_sequences(0, 1, 1, 32), ("n: 0",))):
            self.refuses(server, call, *words)

    def test_the_same_in_asyncio(self):
        async def run():
            server = FakeServer()
            async with await server.core().create_sequences(2, LAYERS, KV_HEADS, DIM) as batch:
                await batch.attend(0, random(2), random(2, KV_HEADS), random(2, KV_HEADS))
                await batch.reorder([0, 0])
                self.assertIsInstance(batch[0], aio.Sequence)
                self.assertEqual(batch.lengths, [[1, 0]] * 2)
            return server.lengths
        self.assertEqual(asyncio.run(run()), {})


class PlanTest(Refuses, unittest.TestCase):
    def test_a_plan_is_attend_batch(self):
        server = FakeServer()
        batch = server.batch()
        plan = server.client().plan(batch, num_heads=HEADS, causal=True, window=(5, 0), softmax_scale=0.5,
                                    precision="int8_qk")
        q, k = random(4, seed=2), random(4, KV_HEADS, seed=3)
        np.testing.assert_array_equal(plan.run(1, q, k, k), q)
        planned = server.requests[-1]
        self.assertEqual(batch.lengths, [[1, 2]] * 4)
        for lengths in server.lengths.values():
            lengths[1] = 1
        batch.info()
        batch.attend(1, q, k, k, causal=True, window=(5, 0), softmax_scale=0.5, precision="int8_qk")
        self.assertEqual(server.requests[-1], planned)
        self.assertIn("plan of 4 sequences: 4 query rows, 4 K/V rows, 4 heads", repr(plan))

    def test_a_plan_follows_its_batch(self):
        server = FakeServer()
        batch = server.batch()
        plan, q, k = server.client().plan(batch, num_heads=HEADS), random(4), random(4, KV_HEADS)
        batch.reorder([3, 3, 0, 0])
        plan.run(0, q, k, k)
        self.assertEqual([span.sequence_id for span in server.requests[-1].spans], [s.id for s in batch])
        batch.reorder([0, 1])
        with self.assertRaisesRegex(flashcore.InvalidArgument, "the batch has 2 now; allowed: the 4"):
            plan.run(0, q, k, k)

    def test_ragged_rows(self):
        server = FakeServer()
        batch = server.batch()
        plan = server.client().plan(batch, num_heads=HEADS, query_rows=[1, 2, 3, 1], append=[0, 2, 0, 1])
        q, k = random(7), random(3, KV_HEADS)
        for layer in range(LAYERS):
            np.testing.assert_array_equal(plan.run(layer, q, k, k), q)
        self.assertEqual(batch.lengths, [[1, 1], [3, 3], [1, 1], [2, 2]])
        reads = server.client().plan(batch, num_heads=HEADS, append=False)
        reads.run(0, random(4))
        self.assertEqual(batch.lengths, [[1, 1], [3, 3], [1, 1], [2, 2]])

    def test_arrays_that_do_not_fit_the_plan_are_refused(self):
        server = FakeServer()
        batch = server.batch()
        client = server.client()
        plan, q, k = client.plan(batch, num_heads=HEADS), random(4), random(4, KV_HEADS)
        for call, words in (
                (lambda: plan.run(2, q, k, k), ("layer: 2",)),
                (lambda: plan.run(0, q), ("k, v: None", "both")),
                (lambda: plan.run(0, q[:3], k, k), ("q:", "[3, 4, 32]", "[4, 4, 32]")),
                (lambda: plan.run(0, q, k[:3], k[:3]), ("k: has 3 rows", "the 4")),
                (lambda: plan.run(0, q.astype(np.float32), k, k), ("q:", "float32")),
                (lambda: client.plan(batch, num_heads=3), ("num_heads: 3", "multiples of the 2")),
                (lambda: client.plan(batch, num_heads=4, query_rows=[1]), ("query_rows: [1]", "4 numbers")),
                (lambda: client.plan(batch, num_heads=4, query_rows=0), ("query_rows", "at least 1")),
                (lambda: client.plan(batch, num_heads=4, window=(-3, 0)), ("window: (-3, 0)",)),
                (lambda: client.plan(batch, num_heads=4, append=False).run(0, q, k, k), ("k, v: given",))):
            self.refuses(server, call, *words)


class KvDTypeTest(unittest.TestCase):
    def test_sequences_keep_it(self):
        for kv_dtype, number in (("int8", 1), ("float8_e4m3", 2)):
            with self.subTest(kv_dtype):
                self.check_sequences_keep(kv_dtype, number)

    def check_sequences_keep(self, kv_dtype, number):
        server = FakeServer()
        client = server.client()
        sequence = client.create_sequence(LAYERS, KV_HEADS, DIM, kv_dtype=kv_dtype)
        batch = client.create_sequences(2, LAYERS, KV_HEADS, DIM, kv_dtype=kv_dtype)
        made = [sequence, *batch, sequence.fork(), client.open_sequence(sequence.id)]
        self.assertEqual({one.kv_dtype for one in made}, {kv_dtype})
        self.assertIn(f"float16 stored as {kv_dtype}, on", repr(sequence))
        first = sequence.id
        sequence.recreate()
        self.assertNotEqual(sequence.id, first)
        self.assertEqual(server.kv_dtypes[sequence.id], number)
        plain = client.create_sequence(LAYERS, KV_HEADS, DIM)
        self.assertEqual(plain.kv_dtype, "same_as_query")
        with self.assertRaisesRegex(flashcore.InvalidArgument, "one shape, dtype, kv_dtype and device"):
            client.attend_batch([sequence, plain], 0, random(2))

    def test_an_unknown_name_says_which_there_are(self):
        with self.assertRaisesRegex(flashcore.InvalidArgument,
                                    "kv_dtype.*'int4'.*'same_as_query', 'int8', 'float8_e4m3'"):
            FakeServer().client().create_sequence(LAYERS, KV_HEADS, DIM, kv_dtype="int4")


class PrecisionTest(unittest.TestCase):
    def test_a_request_says_what_it_accepts(self):
        server = FakeServer()
        batch, client = server.batch(), server.client()
        attends = (
            lambda **options: client.attend_batch(batch, 0, random(4), **options),
            lambda **options: batch.attend(0, random(4), **options),
            lambda **options: batch[0].attend(0, random(1), **options),
            lambda **options: client.plan(batch, num_heads=HEADS, append=False, **options).run(0, random(4)))
        for attend in attends:
            attend()
            for precision in ("16bit", "int8_qk", "int8_qk_pv"):
                attend(precision=precision)
        self.assertEqual([request.precision for request in server.requests], [0, 0, 1, 2] * len(attends))
        with self.assertRaisesRegex(flashcore.InvalidArgument,
                                    "precision.*'int4'.*'16bit', 'int8_qk', 'int8_qk_pv'"):
            batch.attend(0, random(4), precision="int4")


class OnLostTest(unittest.TestCase):
    def setUp(self):
        self.seen = []

    def restore(self, sequence):
        self.seen.append(sequence)
        sequence.recreate()
        return True

    def test_a_lost_sequence_is_restored_and_the_call_repeated(self):
        def restore(sequence):
            self.restore(sequence)
            for layer in range(LAYERS):
                sequence.append(layer, random(3, KV_HEADS), random(3, KV_HEADS))
            return True

        for details in (True, False):
            server = FakeServer(details=details)
            batch = server.batch(on_lost=restore)
            calls = (lambda s: s.attend(0, random(1), random(1, KV_HEADS), random(1, KV_HEADS)),
                     lambda s: s.append(0, random(1, KV_HEADS), random(1, KV_HEADS)),
                     lambda s: s.truncate(1), lambda s: s.fork(), lambda s: s.info())
            for call in calls:
                sequence, self.seen = batch[1], []
                lost = sequence.id
                del server.lengths[lost]
                call(sequence)
                self.assertEqual(self.seen, [sequence])
                self.assertIs(self.seen[0], sequence)
                self.assertNotEqual(sequence.id, lost)
                self.assertEqual(server.lengths[sequence.id], sequence.lengths)

    def test_only_the_lost_ones_of_a_request_are_restored(self):
        for details, method in itertools.product((True, False), ("attend", "truncate", "info")):
            with self.subTest(details=details, method=method):
                server, self.seen = FakeServer(details=details), []
                batch = server.batch(on_lost=self.restore)
                for i in (1, 3):
                    del server.lengths[batch[i].id]
                dict(attend=lambda: batch.attend(0, random(4), random(4, KV_HEADS), random(4, KV_HEADS)),
                     truncate=lambda: batch.truncate(0), info=batch.info)[method]()
                self.assertEqual(self.seen, [batch[1], batch[3]])
                self.assertEqual([server.lengths[sequence.id] for sequence in batch], batch.lengths)

    def test_a_lost_parent_of_several_forks_is_restored_once(self):
        server = FakeServer()
        batch = server.batch(on_lost=self.restore)
        del server.lengths[batch[1].id]
        forks = batch.fork([1, 0, 1])
        self.assertEqual(self.seen, [batch[1]])
        self.assertEqual(forks.lengths, [[0, 0], [1, 1], [0, 0]])

    def test_without_restoration_the_error_stands(self):
        for answer in (False, None):
            server = FakeServer()
            batch = server.batch(on_lost=lambda sequence: answer)
            server.lengths.clear()
            with self.assertRaises(flashcore.SequenceLost):
                batch[0].attend(0, random(1))
        self.assertEqual(server.calls, ["Attend"])

    def test_it_is_repeated_once_and_not_within_the_hook(self):
        def restore(sequence):
            seen.append(sequence)
            with self.assertRaises(flashcore.SequenceLost):
                sequence.info()  # no second hook
            return True

        seen, server = [], FakeServer()
        sequence = server.batch(on_lost=restore)[0]
        server.lengths.clear()
        with self.assertRaises(flashcore.SequenceLost):
            sequence.truncate(0)
        self.assertEqual(seen, [sequence])

    def test_deleting_restores_nothing(self):
        server = FakeServer()
        batch = server.batch(on_lost=self.fail)
        server.lengths.clear()
        batch[0].delete()
        batch.delete()

    def test_a_coroutine_in_asyncio(self):
        async def restore(sequence):
            await sequence.recreate()
            return True

        async def run():
            server = FakeServer()
            sequence = await server.core(on_lost=restore).create_sequence(LAYERS, KV_HEADS, DIM)
            server.lengths.clear()
            await sequence.attend(0, random(1), random(1, KV_HEADS), random(1, KV_HEADS))
            return sequence.lengths
        self.assertEqual(asyncio.run(run()), [1, 0])


class TogetherTest(unittest.TestCase):
    """Attends of many tasks in asyncio."""

    def run_tasks(self, server, step, n=4, **options):
        """The results of step(sequence, i) on n sequences of one row, in tasks of their own."""
        async def run():
            client = server.core(coalescer=Coalescer(server.call), **options)
            sequences = [await client.create_sequence(LAYERS, KV_HEADS, DIM) for _ in range(n)]
            server.calls, server.requests = [], []
            tasks = [step(sequence, i) for i, sequence in enumerate(sequences)]
            return await asyncio.gather(*tasks, return_exceptions=True)
        return asyncio.run(run())

    @staticmethod
    async def append(sequence, i, layer=0, rows=1, **options):
        x = random(rows, KV_HEADS, seed=i)
        return await sequence.attend(layer, random(rows, seed=i), x, x, **options)

    def test_are_one_request_and_each_gets_its_part(self):
        server = FakeServer()
        outputs = self.run_tasks(server, lambda s, i: self.append(s, i, rows=1 + i % 2))
        self.assertEqual(server.calls, ["Attend"])
        for i, output in enumerate(outputs):
            np.testing.assert_array_equal(output, random(1 + i % 2, seed=i))
        self.assertEqual([rows for rows, _ in server.lengths.values()], [1, 2, 1, 2])

    def test_only_what_is_alike_travels_together(self):
        for options in (lambda i: dict(layer=i % 2), lambda i: dict(causal=i % 2 == 0),
                        lambda i: dict(softmax_scale=0.5 + i % 2), lambda i: dict(window=(i % 2, 0)),
                        lambda i: dict(precision=("16bit", "int8_qk")[i % 2]),
                        lambda i: dict(timeout=1.0 + i // 2)):
            server = FakeServer()
            self.run_tasks(server, lambda s, i: self.append(s, i, **options(i)))
            self.assertEqual(server.calls, ["Attend"] * 2)
            self.assertEqual([len(request.spans) for request in server.requests], [2, 2])

    def test_a_request_has_a_sequence_once(self):
        async def step(sequence, i):
            await asyncio.gather(*(sequence.attend(0, random(1)) for _ in range(3)))
        server = FakeServer()
        self.run_tasks(server, step, n=2)
        self.assertEqual(sum(len(request.spans) for request in server.requests), 6)
        for request in server.requests:
            self.assertEqual(len({span.sequence_id for span in request.spans}), len(request.spans))

    def test_a_lost_sequence_fails_its_own_task_only(self):
        async def step(sequence, i):
            if i == 2:
                del server.lengths[sequence.id]
            return await self.append(sequence, i)
        for details in (True, False):
            server = FakeServer(details=details)
            results = self.run_tasks(server, step)
            self.assertEqual([type(result) for result in results],
                             [np.ndarray, np.ndarray, flashcore.SequenceLost, np.ndarray])
            self.assertEqual([rows for rows, _ in server.lengths.values()], [1, 1, 1])

    def test_a_lost_reply_is_settled_for_each(self):
        server = FakeServer(*[None] * 4, (UNAVAILABLE, True))
        results = self.run_tasks(server, self.append)
        for i, output in enumerate(results):
            np.testing.assert_array_equal(output, random(1, seed=i))
        self.assertEqual([rows for rows, _ in server.lengths.values()], [1] * 4)

    def test_an_error_of_the_server_is_everybodys(self):
        server = FakeServer(*[None] * 4, (flashcore.QueueFull("full"), False))
        results = self.run_tasks(server, self.append)
        self.assertEqual([type(result) for result in results], [flashcore.QueueFull] * 4)
        self.assertEqual(len(set(map(id, results))), 4)
        self.assertEqual(server.calls, ["Attend"])

    def test_a_cancelled_task_leaves_the_others(self):
        async def run():
            go = asyncio.Event()
            server = FakeServer()

            async def slow(*args):
                await go.wait()
                return await server.call(*args)

            client = server.core(coalescer=Coalescer(slow))
            sequences = [await client.create_sequence(LAYERS, KV_HEADS, DIM) for _ in range(3)]
            tasks = [asyncio.ensure_future(self.append(s, i)) for i, s in enumerate(sequences)]
            for _ in range(5):
                await asyncio.sleep(0)
            tasks[1].cancel()
            await asyncio.sleep(0)
            go.set()
            return await asyncio.gather(*tasks, return_exceptions=True), sequences

        results, sequences = asyncio.run(run())
        self.assertEqual([type(result) for result in results],
                         [np.ndarray, asyncio.CancelledError, np.ndarray])
        self.assertEqual([bool(sequence.unfinished) for sequence in sequences], [False, True, False])

    def test_the_request_is_cancelled_with_its_last_task(self):
        async def run():
            ended = asyncio.Event()

            async def never(*_):
                try:
                    await asyncio.Event().wait()
                finally:
                    ended.set()

            server = FakeServer()
            client = server.core(coalescer=Coalescer(never))
            sequences = [await client.create_sequence(LAYERS, KV_HEADS, DIM) for _ in range(2)]
            tasks = [asyncio.ensure_future(self.append(s, i)) for i, s in enumerate(sequences)]
            for _ in range(5):
                await asyncio.sleep(0)
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            await ended.wait()
        asyncio.run(run())


class LeaseTest(unittest.TestCase):
    def test_sequences_name_the_lease_that_is_held(self):
        server = FakeServer()
        client = server.client(lease=True)
        sequence = client.create_sequence(LAYERS, KV_HEADS, DIM)
        first = server.held
        batch = client.create_sequences(2, LAYERS, KV_HEADS, DIM)
        batch.fork()
        sequence.fork()
        batch.reorder([0, 0])
        self.assertEqual(server.calls.count("HoldLease"), 1)
        self.assertEqual(set(server.leases.values()), {first})

    def test_a_broken_lease_is_taken_anew(self):
        server = FakeServer()
        client = server.client(lease=True)
        client.create_sequence(LAYERS, KV_HEADS, DIM)
        server.held = None
        again = client.create_sequence(LAYERS, KV_HEADS, DIM)
        self.assertEqual(server.leases[again.id], server.held)
        self.assertEqual(server.calls.count("HoldLease"), 2)

    def test_a_lease_that_breaks_while_a_sequence_is_made_is_taken_anew(self):
        server = FakeServer()
        client = server.client(lease=True)
        client.create_sequence(LAYERS, KV_HEADS, DIM)
        serve = server.serve

        def breaks(method, request, reply):
            server.serve, server.held = serve, None
            serve(method, request, reply)

        server.serve = breaks
        client.create_sequence(LAYERS, KV_HEADS, DIM)
        self.assertEqual(server.calls[-3:], ["CreateSequence", "HoldLease", "CreateSequence"])

    def test_a_server_without_leases_is_named(self):
        server = FakeServer((flashcore.Unimplemented(""), False))
        with self.assertRaisesRegex(flashcore.Unimplemented, "lease: True; .* at fake:1 has no leases"):
            server.client(lease=True).create_sequence(LAYERS, KV_HEADS, DIM)

    def test_without_lease_none_is_named(self):
        server = FakeServer()
        server.batch()
        self.assertEqual(set(server.leases.values()), {b""})


class GrpcServer(grpc.GenericRpcHandler):
    """A gRPC server with HoldLease, whose Attend fails with a status and details."""

    def __init__(self):
        self.ended = threading.Semaphore(0)
        self.leases = itertools.count(1)
        self.status = status(StatusCode.NOT_FOUND, "gone", "SEQUENCE_LOST", spans="1,2", sequence_ids="0a,0b")
        self.silent = False
        options = [("grpc.max_receive_message_length", 1000)]
        self.server = grpc.server(futures.ThreadPoolExecutor(4), options=options)
        self.server.add_generic_rpc_handlers([self])
        self.port = self.server.add_insecure_port("127.0.0.1:0")
        self.server.start()

    @property
    def target(self):
        return f"127.0.0.1:{self.port}"

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.server.stop(0).wait()

    def service(self, call):
        name = call.method.rpartition("/")[2]
        if name == "HoldLease":
            return grpc.unary_stream_rpc_method_handler(self.hold)
        return grpc.unary_unary_rpc_method_handler(self.fail if name == "GetSequence" else self.create)

    def hold(self, _, context):
        self.time_of_lease = context.time_remaining()  # seconds
        over = threading.Event()
        if not context.add_callback(over.set):
            over.set()
        if not self.silent:
            lease = next(self.leases).to_bytes(16, "big")
            yield _messages.message("HoldLeaseResponse")(lease_id=lease).SerializeToString()
        over.wait()
        self.ended.release()

    def create(self, request, _):
        reply = _messages.message("CreateSequenceResponse")()
        lease = _messages.message("CreateSequenceRequest").FromString(request).lease_id
        reply.sequence.sequence_id, reply.sequence.dtype = lease, 1
        return reply.SerializeToString()

    def fail(self, _, context):
        context.set_trailing_metadata([("grpc-status-details-bin", self.status.SerializeToString())])
        context.abort(StatusCode.NOT_FOUND, "gone")


class GrpcTest(unittest.TestCase):
    def check_details(self, error):
        self.assertEqual((type(error), error.reason, error.spans, error.sequence_ids),
                         (flashcore.SequenceLost, "SEQUENCE_LOST", [1, 2], [b"\n", b"\v"]))

    def test_details_become_reasons(self):
        with GrpcServer() as server, flashcore.connect(server.target) as client:
            with self.assertRaises(flashcore.SequenceLost) as caught:
                client.open_sequence(bytes(16))
            self.check_details(caught.exception)

    def test_grpcs_own_refusal_of_a_large_message_names_the_flag(self):
        x = random(20)
        with GrpcServer() as server, flashcore.connect(server.target) as client:
            with self.assertRaises(flashcore.MessageTooLarge) as caught:
                client.attend(x, x, x)
            self.assertFalse(caught.exception.retryable)
            self.assertRegex(str(caught.exception),
                             r"has \d+ bytes; allowed: 1000, .*--max_message_bytes.*load")
            client.core._transport.max_message_bytes = 900  # as it knows from GetServerInfo
            with self.assertRaisesRegex(flashcore.MessageTooLarge, "allowed: 900"):
                client.attend(x, x, x)

    def test_a_lease_is_held_until_the_client_closes(self):
        with GrpcServer() as server:
            with flashcore.connect(server.target, lease=True) as client:
                ids = [client.create_sequence(1, 1, 32).id for _ in range(2)]
                self.assertEqual(ids, [(1).to_bytes(16, "big")] * 2)
                self.assertGreater(server.time_of_lease, 1e9)  # no deadline
            self.assertTrue(server.ended.acquire(timeout=60))

    def test_a_server_that_gives_no_lease_is_a_timeout(self):
        with GrpcServer() as server:
            server.silent = True
            with flashcore.connect(server.target, lease=True) as client, self.assertRaises(TimeoutError):
                client.create_sequence(1, 1, 32, timeout=0.1)

    def test_the_same_in_asyncio(self):
        async def run(server):  # once: grpc.aio complains about a second event loop
            async with aio.connect(server.target) as client:
                with self.assertRaises(flashcore.SequenceLost) as caught:
                    await client.open_sequence(bytes(16))
                self.check_details(caught.exception)
            async with aio.connect(server.target, lease=True) as client:
                ids = [(await client.create_sequence(1, 1, 32)).id for _ in range(2)]
            self.assertGreater(server.time_of_lease, 1e9)
            self.assertEqual(ids, [(1).to_bytes(16, "big")] * 2)
            self.assertTrue(await asyncio.to_thread(server.ended.acquire, timeout=60))
            server.silent = True
            async with aio.connect(server.target, lease=True) as client:
                with self.assertRaises(TimeoutError):
                    await client.create_sequence(1, 1, 32, timeout=0.1)

        with GrpcServer() as server:
            asyncio.run(run(server))


class ReasonsTest(unittest.TestCase):
    def error(self, code, reason, **metadata):
        return errors.from_status(status(code, "words", reason, **metadata))

    def test_each_reason_has_its_class(self):
        full = StatusCode.RESOURCE_EXHAUSTED
        for code, reason, kind in (
                (full, "KV_FULL", flashcore.KvFull), (full, "QUEUE_FULL", flashcore.QueueFull),
                (full, "QUOTA_EXCEEDED", flashcore.QuotaExceeded),
                (full, "STAGING_FULL", flashcore.StagingFull), (full, "TOO_LARGE", flashcore.MessageTooLarge),
                (full, "SERVER_FULL", flashcore.ResourceExhausted),
                (full, "A_NEW_ONE", flashcore.ResourceExhausted),
                (StatusCode.NOT_FOUND, "REGION_LOST", flashcore.NotFound),
                (StatusCode.NOT_FOUND, "SEQUENCE_LOST", flashcore.SequenceLost),
                (StatusCode.UNIMPLEMENTED, "UNKNOWN_FIELD", flashcore.Unimplemented),
                (StatusCode.FAILED_PRECONDITION, "OTHER", flashcore.FailedPrecondition)):
            error = self.error(code, reason, needed_bytes="7")
            self.assertIs(type(error), kind)
            self.assertEqual((error.code, error.reason), (code, reason))
            self.assertEqual(error.metadata, {"needed_bytes": "7"})
            self.assertEqual(str(error), f"{code.name}: words")

    def test_a_length_mismatch_has_its_numbers(self):
        error = self.error(StatusCode.FAILED_PRECONDITION, "LENGTH_MISMATCH", expected="3", actual="5")
        self.assertEqual((error.expected, error.actual), (3, 5))

    def test_servers_without_details_work(self):
        self.assertIs(type(self.error(StatusCode.NOT_FOUND, "")), flashcore.SequenceLost)
        words = "expected_length: 3; the sequence has 5 rows"
        mismatch = errors.from_status(status(StatusCode.FAILED_PRECONDITION, words))
        self.assertIs(type(mismatch), flashcore.LengthMismatch)
        self.assertEqual((mismatch.expected, mismatch.actual), (3, 5))
        garbled = errors.from_rpc(StatusCode.NOT_FOUND, "gone", [("grpc-status-details-bin", b"\xff")])
        self.assertIs(type(garbled), flashcore.SequenceLost)

    def test_errors_of_this_library_have_no_reason(self):
        error = errors.invalid("q", 1, "2")
        self.assertEqual((error.reason, error.metadata), ("", {}))


if __name__ == "__main__":
    unittest.main()
