"""deploy/l4_validate.sh on the CPU, with a bundle of the real server and command line, and stand-ins
for programs that need a GPU."""

import os
import pathlib
import shutil
import subprocess
import unittest

import harness

SCRIPT = pathlib.Path(__file__).parents[2] / "deploy" / "l4_validate.sh"
TESTS = 'mkdir -p "$1" && echo "device_test: PASSED 3, skipped 0 (1 s)"'
KERNELS = """
for argument; do
  case $argument in --json=*) cat >"${argument#--json=}" <<'JSON'
[{"tool": "flashcore-kernel-bench", "gpu": "Test GPU", "shape": "mission",
  "kernel": "sm80_float16_d64_float32", "l2": "cold", "us": 9}]
JSON
  esac
done
echo "mission 9.00"
"""
L2_WINDOW = 'echo "the L2 of the Test GPU keeps nothing persisting"; exit 2'
NO_COUNTERS = 'echo "==ERROR== ERR_NVGPUCTRPERM: no permission to read counters"; exit 1'
NVIDIA_SMI = """
case $* in
  *--loop*) echo 'timestamp, index, sm, mem, temperature, power, utilization'
     echo '12:00, 0, 1980, 2619, 40, 500.0, 99'; exec sleep 600 ;;
  *) echo 'index, name'; echo '0, Test GPU' ;;
esac
"""
# The requested benchmarks, but short and small.
CLI = f"""
small=()
[[ $1 != bench ]] || small=(--duration=600ms --warmup=0s --shape=1x2x64x64)
exec {harness.CLI} "$@" "${{small[@]}}"
"""
SERVER = f'exec {harness.SERVER} --kv_memory_bytes=67108864 "$@"'


def write_program(path, text):
    path.write_text(f"#!/usr/bin/env bash\n{text}\n")
    path.chmod(0o755)


class ValidateTest(unittest.TestCase):
    def setUp(self):
        self.folder = self.enterContext(harness.in_temporary_folder())
        self.bundle, self.bin = self.folder / "bundle", self.folder / "bin"
        self.report = self.folder / "report"
        self.bundle.mkdir()
        self.bin.mkdir()
        self.programs = {"run_tests.sh": TESTS, "flashcore-kernel-bench": KERNELS,
                         "flashcore-l2-window-bench": L2_WINDOW, "flashcore": CLI,
                         "flashcore-server": SERVER}
        write_program(self.bin / "ncu", NO_COUNTERS)
        write_program(self.bin / "nvidia-smi", NVIDIA_SMI)

    def validate(self, *flags):
        for name, text in self.programs.items():
            write_program(self.bundle / name, text)
        return subprocess.run(
            [SCRIPT, "--bundle", self.bundle, "--report", self.report, *flags],
            env={**os.environ, "PATH": f"{self.bin}:{os.environ['PATH']}",
                 "FLASHCORE_TEST_DEVICE": "cpu", "NCU": "ncu"},
            capture_output=True, text=True, timeout=500)

    def rows(self):
        """{step: (result, detail)} of the report."""
        lines = (self.report / "report.md").read_text().splitlines()
        cells = [[cell.strip() for cell in line.split("|")[1:-1]] for line in lines
                 if line.startswith("| ")]
        return {row[0]: (row[1], row[3]) for row in cells[2:]}

    @harness.stress
    def test_quick_reports_every_step_and_why_one_was_skipped(self):
        done = self.validate("--quick")
        self.assertEqual(done.returncode, 0, done.stdout + done.stderr)
        rows = self.rows()
        self.assertEqual({step for step, (result, _) in rows.items() if result == "skipped"},
                         {"attention_test", "end-to-end", "l2-window", "profile"})
        self.assertEqual(rows["tests"], ("passed", "device_test: PASSED 3, skipped 0 (1 s)"))
        self.assertEqual(rows["gate-float16"], ("passed", "0 slower, 0 within, 0 faster, 1 new"))
        self.assertEqual(rows["health"], ("passed", "SERVING"))
        self.assertIn("100 of 100", rows["verify"][1])
        for transport in ("tcp", "unix"):
            for clients in (1, 16):
                for load in ("mission", "decode"):
                    result, detail = rows[f"{load}-{transport}-{clients}"]
                    self.assertEqual(result, "passed")
                    self.assertRegex(detail, r"^p50 [\d.]+ us, p99 [\d.]+ us, [\d.]+ req/s$")
        self.assertEqual(rows["drain"][0], "passed")
        self.assertIn("nothing persisting", rows["l2-window"][1])
        self.assertIn("ERR_NVGPUCTRPERM", rows["profile"][1])
        text = (self.report / "report.md").read_text()
        for fact in ("0, Test GPU", "SM clock while busy: 1980 to 1980 MHz",
                     "no record on Test GPU", "No step failed."):
            self.assertIn(fact, text)

    def test_what_fails_is_named_and_the_rest_goes_on(self):
        self.programs["flashcore-kernel-bench"] = 'echo "mission: NaN in the output"; exit 1'
        self.programs["flashcore-server"] = 'echo "cannot use the device"; exit 1'
        self.programs["flashcore-l2-window-bench"] = "echo 1.08x"
        (self.bin / "ncu").unlink()
        if shutil.which("ncu"):
            self.skipTest("there is an ncu")
        done = self.validate("--quick")
        self.assertEqual(done.returncode, 1, done.stdout + done.stderr)
        rows = self.rows()
        self.assertEqual(rows["kernels-float16"],
                         ("FAILED", "exit status 1: mission: NaN in the output"))
        self.assertEqual(rows["server"], ("FAILED", "did not start: cannot use the device"))
        self.assertEqual(rows["l2-window"], ("passed", "1.08x"))
        self.assertNotIn("gate-float16", rows)
        self.assertIn("2 steps failed", (self.report / "report.md").read_text())

    def test_a_report_is_replaced_and_nothing_else(self):
        self.report.mkdir()
        (self.report / "thesis.txt").write_text("mine")
        done = self.validate("--quick")
        self.assertEqual(done.returncode, 2)
        self.assertIn("is not a report", done.stderr)
        self.assertTrue((self.report / "thesis.txt").exists())

    def test_bad_arguments(self):
        for flags, message in ((["--fast"], "unknown argument '--fast'"),
                               (["--report"], "--report needs a value"),
                               (["--bundle", str(self.bin)], "is not a bundle")):
            done = self.validate(*flags)
            self.assertEqual(done.returncode, 2, flags)
            self.assertIn(message, done.stderr)
            self.assertFalse(self.report.exists())


if __name__ == "__main__":
    harness.main()
