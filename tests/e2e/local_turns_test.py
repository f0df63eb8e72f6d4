"""One user floods the local socket with calls, cancels and bad requests in rings; another one is served as
before. tests/transport/local/turns_test.cc tests what takes turns, and how."""

import contextlib
import json
import os
import pathlib
import subprocess
import sys
import time
import unittest

import harness
from honest_client import assert_unhurt
from local_turns_client import QUIET
from users_test import open_server

CLIENT = pathlib.Path(__file__).with_name("local_turns_client.py")
HONEST, ATTACKER = 20001, 20002  # users, nobody's
STEPS = 500
FLOOR = 0.05  # seconds; the attackers take the cores, too


@harness.stress
@unittest.skipUnless(os.getuid() == 0, "only root can be another user")
class LocalTurnsTest(unittest.TestCase):
    @contextlib.contextmanager
    def client(self, user, *arguments):
        process = subprocess.Popen(
            [sys.executable, "-B", str(CLIENT), str(user), *map(str, arguments)],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        try:
            yield process
        finally:
            process.kill()
            process.communicate()

    def check(self, *attack):
        with open_server() as server, self.client(HONEST, server.local, "honest", STEPS) as honest:
            self.assertEqual(honest.stdout.readline(), QUIET)
            with self.client(ATTACKER, server.local, *attack) as attacker:
                self.assertEqual(attacker.stdout.readline(), "ready\n")
                time.sleep(5)
                output, _ = honest.communicate(timeout=harness.PATIENCE)
                self.assertIsNone(attacker.poll(), "the attack lasts")
            result = json.loads(output)
            self.assertEqual(result["errors"], [])
            for what in ("call", "ring"):
                assert_unhurt(self, result["quiet"][what], result["attacked"][what], FLOOR)

    def test_listings(self):
        self.check("list", 8)

    def test_forks(self):
        self.check("fork", 32)

    def test_many_operations_in_one_call(self):
        self.check("manage", 16)

    def test_quick_calls_on_many_connections(self):
        self.check("call", 200)

    def test_cancels_on_many_connections(self):
        self.check("cancel", 200)

    def test_rings_of_bad_requests_and_their_cancels(self):
        self.check("rings", 150)

    def test_many_more_cancels(self):
        self.check("rings", 5000)

    def test_idle_rings(self):
        self.check("idle", 200)


if __name__ == "__main__":
    harness.main()
