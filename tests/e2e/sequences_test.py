"""Resident sequences over the wire: only queries and new rows travel, with the same results."""

import threading
import unittest

import grpc
import numpy as np
from flashcore.v1 import attention_pb2 as pb

import harness
from harness import failure, wait_until

Code = grpc.StatusCode
HEADS, KV_HEADS, DIM = 4, 2, 64


class SequencesTest(harness.ServerTest):
    flags = ("--insecure_client_names", "--kv_memory_bytes=67108864", "--l2_window=on",
             "--l2_budget_bytes=8388608", "--max_message_bytes=16777216", "--client_kv_bytes=0")
    kv_dtype = pb.KV_DTYPE_SAME_AS_QUERY
    page_bytes = 2 * KV_HEADS * 64 * DIM * 2

    def tearDown(self):
        for info in self.stub.ListSequences(pb.ListSequencesRequest(page_size=1000)).sequences:
            self.stub.DeleteSequence(pb.DeleteSequenceRequest(sequence_id=info.sequence_id))
        # A stream that was cancelled may still be ending.
        wait_until(lambda: self.stub.GetServerInfo(
            pb.GetServerInfoRequest()).devices[0].kv_used_bytes == 0, "the memory is released")

    def create(self, layers=1, **fields):
        return harness.create(self.stub, num_layers=layers, num_kv_heads=KV_HEADS, head_dim=DIM,
                              kv_dtype=self.kv_dtype, **fields).sequence_id

    def tensor(self, rows, heads):
        return harness.random_tensor(self.rng, rows, heads, DIM)

    def load(self, sequence, *chunks, layer=0):
        """Appends (key, value) chunks, alternately as NHD and HND."""
        def messages():
            for i, (key, value) in enumerate(chunks):
                hnd = i % 2 == 1
                key, value = ((x.transpose(1, 0, 2) if hnd else x).copy() for x in (key, value))
                yield pb.LoadSequenceRequest(
                    sequence_id=sequence if i == 0 else b"", layer=layer,
                    layout=pb.LAYOUT_HND if hnd else pb.LAYOUT_NHD, rows=chunks[i][0].shape[0],
                    key=key.tobytes(), value=value.tobytes())
        return self.stub.LoadSequence(messages()).sequence

    def attend_request(self, sequences, queries, rows=(), layer=0, **span_fields):
        """One span per sequence; rows[i] is its (key, value) to append, if any."""
        rows = list(rows) or [(self.tensor(0, KV_HEADS),) * 2 for _ in sequences]
        return pb.AttendRequest(
            spans=[pb.Span(query_rows=q.shape[0], kv_rows=k.shape[0], sequence_id=s, **span_fields)
                   for s, q, (k, _) in zip(sequences, queries, rows)],
            dtype=pb.DTYPE_FLOAT16, num_heads=HEADS, num_kv_heads=KV_HEADS, head_dim=DIM,
            layout=pb.LAYOUT_NHD, mask=pb.Mask(kind=pb.Mask.KIND_CAUSAL), layer=layer,
            query=b"".join(q.tobytes() for q in queries),
            key=b"".join(k.tobytes() for k, _ in rows),
            value=b"".join(v.tobytes() for _, v in rows))

    def outputs(self, reply, queries):
        flat = np.frombuffer(reply.output, np.float16).reshape(-1, HEADS, DIM)
        return np.split(flat, np.cumsum([q.shape[0] for q in queries])[:-1])

    def assert_attends(self, got, q, k, v):
        np.testing.assert_allclose(got, harness.reference(q, k, v, causal=True)[0], atol=4e-3)

    def assert_fails(self, code, message, call, *args):
        self.assertIn(message, failure(code, call, *args).details())

    def get(self, sequence):
        return self.stub.GetSequence(pb.GetSequenceRequest(sequence_id=sequence)).sequence

    def test_decode_steps_over_many_sequences(self):
        lengths = [0, 1, 63, 64, 130]
        sequences, keys, values = [], [], []
        for n in lengths:
            sequences.append(self.create())
            keys.append(self.tensor(n, KV_HEADS))
            values.append(self.tensor(n, KV_HEADS))
            if n:
                self.load(sequences[-1], (keys[-1][:n // 2 + 1], values[-1][:n // 2 + 1]),
                          *([(keys[-1][n // 2 + 1:], values[-1][n // 2 + 1:])] if n > 1 else []))
        for step in range(3):
            queries = [self.tensor(1, HEADS) for _ in sequences]
            rows = [(self.tensor(1, KV_HEADS), self.tensor(1, KV_HEADS)) for _ in sequences]
            reply = self.stub.Attend(self.attend_request(sequences, queries, rows))
            self.assertEqual(list(reply.sequence_lengths), [n + step + 1 for n in lengths])
            for i, got in enumerate(self.outputs(reply, queries)):
                keys[i] = np.concatenate([keys[i], rows[i][0]])
                values[i] = np.concatenate([values[i], rows[i][1]])
                self.assert_attends(got, queries[i], keys[i], values[i])

    def test_resident_and_inline_give_the_same_bits(self):
        k, v, q = self.tensor(700, KV_HEADS), self.tensor(700, KV_HEADS), self.tensor(3, HEADS)
        sequence = self.create()
        self.load(sequence, (k[:300], v[:300]), (k[300:], v[300:]))
        inline = harness.request(q, k, v, mask=pb.Mask(kind=pb.Mask.KIND_CAUSAL))
        self.assertEqual(self.stub.Attend(self.attend_request([sequence], [q])).output,
                         self.stub.Attend(inline).output)

    def test_inline_and_resident_spans_in_one_request(self):
        k, v = self.tensor(90, KV_HEADS), self.tensor(90, KV_HEADS)
        q = [self.tensor(2, HEADS), self.tensor(1, HEADS)]
        own = self.tensor(10, KV_HEADS), self.tensor(10, KV_HEADS)
        sequence = self.create()
        self.load(sequence, (k, v))
        nothing = self.tensor(0, KV_HEADS)
        reply = self.stub.Attend(
            self.attend_request([b"", sequence], q, [own, (nothing, nothing)]))
        self.assertEqual(list(reply.sequence_lengths), [0, 90])
        got = self.outputs(reply, q)
        self.assert_attends(got[0], q[0], *own)
        self.assert_attends(got[1], q[1], k, v)

    def test_prefill_in_chunks_is_causal_at_the_bottom_right(self):
        n = 200
        k, v, q = self.tensor(n, KV_HEADS), self.tensor(n, KV_HEADS), self.tensor(n, HEADS)
        sequence = self.create()
        got = []
        for begin, end in ((0, 70), (70, 71), (71, 200)):
            part = slice(begin, end)
            reply = self.stub.Attend(self.attend_request(
                [sequence], [q[part]], [(k[part], v[part])], expected_length=begin))
            got.append(self.outputs(reply, [q[part]])[0])
        self.assert_attends(np.concatenate(got), q, k, v)

    def test_forks_diverge_and_outlive_their_parent(self):
        k, v = self.tensor(100, KV_HEADS), self.tensor(100, KV_HEADS)
        parent = self.create()
        self.load(parent, (k, v))
        child = self.stub.ForkSequence(pb.ForkSequenceRequest(sequence_id=parent)).sequence_id
        short = self.stub.ForkSequence(
            pb.ForkSequenceRequest(sequence_id=child, length=70)).sequence_id
        info = self.stub.GetServerInfo(pb.GetServerInfoRequest())
        self.assertEqual(info.devices[0].kv_used_bytes, 2 * self.page_bytes)  # shared, not copied
        self.stub.DeleteSequence(pb.DeleteSequenceRequest(sequence_id=parent))
        for sequence, length in ((child, 100), (short, 70)):
            q = self.tensor(1, HEADS)
            row = self.tensor(1, KV_HEADS), self.tensor(1, KV_HEADS)
            reply = self.stub.Attend(self.attend_request([sequence], [q], [row]))
            self.assert_attends(self.outputs(reply, [q])[0], q,
                                np.concatenate([k[:length], row[0]]),
                                np.concatenate([v[:length], row[1]]))

    def test_a_step_of_beam_search_is_one_call(self):
        k, v = self.tensor(70, KV_HEADS), self.tensor(70, KV_HEADS)
        winner, loser, foreign = self.create(), self.create(), self.create(shared=True)
        self.load(winner, (k, v))
        fork, delete, get = pb.ForkSequenceRequest, pb.DeleteSequenceRequest, pb.GetSequenceRequest
        step = [dict(fork=fork(sequence_id=winner)), dict(fork=fork(sequence_id=winner)),
                dict(delete=delete(sequence_id=loser)), dict(get=get(sequence_id=winner))]
        request = pb.ManageSequencesRequest(operations=[pb.SequenceOperation(**o) for o in step])
        results = self.stub.ManageSequences(request).results
        self.assertEqual([r.status.code for r in results], [0, 0, 0, 0])
        beams = [winner, results[0].sequence.sequence_id, results[1].sequence.sequence_id]
        self.assertEqual(len(set(beams)), 3)
        self.assertEqual(results[3].sequence.kv_bytes, 2 * self.page_bytes)
        queries = [self.tensor(1, HEADS) for _ in beams]
        reply = self.stub.Attend(self.attend_request(beams, queries))
        for got, q in zip(self.outputs(reply, queries), queries):
            self.assert_attends(got, q, k, v)
        # Another client may fork what is shared with it, and nothing else; each operation says so.
        step = [dict(fork=fork(sequence_id=foreign)), dict(delete=delete(sequence_id=foreign)),
                dict(get=get(sequence_id=winner)), dict(delete=delete(sequence_id=winner))]
        request = pb.ManageSequencesRequest(operations=[pb.SequenceOperation(**o) for o in step])
        other = (("flashcore-client", "someone else"),)
        rejected = 'flashcore_rejected_requests_total{reason="SEQUENCE_LOST"}'
        before = self.server.metric(rejected)
        results = self.stub.ManageSequences(request, metadata=other).results
        self.assertEqual(self.server.metric(rejected), before + 1)
        codes = [Code.OK, Code.PERMISSION_DENIED, Code.NOT_FOUND, Code.ABORTED]
        self.assertEqual([r.status.code for r in results], [code.value[0] for code in codes])
        self.stub.DeleteSequence(delete(sequence_id=results[0].sequence.sequence_id), metadata=other)

    def test_bits_do_not_depend_on_company(self):
        prefix = self.tensor(1100, KV_HEADS), self.tensor(1100, KV_HEADS)
        parent = self.create()
        self.load(parent, prefix)
        forks = [self.stub.ForkSequence(pb.ForkSequenceRequest(sequence_id=parent)).sequence_id
                 for _ in range(32)]
        for i, fork in enumerate(forks):  # tails of their own, of several lengths
            self.load(fork, (self.tensor(1 + 37 * i, KV_HEADS), self.tensor(1 + 37 * i, KV_HEADS)))
        queries = [self.tensor(1, HEADS) for _ in forks]
        alone = [self.stub.Attend(self.attend_request([fork], [q])).output
                 for fork, q in zip(forks, queries)]
        # In one request, and from many clients at once while another prefills.
        together = self.stub.Attend(self.attend_request(forks, queries)).output
        self.assertEqual(together, b"".join(alone))
        long = [harness.random_tensor(self.rng, 512, heads, DIM) for heads in (HEADS, 2, 2)]

        def in_company():
            before = self.batches()
            calls = [self.stub.Attend.future(harness.request(*long))]
            calls += [self.stub.Attend.future(self.attend_request([fork], [q]))
                      for fork, q in zip(forks, queries)]
            self.assertEqual([call.result().output for call in calls[1:]], alone)
            launches, requests = (now - then for now, then in zip(self.batches(), before))
            self.assertEqual(requests, len(calls))
            return launches < requests

        harness.wait_until(in_company, "no two requests were in one launch")

    def batches(self):
        """(launches, requests in them) so far."""
        return [self.server.metric(f"flashcore_batch_requests_{what}") for what in ("count", "sum")]

    def test_truncate_rolls_back(self):
        k, v = self.tensor(130, KV_HEADS), self.tensor(130, KV_HEADS)
        sequence = self.create()
        self.load(sequence, (k, v))
        request = pb.TruncateSequenceRequest(sequence_id=sequence, length=66, expected_length=130)
        self.assertEqual(list(self.stub.TruncateSequence(request).sequence.layer_lengths), [66])
        self.assert_fails(Code.FAILED_PRECONDITION, "the sequence has 66 rows",
                          self.stub.TruncateSequence, request)
        request = pb.TruncateSequenceRequest(sequence_id=sequence, length=67)
        self.assert_fails(Code.INVALID_ARGUMENT, "length: 67; layer 0 has only 66 rows",
                          self.stub.TruncateSequence, request)
        row, q = (self.tensor(1, KV_HEADS), self.tensor(1, KV_HEADS)), self.tensor(1, HEADS)
        reply = self.stub.Attend(self.attend_request([sequence], [q], [row]))
        self.assert_attends(self.outputs(reply, [q])[0], q, np.concatenate([k[:66], row[0]]),
                            np.concatenate([v[:66], row[1]]))

    def test_expected_length_makes_a_retry_safe(self):
        sequence = self.create()
        row, q = (self.tensor(1, KV_HEADS), self.tensor(1, KV_HEADS)), self.tensor(1, HEADS)
        request = self.attend_request([sequence], [q], [row], expected_length=0)
        self.stub.Attend(request)
        self.assert_fails(Code.FAILED_PRECONDITION,
                          "spans[0].expected_length: 0; the sequence has 1 rows in layer 0",
                          self.stub.Attend, request)
        self.assertEqual(list(self.get(sequence).layer_lengths), [1])

    def test_layers_are_apart(self):
        sequence = self.create(layers=3)
        k, v, q = self.tensor(5, KV_HEADS), self.tensor(5, KV_HEADS), self.tensor(1, HEADS)
        self.load(sequence, (k, v), layer=2)
        self.assertEqual(list(self.get(sequence).layer_lengths), [0, 0, 5])
        reply = self.stub.Attend(self.attend_request([sequence], [q], layer=2))
        self.assert_attends(self.outputs(reply, [q])[0], q, k, v)
        reply = self.stub.Attend(self.attend_request([sequence], [q], layer=1))
        self.assertFalse(np.frombuffer(reply.output, np.float16).any())

    def test_bad_ids_and_shapes(self):
        sequence = self.create(layers=2)
        q, nothing = self.tensor(1, HEADS), self.tensor(0, KV_HEADS)

        def attend(**fields):
            return self.stub.Attend(self.attend_request(
                [fields.pop("id", sequence)], [q], [(nothing, nothing)], **fields))

        unknown = bytes(16)
        self.assert_fails(Code.NOT_FOUND, "load its K/V again", lambda: attend(id=unknown))
        self.assert_fails(Code.INVALID_ARGUMENT, "5 bytes; an id has 16", lambda: attend(id=b"12345"))
        self.assert_fails(Code.INVALID_ARGUMENT, "layer: 2; the sequence of spans[0] has 2 layers",
                          lambda: attend(layer=2))
        for call, request in (
                (self.stub.GetSequence, pb.GetSequenceRequest),
                (self.stub.DeleteSequence, pb.DeleteSequenceRequest),
                (self.stub.ForkSequence, pb.ForkSequenceRequest),
                (self.stub.TruncateSequence, pb.TruncateSequenceRequest)):
            self.assert_fails(Code.NOT_FOUND, "no such sequence", call,
                              request(sequence_id=unknown))
            self.assert_fails(Code.INVALID_ARGUMENT, "sequence_id: 0 bytes", call, request())
        bad = self.attend_request([sequence], [q])
        bad.dtype = pb.DTYPE_BFLOAT16
        self.assert_fails(Code.INVALID_ARGUMENT, "dtype: bfloat16; the sequence of spans[0] has",
                          self.stub.Attend, bad)
        bad = self.attend_request([sequence], [q])
        bad.num_kv_heads = 4
        self.assert_fails(Code.INVALID_ARGUMENT, "num_kv_heads: 4; the sequence of spans[0] has 2",
                          self.stub.Attend, bad)
        self.assert_fails(Code.INVALID_ARGUMENT, "spans[1].sequence_id: names a sequence that",
                          self.stub.Attend, self.attend_request([sequence] * 2, [q, q]))
        for field, value, message in (("num_layers", 1025, "num_layers: 1025 is not in 1..1024"),
                                      ("head_dim", 33, "head_dim: 33 is not one of 32, 64"),
                                      ("num_kv_heads", 0, "num_kv_heads: 0 is not in 1.."),
                                      ("num_kv_heads", 1000, "need pages of"),
                                      ("dtype", 0, "dtype: 0 is not")):
            self.assert_fails(Code.INVALID_ARGUMENT, message, self.stub.CreateSequence,
                              harness.create_request(**{"head_dim": 64, field: value}))

    def test_a_bad_load_says_why_and_keeps_what_was_taken(self):
        sequence = self.create()
        chunk = self.tensor(10, KV_HEADS), self.tensor(10, KV_HEADS)
        message = pb.LoadSequenceRequest(
            sequence_id=sequence, layout=pb.LAYOUT_NHD, rows=10, key=chunk[0].tobytes(),
            value=chunk[1].tobytes())
        short = pb.LoadSequenceRequest(layout=pb.LAYOUT_NHD, rows=10, key=b"123", value=b"")
        self.assert_fails(Code.INVALID_ARGUMENT, "key: 3 bytes came, but 10 rows",
                          self.stub.LoadSequence, iter([message, short]))
        self.assertEqual(list(self.get(sequence).layer_lengths), [10])
        self.assert_fails(Code.INVALID_ARGUMENT, "this is not the first message",
                          self.stub.LoadSequence, iter([message, message]))
        self.assertEqual(list(self.get(sequence).layer_lengths), [20])
        self.assert_fails(Code.INVALID_ARGUMENT, "nothing names a sequence",
                          self.stub.LoadSequence, iter([]))
        message.sequence_id = bytes(16)
        self.assert_fails(Code.NOT_FOUND, "no such sequence", self.stub.LoadSequence,
                          iter([message]))

    def test_a_full_arena_refuses_and_loses_nothing(self):
        sequence, other = self.create(), self.create()
        rows = 64 * 64
        chunk = self.tensor(rows, KV_HEADS), self.tensor(rows, KV_HEADS)
        self.load(other, (chunk[0][:5], chunk[1][:5]))
        loaded = 0
        with self.assertRaises(grpc.RpcError) as caught:
            while True:
                self.load(sequence, chunk)
                loaded += rows
        self.assertEqual(caught.exception.code(), Code.RESOURCE_EXHAUSTED)
        self.assertIn("K/V memory is full", caught.exception.details())
        self.assertGreater(loaded, 0)
        self.assertEqual(list(self.get(sequence).layer_lengths), [loaded])
        q = self.tensor(1, HEADS)
        reply = self.stub.Attend(self.attend_request([other], [q]))
        self.assert_attends(self.outputs(reply, [q])[0], q, chunk[0][:5], chunk[1][:5])

    def test_pinned_sequences_say_how_much_is_pinned(self):
        pinned = self.create(pin=True)
        info = self.load(pinned, (self.tensor(128, KV_HEADS), self.tensor(128, KV_HEADS)))
        self.assertTrue(info.pin)
        if harness.ON_FAKE_GPU:  # its L2 is too small for a hot segment
            self.assertEqual(info.pinned_bytes, 0)
            return
        self.assertEqual((info.kv_bytes, info.pinned_bytes), (2 * self.page_bytes, 2 * self.page_bytes))
        plain = self.create()
        info = self.load(plain, (self.tensor(64, KV_HEADS), self.tensor(64, KV_HEADS)))
        self.assertEqual((info.kv_bytes, info.pinned_bytes), (self.page_bytes, 0))
        hot = 'flashcore_kv_bytes{segment="hot",state="used"}'
        wait_until(lambda: self.server.metric(hot) == 2 * self.page_bytes,
                   lambda: f"{self.server.metric(hot)} bytes are hot")
        # Pages that are read often are promoted. Their bits do not change.
        q = self.tensor(1, HEADS)
        before = self.stub.Attend(self.attend_request([plain], [q])).output

        def promoted():
            self.assertEqual(self.stub.Attend(self.attend_request([plain], [q])).output, before)
            return self.get(plain).pinned_bytes > 0

        wait_until(promoted, "pages are promoted")
        self.assertEqual(self.get(plain).pinned_bytes, self.page_bytes)
        self.assertEqual(self.stub.Attend(self.attend_request([plain], [q])).output, before)
        wait_until(lambda: self.server.metric('flashcore_kv_moved_bytes_total{to="hot"}') > 0,
                   "the move is counted")

    def test_listing_pages_and_shows_the_callers_own(self):
        mine = [self.create() for _ in range(5)]
        listed, token = [], ""
        while True:
            page = self.stub.ListSequences(pb.ListSequencesRequest(page_size=2, page_token=token))
            listed += [info.sequence_id for info in page.sequences]
            token = page.next_page_token
            if not token:
                break
        self.assertEqual(listed, mine)
        other = (("flashcore-client", "someone else"),)
        self.assertFalse(self.stub.ListSequences(pb.ListSequencesRequest(), metadata=other).sequences)
        self.assert_fails(Code.INVALID_ARGUMENT, "page_token", self.stub.ListSequences,
                          pb.ListSequencesRequest(page_token="x"))
        failure(Code.INVALID_ARGUMENT, self.stub.ListSequences, pb.ListSequencesRequest(),
                metadata=(("flashcore-client", "x" * 65),))

    def test_a_client_killed_while_loading_leaves_whole_chunks(self):
        sequence = self.create()
        chunk = self.tensor(1000, KV_HEADS), self.tensor(1000, KV_HEADS)
        stalled = threading.Event()

        def messages():
            for i in range(3):
                yield pb.LoadSequenceRequest(
                    sequence_id=sequence if i == 0 else b"", layout=pb.LAYOUT_NHD, rows=1000,
                    key=chunk[0].tobytes(), value=chunk[1].tobytes())
            stalled.wait()
        call = self.stub.LoadSequence.future(messages())
        wait_until(lambda: list(self.get(sequence).layer_lengths) == [3000], "the rows are loaded")
        call.cancel()
        stalled.set()
        self.assertEqual(list(self.get(sequence).layer_lengths), [3000])

    def test_one_layer_sees_pipelined_requests_in_order(self):
        sequence = self.create()
        rows = [(self.tensor(1, KV_HEADS), self.tensor(1, KV_HEADS)) for _ in range(50)]
        q = self.tensor(1, HEADS)

        def requests():
            for i, row in enumerate(rows):
                request = self.attend_request([sequence], [q], [row], expected_length=i)
                request.request_id = str(i)
                yield request
        replies = {r.request_id: r for r in self.stub.AttendStream(requests())}
        for i in range(50):
            self.assertEqual(replies[str(i)].status.code, 0, replies[str(i)].status.message)
            self.assertEqual(list(replies[str(i)].sequence_lengths), [i + 1])
            self.assert_attends(self.outputs(replies[str(i)], [q])[0], q,
                                np.concatenate([k for k, _ in rows[:i + 1]]),
                                np.concatenate([v for _, v in rows[:i + 1]]))


class LimitsTest(unittest.TestCase):
    """Expiry, eviction and quotas, each on a server of its own."""

    def create(self, stub):
        return harness.create(stub, num_kv_heads=8, head_dim=256)

    def load(self, stub, sequence, rows):
        return stub.LoadSequence(iter([harness.chunk(sequence, rows, 8 * 256 * 2)]))

    def assert_code(self, code, call, *args):
        return failure(code, call, *args).details()

    def test_idle_sequences_expire(self):
        with harness.Server("--sequence_idle_timeout_s=0.2") as server, \
                server.channel() as channel:
            stub, created = harness.stub(channel), []

            def create_and_load():
                created.append(self.create(stub).sequence_id)
                try:
                    return self.load(stub, created[-1], 64)
                except grpc.RpcError as error:  # it has expired already
                    self.assertEqual(error.code(), Code.NOT_FOUND)

            wait_until(create_and_load, "a sequence is loaded")
            wait_until(lambda: server.metric("flashcore_sequences") == 0, "it expires")
            self.assert_code(Code.NOT_FOUND, stub.GetSequence,
                             pb.GetSequenceRequest(sequence_id=created[-1]))
            evicted = 'flashcore_sequences_evicted_total{reason="idle"}'
            wait_until(lambda: server.metric(evicted) == len(created), "all are counted")
            used = 'flashcore_kv_bytes{segment="cold",state="used"}'
            wait_until(lambda: server.metric(used) == 0, "the memory is released")

    def test_lru_evicts_the_one_used_longest_ago(self):
        # 4 MiB of K/V: eight pages of 512 KiB.
        with harness.Server("--kv_memory_bytes=4194304", "--evict=lru",
                            "--client_kv_bytes=0") as server:
            with server.channel() as channel:
                stub = harness.stub(channel)
                self.assertTrue(stub.GetServerInfo(pb.GetServerInfoRequest()).limits.evicts)
                first, second, third = (self.create(stub).sequence_id for _ in range(3))
                self.load(stub, first, 4 * 64)
                self.load(stub, second, 4 * 64)
                self.load(stub, third, 64)
                self.assert_code(Code.NOT_FOUND, stub.GetSequence,
                                 pb.GetSequenceRequest(sequence_id=first))
                for kept, rows in ((second, 256), (third, 64)):
                    info = stub.GetSequence(pb.GetSequenceRequest(sequence_id=kept)).sequence
                    self.assertEqual(list(info.layer_lengths), [rows])
                # An append larger than the whole arena is refused and evicts nothing.
                self.assert_code(Code.RESOURCE_EXHAUSTED, self.load, stub, third, 8 * 64)
                info = stub.GetSequence(pb.GetSequenceRequest(sequence_id=third)).sequence
                self.assertEqual(list(info.layer_lengths), [64])
            evicted = 'flashcore_sequences_evicted_total{reason="lru"}'
            wait_until(lambda: server.metric(evicted) == 2, lambda: f"{server.metric(evicted)}")

    def test_quotas_are_per_client(self):
        with harness.Server("--client_sequences=2", "--client_kv_bytes=1048576",
                            harness.by_address("unix")) as server:
            with server.channel() as channel:
                stub = harness.stub(channel)
                mine = [self.create(stub).sequence_id for _ in range(2)]
                self.assertIn("client quota", self.assert_code(
                    Code.RESOURCE_EXHAUSTED, self.create, stub))
                self.load(stub, mine[0], 2 * 64)
                self.assertIn("client quota", self.assert_code(
                    Code.RESOURCE_EXHAUSTED, self.load, stub, mine[1], 1))
                with server.channel(f"unix:{server.socket}") as of_another:
                    another = harness.stub(of_another)
                    self.load(another, self.create(another).sequence_id, 64)
                stub.DeleteSequence(pb.DeleteSequenceRequest(sequence_id=mine[0]))
                self.load(stub, mine[1], 64)

    def test_deleting_a_sequence_that_a_queued_request_names(self):
        with harness.Server(*harness.HELD) as server, server.channel() as channel:
            stub = harness.stub(channel)
            sequence = self.create(stub).sequence_id
            queued = harness.zeros_request(1, 1, 8, 256, sequence=sequence)
            with harness.held_lane(server, channel):
                waiting = stub.Attend.future(queued)
                # The one that holds the lane is in the queue too, but only between two launches.
                wait_until(lambda: all(server.metric("flashcore_queue_depth") >= 1
                                       for _ in range(5)), "the request waits")
                stub.DeleteSequence(pb.DeleteSequenceRequest(sequence_id=sequence))
            self.assertEqual(waiting.code(), Code.NOT_FOUND)


if __name__ == "__main__":
    harness.main()
