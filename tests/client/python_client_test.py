"""The Python client without a server: what it refuses, what it repeats, and how it reads the environment."""

import asyncio
import copy
import dataclasses
import datetime
import itertools
import math
import pickle
import re
import sys
import threading
import types
import unittest
import warnings
from unittest import mock

import flashcore
import numpy as np
from flashcore import _doctor, _messages, _requests, _tensors, aio, errors
from flashcore._terms import terms_of
from flashcore._transport import Config, Retry
from grpc import StatusCode
from python_fakes import DIM, KV_HEADS, NOT_REACHED, UNAVAILABLE, FakeTransport, Refuses, random

TIMEOUT = flashcore.DeadlineExceeded("Deadline Exceeded")


class FakeServer(FakeTransport):
    """A server with one sequence of two layers."""

    def __init__(self, *faults):
        super().__init__(faults)
        self.rows = [b"", b""]  # of K, by layer

    def length(self, layer):
        return len(self.rows[layer]) // (2 * KV_HEADS * DIM)

    def check(self, message, layer):
        if message.HasField("expected_length") and message.expected_length != self.length(layer):
            raise errors.from_rpc(
                StatusCode.FAILED_PRECONDITION,
                f"expected_length: {message.expected_length}; the sequence has {self.length(layer)} rows",
                None)

    def serve(self, method, request, reply):
        if method == "GetServerInfo":
            reply.limits.max_message_bytes = 4096 + 2 * 4 * KV_HEADS * DIM  # two rows
        if method == "LoadSequence":
            self.check(request, request.layer)
            self.rows[request.layer] += request.key
        if method == "Attend":
            for span in request.spans:
                self.check(span, request.layer)
            self.rows[request.layer] += request.key
            reply.output = request.query
            reply.sequence_lengths.append(self.length(request.layer))
        if method == "TruncateSequence":
            self.check(request, 0)
            self.rows = [rows[:request.length * 2 * KV_HEADS * DIM] for rows in self.rows]
        if "sequence" in reply.DESCRIPTOR.fields_by_name:
            info = reply.sequence
            info.sequence_id, info.device_id, info.dtype = bytes(16), "cpu", 1
            info.num_layers, info.num_kv_heads, info.head_dim = 2, KV_HEADS, DIM
            info.layer_lengths.extend(map(self.length, range(2)))

    def client(self, **options):
        return flashcore.Client(aio.Client(self.config(**options), self))

    def sequence(self, **options):
        """A sequence on it. The faults are those of later calls."""
        faults, self.faults = self.faults, []
        sequence = self.client(**options).create_sequence(2, KV_HEADS, DIM)
        sequence.core.client._info = _messages.METHODS["GetServerInfo"][1]()
        self.serve("GetServerInfo", None, sequence.core.client._info)
        self.faults, self.calls = faults, []
        return sequence


class RetryTest(unittest.TestCase):
    def test_waits_double_up_to_the_longest(self):
        server = FakeServer(*[(UNAVAILABLE, False)] * 4)
        server.client(retry=Retry(attempts=5, initial=0.5, longest=1.5)).server_info()
        self.assertEqual(server.waits, [0.5, 1.0, 1.5, 1.5])

    def test_jitter_is_half_of_the_wait_at_most(self):
        retry = Retry(initial=1, longest=8)
        waits = [retry.wait(UNAVAILABLE, 2, True, 100, uniform) for uniform in (0, 0.5, 1)]
        self.assertEqual(waits, [1, 1.5, 2])

    def test_gives_up_after_the_attempts(self):
        server = FakeServer(*[(UNAVAILABLE, False)] * 9)
        with self.assertRaises(flashcore.Unavailable):
            server.client(retry=Retry(attempts=4)).server_info()
        self.assertEqual(len(server.calls), 4)

    def test_lasts_as_long_as_the_timeout(self):
        for timeout, attempts in ((30.0, 61), (None, 5000)):
            server = FakeServer(*[(UNAVAILABLE, False)] * attempts)
            server.client(timeout=timeout).server_info()
            self.assertEqual(len(server.calls), attempts + 1)
        server = FakeServer(*[(UNAVAILABLE, False)] * 100)
        with self.assertRaises(flashcore.Unavailable):
            server.client(timeout=30.0).server_info()
        self.assertEqual(server.waits[-1], 0.5)
        self.assertTrue(29.5 <= server.time < 30, server.time)

    def test_never_waits_past_the_timeout(self):
        server = FakeServer(*[(UNAVAILABLE, False)] * 9)
        with self.assertRaises(flashcore.Unavailable):
            server.client(timeout=0.2).server_info()
        self.assertEqual(server.waits, [0.05, 0.1])

    def test_a_call_that_makes_a_sequence_is_repeated_only_if_it_reached_no_server(self):
        server = FakeServer((UNAVAILABLE, True))
        with self.assertRaises(flashcore.Unavailable):
            server.client().create_sequence(2, KV_HEADS, DIM)
        server = FakeServer((NOT_REACHED, False))
        server.client().create_sequence(2, KV_HEADS, DIM)
        self.assertEqual(server.calls, ["CreateSequence"] * 2)

    def test_a_ping_is_not_repeated_and_says_what_to_do(self):
        for error in (NOT_REACHED, TIMEOUT):
            server = FakeServer((error, False))
            with self.assertRaises(type(error)) as caught:
                _doctor.ping(server.client())
            self.assertRegex(caught.exception.message, f"no server answers at fake:1: {error.message}; .*"
                             "flashcore serve.*FLASHCORE_TARGET")
            self.assertEqual(server.calls, ["GetServerInfo"])
        self.assertEqual(_doctor.ping(FakeServer().client()).limits.max_message_bytes, 4096 + 16 * DIM)

    def test_other_errors_are_not_repeated(self):
        for error in (TIMEOUT, flashcore.ResourceExhausted("full"), flashcore.Internal("the device failed")):
            server = FakeServer((error, False))
            with self.subTest(error), self.assertRaises(type(error)):
                server.client().server_info()
            self.assertEqual(len(server.calls), 1)


class AppendOnceTest(unittest.TestCase):
    """Rows are appended once, whatever is lost: a request (effect False) or a reply (effect True)."""

    def test_attend_whose_reply_is_lost_is_answered_without_appending_again(self):
        q, k = random(2), random(2, KV_HEADS)
        for effect in (False, True):
            with self.subTest(effect=effect):
                server = FakeServer((UNAVAILABLE, effect))
                sequence = server.sequence()
                output = sequence.attend(1, q, k, k)
                np.testing.assert_array_equal(output, q)
                self.assertEqual(server.rows[1], k.tobytes())
                self.assertEqual(sequence.lengths, [0, 2])

    def test_append_goes_on_after_the_message_that_was_lost(self):
        k = random(7, KV_HEADS)  # in messages of two rows
        for lost, effect in itertools.product(range(4), (False, True)):
            with self.subTest(lost=lost, effect=effect):
                server = FakeServer(*[None] * lost, (UNAVAILABLE, effect))
                sequence = server.sequence()
                self.assertEqual(sequence.append(0, k, k), 7)
                self.assertEqual(server.rows[0], k.tobytes())
                self.assertEqual(sequence.lengths, [7, 0])

    def test_the_same_append_after_a_timeout_finishes_it(self):
        k = random(7, KV_HEADS)
        for lost, effect in itertools.product(range(4), (False, True)):
            with self.subTest(lost=lost, effect=effect):
                server = FakeServer(*[None] * lost, (TIMEOUT, effect))
                sequence = server.sequence()
                with self.assertRaises(TimeoutError):
                    sequence.append(0, k, k)
                self.assertEqual(sequence.append(0, k, k), 7)
                self.assertEqual(server.rows[0], k.tobytes())

    def test_the_same_attend_after_a_timeout_is_answered(self):
        q, k = random(1), random(1, KV_HEADS)
        for effect in (False, True):
            with self.subTest(effect=effect):
                server = FakeServer((TIMEOUT, effect))
                sequence = server.sequence()
                with self.assertRaises(flashcore.DeadlineExceeded):
                    sequence.attend(0, q, k, k)
                np.testing.assert_array_equal(sequence.attend(0, q, k, k), q)
                self.assertEqual(server.rows[0], k.tobytes())

    def test_the_same_append_after_a_refusal_midway_finishes_it(self):
        server = FakeServer(None, (flashcore.ResourceExhausted("K/V memory is full"), False))
        sequence, k = server.sequence(), random(7, KV_HEADS)
        with self.assertRaises(flashcore.ResourceExhausted):
            sequence.append(0, k, k)
        self.assertEqual((sequence.lengths[0], server.length(0)), (0, 2))
        self.assertEqual(sequence.append(0, k, k), 7)
        self.assertEqual(server.rows[0], k.tobytes())

    def test_other_rows_after_a_timeout_are_never_taken_for_the_same(self):
        server = FakeServer((TIMEOUT, True))
        sequence = server.sequence()
        first, other = random(1, KV_HEADS), random(1, KV_HEADS, seed=2)
        with self.assertRaises(flashcore.DeadlineExceeded):
            sequence.append(0, first, first)
        with self.assertRaises(flashcore.LengthMismatch) as caught:
            sequence.append(0, other, other)
        self.assertEqual((caught.exception.expected, caught.exception.actual), (0, 1))
        sequence.truncate(0)
        self.assertEqual(sequence.append(0, other, other), 1)
        self.assertEqual(server.rows[0], other.tobytes())

    def test_a_refusal_leaves_nothing_to_finish(self):
        server = FakeServer()
        sequence, k = server.sequence(), random(1, KV_HEADS)
        server.rows[0] = k.tobytes()  # by somebody else
        for _ in range(2):
            with self.assertRaises(flashcore.LengthMismatch):
                sequence.attend(0, random(1), k, k)
        self.assertEqual(sequence.info().layer_lengths, [1, 0])
        self.assertEqual(sequence.append(0, k, k), 2)

    def test_an_interrupt_counts_as_a_timeout(self):
        server = FakeServer((KeyboardInterrupt(), True))
        sequence, k = server.sequence(), random(1, KV_HEADS)
        with self.assertRaises(KeyboardInterrupt):
            sequence.append(0, k, k)
        self.assertEqual(sequence.append(0, k, k), 1)

    def test_truncate_whose_reply_is_lost_is_done(self):
        server = FakeServer(None, None, (UNAVAILABLE, True))
        sequence, k = server.sequence(), random(2, KV_HEADS)
        for layer in range(2):
            sequence.append(layer, k, k)
        sequence.truncate(1)
        self.assertEqual(sequence.lengths, [1, 1])
        self.assertEqual(server.calls[2:], ["TruncateSequence", "TruncateSequence", "GetSequence"])

    def test_load_tells_its_progress(self):
        k, told = random(5, KV_HEADS), []
        FakeServer().sequence().load(0, k, k, progress=lambda *step: told.append(step))
        self.assertEqual(told, [(2, 5), (4, 5), (5, 5)])

    def test_the_same_code_runs_in_asyncio(self):
        async def run():
            client = FakeServer((UNAVAILABLE, True)).client().core
            return await client.server_info()
        self.assertIn("limits", asyncio.run(run()).DESCRIPTOR.fields_by_name)


class ValidationTest(Refuses, unittest.TestCase):
    """Each bad input is refused before anything is sent, by a message that names it."""

    def test_attend(self):
        server = FakeServer()
        attend = server.client().attend
        q, k = random(3), random(5, KV_HEADS)

        class OnGpu:
            def __dlpack_device__(self):
                return 2, 0

        for args, options, words in (
                ((q.astype(np.float32), k, k), {}, ("q:", "float32", "float16, bfloat16")),
                ((q.astype(">f2"), k, k), {}, ("q:", ">f2")),
                ((q.view(np.uint16), k, k), {}, ("q:", 'dtype="bfloat16"')),
                ((q, k.view(np.uint16), k), {}, ("k:", "uint16")),
                ((q, k, k), dict(dtype="bfloat16"), ("q:", "float16", "bfloat16")),
                ((q, k, k), dict(dtype="float64"), ("dtype:", "float64", "float16, bfloat16")),
                ((q[0], k, k), {}, ("q:", "[4, 32]", "[rows, heads, head_dim]")),
                ((q[None], k, k), {}, ("q:", "cu_seqlens_q")),
                ((q[:0], k, k), {}, ("q:", "at least one row")),
                ((q[:, :0], k, k), {}, ("q:", "at least one head")),
                ((q, k, k[:4]), {}, ("v:", "[4, 2, 32]", "[5, 2, 32]")),
                ((q[:, :3], k, k), {}, ("k:", "2 heads", "divides the 3")),
                ((q, k[..., :16], k[..., :16]), {}, ("k:", "head_dim 16", "head_dim 32")),
                ((q.tolist(), k, k), {}, ("q:", "list", "numpy")),
                ((q, OnGpu(), k), {}, ("k:", "DLPack device type 2", "host memory")),
                ((q, k, k), dict(layout="BHND"), ("layout:", "'NHD', 'HND'")),
                ((q, k, k), dict(window=3), ("window:", "(left, right)")),
                ((q, k, k), dict(window=(-2, 0)), ("window:", "(-2, 0)")),
                ((q, k, k), dict(window=(1, 2, 3)), ("window:",)),
                ((q, k, k), dict(softmax_scale=float("nan")), ("softmax_scale:", "nan")),
                ((q, k, k), dict(cu_seqlens_q=[0, 3]), ("cu_seqlens_k", "both, or neither")),
                ((q, k, k), dict(cu_seqlens_q=[0, 2], cu_seqlens_k=[0, 5]), ("cu_seqlens_q:", "3 rows")),
                ((q, k, k), dict(cu_seqlens_q=[0, 3, 3], cu_seqlens_k=[0, 1, 5]), ("cu_seqlens_q:",)),
                ((q, k, k), dict(cu_seqlens_q=[0, 3], cu_seqlens_k=[0, 1, 5]), ("cu_seqlens_k:", "2 spans")),
                ((q, k, k), dict(cu_seqlens_q=[], cu_seqlens_k=[]), ("cu_seqlens_q:", "[]"))):
            self.refuses(server, lambda: attend(*args, **options), *words)

    def test_a_window_of_2_to_the_31_is_no_bound(self):
        for window, wanted in (((2 ** 31 - 1, 0), (2 ** 31 - 1, 0)), ((2 ** 31, 0), (None, 0)),
                               ((0, 2 ** 31), (0, None)), ((2 ** 100, np.uint64(2 ** 63)), (None, None)),
                               ((-1, np.int64(3)), (None, 3)), ((None, -1), (None, None)), ([1, 2], (1, 2))):
            terms = terms_of("Client.attend", False, dict(window=window))
            self.assertEqual(terms.window, wanted)
            mask = terms.fields()["mask"]
            found = [getattr(mask, side) if mask.HasField(side) else None
                     for side in ("window_left", "window_right")]
            self.assertEqual(tuple(found), wanted)

    def test_terms_are_equal_whatever_says_them(self):
        one = terms_of("Client.plan", False, dict(causal=1, window=[3, -1], softmax_scale=np.float32(0.5)))
        same = terms_of("Sequence.attend", np.False_, dict(softmax_scale=0.5, window=(np.int64(3), None),
                                                           causal=True, precision="16bit"))
        self.assertEqual(one, same)
        self.assertEqual(hash(one), hash(same))
        for name, value in (("causal", False), ("window", None), ("softmax_scale", None),
                            ("precision", "int8_qk"), ("return_lse", True)):
            self.assertNotEqual(dataclasses.replace(one, **{name: value}), one)

    def test_sequences(self):
        server = FakeServer()
        sequence = server.sequence()
        batch = server.client().attend_batch
        q, k = random(3), random(3, KV_HEADS)
        for call, words in (
                (lambda: sequence.attend(2, q), ("layer: 2", "0 to 1")),
                (lambda: sequence.append(-1, k, k), ("layer: -1",)),
                (lambda: sequence.append(0, k[:0], k[:0]), ("k:", "at least one row")),
                (lambda: sequence.append(0, q, q), ("k:", "[3, 4, 32]", "[rows, 2, 32]")),
                (lambda: sequence.append(0, k.astype(np.float64), k), ("k:", "float64", "float16")),
                (lambda: sequence.attend(0, q, k), ("k, v:", "both, or neither")),
                (lambda: sequence.attend(0, q[:, :3]), ("q:", "3 heads", "multiple of the 2")),
                (lambda: sequence.attend(0, q[..., :16]), ("q:", "head_dim 16")),
                (lambda: batch([], 0, q), ("sequences:", "at least one")),
                (lambda: batch([sequence, sequence], 0, q), ("sequences:", "twice")),
                (lambda: batch([sequence], 0, q, k, k, cu_seqlens_k=[0, 1, 3]), ("cu_seqlens_k:", "2 spans")),
                (lambda: server.client().create_sequence(1, 1, 32, dtype=np.float32), ("dtype:", "float16"))):
            self.refuses(server, call, *words)

    def test_connect(self):
        server = FakeServer()
        for options, words in (
                (dict(timeout=0), ("timeout: 0",)),
                (dict(tls=flashcore.Tls(cert_file="a.crt")), ("tls:", "key_file")),
                (dict(target="attention.example:7070", token="secret"), ("token:", "attention.example")),
                (dict(target="127.0.0.1.evil.example:1", token="secret"), ("token:", "plaintext"))):
            self.refuses(server, lambda: flashcore.connect(**options), *words)


class TimeoutTest(unittest.TestCase):
    def test_refuses_what_is_no_time(self):
        server = FakeServer()
        for wrong in (math.nan, -1, -1e-9, -math.inf, -10**400, "1", datetime.timedelta(seconds=1), True,
                      [], np.float16("nan")):
            text = "timeout: " + re.escape(repr(wrong)) + "; allowed: seconds"
            for call in (lambda: flashcore.connect("127.0.0.1:1", timeout=wrong),
                         lambda: server.client().server_info(timeout=wrong),
                         lambda: server.sequence().attend(0, random(1), timeout=wrong)):
                with self.subTest(text), self.assertRaisesRegex(flashcore.InvalidArgument, text):
                    call()
        with self.assertRaisesRegex(flashcore.InvalidArgument, "timeout: 0; allowed: seconds, more than 0"):
            flashcore.connect(timeout=0)

    def test_huge_is_none(self):
        for huge in (9e9, threading.TIMEOUT_MAX, 1e300, 10**400, math.inf, 366 * 86400, np.float64(1e30)):
            self.assertEqual(flashcore.connect("127.0.0.1:1", timeout=huge).config.timeout, math.inf)
            self.assertEqual(FakeServer().client().core.deadline(huge), math.inf)
        for timeout in (1, 0.5, np.float32(0.5), 364 * 86400):
            self.assertEqual(flashcore.connect("127.0.0.1:1", timeout=timeout).config.timeout, timeout)

    def test_retries_that_make_no_sense(self):
        for options, text in ((dict(attempts=0), "attempts: 0"), (dict(attempts=1.5), "attempts: 1.5"),
                              (dict(initial=0), "initial: 0"), (dict(longest=math.nan), "longest: nan"),
                              (dict(longest="1"), "longest: '1'")):
            with self.assertRaisesRegex(flashcore.InvalidArgument, f"{text}; allowed"):
                flashcore.Retry(**options)


class ConfigTest(unittest.TestCase):
    def read(self, target=None, tls=None, token=None, **environment):
        return Config.read(target, tls, token, None, None, None, environment)

    def test_an_unknown_variable_is_named_once(self):
        with warnings.catch_warnings(record=True) as said:
            warnings.simplefilter("always")
            for _ in range(2):
                self.read(FLASHCORE_CLIENT_TOKN_FILE="/secret", FLASHCORE_CLIENT_KV_BYTES="0", FLASHCORE_X="")
        self.assertEqual(len(said), 1, said)
        self.assertIn("unknown environment variable FLASHCORE_CLIENT_TOKN_FILE;", str(said[0].message))
        self.assertNotIn("secret", str(said[0].message))

    def test_arguments_come_before_the_environment(self):
        self.assertEqual(self.read().target, "127.0.0.1:7070")
        self.assertEqual(self.read(FLASHCORE_TARGET="unix:/a").target, "unix:/a")
        self.assertEqual(self.read("b:1", FLASHCORE_TARGET="unix:/a").target, "b:1")

    def test_tls_from_the_environment(self):
        variable = dict(FLASHCORE_CLIENT_TLS_CA_FILE="ca.crt")
        self.assertEqual(self.read(**variable).tls, flashcore.Tls(ca_file="ca.crt"))
        self.assertIsNone(self.read(tls=False, **variable).tls)
        self.assertEqual(self.read(tls=True).tls, flashcore.Tls())
        self.assertIsNone(self.read().tls)

    def test_a_token_stays_on_the_host_and_out_of_sight(self):
        for target in ("127.0.0.1:1", "localhost:1", "[::1]:1", "ipv4:127.0.0.1:1", "unix:/a"):
            config = self.read(target, token=lambda: "secret")
            self.assertIn(("authorization", "Bearer secret"), config.metadata(on_sequence=False))
            self.assertNotIn("secret", repr(config))
        self.assertEqual(self.read("host.example:1", True, "secret").token, "secret")

    def test_the_local_socket_takes_neither_tls_nor_token(self):
        target = "local:/run/flashcore.sock"
        for options, name in ((dict(tls=True), "tls:"), (dict(tls=flashcore.Tls()), "tls:"),
                              (dict(token="secret"), "token:"), (dict(token=lambda: "secret"), "token:")):
            with self.subTest(name), self.assertRaises(flashcore.InvalidArgument) as caught:
                self.read(target, **options)
            self.assertIn(f"{name} given for {target}", str(caught.exception))
            self.assertNotIn("secret", str(caught.exception))
        config = self.read(target, False, FLASHCORE_CLIENT_TLS_CA_FILE="ca.crt",
                           FLASHCORE_CLIENT_TOKEN_FILE="/nonexistent")  # of other targets
        self.assertEqual((config.tls, config.token), (None, None))

    def test_targets(self):
        long = "/" + "a" * 106
        for target in ("127.0.0.1:1", "localhost:7070", "a_b-c.example:65535", "[::1]:1", "[fe80::1%eth0]:1",
                       "unix:a", f"unix:{long}", "unix:///a/b", "unix:/a%20b", "unix-abstract:a",
                       f"local:{long}", "local:/a b", "dns:a:1", "dns:///a:1", "ipv6:[::1]:1",
                       "ipv4:127.0.0.1:1,127.0.0.2:1"):
            self.assertEqual(self.read(target).target, target)

    def test_targets_that_are_refused(self):
        path = "/" + "a" * 107
        for problem, *targets in (
                ("is empty", ""), ("is a int", 7070), ("is a bytes", b"a:1"),
                ("has no port: 127.0.0.1:7070", "127.0.0.1", "ipv4:127.0.0.1", "ipv4:127.0.0.1,127.0.0.2:1"),
                ("has no port: a:7070", "a", "dns:a", "dns:///a"), ("has no port: [::1]:7070", "[::1]"),
                ("has no host and no port", "ipv4:1.1.1.1:1,", "dns:", "dns://a"), ("has no host", ":1"),
                ("is an IPv6 address without brackets: [::1]:7070", "::1", "::1:7070"),
                ("has a port that is not from 1 to 65535", "a:0", "a:65536"),
                ("has a host or a port that is none", "a:", "a:http", "a:+1", "a,b:1", "\u00e4:1", "[a:1"),
                ("has a scheme: leave http:// away", "http://127.0.0.1:7070", "http://127.0.0.1"),
                ("has a scheme: leave grpc:// away", "grpc://a:1"),
                ("has a scheme: leave https:// away, and tls=True", "https://a:1"),
                ("has a space or a control character", " a:1", "a b:1", "a:1\n", "local:/a\0"),
                ("has a space or a control character: write %20", "unix:/a b"),
                ("has a '/'", "a:1/b", "./a"), ("has a '/': unix:/a.sock or local:/a.sock", "/a.sock"),
                ("has no path", "unix:"), ("has no absolute path", "unix://a", "local:", "local:a"),
                ("has a path of 108 bytes; a Unix socket's has at most 107", f"unix:{path}", f"local:{path}"),
                ("has no name", "unix-abstract:")):
            for target in targets:
                with self.subTest(target), self.assertRaises(flashcore.InvalidArgument) as caught:
                    self.read(target)
                self.assertEqual(caught.exception.message, f"target: {target!r} {problem}; allowed: "
                                 "host:port, unix:/path, or local:/path of the server's --local_listen")
        with self.assertRaisesRegex(flashcore.InvalidArgument, "FLASHCORE_TARGET: '127.0.0.1' has no port"):
            self.read(FLASHCORE_TARGET="127.0.0.1")
        self.assertEqual(self.read(FLASHCORE_TARGET="").target, "127.0.0.1:7070")


class ErrorsTest(unittest.TestCase):
    def test_codes(self):
        for code, kind, base in (
                (StatusCode.INVALID_ARGUMENT, flashcore.InvalidArgument, ValueError),
                (StatusCode.NOT_FOUND, flashcore.SequenceLost, flashcore.NotFound),
                (StatusCode.DEADLINE_EXCEEDED, flashcore.DeadlineExceeded, TimeoutError),
                (StatusCode.UNIMPLEMENTED, flashcore.Unimplemented, NotImplementedError),
                (StatusCode.PERMISSION_DENIED, flashcore.PermissionDenied, flashcore.Error),
                (StatusCode.UNAUTHENTICATED, flashcore.Unauthenticated, flashcore.Error),
                (StatusCode.FAILED_PRECONDITION, flashcore.FailedPrecondition, flashcore.Error),
                (StatusCode.DATA_LOSS, flashcore.Error, Exception)):
            error = errors.from_rpc(code, "words of the server", None)
            self.assertIs(type(error), kind)
            self.assertIsInstance(error, base)
            self.assertEqual((error.code, error.message), (code, "words of the server"))
            self.assertEqual(str(error), f"{code.name}: words of the server")

    def test_what_may_be_tried_again(self):
        retryable = [error.retryable for error in (UNAVAILABLE, flashcore.ResourceExhausted(""), TIMEOUT)]
        self.assertEqual(retryable, [True, True, False])

    def test_every_error_survives_copies_and_pickles(self):
        kinds = [kind for kind in vars(flashcore).values()
                 if isinstance(kind, type) and issubclass(kind, flashcore.Error)]
        self.assertGreater(len(kinds), 15)
        lost = flashcore.SequenceLost("lost", metadata={"lost": "2"})
        ways = [copy.copy, copy.deepcopy, *(
            lambda error, protocol=protocol: pickle.loads(pickle.dumps(error, protocol))
            for protocol in range(pickle.HIGHEST_PROTOCOL + 1))]
        for kind, way in itertools.product(kinds, ways):
            for error in ([kind({1: lost}, [b"made", None])] if kind is flashcore.BatchError else
                          [kind("text"), kind("text", StatusCode.DATA_LOSS, "REASON", {"key": "value"})]):
                error.hint = "of a caller"
                same = way(error)
                self.assertIs(type(same), kind)
                self.assertIsNot(same, error)
                self.assertEqual((str(same), repr(same), same.args), (str(error), repr(error), error.args))
                for name in ("message", "code", "reason", "metadata", "hint", "retryable", "refused"):
                    self.assertEqual(getattr(same, name), getattr(error, name), f"{kind} {name}")

    def test_a_batch_error_leaves_the_process_without_its_sequences(self):
        made = FakeServer().sequence()
        error = flashcore.BatchError({1: flashcore.KvFull("full", metadata={"a": "b"})}, [made, None, 7])
        self.assertIs(copy.copy(error).results[0], made)
        self.assertIs(copy.deepcopy(error).results[0], made)
        there = pickle.loads(pickle.dumps(error))
        self.assertEqual(there.results, [repr(made), None, 7])
        self.assertIn(made.id.hex(), there.results[0])
        self.assertEqual((str(there), there.errors[1].metadata), (str(error), {"a": "b"}))


class TensorsTest(unittest.TestCase):
    def test_bfloat16_rounds_to_nearest_even(self):
        values = np.array([1, -2.5, 1 + 2**-8, 1 + 3 * 2**-8, 3e38, np.inf, np.nan, 0], np.float32)
        bits = _tensors.from_float32(values, "bfloat16")
        back = _tensors.to_float32(_tensors.to_host("x", bits, "bfloat16"))
        np.testing.assert_array_equal(back[[0, 1, 5, 6, 7]], values[[0, 1, 5, 6, 7]])
        np.testing.assert_array_equal(back[2:4], [1, 1 + 2**-6])
        self.assertLess(abs(back[4] / 3e38 - 1), 2**-8)

    def test_dtype_names(self):
        class Torchlike:
            def __str__(self):
                return "torch.bfloat16"
        for dtype, name in (("float16", "float16"), (np.float16, "float16"), (np.dtype("<f2"), "float16"),
                            (Torchlike(), "bfloat16"), (np.float32, "float32")):
            self.assertEqual(_tensors.dtype_name(dtype), name)

    def test_elements_travel_in_order_whatever_the_strides(self):
        x = random(6)
        for view in (x, x[::-1], x[::2, ::-1], x.swapaxes(0, 1), x[..., ::-1]):
            self.assertEqual(_requests.to_bytes(view), np.ascontiguousarray(view).tobytes())


class TorchTensor:
    """As much of torch.Tensor as the client uses."""

    def __init__(self, array, dtype, device="cpu", requires_grad=False):
        self.array, self.dtype, self.requires_grad = array, dtype, requires_grad
        self.device = types.SimpleNamespace(type=device)
        self.is_cpu = device == "cpu"

    def numpy(self):
        if self.dtype == "torch.bfloat16":
            raise TypeError("Got unsupported ScalarType BFloat16")
        return self.array

    def view(self, dtype):
        return TorchTensor(self.array, dtype)


TorchTensor.__module__ = "torch"
TORCH = types.SimpleNamespace(
    Tensor=TorchTensor, bfloat16="torch.bfloat16", int16="torch.int16",
    from_numpy=lambda array: TorchTensor(array, f"torch.{array.dtype.name}"))


@mock.patch.dict(sys.modules, torch=TORCH)
class TorchTest(unittest.TestCase):
    def test_results_are_tensors_of_the_same_dtype(self):
        for dtype, bits in (("float16", np.float16), ("bfloat16", np.int16)):
            q = TorchTensor(random(2).view(bits), f"torch.{dtype}")
            host = _tensors.to_host("q", q)
            self.assertEqual(host.dtype, dtype)
            back = host.restore(host.array)
            self.assertEqual((type(back), back.dtype), (TorchTensor, q.dtype))
            np.testing.assert_array_equal(back.array, q.array)
            self.assertEqual(host.restore(np.zeros(3, np.float32)).dtype, "torch.float32")

    def test_refuses_gpus_and_gradients(self):
        for options, words in ((dict(device="cuda"), r"k: .*pass k.cpu\(\)"),
                               (dict(requires_grad=True), r"k: requires a gradient.*k.detach\(\)")):
            with self.assertRaisesRegex(ValueError, words):
                _tensors.to_host("k", TorchTensor(random(2), "torch.float16", **options))


class MergeTest(unittest.TestCase):
    def setUp(self):
        rng = np.random.default_rng(1)
        self.o = [rng.standard_normal((5, 4, 32)).astype(np.float32) for _ in range(2)]
        self.lse = [(100 * rng.standard_normal((5, 4))).astype(np.float32) for _ in range(2)]

    def test_is_the_weighted_mean(self):
        weights = np.exp(np.float64(self.lse) - np.max(self.lse, axis=0))
        wanted = (weights[..., None] * self.o).sum(0) / weights.sum(0)[..., None]
        o, lse = flashcore.merge(self.o[0], self.lse[0], self.o[1], self.lse[1])
        np.testing.assert_allclose(o, wanted, atol=1e-5)
        np.testing.assert_allclose(lse, np.max(self.lse, axis=0) + np.log(weights.sum(0)), rtol=1e-6)
        half, _ = flashcore.merge(*(x for o, l in zip(self.o, self.lse) for x in (o.astype(np.float16), l)))
        self.assertEqual(half.dtype, np.float16)
        np.testing.assert_allclose(half, wanted, atol=5e-3)

    def test_nothing_contributes_nothing(self):
        nothing = np.full((5, 4), -np.inf, np.float32)
        o, lse = flashcore.merge(self.o[0], self.lse[0], np.zeros_like(self.o[0]), nothing)
        np.testing.assert_array_equal(o, self.o[0])
        np.testing.assert_array_equal(lse, self.lse[0])
        o, lse = flashcore.merge(self.o[0], nothing, self.o[1], nothing)
        np.testing.assert_array_equal(o, 0)
        np.testing.assert_array_equal(lse, nothing)

    def test_an_empty_operand_contributes_nothing_whatever_it_holds(self):
        full, infinity = (self.o[0], self.lse[0]), np.float32(np.inf)
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            for lse, held, kind in itertools.product((-infinity, infinity), (0, np.nan, np.inf, -np.inf, 7),
                                                     (np.float32, np.float16)):
                empty = (np.full((5, 4, 32), held, kind), np.full((5, 4), lse))
                for operands in ((*full, *empty), (*empty, *full)):
                    o, lse_of_both = flashcore.merge(*operands)
                    np.testing.assert_array_equal(o, full[0].astype(o.dtype))
                    np.testing.assert_array_equal(lse_of_both, full[1])
                for other in (-infinity, infinity):
                    o, lse_of_both = flashcore.merge(*empty, empty[0], np.full((5, 4), other))
                    np.testing.assert_array_equal(o, 0)
                    np.testing.assert_array_equal(lse_of_both, -infinity)

    def test_a_nan_is_not_taken_for_nothing(self):
        nan = np.full((5, 4), np.nan, np.float32)
        for lse in (self.lse[0], nan, np.full_like(nan, np.inf), np.full_like(nan, -np.inf)):
            for operands in ((self.o[0], lse, self.o[1], nan), (self.o[0], nan, self.o[1], lse)):
                self.assertTrue(all(np.isnan(result).all() for result in flashcore.merge(*operands)))
        broken = np.full_like(self.o[0], np.nan)
        self.assertTrue(np.isnan(flashcore.merge(broken, self.lse[0], self.o[1], self.lse[1])[0]).all())

    def test_refuses_shapes_that_do_not_fit(self):
        with self.assertRaisesRegex(ValueError, "without the last axis"):
            flashcore.merge(self.o[0], self.lse[0][:4], self.o[1], self.lse[1])


if __name__ == "__main__":
    unittest.main()
