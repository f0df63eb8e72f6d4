"""The server's wheel as a user gets it: built, installed into an empty environment, and run."""

import os
import pathlib
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import unittest

import harness

ROOT = pathlib.Path(__file__).resolve().parents[2]
BUILD = pathlib.Path(harness.SERVER).resolve().parents[1]
VERSION = re.search(r"project\(flashcore VERSION (\S+)", (ROOT / "CMakeLists.txt").read_text()).group(1)
MAX_WHEEL_BYTES = 40_000_000
# The machine's own libraries, all of glibc. Everything else must be in the wheel.
GLIBC = r"(linux-vdso|lib(c|m|pthread|dl|rt|resolv)|.*/ld-linux-x86-64)\.so\.\d+"


def run(*command, status=0, **options):
    """Runs a command without this test's environment. Returns its output; fails with another exit status."""
    environment = {"PATH": os.environ["PATH"], "HOME": "/nonexistent", **options.pop("env", {})}
    done = subprocess.run(list(map(str, command)), text=True, stdout=subprocess.PIPE,
                          stderr=subprocess.STDOUT, timeout=300, env=environment, **options)
    if done.returncode != status:
        raise AssertionError(f"{command} exited {done.returncode}:\n{done.stdout}")
    return done.stdout


class ServerWheelTest(unittest.TestCase):
    @classmethod
    def setUpClass(cls):
        folder = pathlib.Path(cls.enterClassContext(tempfile.TemporaryDirectory()))
        cls.source = folder / "checkout" / "deploy" / "wheel"
        shutil.copytree(ROOT / "deploy" / "wheel", cls.source,
                        ignore=shutil.ignore_patterns("build", "*.egg-info", "__pycache__"))
        shutil.copy(ROOT / "CMakeLists.txt", folder / "checkout")
        run(sys.executable, "-W", "ignore", "setup.py", "--quiet", "bdist_wheel", "--dist-dir", folder,
            cwd=cls.source, env={"FLASHCORE_BUILD_DIR": str(BUILD)})
        cls.wheel, = folder.glob("*.whl")
        run(sys.executable, "-m", "venv", "--without-pip", folder / "venv")
        cls.python = folder / "venv" / "bin" / "python"
        run(sys.executable, "-m", "pip", "--python", cls.python, "install", "--quiet", "--no-index",
            "--no-deps", cls.wheel)
        cls.flashcore = folder / "venv" / "bin" / "flashcore"
        cls.package, = folder.glob("venv/lib/python*/site-packages/flashcore_server")
        # harness.Server starts one program: it becomes `flashcore serve`.
        cls.serve = folder / "serve"
        cls.serve.write_text(f'#!/bin/sh\nexec "{cls.flashcore}" serve "$@"\n')
        cls.serve.chmod(0o755)

    def test_name_and_size(self):
        tag = r"py3-none-manylinux_2_\d+_x86_64"
        self.assertRegex(self.wheel.name, rf"^flashcore_server-{re.escape(VERSION)}-{tag}\.whl$")
        size = self.wheel.stat().st_size
        print(f"{self.wheel.name}: {size / 1e6:.1f} MB", flush=True)
        self.assertLessEqual(size, MAX_WHEEL_BYTES)

    def test_every_library_but_glibc_is_in_the_wheel(self):
        programs = sorted((self.package / "bin").iterdir())
        self.assertEqual([program.name for program in programs], ["flashcore", "flashcore-server"])
        # The RPATH goes before what other packages set.
        loaded = run("ldd", *programs, env={"LD_LIBRARY_PATH": "/usr/lib/x86_64-linux-gnu"})
        found = re.findall(r"^\s+(\S+)(?: => (.*?))?(?: \(0x\w+\))?$", loaded, re.MULTILINE)
        ours = {name: path for name, path in found if not re.fullmatch(GLIBC, name)}
        for name, path in ours.items():
            self.assertEqual(os.path.realpath(path), str(self.package / "lib" / name), loaded)
        self.assertIn("libstdc++.so.6", ours)
        self.assertEqual(set(ours), set(os.listdir(self.package / "lib")))

    def test_licences_of_all_libraries(self):
        bundled = (self.package / "BUNDLED").read_text()
        owners = dict(re.findall(r"^(lib\S+\.so\S*)  (.*)$", bundled, re.MULTILINE))
        self.assertEqual(set(owners), set(os.listdir(self.package / "lib")))
        versions = dict(re.findall(r"^([\w.+-]+) (\d\S*)$", bundled, re.MULTILINE))
        for package in owners.values():
            self.assertIn(package, versions)
            self.assertTrue((self.package / "licences" / package).stat().st_size, package)

    def test_serves_and_drains(self):
        with harness.Server(program=str(self.serve)) as server:
            # The process became the server: signals and the exit status are its own.
            self.assertEqual(os.readlink(f"/proc/{server.process.pid}/exe"),
                             os.path.realpath(self.package / "bin" / "flashcore-server"))
            target = f"--target={server.target}"
            for command in ((self.flashcore,), (self.python, "-m", "flashcore_server")):
                self.assertIn(f"\ndevice    {harness.DEVICE}: ", run(*command, "info", target))
            run(self.flashcore, "verify", "--cases=5", target)
            server.process.send_signal(signal.SIGTERM)
            self.assertEqual(server.process.wait(harness.PATIENCE), 0)
            self.assertIn("drained", [record["msg"] for record in server.records()])

    def test_help_and_errors(self):
        self.assertRegex(run(self.flashcore, "--help"), r"(?s)^flashcore serve .*\n  sequences ")
        self.assertRegex(run(self.flashcore, status=2), r"(?s)^flashcore serve .*\n  sequences ")
        self.assertIn("\n  --kv_memory_bytes=", run(self.flashcore, "serve", "--help"))
        self.assertIn("unexpected argument 'stray'", run(self.flashcore, "serve", "stray", status=2))
        self.assertIn("unknown command 'server'", run(self.flashcore, "server", status=2))

    def test_a_build_folder_without_the_programs(self):
        self.assertIn(f"FLASHCORE_BUILD_DIR={self.source} has no server/flashcore-server",
                      run(sys.executable, "-W", "ignore", "setup.py", "--quiet", "build", cwd=self.source,
                          status=1, env={"FLASHCORE_BUILD_DIR": str(self.source)}))


if __name__ == "__main__":
    harness.main()
