"""Tests of gate.py and results_table.py. Needs no GPU."""

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
import results_table  # noqa: E402


def result(p50_us, shape="mission", gpu="NVIDIA H200", kernel="sm80_float16_d64_float32"):
    return {"shape": shape, "gpu": gpu, "kernel": kernel, "p50_us": p50_us, "max_err": 1e-4}


class JudgeTest(unittest.TestCase):
    def verdict(self, measured, recorded):
        verdicts = gate.judge([measured], [recorded])
        return [name for name, pairs in verdicts.items() if pairs]

    def test_three_percent_either_way_is_noise(self):
        self.assertEqual(self.verdict(result(10.31), result(10)), ["slower"])
        self.assertEqual(self.verdict(result(10.29), result(10)), ["within"])
        self.assertEqual(self.verdict(result(9.71), result(10)), ["within"])
        self.assertEqual(self.verdict(result(9.69), result(10)), ["faster"])

    def test_only_the_same_shape_gpu_and_kernel_compare(self):
        for other in ({"shape": "long"}, {"gpu": "NVIDIA L4"}, {"kernel": "sm90"}):
            self.assertEqual(self.verdict(result(99), result(10, **other)), ["new"])

    def test_updated_keeps_records_that_were_not_beaten(self):
        records = [result(10), result(20, shape="long"), result(5, shape="b8")]
        results = [result(9), result(21, shape="long"), result(7, shape="b8"),
                   result(3, shape="seed2")]
        board = gate.updated(records, gate.judge(results, records), "2026-01-02", "abc")
        self.assertEqual({r["shape"]: r["p50_us"] for r in board},
                         {"b8": 5, "long": 20, "mission": 9, "seed2": 3})
        mission = next(r for r in board if r["shape"] == "mission")
        self.assertEqual((mission["date"], mission["commit"]), ("2026-01-02", "abc"))
        self.assertNotIn("max_err", mission)


class ParseTest(unittest.TestCase):
    def test_says_what_is_wrong_with_a_file(self):
        for text, why in (("[", "not JSON"), ("{}", "not a list"), ("[1]", "entry 0"),
                          ('[{"shape": "mission"}]', "entry 0"),
                          (json.dumps([result(10), result(0, shape="b8")]), "entry 1"),
                          (json.dumps([result(float("nan"))]), "entry 0"),
                          (json.dumps([result("10")]), "entry 0"),
                          (json.dumps([result(10), result(11)]), "twice")):
            with self.subTest(text), self.assertRaisesRegex(gate.BadFile, why):
                gate.parse(text, "results.json")


class MainTest(unittest.TestCase):
    def setUp(self):
        folder = tempfile.TemporaryDirectory()
        self.addCleanup(folder.cleanup)
        self.results = os.path.join(folder.name, "results.json")
        self.leaderboard = os.path.join(folder.name, "leaderboard.json")
        self.write(self.leaderboard, [result(10)])

    def write(self, path, entries):
        with open(path, "w", encoding="utf-8") as file:
            json.dump(entries, file)

    def gate(self, entries, *flags):
        """Exit status and output."""
        self.write(self.results, entries)
        with contextlib.redirect_stdout(io.StringIO()) as out:
            with contextlib.redirect_stderr(out):
                status = gate.main([self.results, f"--leaderboard={self.leaderboard}", *flags])
        return status, out.getvalue()

    def recorded(self):
        with open(self.leaderboard, encoding="utf-8") as file:
            return {r["shape"]: r["p50_us"] for r in json.load(file)}

    def test_slower_fails_and_names_shape_record_and_result(self):
        status, output = self.gate([result(11)], "--record")
        self.assertEqual(status, 1)
        for word in ("slower", "mission", "11.00", "10.00", "+10.0%", "NVIDIA H200"):
            self.assertIn(word, output)
        self.assertEqual(self.recorded(), {"mission": 10})

    def test_faster_is_recorded_when_asked(self):
        self.assertEqual(self.gate([result(8)])[0], 0)
        self.assertEqual(self.recorded(), {"mission": 10})
        self.assertEqual(self.gate([result(8)], "--record", "--commit=abc")[0], 0)
        self.assertEqual(self.recorded(), {"mission": 8})

    def test_within_changes_nothing(self):
        self.assertEqual(self.gate([result(9.8)], "--record")[0], 0)
        self.assertEqual(self.recorded(), {"mission": 10})

    def test_new_is_recorded(self):
        self.assertEqual(self.gate([result(7, shape="b8")], "--record")[0], 0)
        self.assertEqual(self.recorded(), {"mission": 10, "b8": 7})

    def test_bad_file_is_no_pass(self):
        status, output = self.gate({"mission": 10})
        self.assertEqual(status, 2)
        self.assertIn("not a list", output)
        os.remove(self.leaderboard)
        status, output = self.gate([result(10)])
        self.assertEqual(status, 2)
        self.assertIn("cannot read", output)

    def test_the_committed_leaderboard_is_good(self):
        gate.read(gate.DEFAULT_LEADERBOARD)


class TableTest(unittest.TestCase):
    def test_a_row_has_ratios_fractions_and_dashes(self):
        run = {"date": "2026-01-02", "torch": "2.11", "cuda": "13.0", "cudnn": 91002, "rounds": 40,
               "launches": 20, "matmul_tflops": 700.0, "copy_gbps": 4000.0}
        row = {**result(5), "torch_flash_us": 10, "torch_cudnn_us": 9, "torch_efficient_us": None,
               "tflops": 70, "gbps": 400, "run": run}
        lines = results_table.table([row, row])
        self.assertIn("matmul 700 TFLOP/s, copy 4000 GB/s", lines[0])
        self.assertEqual(len(lines), 6)
        self.assertEqual([line.count("|") for line in lines[2:]], [14] * 4)
        self.assertEqual(lines[4].split(" | ")[2:],
                         ["5.00", "10.00", "9.00", "-", "2.00x", "1.80x", "70.0", "10%", "400",
                          "10%", "1.0e-04 |"])


if __name__ == "__main__":
    unittest.main()
