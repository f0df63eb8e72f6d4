"""All attackers of the other tests at once, each another user, beside honest clients at every door.

FLASHCORE_SOAK_SECONDS says how long; 3600 is a real soak."""

import contextlib
import json
import os
import pathlib
import subprocess
import sys
import threading
import types
import unittest

import harness
from doors_test import idlers
from flooding_client import ALL_FLOODS
from harness import MIB, wait_until
from honest_client import QUIET, HonestClient, p99
from unread_local_test import CALLS, FLOOD, HALF, HELLO
from users_test import kernel_tells_of_tcp, open_server

SECONDS = int(os.environ.get("FLASHCORE_SOAK_SECONDS", 60))
FOLDER = pathlib.Path(__file__).resolve().parent
TURNS = FOLDER / "local_turns_client.py"  # it becomes another user by itself
# Other users may not be able to read this folder.
FLOODING = f"""
import os, sys
sys.path.insert(0, {str(FOLDER)!r})
import flooding_client
os.setuid(int(sys.argv.pop(1)))
flooding_client.main()
"""
HONEST, FIRST_ATTACKER = 20001, 20010  # users, nobody's
LOCAL_ATTACKS = {"list": 8, "fork": 8, "manage": 8, "call": 40, "cancel": 20, "rings": 150, "idle": 20}
# The memory that the flags let clients take, all together: messages over gRPC, half frames, unanswered calls,
# replies.
BUDGETS = (3 * 256 + 64) * MIB


@harness.stress
@unittest.skipUnless(os.getuid() == 0, "only root can be another user")
@unittest.skipUnless(kernel_tells_of_tcp(), "the kernel does not tell whose a TCP connection is")
class AttackersTest(unittest.TestCase):
    def test_nobody_is_hurt_by_all_of_them(self):
        with open_server() as server, contextlib.ExitStack() as stack:
            tcp, unix = (next(address for address in server.addresses if address.startswith(start))
                         for start in ("127.", "unix:"))
            honest = {name: stack.enter_context(HonestClient(types.SimpleNamespace(target=target)))
                      for name, target in (("TCP", tcp), ("unix", unix))}
            honest_local = self.start(stack, TURNS, HONEST, server.local, "honest", 500)
            self.assertEqual(honest_local.stdout.readline(), QUIET)
            before = server.status_bytes("VmRSS")
            attackers = self.attack(stack, server, tcp, unix)
            memory = []
            for tenth in range(1, 11):
                threading.Event().wait(SECONDS / 10)
                memory.append(server.status_bytes("RssAnon"))
                print(f"{self.id()}: {memory[-1] / MIB:.0f} MiB after {tenth}/10", flush=True)

            ended = [name for name, process in attackers.items() if process.poll() is not None]
            print(f"{self.id()}: {SECONDS} s, ended before: {ended}", flush=True)
            errors = self.report("local", honest_local.communicate(input="", timeout=harness.PATIENCE)[0])
            for name, client in honest.items():
                errors += self.report(name, client.end())
            grown = server.status_bytes("VmHWM") - before
            print(f"{self.id()}: {grown / MIB:.0f} MiB more", flush=True)
            self.assertEqual(errors, [])
            if not harness.SANITIZED:
                self.assertLess(grown, 1.1 * BUDGETS)
                self.assertLess(max(memory[5:]), 1.25 * max(memory[:5]) + 16 * MIB, "it grows and grows")
            stack.close()
            wait_until(lambda: server.metric("flashcore_connections") <= 3, "connections are closed")
            wait_until(lambda: server.metric("flashcore_local_connections") == 0, "local ones, too")
            self.assertEqual(server.stop(), 0)

    def attack(self, stack, server, tcp, unix):
        user = iter(range(FIRST_ATTACKER, FIRST_ATTACKER + 100))
        attackers = {}
        for name, number in LOCAL_ATTACKS.items():
            uid = next(user)
            attackers[name] = self.start(stack, TURNS, uid, server.local, name, number)
        for name, data, again in (("unread replies", HELLO + CALLS, 1), ("half frames", HELLO + HALF, 0)):
            attackers[name] = self.start(stack, "-c", FLOOD, server.local, 80, SECONDS + 60, 0, again,
                                         user=next(user), text=False)
            with contextlib.suppress(BrokenPipeError):
                attackers[name].stdin.write(data)
                attackers[name].stdin.close()
        for number, name in enumerate(ALL_FLOODS):
            target = (tcp, unix)[number % 2]
            attackers[name] = self.start(stack, "-c", FLOODING, next(user), name, 2, SECONDS + 60, target, 1)
        stack.enter_context(idlers([tcp, unix, f"local:{server.local}"], [next(user), next(user)], 100,
                                   refill=True))
        return attackers

    def start(self, stack, *arguments, user=None, text=True):
        """A Python program with these arguments, of another user than this test's if one is given."""
        process = stack.enter_context(subprocess.Popen(
            [sys.executable, "-B", *map(str, arguments)], user=user, cwd="/", stdin=subprocess.PIPE,
            stdout=subprocess.PIPE, text=text))
        stack.callback(process.kill)
        return process

    def report(self, name, output):
        """Prints how a client fared. Returns its errors."""
        result = json.loads(output.splitlines()[-1])
        errors = [f"{name}: {error}" for error in result["errors"]]
        quiet, attacked = ([result[when]] if isinstance(result[when], list) else result[when].values()
                           for when in ("quiet", "attacked"))
        for before, under in zip(quiet, attacked):
            if not under:
                errors.append(f"{name}: no calls")
                continue
            print(f"{self.id()}: {name}: {len(under)} calls, p99 {1e3 * p99(before):.1f} ms, "
                  f"attacked {1e3 * p99(under):.1f} ms, longest {1e3 * max(under):.0f} ms", flush=True)
        for error in errors:
            print(f"{self.id()}: {error}", flush=True)
        return errors


if __name__ == "__main__":
    harness.main()
