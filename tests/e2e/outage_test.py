"""A server that was away: every API finds it again by itself, whichever side starts first.

gRPC's own poller, which finds a restarted server after 5 s or more, is off in these clients: what finds it
is the library.
"""

import asyncio
import concurrent.futures
import contextlib
import itertools
import os
import subprocess
import unittest

import flashcore
from flashcore import aio

import harness

os.environ["GRPC_CLIENT_CHANNEL_BACKUP_POLL_INTERVAL_MS"] = "0"
CLIENT = os.environ["FLASHCORE_OUTAGE_CLIENT"]
ONCE = flashcore.Retry(attempts=1)


class Caller:
    """An outage_client. Use as a context manager."""

    def __init__(self, target, *options):
        self.process = subprocess.Popen([CLIENT, target, *options], stdin=subprocess.PIPE,
                                        stdout=subprocess.PIPE, text=True)

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.process.stdin.close()
        self.process.wait(harness.PATIENCE)
        self.process.stdout.close()

    def begin(self, call, seconds=harness.PATIENCE):
        self.process.stdin.write(f"{call} {seconds}\n")
        self.process.stdin.flush()

    def end(self):
        """The status of the call that began first."""
        return self.process.stdout.readline().partition(" ")[0]

    def call(self, *args):
        self.begin(*args)
        return self.end()


class Outage(unittest.TestCase):
    def setUp(self):
        self.folder = self.enterContext(harness.in_temporary_folder())
        self.targets = [f"unix:{self.folder}/grpc", f"local:{self.folder}/local"]

    def serve(self):
        return harness.Server(f"--listen=unix:{self.folder}/grpc",
                              f"--local_listen={self.folder}/local")


class CppOutageTest(Outage):
    def test_a_call_outlasts_the_outage(self):
        """Calls begin while there is no server, one after the other; one before has failed to connect."""
        calls = ("info", "attend", "async", "create", "manage", "append")
        with contextlib.ExitStack() as stack:
            callers = [stack.enter_context(Caller(target, *options)) for target in self.targets
                       for options in ((), ("lease",))]
            before = self.serve()
            for caller in callers:
                self.assertEqual([caller.call("create"), caller.call("attend")], ["OK", "OK"])
            before.__exit__()
            for caller in callers:
                self.assertEqual(caller.call("info", 0.2), "UNAVAILABLE")
                for call in calls:
                    caller.begin(call)
            with self.serve():
                for caller in callers:
                    self.assertEqual([caller.end() for _ in calls], ["OK"] * len(calls))

    def test_a_client_may_start_before_its_server(self):
        with contextlib.ExitStack() as stack:
            callers = {call: stack.enter_context(Caller(target)) for target in self.targets
                       for call in ("attend", "async", "create")}
            for call, caller in callers.items():
                caller.begin(call)
            with self.serve():
                for caller in callers.values():
                    self.assertEqual(caller.end(), "OK")

    def test_calls_without_retries_find_the_server(self):
        with contextlib.ExitStack() as stack:
            callers = [stack.enter_context(Caller(target, "once")) for target in self.targets]
            for caller in callers:
                self.assertEqual(caller.call("attend", 1), "UNAVAILABLE")
            with self.serve():
                for caller, call in itertools.product(callers, ("attend", "health", "stream")):
                    harness.wait_until(lambda: caller.call(call, 1) == "OK", call)


class PythonOutageTest(Outage):
    def test_a_call_outlasts_the_outage(self):
        with contextlib.ExitStack() as stack:
            pool = stack.enter_context(concurrent.futures.ThreadPoolExecutor())
            clients = [stack.enter_context(flashcore.connect(target, timeout=harness.PATIENCE, lease=True))
                       for target in self.targets]
            once = [stack.enter_context(flashcore.connect(target, retry=ONCE, timeout=1))
                    for target in self.targets]
            with self.serve():
                for client in clients:
                    client.create_sequence(1, 1, 32)
                self.assertTrue(all(map(self.answers, once)))
            for client in clients:
                with self.assertRaises(flashcore.Unavailable):
                    client.server_info(timeout=0.2)
            self.assertFalse(any(map(self.answers, once)))
            made = [pool.submit(client.create_sequence, 1, 1, 32) for client in clients]
            with self.serve():
                self.assertEqual([sequence.result().lengths for sequence in made], [[0]] * 2)
                for client in once:
                    harness.wait_until(lambda: self.answers(client), "a call without repetition")

    def test_a_call_outlasts_the_outage_in_asyncio(self):
        asyncio.run(self.outage())

    async def outage(self):
        async with contextlib.AsyncExitStack() as stack:
            clients = [await stack.enter_async_context(
                aio.connect(target, timeout=harness.PATIENCE, lease=True)) for target in self.targets]
            for client in clients:
                with self.assertRaises(flashcore.Unavailable):
                    await client.server_info(timeout=0.2)
            made = [asyncio.create_task(client.create_sequence(1, 1, 32)) for client in clients]
            await asyncio.sleep(0)  # they begin
            with self.serve():
                self.assertEqual([(await sequence).lengths for sequence in made], [[0]] * 2)

    @staticmethod
    def answers(client):
        try:
            client.server_info()
            return True
        except flashcore.Unavailable:
            return False


if __name__ == "__main__":
    harness.main()
