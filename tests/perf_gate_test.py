"""Tests of perf_gate.py with numbers that nobody measured."""

import json
import pathlib
import sys
import tempfile
import unittest

sys.path.insert(0, str(pathlib.Path(__file__).parent))
import perf_gate  # noqa: E402


def record(kind="AVX2, Zen", date="2026-01-02T03:04Z", **ratios):
    ratios = ratios or {name: [1.0] for name in (*perf_gate.KERNELS, *perf_gate.SERVER)}
    return {"run": {"date": date, "commit": "abc", "cpu": {"model": "a CPU"}},
            "cpu_kind": kind, "openblas": "", "ratios": ratios}


class Script:
    """Measures what it is told to, in order; then the last of it for ever."""

    def __init__(self, **ratios):
        self.left = {name: list(values) for name, values in ratios.items()}
        self.calls = []

    def __call__(self, name):
        self.calls.append(name)
        values = self.left[name]
        return values.pop(0) if len(values) > 1 else values[0]


class JudgeTest(unittest.TestCase):
    def judge(self, measure, **recorded):
        return perf_gate.measure_and_judge(measure, list(recorded), recorded)

    def test_1_29_times_the_record_passes_and_1_31_times_fails(self):
        recorded = [1.9, 2.0, 2.0, 2.1, 9.0]
        for ratio, slower in ((1.29, []), (1.31, ["a"])):
            with self.subTest(ratio):
                self.assertEqual(self.judge(Script(a=[2.0 * ratio]), a=recorded)[1], slower)

    def test_the_median_of_five_repeats_counts(self):
        self.assertEqual(perf_gate.REPEATS, 5)
        two_of_five = Script(a=[1, 1, 1, 9, 9, 99])
        self.assertEqual(self.judge(two_of_five, a=[1.0]), ({"a": [1, 1, 1, 9, 9]}, []))
        self.assertEqual(len(two_of_five.calls), 5)
        three_of_five = Script(a=[1, 1, 2, 2, 2])
        self.assertEqual(self.judge(three_of_five, a=[1.0])[1], ["a"])

    def test_repeats_take_turns(self):
        measure = Script(a=[1], b=[1])
        self.judge(measure, a=[1.0], b=[1.0])
        self.assertEqual(measure.calls, ["a", "b"] * 5)

    def test_only_what_fails_is_measured_again_and_may_then_pass(self):
        burst = Script(a=[2] * 5 + [1], b=[1])
        best, slower = self.judge(burst, a=[1.0], b=[1.0])
        self.assertEqual((best["a"], slower), ([1] * 5, []))
        self.assertEqual((burst.calls.count("a"), burst.calls.count("b")), (10, 5))

    def test_what_stays_slow_fails_after_three_attempts(self):
        slow = Script(a=[2] * 5 + [1.5] * 5 + [1.8])
        best, slower = self.judge(slow, a=[1.0])
        self.assertEqual((best["a"], slower, len(slow.calls)), ([1.5] * 5, ["a"], 15))

    def test_a_ratio_without_a_record_is_measured_once_and_not_judged(self):
        measure = Script(a=[9])
        self.assertEqual(perf_gate.measure_and_judge(measure, ["a"], {}), ({"a": [9] * 5}, []))
        self.assertEqual(len(measure.calls), 5)

    def test_the_line_says_what_was_judged(self):
        self.assertRegex(perf_gate.line("a", [1.0, 1.31, 2.0], [1.0]), "1.000 to 2.000.*SLOWER")
        self.assertRegex(perf_gate.line("a", [1.0, 1.29, 2.0], [1.0]), "1.29x.*ok")
        self.assertRegex(perf_gate.line("a", [1.0], None), "not compared")


class RecordTest(unittest.TestCase):
    def test_a_kind_of_cpu_is_compared_with_its_own_record_only(self):
        mine, other = record("AVX2, Zen"), record("AVX3, Zen", "2027-01-01T00:00Z")
        self.assertIs(perf_gate.choose_record([other, mine], "AVX2, Zen"), mine)
        self.assertIsNone(perf_gate.choose_record([other, mine], "AVX2, Haswell"))

    def test_a_new_record_replaces_that_of_its_kind(self):
        old, other = record("AVX2, Zen"), record("AVX3, Zen")
        new = record("AVX2, Zen", "2027-01-01T00:00Z")
        with tempfile.TemporaryDirectory() as folder:
            path = pathlib.Path(folder, "records.json")
            for made in (other, old, new):
                perf_gate.write_record(path, made)
            self.assertEqual(perf_gate.read_records(path), [new, other])

    def test_the_record_of_this_repository_is_complete(self):
        records = json.loads(perf_gate.RECORDS.read_text(encoding="utf-8"))["records"]
        self.assertTrue(records)
        for made in records:
            with self.subTest(made["cpu_kind"]):
                self.assertEqual(set(made["ratios"]), {*perf_gate.KERNELS, *perf_gate.SERVER})
                self.assertTrue(all(len(ratios) >= 5 for ratios in made["ratios"].values()))
                self.assertTrue(made["run"]["date"] and made["run"]["commit"]
                                and made["run"]["cpu"]["model"])


if __name__ == "__main__":
    unittest.main()
