"""gate_rules.py finds what a gate may not have, and leaves stress tests and excused lines alone."""

import unittest

import gate_rules

SCRIPT = '''
class AStressTest(unittest.TestCase):
    @harness.stress
    def test_measured(self):
        time.sleep(1)
        self.assertLess(time.monotonic() - begin, 8)

    def test_gate(self):
        {line}
'''
SOURCE = '''
TEST(Queue, {name}) {{
  {line}
}}
'''


def python(line):
    return [why for _, why in gate_rules.python_findings(SCRIPT.format(line=line))]


def cpp(line, name="IsEmpty"):
    return [why for _, why in gate_rules.cpp_findings(SOURCE.format(line=line, name=name))]


class PythonTest(unittest.TestCase):
    def test_finds_what_depends_on_time_memory_luck_or_other_programs(self):
        for line in ("time.sleep(0.1)", "for _ in range(9): time.sleep(1)", "begin = time.monotonic()",
                     "before = server.status_bytes('VmRSS')", "rng = np.random.default_rng()",
                     "assert_unhurt(self, quiet, times)", "subprocess.Popen(['haproxy', '-f', path])"):
            self.assertEqual(len(python(line)), 1, line)

    def test_leaves_the_rest_alone(self):
        for line in ("rng = np.random.default_rng(harness.SEED)", "self.assertLess(rows, 8)",
                     "time.sleep(1)  # gate: a reason", "while not ready(): time.sleep(0.01)",
                     "subprocess.run(['promtool', 'check'])"):
            self.assertEqual(python(line), [], line)

    def test_a_script_of_stress_tests_alone_may_do_all(self):
        self.assertEqual(gate_rules.python_findings(
            "def wait():\n    time.sleep(1)\n\n@harness.stress\nclass SoakTest(TestCase):\n    pass\n"), [])


class CppTest(unittest.TestCase):
    def test_finds_what_depends_on_time_memory_or_luck(self):
        for line in ("absl::SleepFor(absl::Seconds(1));", "std::mt19937 random(std::random_device{}());",
                     "EXPECT_LT(absl::Now() - begin, absl::Seconds(8));", "getrusage(RUSAGE_SELF, &usage);"):
            self.assertEqual(len(cpp(line)), 1, line)
            self.assertEqual(cpp(line, name="IsEmptyStress"), [], line)

    def test_leaves_the_rest_alone(self):
        for line in ("while (!ready()) absl::SleepFor(absl::Milliseconds(1));", "EXPECT_LT(rows, 8);",
                     "absl::SleepFor(jitter);  // gate: a reason", "// A sleep_for(1) would do."):
            self.assertEqual(cpp(line), [], line)

    def test_what_stands_before_and_after_a_stress_case_is_of_the_gate(self):
        stress = SOURCE.format(line="absl::SleepFor(a);", name="AStress")
        text = stress + "void Wait() { absl::SleepFor(b); }\n"
        self.assertEqual([line for line, _ in gate_rules.cpp_findings(text)], [5])


class ShellTest(unittest.TestCase):
    def test_finds_downloads_and_servers(self):
        script = "pip install torch\napt-get install nginx\ntrue\n"
        self.assertEqual([line for line, _ in gate_rules.shell_findings(script)], [1, 2])


if __name__ == "__main__":
    unittest.main()
