"""--pin_threads sets the cores of the server's threads."""

import contextlib
import os
import unittest

import harness

CORES = sorted(os.sched_getaffinity(0))
LANES = ("--lanes=1",)


def cores_of_threads(server):
    """[(name, set of cores)] of the threads."""
    threads = []
    for task in (server.proc / "task").iterdir():
        with contextlib.suppress(FileNotFoundError, ProcessLookupError):  # it has ended
            threads.append(((task / "comm").read_text().strip(),
                            os.sched_getaffinity(int(task.name))))
    return threads


def refusal(cores):
    return harness.refusal(*harness.device_flags(), *LANES, f"--pin_threads={cores}")


class PinThreadsTest(unittest.TestCase):
    @unittest.skipIf(len(CORES) < 2, "needs two cores")
    def test_a_lane_has_its_core_and_the_rest_share_theirs(self):
        lane, rest = CORES[-1], CORES[0]
        with harness.Server(f"--pin_threads={lane},{rest}", *LANES) as server:
            with server.channel() as channel:
                harness.stub(channel).Attend(harness.small_request())
            threads = cores_of_threads(server)
            self.assertEqual([cores for _, cores in threads].count({lane}), 1, threads)
            polling = [cores for name, cores in threads if name.startswith("nexting")]
            self.assertTrue(polling)
            self.assertEqual(polling, [{rest}] * len(polling))
            for name, cores in threads:
                self.assertLessEqual(cores, {lane, rest}, name)

    def test_without_it_all_run_anywhere(self):
        with harness.Server(*LANES) as server:
            for name, cores in cores_of_threads(server):
                self.assertEqual(cores, set(CORES), name)

    def test_lists_that_cannot_be_are_refused(self):
        for cores in ("x", "1-", f"{CORES[0]},{CORES[0]}", "1023", "-1"):
            status, output = refusal(cores)
            self.assertEqual(status, 2, cores)
            self.assertIn(f"--pin_threads: '{cores}' is not", output)
        status, output = refusal(CORES[0])
        self.assertEqual(status, 1)
        self.assertIn("1 cores for 1 lanes and at least one for the rest", output)


if __name__ == "__main__":
    harness.main()
