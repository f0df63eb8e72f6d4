"""The Python package as a user gets it: built, installed into an empty environment, and run."""

import os
import pathlib
import re
import shutil
import subprocess
import sys
import tempfile
import unittest

import harness

ROOT = pathlib.Path(__file__).resolve().parents[2]


def run(*command, **options):
    """Runs a command without this test's PYTHONPATH and C library. Returns its output; fails with it."""
    environment = {name: value for name, value in os.environ.items()
                   if name not in ("PYTHONPATH", "FLASHCORE_C_LIBRARY")}
    environment.update(options.pop("env", {}))
    done = subprocess.run(list(map(str, command)), text=True, stdout=subprocess.PIPE,
                          stderr=subprocess.STDOUT, timeout=300, env=environment, **options)
    if done.returncode != 0:
        raise AssertionError(f"{command} exited {done.returncode}:\n{done.stdout}")
    return done.stdout


class PackageTest(unittest.TestCase):
    @classmethod
    def setUpClass(cls):
        folder = pathlib.Path(cls.enterClassContext(tempfile.TemporaryDirectory()))
        source = folder / "checkout" / "client" / "python"
        shutil.copytree(ROOT / "client" / "python", source,
                        ignore=shutil.ignore_patterns("build", "*.egg-info", "*.binpb", "__pycache__"))
        for part in ("proto", "client/c", "client/local", "client/include"):
            shutil.copytree(ROOT / part, folder / "checkout" / part)
        # Debian's grpcio, protobuf and numpy, and nothing of this test's.
        run(sys.executable, "-m", "venv", "--system-site-packages", "--without-pip", folder / "venv")
        cls.python = folder / "venv" / "bin" / "python"
        # From the source distribution, which has all that a build needs.
        run(sys.executable, "-W", "ignore", "setup.py", "--quiet", "sdist", cwd=source)
        cls.distribution, = (source / "dist").iterdir()
        # With the C library that is built already: CMake builds it where none is named.
        cls.install(os.environ["FLASHCORE_C_LIBRARY"])
        cls.server = cls.enterClassContext(harness.Server(local=True))
        cls.environment = {"FLASHCORE_TARGET": cls.server.target}

    @classmethod
    def install(cls, c_library, *where):
        """The source distribution, with a C library or with "none"."""
        run(sys.executable, "-m", "pip", "--python", cls.python, "install", "--quiet", "--no-build-isolation",
            "--no-index", "--no-deps", *where, cls.distribution, env={"FLASHCORE_C_LIBRARY": c_library})

    def test_info_and_configuration(self):
        found = run(self.python, "-m", "flashcore", "info", env=self.environment)
        self.assertIn(f"at {self.server.target}\ndevice {harness.DEVICE}: ", found)
        shown = run(self.python, "-m", "flashcore", "--target=unix:/a", "show-config", env=self.environment)
        self.assertRegex(shown, r"target: unix:/a\ntls: off\ntoken: none\ntimeout: 30 s\n")

    def test_doctor(self):
        lines = run(self.python, "-m", "flashcore", "doctor", env=self.environment).splitlines()
        patterns = (r"flashcore: \d\S* in /.*, Python \d\S*, grpcio \d\S*, protobuf \d",
                    f"target: {self.server.target}, FLASHCORE_TARGET$",
                    "credentials: TLS off, token none$",
                    r"server: FlashCore \d\S* answered in \d+\.\d ms, connecting included$",
                    rf"devices: {harness.DEVICE}, .* \d+ of \d+ MiB of K/V used$",
                    "transports: host:port and unix:/path; local:/path$",
                    "extras: torch .*, transformers .*, ml_dtypes .*client/python.transformers")
        self.assertEqual(len(lines), len(patterns), lines)
        for line, pattern in zip(lines, patterns):
            self.assertRegex(line, f"^{pattern}")
        gone = "UNAVAILABLE: no server answers at .*; start a server .*flashcore serve.* FLASHCORE_TARGET\n"
        for target, said in ((f"unix:{self.server.socket}.gone", gone),
                             ("127.0.0.1", "INVALID_ARGUMENT: target: '127.0.0.1' has no port")):
            with self.assertRaisesRegex(AssertionError, f"exited 1:(\n.*){{2,3}}\nserver: {said}"):
                run(self.python, "-m", "flashcore", f"--target={target}", "doctor")

    def test_bench_measures_both_kinds(self):
        for target in (self.server.target, f"local:{self.server.local}"):
            with self.subTest(target):
                measured = run(self.python, "-m", "flashcore", "bench", "--shape=2x8x64", "--iterations=3",
                               env={"FLASHCORE_TARGET": target})
                self.assertRegex(measured,
                                 r"^inline 2x8x64: median \d+ us, .*\ndecode 2x8x64: median \d+ us, ")

    def test_the_wheel_is_for_this_platform_only_with_the_c_library(self):
        where = "import flashcore, glob; print(glob.glob(flashcore.__path__[0] + '-*/WHEEL')[0])"
        wheel = pathlib.Path(run(self.python, "-c", where).strip()).read_text()
        self.assertRegex(wheel, r"\nTag: py3-none-linux_\w+\n")
        self.assertIn("py.typed", run(self.python, "-c", "import flashcore, os; "
                                      "print(os.listdir(flashcore.__path__[0]))"))  # its types are for users
        with tempfile.TemporaryDirectory() as folder:
            self.install("none", "--target", folder)
            wheel, = pathlib.Path(folder).glob("*/WHEEL")
            self.assertIn("\nTag: py3-none-any\n", wheel.read_text())
            connect = f"import flashcore; flashcore.connect('local:{self.server.local}')"
            with self.assertRaisesRegex(AssertionError, "Unimplemented.*install CMake and a C"):
                run(self.python, "-c", connect, env={"PYTHONPATH": folder})

    def test_a_server_that_is_not_there(self):
        with self.assertRaisesRegex(AssertionError, "exited 1:\nUNAVAILABLE: "):
            run(self.python, "-m", "flashcore", f"--target=unix:{self.server.socket}.gone", "info")

    def test_the_readmes_code_runs(self):
        for name in ("README.md", "client/python/README.md"):
            blocks = re.findall(r"```python\n(.*?)```", (ROOT / name).read_text(encoding="utf-8"), re.DOTALL)
            self.assertTrue(blocks, name)
            for block in blocks:
                with self.subTest(name, block=block):
                    run(self.python, "-c", block, env=self.environment)

    def test_the_examples_run(self):
        printed = {"merge.py": r"differ by [\d.]+e-0[4-9]", "speculative.py": r"64 tokens in 64 steps, with",
                   "beam.py": r"log probability -[\d.]+, computed at once -"}
        for name, output in printed.items():
            with self.subTest(name):
                path = ROOT / "client/python/examples" / name
                self.assertRegex(run(self.python, path, env=self.environment), output)


if __name__ == "__main__":
    harness.main()
