"""Tests of profile_check.py. Needs no GPU."""

import pathlib
import sys
import unittest

sys.path.insert(0, str(pathlib.Path(__file__).parents[2] / "kernels" / "bench"))
import profile_check as check  # noqa: E402

QUERY = """Device NVIDIA H200 (GH100)
---------------------------- --------- ------- ----------------
gpu__time_duration           Counter   nsecond time
sm__pipe_tensor_cycles_active Counter  cycle   cycles
dram__throughput             Throughput %      DRAM
"""


def csv_of(kernels):
    """ncu's output for kernels, dictionaries of metric to text."""
    metrics = list(kernels[0])
    fixed = ["ID", "Process ID", "Kernel Name"]

    def line(cells):
        return ",".join(f'"{cell}"' for cell in cells)

    rows = [line([n, "4242", "void Attend<half, 64>(Params, int)", *kernel.values()])
            for n, kernel in enumerate(kernels)]
    return "\n".join(["==PROF== Connected to process 4242", "a line of the program",
                      line([*fixed, *metrics]), line(["", "", "", *("%" for _ in metrics)]),
                      rows[0], "==PROF== Disconnected from process 4242", *rows[1:]])


GOOD = {check.TIME: "10,240", check.TENSOR[1]: "31.5", check.CONFLICTS: "12",
        check.WAVEFRONTS: "65,536", check.LOCAL[0]: "0", check.LOCAL[1]: "0", check.DRAM: "81.25"}
COMBINE = {**GOOD, check.TIME: "2,000", check.TENSOR[1]: "0", check.DRAM: "3"}


def judged(shape, *kernels):
    return [passed for passed, _ in check.judge(shape, check.parse(csv_of(kernels)))]


class ParseTest(unittest.TestCase):
    def test_rows_are_kernels_and_numbers_have_commas(self):
        kernels = check.parse(csv_of([GOOD, COMBINE]))
        self.assertEqual([kernel[check.TIME] for kernel in kernels], [10240, 2000])
        self.assertEqual(kernels[0]["name"], "void Attend<half, 64>(Params, int)")
        self.assertEqual(kernels[0][check.DRAM], 81.25)

    def test_metrics_without_a_number_are_left_out(self):
        kernel, = check.parse(csv_of([{**GOOD, check.DRAM: "n/a"}]))
        self.assertNotIn(check.DRAM, kernel)
        self.assertNotIn(check.TENSOR[0], kernel)

    def test_without_a_kernel_there_is_nothing_to_judge(self):
        with self.assertRaisesRegex(check.NothingToJudge, "ERR_NVGPUCTRPERM"):
            check.parse("==ERROR== ERR_NVGPUCTRPERM - no permission\n")
        only_units = "\n".join(csv_of([GOOD]).splitlines()[:4])
        with self.assertRaises(check.NothingToJudge):
            check.parse(only_units)

    def test_asks_only_for_metrics_that_the_gpu_has(self):
        self.assertEqual(check.metrics_of(QUERY), [check.TIME, check.TENSOR[1], check.DRAM])


class JudgeTest(unittest.TestCase):
    def test_the_longest_kernel_counts_for_tensor_and_dram(self):
        self.assertEqual(judged("mission", COMBINE, GOOD), [True, True, True])
        self.assertEqual(judged("decode64", COMBINE, GOOD), [True, True, True])

    def test_prefill_wants_the_tensor_pipe_and_decode_the_dram(self):
        idle = {**GOOD, check.TENSOR[1]: "0"}
        slow = {**GOOD, check.DRAM: "50"}
        self.assertEqual(judged("mission", idle), [False, True, True])
        self.assertEqual(judged("decode64", idle), [True, True, True])
        self.assertEqual(judged("decode64", slow), [False, True, True])
        self.assertEqual(judged("64x32/8x4096x128,q=1", slow), [False, True, True])
        self.assertEqual(judged("1x8x4096x128,q=16", slow), [True, True, True])

    def test_conflicts_and_local_traffic_of_any_kernel_fail(self):
        conflicting = {**COMBINE, check.CONFLICTS: "60,000"}
        spilling = {**COMBINE, check.LOCAL[1]: "1"}
        self.assertEqual(judged("mission", GOOD, conflicting), [True, False, True])
        self.assertEqual(judged("mission", GOOD, spilling), [True, True, False])

    def test_what_was_not_counted_fails(self):
        self.assertEqual(judged("decode64", {**GOOD, check.DRAM: "n/a"}), [False, True, True])
        self.assertEqual(judged("mission", {**GOOD, check.TENSOR[1]: "nan"}), [False, True, True])


if __name__ == "__main__":
    unittest.main()
