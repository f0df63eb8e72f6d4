"""Tests of gate.py. Needs no GPU."""

import contextlib
import io
import json
import os
import pathlib
import sys
import tempfile
import unittest

sys.path.insert(0, str(pathlib.Path(__file__).parents[2] / "kernels" / "bench"))
import gate  # noqa: E402


def result(us, **fields):
    return {"tool": "flashcore-kernel-bench", "gpu": "NVIDIA H200", "shape": "mission",
            "kernel": "sm80_float16_d64_float32", "l2": "cold", "us": us, "max_err": 1e-4, **fields}


class JudgeTest(unittest.TestCase):
    def verdict(self, measured, recorded):
        verdicts = gate.judge([measured], [recorded])
        return [name for name, pairs in verdicts.items() if pairs]

    def test_three_percent_either_way_is_noise(self):
        self.assertEqual(self.verdict(result(10.31), result(10)), ["slower"])
        self.assertEqual(self.verdict(result(10.29), result(10)), ["within"])
        self.assertEqual(self.verdict(result(9.71), result(10)), ["within"])
        self.assertEqual(self.verdict(result(9.69), result(10)), ["faster"])

    def test_only_the_same_tool_gpu_shape_kernel_and_l2_state_compare(self):
        for other in ({"tool": "compare_torch.py"}, {"gpu": "NVIDIA L4"}, {"shape": "long"},
                      {"kernel": "sm90"}, {"l2": "warm"}):
            self.assertEqual(self.verdict(result(99), result(10, **other)), ["new"])


class CheckTest(unittest.TestCase):
    def test_says_what_is_wrong_with_results(self):
        for results, why in (({}, "not a list"), ([1], "entry 0"), ([{"shape": "b8"}], "entry 0"),
                             ([result(10), result(0, shape="b8")], "entry 1"),
                             ([result(float("nan"))], "entry 0"), ([result("10")], "entry 0"),
                             ([result(10), result(11)], "twice")):
            with self.subTest(results), self.assertRaisesRegex(gate.BadFile, why):
                gate.check(results, "results.json")


class MainTest(unittest.TestCase):
    def setUp(self):
        folder = tempfile.TemporaryDirectory()
        self.addCleanup(folder.cleanup)
        self.results = os.path.join(folder.name, "results.json")
        self.record = os.path.join(folder.name, "record.json")
        self.write(self.record, {"kernels": {"results": [result(10)]}})

    def write(self, path, value):
        with open(path, "w", encoding="utf-8") as file:
            json.dump(value, file)

    def gate(self, value):
        """Exit status and output."""
        self.write(self.results, value)
        with contextlib.redirect_stdout(io.StringIO()) as out:
            with contextlib.redirect_stderr(out):
                status = gate.main([self.results, f"--record={self.record}"])
        return status, out.getvalue()

    def test_slower_fails_and_names_shape_record_and_result(self):
        status, output = self.gate([result(11)])
        self.assertEqual(status, 1)
        for word in ("slower", "mission", "cold", "11.00", "10.00", "+10.0%", "NVIDIA H200"):
            self.assertIn(word, output)

    def test_within_faster_and_new_pass(self):
        for us, fields in ((10.2, {}), (8, {}), (99, {"shape": "b8"})):
            self.assertEqual(self.gate([result(us, **fields)])[0], 0)

    def test_bad_file_is_no_pass(self):
        status, output = self.gate({"mission": 10})
        self.assertEqual(status, 2)
        self.assertIn("not a list", output)
        self.write(self.record, [result(10)])
        status, output = self.gate([result(10)])
        self.assertEqual(status, 2)
        self.assertIn("no part kernels", output)
        os.remove(self.record)
        status, output = self.gate([result(10)])
        self.assertEqual(status, 2)
        self.assertIn("cannot read", output)

    def test_the_published_record_is_good(self):
        self.assertTrue(gate.read_record(gate.RECORD))


if __name__ == "__main__":
    unittest.main()
