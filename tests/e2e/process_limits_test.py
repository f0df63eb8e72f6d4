"""The behaviour of a server and clients at other limits of their process than that of threads (threads_test):
open files, stack, CPU time."""

import json
import os
import signal
import subprocess
import sys
import unittest

import harness
from limited import LAUNCHER, LimitedServer, refusal

PYTHON_CLIENTS = (
    "import flashcore, sys; flashcore.connect(sys.argv[1]).server_info()",
    """import asyncio, flashcore.aio, sys
async def main():
    async with flashcore.aio.connect(sys.argv[1]) as client:
        await client.server_info()
asyncio.run(main())""")


class ClientsTest(unittest.TestCase):
    """Clients that cannot make a thread, because its stack does not fit into the address space. Numpy's BLAS
    would make threads of its own when it is imported, and end Python where it cannot."""

    def assert_says_so(self, text, *command):
        done = subprocess.run([sys.executable, "-c", LAUNCHER, "0", json.dumps({"RLIMIT_STACK": 1 << 47}),
                               *command],
                              env={**os.environ, "OPENBLAS_NUM_THREADS": "1", "OMP_NUM_THREADS": "1"},
                              capture_output=True, text=True, timeout=harness.PATIENCE, check=False)
        self.assertNotIn(done.returncode, (0, -signal.SIGABRT, -signal.SIGSEGV), done)
        self.assertIn(text, done.stderr)
        self.assertIn("cannot make a thread: ", done.stderr)
        self.assertIn("pids.max of the control group, and ulimit -u", done.stderr)

    def test_a_client_without_threads_says_so(self):
        with harness.Server(local=True) as server:
            for address in server.addresses:
                text = "" if address.startswith("local:") else "gRPC needs "
                with self.subTest(address):
                    self.assert_says_so(text, harness.CLI, "info", f"--target={address}")
                for program in PYTHON_CLIENTS:
                    with self.subTest(address, program=program):
                        self.assert_says_so(text, sys.executable, "-c", program, address)
            self.assertEqual(server.stop(), 0)

    def test_a_client_without_files_says_so(self):
        with harness.Server() as server:
            for program in ((harness.CLI, "info", f"--target={server.target}"),
                            *((sys.executable, "-c", text, server.target) for text in PYTHON_CLIENTS)):
                with self.subTest(program=program):
                    said = ""
                    # From the fewest with which the program itself starts, to those that suffice.
                    for files in range(6, 40):
                        done = subprocess.run([sys.executable, "-c", LAUNCHER, "0",
                                               json.dumps({"RLIMIT_NOFILE": files}), *program],
                                              capture_output=True, text=True, timeout=harness.PATIENCE,
                                              check=False)
                        if done.returncode == 0:
                            break
                        self.assertGreater(done.returncode, 0, done.stderr)
                        said += done.stderr
                    self.assertEqual(done.returncode, 0, done.stderr)
                    self.assertIn("open files: Too many open files; the limit is ulimit -n", said)


class LimitsTest(unittest.TestCase):
    def test_too_few_open_files_are_refused_by_name(self):
        for files in (20, 257):
            status, said = refusal({"RLIMIT_NOFILE": files})
            self.assertEqual((status, said), (
                2, f"flashcore-server: RLIMIT_NOFILE (ulimit -Hn) is {files}; the server needs at least 258 "
                "open files\n"))

    def test_the_fewest_open_files_serve_one_connection(self):
        with LimitedServer({"RLIMIT_NOFILE": 258}) as server, server.channel() as channel:
            harness.stub(channel).Attend(harness.small_request(), timeout=harness.PATIENCE)
            self.assertEqual(server.stop(), 0)

    def test_a_small_stack_is_refused_by_name(self):
        status, said = refusal({"RLIMIT_STACK": 256 << 10})
        self.assertEqual((status, said), (
            2, "flashcore-server: RLIMIT_STACK (ulimit -Hs) is 262144 bytes; the server needs at least "
            "1048576\n"))

    def test_a_log_file_beyond_its_size_does_not_end_the_server(self):
        with LimitedServer({"RLIMIT_FSIZE": 8192}) as server, server.channel() as channel:
            for _ in range(100):  # each is logged
                server.process.send_signal(signal.SIGHUP)
                harness.stub(channel).Attend(harness.small_request(), timeout=harness.PATIENCE)
            self.assertEqual(server.stop(), 0)

    def test_the_end_of_the_cpu_time_drains(self):
        with harness.Server() as server:
            self.assertEqual(server.stop(signal.SIGXCPU), 0)
            self.assertEqual(server.wait_for_record("draining")["signal"], "CPU time limit exceeded")


if __name__ == "__main__":
    harness.main()
