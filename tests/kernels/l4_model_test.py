"""Tests of l4_model.py. Needs no GPU.

  l4_model_test.py FLASHCORE_KERNEL_PLAN
"""

import dataclasses
import pathlib
import sys
import unittest

ROOT = pathlib.Path(__file__).parents[2]
sys.path.insert(0, str(ROOT / "kernels" / "bench"))
import l4_model  # noqa: E402

PROGRAM = sys.argv.pop()
KERNELS = l4_model.read_kernels((ROOT / "kernels" / "ptxas_sm_89.md").read_text(encoding="utf-8"))


def predictions(device, *shapes):
    plans = l4_model.read_plans(PROGRAM, device, shapes)
    return [l4_model.predict(device, plans[shape], KERNELS) for shape in shapes]


class TableTest(unittest.TestCase):
    def test_has_a_kernel_for_every_tile(self):
        for head_dim in (32, 64, 96, 128, 256):
            for rows in (16, 32, 64) + ((128,) if head_dim <= 128 else ()):
                threads, registers, shared = KERNELS[head_dim, rows, "sm80", False]
                self.assertIn(threads, (32, 64, 128, 256))
                self.assertLessEqual(registers, 255)
                self.assertLessEqual(shared, 99 * 1024)

    def test_reads_float16_kernels_only(self):
        line = ("| sm80::AttendKernel<Config<{}, 64, 128, float, {}, sm89, (sm80::Items)0>, 3968ul> "
                "|     256 |       229 |             0 |          61440 |     0 |")
        self.assertEqual(l4_model.read_kernels(line.format("half", "half")),
                         {(64, 128, "sm89", False): (256, 229, 61440)})
        self.assertEqual(l4_model.read_kernels(line.format("bf16", "bf16")), {})


class ModelTest(unittest.TestCase):
    def test_places_end_with_registers_or_shared_memory(self):
        self.assertEqual(l4_model.places_on_sm(l4_model.H100, 128, 255, 66560), 2)
        self.assertEqual(l4_model.places_on_sm(l4_model.L4, 128, 255, 66560), 1)
        self.assertEqual(l4_model.places_on_sm(l4_model.L4, 256, 229, 20000), 1)

    def test_twice_the_work_takes_longer(self):
        few, many = predictions(l4_model.L4, "4x16x2048x128", "8x16x2048x128")
        self.assertAlmostEqual(many.us / few.us, 2, delta=0.1)

    def test_a_lower_clock_slows_what_is_not_bound_by_dram(self):
        for shape, bound, ratio in (("canon_1", "blocks", 2.17), ("decode64", "DRAM", 1)):
            boost = predictions(l4_model.L4, shape)[0]
            loaded = predictions(l4_model.L4_LOADED, shape)[0]
            self.assertEqual(loaded.bound, bound)
            self.assertAlmostEqual(loaded.us / boost.us, ratio, delta=0.02)

    def test_a_faster_dram_speeds_decode_up(self):
        fast = dataclasses.replace(l4_model.H100, dram_gbps=2 * l4_model.H100.dram_gbps)
        self.assertLess(predictions(fast, "decode64")[0].us,
                        0.55 * predictions(l4_model.H100, "decode64")[0].us)

    def test_is_near_what_was_measured(self):
        for device, limit in ((l4_model.H100, 0.07), (l4_model.H200, 0.08),
                              (l4_model.SLOWED, 0.14), (l4_model.SLOWED_SM89, 0.08)):
            measured = l4_model.MEASURED[device.name]
            errors = [abs(prediction.us / us - 1) for prediction, us in
                      zip(predictions(device, *measured), measured.values())]
            self.assertLess(sum(errors) / len(errors), limit, device.name)


if __name__ == "__main__":
    unittest.main()
