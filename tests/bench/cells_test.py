"""Tests of cells.py and record_server.py without servers."""

import argparse
import json
import pathlib
import re
import sys
import tempfile
import time
import unittest

sys.path.insert(0, str(pathlib.Path(__file__).parent))
import cells  # noqa: E402
import record_server  # noqa: E402


def report(p50, rate=100.0, server="flashcore", **more):
    percentiles = {"p50": p50, "p99": 2 * p50, "mean": p50}
    return {"server": server, "target": "t", "shape": "s", "mode": "attend", "ok": 10,
            "window_seconds": 1, "latency_us": percentiles, "outside_kernel_us": percentiles,
            "server_phase_us": {phase: percentiles for phase in cells.PHASES},
            "requests_per_second": rate, "request_bytes": 5.0, **more}


class FakeBench:
    """Takes the reports of its rounds as its command; an exception among them is raised."""

    log = []

    def __init__(self, command):
        self._reports = iter(command)

    def __enter__(self):
        return self

    def __exit__(self, *_):
        FakeBench.log.append("closed")

    def wait_until_ready(self):
        FakeBench.log.append("ready")

    def round(self):
        result = next(self._reports)
        if isinstance(result, Exception):
            raise result
        FakeBench.log.append(result["server"])
        return result


def run(commands, rounds):
    FakeBench.log = []
    return cells.run_rounds(commands, rounds, start=FakeBench)


class RoundsTest(unittest.TestCase):
    def test_variants_take_turns_and_every_other_round_goes_backwards(self):
        run({name: [report(1, server=name)] * 3 for name in "abc"}, 3)
        self.assertEqual(FakeBench.log, ["ready"] * 3 + list("abc" "cba" "abc") + ["closed"] * 3)

    def test_a_variant_that_fails_is_left_out_from_then_on(self):
        results = run({"a": [report(1, server="a")] * 3,
                       "b": [report(2, server="b"), cells.Failure("broke"), report(3)]}, 3)
        self.assertEqual([len(reports) for reports, _ in results.values()], [3, 1])
        self.assertEqual([error for _, error in results.values()], ["", "broke"])
        rows = cells.make_rows({"case": "c"}, results, "a")
        self.assertNotIn("error", rows[0])
        self.assertEqual((rows[1]["error"], rows[1]["rounds"], rows[1]["p50_us"]), ("broke", 1, 2))


class RowsTest(unittest.TestCase):
    def rows(self):
        results = {"flashcore": ([report(10, 50), report(20, 40), report(12, 60)], ""),
                   "peer": ([report(30, 10, "peer"), report(80, 8, "peer"),
                             report(60, 6, "peer")], "")}
        return cells.make_rows({"section": "peer", "case": "mission"}, results, "flashcore")

    def test_each_row_has_its_own_servers_name_and_numbers(self):
        ours, theirs = self.rows()
        self.assertEqual((ours["variant"], ours["server_version"]), ("flashcore", "flashcore"))
        self.assertEqual((theirs["variant"], theirs["server_version"]), ("peer", "peer"))
        self.assertEqual([ours[f"p50_us{end}"] for end in ("", "_min", "_max")], [12, 10, 20])
        self.assertEqual([theirs[f"p50_us{end}"] for end in ("", "_min", "_max")], [60, 30, 80])
        self.assertEqual(theirs["requests_per_second"], 8)
        self.assertEqual(theirs["samples"], 30)

    def test_ratios_are_of_the_same_round(self):
        ours, theirs = self.rows()
        self.assertNotIn("p50_over_baseline", ours)
        self.assertEqual([theirs[f"p50_over_baseline{end}"] for end in ("", "_min", "_max")],
                         [4, 3, 5])
        self.assertEqual(theirs["requests_per_second_over_baseline"], 0.2)

    def test_rows_are_flat_and_their_keys_documented(self):
        echo = {"echo_us": {"p50": 1, "p99": 1}, "echoes": 1, "outside_kernel_to_echo_p50_ratio": 2,
                "latency_to_echo_and_kernel_p50_ratio": 3,
                "inline": {"latency_us": {"p50": 1}, "request_bytes": 9},
                "inline_to_decode_p50_ratio": 7}
        rows = cells.make_rows({"section": "s", "case": "c", "clients": 1},
                               {"a": ([report(1, **echo)], ""), "b": ([report(1, **echo)], "x")},
                               "a")
        documented = set(re.findall(r"\w+", record_server.__doc__))
        for key, value in (item for row in rows for item in row.items()):
            self.assertIsInstance(value, (str, int, float, bool), key)
            self.assertIn(key.removesuffix("_min").removesuffix("_max"), documented)


class RecordTest(unittest.TestCase):
    def arguments(self, *more):
        parser = argparse.ArgumentParser()
        cells.add_arguments(parser)
        return parser.parse_args(more)

    def test_says_when_and_where_and_is_written_early(self):
        with tempfile.TemporaryDirectory() as folder:
            args = self.arguments(f"--json={folder}/r.json")
            record = cells.Record(args)
            record.fail("a failure")
            record.write()
            read = json.loads(pathlib.Path(folder, "r.json").read_text())
        self.assertEqual(set(read["run"]), {"date", "commit", "cpu", "gpus"})
        self.assertEqual(read["failures"], ["a failure"])
        self.assertEqual(read["settings"]["rounds"], 3)

    def test_starts_no_cell_after_its_budget(self):
        args = self.arguments("--budget_seconds=0")
        record = cells.Record(args)
        while time.monotonic() <= record._end:
            pass
        self.assertEqual(record.cell(args, "peer", "mission", 1, {"a": ["--no_such_flag"]}), [])
        self.assertEqual(record.data["left_out"],
                         [{"section": "peer", "case": "mission", "clients": 1,
                           "why": "out of time"}])


class BenchTest(unittest.TestCase):
    """The protocol of `flashcore bench --rounds_from_stdin`, spoken by a shell."""

    def bench(self, script):
        return cells.Bench(["/bin/sh", "-c", script])

    def test_reads_a_report_for_each_line(self):
        text = json.dumps(report(1, failed=0, wrong_replies=0))
        with self.bench(f"echo '{{\"ready\":true}}'; while read -r l; do echo '{text}'; done") as b:
            b.wait_until_ready()
            self.assertEqual(b.round()["latency_us"]["p50"], 1)
            self.assertEqual(b.round()["ok"], 10)

    def test_a_round_without_a_request_is_repeated(self):
        empty, full = (json.dumps(report(1, failed=0, wrong_replies=0, echoes=n)) for n in (0, 2))
        with self.bench(f"read -r l; echo '{empty}'; while read -r l; do echo '{full}'; done") as b:
            self.assertEqual(b.round()["echoes"], 2)
        with self.bench(f"while read -r l; do echo '{empty}'; done") as b:
            with self.assertRaisesRegex(cells.Failure, "'echoes': 0"):
                b.round()

    def test_failed_requests_and_an_early_end_are_failures(self):
        text = json.dumps(report(1, failed=2, wrong_replies=0))
        with self.bench(f"read -r l; echo '{text}'; read -r l; echo gone >&2; exit 3") as b:
            with self.assertRaisesRegex(cells.Failure, "'failed': 2"):
                b.round()
            with self.assertRaisesRegex(cells.Failure, "exit status 3: gone"):
                b.round()


if __name__ == "__main__":
    unittest.main()
