"""The check of the ptxas table: when it fails, and the arithmetic of resident blocks."""

import contextlib
import io
import pathlib
import sys
import tempfile
import unittest
from unittest import mock

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[2] / "kernels"))
import ptxas_report  # pylint: disable=wrong-import-position


def kernel(name="K", threads=128, dynamic_shared=0, registers=32, static_shared=0):
    return ptxas_report.Kernel(name, threads, dynamic_shared, registers, static_shared,
                               stack=0, spill_stores=0, spill_loads=0)


def file_with(**numbers):
    clean = {"registers": 32, "static_shared": 0, "stack": 0, "spill_stores": 0, "spill_loads": 0}
    return ptxas_report.File("a.cu", {"90a": {"K": {**clean, **numbers}}}, "")


class ResidentBlocksTest(unittest.TestCase):
    def test_each_limit(self):
        for what, want in (
                (kernel(), (12, "threads")),
                (kernel(threads=32), (24, "blocks")),
                # 33 registers take 5 units of 256 a warp: 12 warps of each scheduler's 16384.
                (kernel(registers=33), (12, "registers")),
                (kernel(registers=168), (3, "registers")),
                (kernel(registers=169), (2, "registers")),
                (kernel(registers=255), (2, "registers")),
                (kernel(dynamic_shared=49 * 1024), (2, "shared memory")),
                (kernel(dynamic_shared=49 * 1024, static_shared=1), (1, "shared memory")),
                (kernel(dynamic_shared=99 * 1024), (1, "shared memory"))):
            with self.subTest(what):
                self.assertEqual(ptxas_report.resident_blocks(what), want)


class CheckTest(unittest.TestCase):
    def setUp(self):
        folder = tempfile.TemporaryDirectory()
        self.addCleanup(folder.cleanup)
        self.table = pathlib.Path(folder.name, "table.md")
        for name, value in (("ROOT", pathlib.Path(folder.name)), ("TABLE", self.table)):
            patch = mock.patch.object(ptxas_report, name, value)
            patch.start()
            self.addCleanup(patch.stop)
        self.said = io.StringIO()
        redirect = contextlib.redirect_stdout(self.said)
        redirect.__enter__()
        self.addCleanup(redirect.__exit__, None, None, None)

    def test_no_table_fails_until_it_is_accepted(self):
        text = ptxas_report.table([kernel()], "13.0.88", "5a")
        with self.assertRaisesRegex(SystemExit, "ptxas_report.py --update"):
            ptxas_report.compare(text, update=False)
        ptxas_report.compare(text, update=True)
        self.assertEqual(self.table.read_text(), text)
        ptxas_report.compare(text, update=False)

    def test_other_sources_with_the_same_resources_pass(self):
        self.table.write_text(ptxas_report.table([kernel()], "13.0.88", "5a"))
        ptxas_report.compare(ptxas_report.table([kernel()], "13.0.88", "5b"), update=False)
        self.assertIn("the same for other sources", self.said.getvalue())

    def test_a_difference_fails_unless_another_compiler_made_the_table(self):
        text = ptxas_report.table([kernel(registers=40)], "13.0.88", "5a")
        self.table.write_text(ptxas_report.table([kernel(registers=41)], "13.0.88", "5a"))
        with self.assertRaises(SystemExit):
            ptxas_report.compare(text, update=False)
        self.assertRegex(self.said.getvalue(), r"(?m)^-\| K .* 41 .*\n\+\| K .* 40 ")
        self.table.write_text(ptxas_report.table([kernel(registers=41)], "12.2.140", "5a"))
        ptxas_report.compare(text, update=False)
        self.assertIn("made by nvcc 12.2.140", self.said.getvalue())

    def test_local_memory_fails(self):
        ptxas_report.check_spills([file_with()])
        for numbers in ({"stack": 8}, {"spill_stores": 4}, {"spill_loads": 4}):
            with self.subTest(numbers), self.assertRaisesRegex(SystemExit, "1 of 1 kernels"):
                ptxas_report.check_spills([file_with(**numbers)])
        with self.assertRaisesRegex(SystemExit, "no kernel"):
            ptxas_report.check_spills([])


if __name__ == "__main__":
    unittest.main()
