"""The users of a client of the Python package: the process and the event loop that it belongs to."""

import asyncio
import gc
import multiprocessing
import os
import signal
import subprocess
import sys
import threading
import unittest

import flashcore
import numpy as np

import harness

ROWS = np.ones((1, 1, 32), np.float16)
WORDS = "event loop"
# Prints how a child ended, the sequences of the parent's lease, and whether that is still held.
LEAVES = """
import gc, os, sys, flashcore
client = flashcore.connect(sys.argv[1], lease=True)
client.create_sequence(1, 1, 32)
for drops in (False, True):
    child = os.fork()
    if child == 0:
        if drops:
            client.close()
            del client
            gc.collect()
        sys.exit(0)
    print(os.waitpid(child, 0)[1], len(client.list_sequences()), client.core._transport.holds_lease(),
          flush=True)
"""


class OwnershipTest(unittest.TestCase):
    """Over gRPC, and in LocalOwnershipTest over the local socket."""

    @classmethod
    def setUpClass(cls):
        cls.server = cls.enterClassContext(harness.Server(local=True))

    def target(self):
        return self.server.target

    def child(self, run):
        """Runs `run` in a forked child, which has to return True within a minute."""
        pid = os.fork()
        if pid == 0:
            signal.alarm(harness.PATIENCE)  # ends a hang
            code = 1
            try:
                code = 0 if run() else 2
            finally:
                os._exit(code)
        self.assertEqual(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]), 0)

    def refused(self, call, words=f"process {os.getpid()}, from which"):
        """Whether a call is refused, by name."""
        try:
            call()
        except flashcore.FailedPrecondition as error:
            return words in str(error)
        return False

    def test_every_call_in_a_forked_child_is_refused_and_the_parent_is_unharmed(self):
        client = self.enterContext(flashcore.connect(self.target(), lease=True))
        batch = client.create_sequences(2, 1, 1, 32)
        sequence, plan = batch[0], client.plan(batch, num_heads=1)
        calls = [
            client.server_info, client.list_sequences, lambda: client.open_sequence(sequence.id),
            lambda: client.attend(ROWS, ROWS, ROWS), lambda: client.create_sequence(1, 1, 32),
            lambda: client.create_sequences(1, 1, 1, 32), lambda: sequence.append(0, ROWS, ROWS),
            lambda: sequence.load(0, ROWS, ROWS), lambda: sequence.attend(0, ROWS, ROWS, ROWS), sequence.fork,
            sequence.recreate, lambda: sequence.truncate(0), sequence.delete, sequence.info,
            lambda: batch.attend(0, *[np.ones((2, 1, 32), np.float16)] * 3), batch.fork,
            lambda: batch.reorder([0, 0]), lambda: batch.truncate(0), batch.delete, batch.info,
            lambda: plan.run(0, *[np.ones((2, 1, 32), np.float16)] * 3)]

        def use():
            return all([self.refused(call) for call in calls])

        def use_and_drop():
            used = use()
            client.close()
            client.close()
            calls.clear()
            gc.collect()
            return used

        self.child(use)
        self.child(use_and_drop)
        # None was deleted or appended to, and the lease holds.
        self.assertEqual([(info.sequence_id, list(info.layer_lengths)) for info in client.list_sequences()],
                         [(core.id, [0]) for core in batch])
        self.assertTrue(client.core._transport.holds_lease())
        batch.delete()

    def test_a_child_that_leaves_by_the_end_of_its_interpreter(self):
        done = subprocess.run([sys.executable, "-c", LEAVES, self.target()], capture_output=True, text=True,
                              timeout=harness.PATIENCE)
        self.assertEqual(done.stdout, "0 1 True\n" * 2, done.stderr)

    def test_a_child_of_multiprocessing(self):
        client = self.enterContext(flashcore.connect(self.target()))
        client.server_info()
        done = multiprocessing.get_context("fork").SimpleQueue()
        process = multiprocessing.get_context("fork").Process(
            target=lambda: done.put(self.refused(client.server_info)))
        process.start()
        self.assertTrue(done.get())
        process.join()
        self.assertEqual(process.exitcode, 0)
        self.assertTrue(client.server_info().version)

    def test_forks_amid_calls_of_other_threads(self):
        client = self.enterContext(flashcore.connect(self.target(), lease=True))
        client.create_sequence(1, 1, 32)
        stop, errors = threading.Event(), []

        def call():
            while not stop.is_set():
                try:
                    np.testing.assert_array_equal(client.attend(ROWS, ROWS, ROWS), ROWS)
                    client.create_sequence(1, 1, 32).delete()
                except BaseException as error:
                    errors.append(error)

        threads = [threading.Thread(target=call) for _ in range(3)]
        for thread in threads:
            thread.start()
        for _ in range(5):
            self.child(lambda: self.refused(client.server_info)
                       and self.refused(lambda: client.create_sequence(1, 1, 32)))
        stop.set()
        for thread in threads:
            thread.join()
        self.assertEqual(errors, [])

    def test_a_client_of_the_child(self):
        client = self.enterContext(flashcore.connect(self.target()))
        client.server_info()
        self.child(lambda: self.refused(
            flashcore.connect(self.target()).server_info,
            f"process {os.getpid()} was forked from process {os.getppid()}, which has used gRPC"))
        self.assertTrue(client.server_info().version)

    # The event loop.

    def test_a_client_belongs_to_the_loop_of_its_first_call(self):
        client = flashcore.aio.connect(self.target())  # outside of a loop

        async def use():
            return np.array_equal(await client.attend(ROWS, ROWS, ROWS), ROWS)

        self.assertTrue(asyncio.run(use()))
        for _ in range(2):
            self.assertTrue(self.refused(lambda: asyncio.run(use()), "its first call, which is closed"))

        async def every_call_and_close():
            calls = [client.server_info(), client.attend(ROWS, ROWS, ROWS), client.create_sequence(1, 1, 32),
                     client.list_sequences(), client.open_sequence(bytes(16)), use()]
            for call in calls:
                with self.assertRaisesRegex(flashcore.FailedPrecondition, WORDS):
                    await call
            await client.close()
            async with flashcore.aio.connect(self.target()) as fresh:
                self.assertTrue((await fresh.server_info()).version)

        asyncio.run(every_call_and_close())

    def test_a_client_of_a_loop_in_another_thread(self):
        async def use(client):
            return (await client.server_info()).version

        async def run():
            async with flashcore.aio.connect(self.target()) as client:
                self.assertTrue(await use(client))

                def elsewhere():
                    return all([self.refused(lambda: asyncio.run(call), "which is another one")
                                for call in (use(client), client.close())])

                self.assertTrue(await asyncio.to_thread(elsewhere))
                self.assertTrue(await use(client))  # it was not closed

        asyncio.run(run())

    def test_without_a_loop_it_says_so(self):
        client = flashcore.aio.connect(self.target())
        call = client.server_info()
        self.assertTrue(self.refused(lambda: call.send(None), "no asyncio event loop runs"))
        asyncio.run(client.close())

    def test_calls_that_a_closed_loop_left_behind(self):
        client = flashcore.aio.connect(self.target())

        async def leave():
            await client.server_info()
            asyncio.ensure_future(client.attend(ROWS, ROWS, ROWS))
            await asyncio.sleep(0)

        asyncio.run(leave())
        self.assertTrue(self.refused(lambda: asyncio.run(client.server_info()), WORDS))
        asyncio.run(client.close())


class LocalOwnershipTest(OwnershipTest):
    def target(self):
        return f"local:{self.server.local}"

    def test_a_client_of_the_child(self):
        client = self.enterContext(flashcore.connect(self.target()))
        client.server_info()

        def use():
            with flashcore.connect(self.target()) as own:
                return self.refused(client.server_info) and np.array_equal(own.attend(ROWS, ROWS, ROWS), ROWS)

        self.child(use)
        self.assertTrue(client.server_info().version)


if __name__ == "__main__":
    harness.main()
