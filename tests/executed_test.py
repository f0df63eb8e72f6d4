"""executed.py counts what ran, in a log as ctest writes it."""

import pathlib
import tempfile
import unittest

import executed

LOG = """Start testing: Nov 24 14:00 UTC
----------------------------------------------------------
1/4 Testing: kv_test
1/4 Test: kv_test
Output:
[ RUN      ] Arena.Grows
[       OK ] Arena.Grows (1234 ms)
[  SKIPPED ] Arena.OfAGpu (0 ms)
[==========] 3 tests from 1 test suite ran. (1300 ms total)
[  PASSED  ] 2 tests.
[  SKIPPED ] 1 test, listed below:
2/4 Testing: e2e.drain_test
2/4 Test: e2e.drain_test
Output:
[ ran ] __main__.DrainTest.test_idle (2500 ms)
[ skip ] __main__.DrainTest.test_user: only root can
Ran 5 tests in 3.1s
OK (skipped=1)
3/4 Testing: docs.links
3/4 Test: docs.links
Output:
links: ok
4/4 Testing: attention_test.gpu
4/4 Test: attention_test.gpu
Output:
[  SKIPPED ] Kernels.Any/sm80 (0 ms)
[==========] 7 tests from 1 test suite ran. (1 ms total)
[  SKIPPED ] 7 tests, listed below:
Test Skipped.
"""


class ExecutedTest(unittest.TestCase):
    def setUp(self):
        folder = tempfile.TemporaryDirectory()
        self.addCleanup(folder.cleanup)
        self.log = pathlib.Path(folder.name, "log")
        self.log.write_text(LOG)

    def test_counts(self):
        self.assertEqual(executed.count(self.log), (2 + 4 + 1, 1 + 1 + 7))

    def test_names_what_skipped_itself_without_needing_a_gpu(self):
        self.assertEqual(executed.skipped_names([self.log]), ["Arena.OfAGpu", "__main__.DrainTest.test_user"])

    def test_slowest(self):
        self.assertEqual(executed.slowest([self.log], 2), [
            (2500, "e2e.drain_test __main__.DrainTest.test_idle"), (1234, "kv_test Arena.Grows")])


if __name__ == "__main__":
    unittest.main()
