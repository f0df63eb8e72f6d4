"""A process with a client forks: the child's calls are refused, and the parent's go on being right."""

import os
import subprocess
import unittest

import harness

CLIENT = os.environ["FLASHCORE_FORK_CLIENT"]


class ForkTest(unittest.TestCase):
    """tests/e2e/python_ownership_test.py has Python's."""

    @classmethod
    def setUpClass(cls):
        cls.server = cls.enterClassContext(harness.Server(local=True))

    def run_client(self, library, target):
        done = subprocess.run([CLIENT, library, target], capture_output=True, text=True,
                              timeout=harness.PATIENCE)
        self.assertEqual((done.returncode, done.stderr), (0, ""))

    def test_cpp_over_tcp(self):
        self.run_client("cpp", self.server.target)

    def test_cpp_over_a_unix_socket(self):
        self.run_client("cpp", f"unix:{self.server.socket}")

    def test_cpp_over_the_local_socket(self):
        self.run_client("cpp", f"local:{self.server.local}")

    def test_c(self):
        self.run_client("c", f"local:{self.server.local}")


if __name__ == "__main__":
    harness.main()
