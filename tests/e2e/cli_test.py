"""The command line against a live server."""

import json
import os
import pathlib
import pty
import re
import subprocess
import warnings
from unittest import mock

import flashcore
import numpy as np
from flashcore.v1 import attention_pb2 as pb

import harness
from harness import cli, wait_until


class CliTest(harness.ServerTest):
    flags = ("--insecure_client_names",)

    def run_json(self, *args):
        return json.loads(cli(*args, f"--target={self.server.target}", "--json").stdout)

    def bench(self, *flags, target=None, kinds=()):
        """The report of a benchmark that has done requests, also of these kinds, and none wrong."""
        def enough(report):
            return report["ok"] > 0 and all(report[kind]["ok"] > 0 for kind in kinds)

        short = [] if kinds else ["--duration=50ms"]
        report = harness.bench(f"--target={target or self.server.target}", *short, *flags,
                               enough=enough)
        self.assertEqual((report["failed"], report["wrong_replies"]), (0, 0))
        return report

    def assert_ratio(self, result, name, dividend, divisor):
        """The ratio is that of the p50s."""
        self.assertGreater(min(dividend["p50"], divisor["p50"]), 0)
        self.assertAlmostEqual(result[name] / (dividend["p50"] / divisor["p50"]), 1, delta=1e-3)

    def test_info_and_health(self):
        info = self.run_json("info")
        plain = [kernel for kernel in info["kernels"] if kernel["kv_dtype"] == "KV_DTYPE_SAME_AS_QUERY"]
        self.assertEqual(len(plain), 10)
        self.assertIn("SERVING", cli("health", f"--target=unix:{self.server.socket}").stdout)

    def test_attend_matches_float64_in_both_layouts(self):
        q = harness.random_tensor(self.rng, 70, 6, 64)
        k, v = (harness.random_tensor(self.rng, 100, 3, 64) for _ in range(2))
        want, want_lse = harness.reference(q, k, v, causal=True)
        for layout in ("NHD", "HND"):
            with self.subTest(layout), harness.in_temporary_folder() as folder:
                for name, tensor in (("q", q), ("k", k), ("v", v)):
                    if layout == "HND":
                        tensor = np.ascontiguousarray(tensor.transpose(1, 0, 2))
                    np.save(folder / name, tensor)
                timing = self.run_json(
                    "attend", f"--query={folder}/q.npy", f"--key={folder}/k.npy",
                    f"--value={folder}/v.npy", f"--output={folder}/o.npy",
                    f"--lse={folder}/lse.npy", f"--layout={layout}", "--mask=causal")
                for field in pb.Timing.DESCRIPTOR.fields_by_name:
                    self.assertIn(field, timing)
                self.assertGreater(timing["kernel_ns"], 0)
                got, got_lse = np.load(folder / "o.npy"), np.load(folder / "lse.npy")
                if layout == "HND":
                    got, got_lse = got.transpose(1, 0, 2), got_lse.T
                self.assertEqual(got.dtype, np.float16)
                np.testing.assert_allclose(got, want, atol=2e-3)
                np.testing.assert_allclose(got_lse, want_lse, atol=1e-4)

    def test_attend_explains_what_is_wrong(self):
        with harness.in_temporary_folder() as folder:
            np.save(folder / "q", np.zeros((2, 2, 64), np.float16))
            np.save(folder / "k48", np.zeros((2, 2, 48), np.float16))
            (folder / "junk.npy").write_bytes(b"not an array")
            common = ("attend", f"--target={self.server.target}", f"--query={folder}/q.npy",
                      f"--output={folder}/o.npy")
            for key, message in (("k48.npy", "48"), ("junk.npy", "junk.npy"),
                                 ("none.npy", "none.npy")):
                done = cli(*common, f"--key={folder}/{key}", f"--value={folder}/q.npy",
                           check=False)
                self.assertEqual(done.returncode, 1, key)
                self.assertIn(message, done.stderr)
                self.assertFalse((folder / "o.npy").exists())

    def verify(self, cases):
        done = cli("verify", f"--target={self.server.target}", f"--cases={cases}",
                   f"--seed={harness.SEED}")
        summary = done.stdout.splitlines()[-1]
        print(summary)
        self.assertIn(f"{cases} of {cases} cases within twice the error", summary)

    def test_verify_passes_on_random_shapes(self):
        self.verify(5)

    @harness.stress
    def test_verify_passes_on_many_random_shapes(self):
        self.verify(150)

    def test_bench_measures_every_mode(self):
        for flags in ((), ("--concurrency=4", "--connections=2"), ("--stream", "--concurrency=4"),
                      ("--rate=50",), ("--causal", "--dtype=bfloat16", "--shape=2x8/2x64x128")):
            with self.subTest(flags):
                result = self.bench("--shape=1x8x64x64", *flags)
                latency = result["latency_us"]
                in_order = [0, *(latency[name] for name in ("p50", "p99", "max"))]  # gate: not their size
                self.assertEqual(in_order, sorted(in_order))
                kernel = result["server_phase_us"]["kernel"]["p50"]  # gate: that it was measured
                self.assertGreater(kernel, 0)
                self.assertIn("staging_wait", result["server_phase_us"])

    def test_bench_measures_resident_sequences(self):
        shape = "--shape=1x8/2x200x64"
        for flags in (("--mode=decode", "--sequences=8"),
                      ("--mode=decode", "--sequences=9", "--fork_from_prefix=130", "--stream",
                       "--concurrency=3", "--layout=HND"),
                      ("--mode=prefill", "--query_rows=70", "--concurrency=2"),
                      ("--mode=mixed", "--concurrency=4", "--connections=2", "--pin")):
            with self.subTest(flags):
                self.bench(shape, *flags)
        wait_until(lambda: self.server.metric("flashcore_sequences") == 0, "all are deleted")

    def test_bench_holds_a_stream_against_unary_calls(self):
        result = self.bench("--transport=unix", "--mode=decode", "--shape=1x8x200x64", "--stream",
                            "--compare_unary", kinds=["unary"],
                            target=f"{self.server.target},unix:{self.server.socket}")
        self.assertEqual(result["transport"], "unix")
        self.assert_ratio(result, "stream_to_unary_p50_ratio", result["latency_us"],
                          result["unary"]["latency_us"])

    def test_bench_compares_resident_with_inline(self):
        result = self.bench("--shape=1x8x200x64", "--mode=decode", "--sequences=16",
                            "--compare_inline", kinds=["inline"])
        row = 8 * 64 * 2  # bytes
        # Q, K and V of 16 new rows, against Q of 16 and K and V of 16 times 200 rows.
        self.assertAlmostEqual(result["request_bytes"], 16 * 3 * row, delta=2000)
        self.assertAlmostEqual(result["inline"]["request_bytes"], 16 * 401 * row, delta=2000)
        self.assertAlmostEqual(result["inline_to_decode_request_bytes_ratio"],
                               result["inline"]["request_bytes"] / result["request_bytes"], delta=0.1)

    def test_sequences_lists_and_deletes(self):
        name = "--client_name=lister"
        with self.server.channel() as channel:
            stub = harness.stub(channel)
            for layers in (1, 3):
                stub.CreateSequence(pb.CreateSequenceRequest(
                    num_layers=layers, num_kv_heads=2, head_dim=64, dtype=pb.DTYPE_BFLOAT16),
                    metadata=(("flashcore-client", "lister"),))
        listed = cli("sequences", f"--target={self.server.target}", name).stdout.splitlines()
        self.assertEqual(len(listed), 3, listed)
        self.assertIn("bfloat16", listed[1])
        first = listed[1].split()[0]
        cli("sequences", f"--target={self.server.target}", name, f"--delete={first}")
        cli("sequences", f"--target={self.server.target}", name, "--delete=all", "--yes")
        wait_until(lambda: self.server.metric("flashcore_sequences") == 0, "all are deleted")
        done = cli("sequences", f"--target={self.server.target}", name, "--delete=zz", check=False)
        self.assertNotEqual(done.returncode, 0)

    def test_sequences_asks_before_it_deletes_all(self):
        name = (("flashcore-client", "asked"),)
        flags = (f"--target={self.server.target}", "--client_name=asked", "--delete=all")
        with self.server.channel() as channel:
            stub = harness.stub(channel)
            ids = [stub.CreateSequence(pb.CreateSequenceRequest(
                num_layers=1, num_kv_heads=2, head_dim=64, dtype=pb.DTYPE_FLOAT16),
                metadata=name).sequence_id for _ in range(2)]

            def left():
                return len(stub.ListSequences(pb.ListSequencesRequest(), metadata=name).sequences)

            done = cli("sequences", *flags, check=False)  # there is no terminal
            self.assertEqual((done.returncode, left()), (2, 2), done.stderr)
            self.assertIn("--yes", done.stderr)
            for answer, code, remaining in (("\n", 1, 2), ("no\n", 1, 2), ("\4", 1, 2), ("y\n", 0, 0)):
                with self.subTest(answer):
                    done = self.on_a_terminal(answer, "sequences", *flags)
                    self.assertEqual((done.returncode, left()), (code, remaining), done.stderr)
                    for sequence in ids:
                        self.assertIn(sequence.hex(), done.stderr)
                    # They may be older than a minute on a machine that is very busy.
                    self.assertRegex(done.stderr, r"Delete 2 sequences, of which [012] were used in the "
                                     r"last minute\? \[y/N\] ")

    def on_a_terminal(self, typed, *args):
        """Runs the command line, whose standard input is a terminal on which this is typed."""
        terminal, end = pty.openpty()
        try:
            os.write(terminal, typed.encode())
            return subprocess.run([harness.CLI, *args], stdin=end, capture_output=True, text=True,
                                  timeout=harness.PATIENCE)
        finally:
            os.close(terminal)
            os.close(end)

    @harness.stress
    def test_the_ratios_of_bench_are_plausible(self):
        # The dividend takes about as long as the divisor, whatever else the machine does.
        resident = ("--mode=decode", "--shape=1x8x200x64", "--duration=2s")
        stream = self.run_json("bench", *resident, "--stream", "--compare_unary")
        self.assertGreater(stream["stream_to_unary_p50_ratio"], 0.1)
        self.assertLess(stream["stream_to_unary_p50_ratio"], 10)
        # They take turns, so there are about as many in the same time.
        self.assertGreater(stream["unary"]["ok"], stream["ok"] / 4)
        inline = self.run_json("bench", *resident, "--sequences=16", "--compare_inline")
        # Sending 130 times the bytes takes longer.
        self.assertGreater(inline["inline_to_decode_p50_ratio"], 1)

    def test_variables_of_the_server_are_none_that_a_client_warns_of(self):
        flags = pathlib.Path(__file__).parents[2].joinpath("server", "FLAGS.md").read_text()
        names = re.findall(r"^\W*--(client_\w+)", flags, re.M)
        variables = {f"FLASHCORE_{name.upper()}": "1" for name in names}
        self.assertIn("FLASHCORE_CLIENT_KV_BYTES", variables)
        with mock.patch.dict(os.environ, variables), warnings.catch_warnings():
            warnings.simplefilter("error")
            self.assertEqual(cli("info", f"--target={self.server.target}").stderr, "")
            flashcore.connect(self.server.target).close()

    def test_a_server_that_is_not_there(self):
        done = cli("bench", "--target=127.0.0.1:1", "--timeout=100ms", check=False)
        self.assertEqual(done.returncode, 1)
        self.assertIn("UNAVAILABLE", done.stderr)
        self.assertEqual(cli("health", "--target=127.0.0.1:1", "--timeout=100ms",
                             check=False).returncode, 1)


if __name__ == "__main__":
    harness.main()
