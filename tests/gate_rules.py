#!/usr/bin/env python3
"""Checks that the gate's tests can fail for a defect only. Fails on any finding.

In the gate no test may compare elapsed time, memory readings, rates or percentiles, sleep but between looks
at a state, draw a fresh seed or start a third party's server. Tests for `tests/run.sh --stress` may: methods
and classes marked @harness.stress, GoogleTest cases with Stress in their name. A comment `gate: REASON` on
the line or the one before it excuses a line.

  gate_rules.py [ROOT]
"""

import ast
import pathlib
import re
import subprocess
import sys

EXCUSE = "gate: "
# The patterns that a line of the gate may not have, and why.
SLEEP = (r"\btime\.sleep\(|\bsleep_for\(|\bsleep_until\(|\bSleepFor\(|\busleep\(|\bnanosleep\(",
         "sleeps: wait for a state or an event")
PYTHON = [
    SLEEP,
    (r"\bdefault_rng\(\)|\bRandom\(\)|\bSystemRandom\b|\brandom\.seed\(\)", "draws a fresh seed"),
]
PYTHON_TESTS = [
    (r"\btime\.(monotonic|time|perf_counter)\(", "reads the time"),
    (r"\bstatus_bytes\(|VmRSS|VmHWM|getrusage", "reads memory"),
    (r"\bassert_unhurt\(|\bp99\b|\bp50\b", "measures latency"),
    (r"(Popen|run|call|check_output|which)\(.*\b(haproxy|nginx|prometheus|envoy)\b",
     "starts a third party's server"),
]
CPP = [
    SLEEP,
    (r"\brandom_device\b", "draws a fresh seed"),
    (r"\bVmRSS\b|\bVmHWM\b|\bgetrusage\(|/proc/self/statm", "reads memory"),
    (r"\b(EXPECT|ASSERT)_[LG][TE]\(.*(\bNow\(|\belapsed|\bduration\b|\bseconds\b)", "compares elapsed time"),
]
# Scripts of the gate.
SHELL = [
    (r"\bpip3? install\b|\btorch\b|\btransformers\b", "downloads more than 20 MB"),
    (r"\bhaproxy\b|\bnginx\b", "installs a third party's server"),
]
LOOP = r"^\s*(while\b|(for|do) ?[({])"  # no loop of Python's that runs a number of times
CASE = re.compile(r"^(TYPED_)?TEST(_F|_P)?\((\w+),?\s*(\w*)")


def excused(lines, number):
    """Whether line `number` (from 1) has a reason."""
    return any(EXCUSE in line for line in lines[max(0, number - 2):number])


def indent(line):
    return len(line) - len(line.lstrip())


def in_loop(lines, number):
    """Whether line `number` is in the body of a loop, by its indentation."""
    inner = indent(lines[number - 1])
    if re.search(LOOP, lines[number - 1]):
        return True
    for line in reversed(lines[:number - 1]):
        if line.strip() and indent(line) < inner:
            if re.search(LOOP, line):
                return True
            inner = indent(line)
    return False


def matches(rules, lines, numbers):
    return [(number, rule[1]) for number in numbers for rule in rules
            if re.search(rule[0], lines[number - 1].split("  # ")[0]) and not excused(lines, number)
            and not (rule is SLEEP and in_loop(lines, number))]


def is_stress(node):
    return any("stress" in ast.unparse(decorator) for decorator in node.decorator_list)


def python_findings(text):
    """Findings of a test script: everything but what is marked @harness.stress; tests more strictly."""
    lines, tree = text.splitlines(), ast.parse(text)
    free, tests = set(), set()
    classes = [node for node in tree.body if isinstance(node, ast.ClassDef) and node.name.endswith("Test")]
    if classes and all(map(is_stress, classes)):
        return []
    for node in ast.walk(tree):
        if not isinstance(node, (ast.ClassDef, ast.FunctionDef)):
            continue
        inside = range(node.lineno, node.end_lineno + 1)
        if is_stress(node):
            free.update(inside)
        elif isinstance(node, ast.FunctionDef) and node.name.startswith("test_"):
            tests.update(inside)
    return (matches(PYTHON, lines, sorted(set(range(1, len(lines) + 1)) - free)) +
            matches(PYTHON_TESTS, lines, sorted(tests - free)))


def cpp_findings(text):
    """Findings of a C++ test file. A case ends where a line is `}`."""
    lines, gate, stress = text.splitlines(), [], False
    for number, line in enumerate(lines, 1):
        case = CASE.match(line)
        if case:
            name = case.group(3) + (case.group(4) or lines[number].strip())
            stress = "Stress" in name
        if not stress and not line.lstrip().startswith("//"):
            gate.append(number)
        if line.startswith("}"):
            stress = False
    return matches(CPP, lines, gate)


def shell_findings(text):
    lines = text.splitlines()
    return matches(SHELL, lines, range(1, len(lines) + 1))


def findings(root):
    """Yields (file, line, why) of a checkout."""
    names = subprocess.run(["git", "ls-files", "tests", "deploy/quickstart.sh", ".ci/run"], check=True,
                           cwd=root, stdout=subprocess.PIPE, text=True).stdout.split()
    for name in names:
        path = pathlib.Path(root, name)
        if not path.exists() or name.startswith("tests/bench/"):
            continue
        if re.fullmatch(r"tests/e2e/.*\.py", name):
            check = python_findings
        elif path.suffix in (".cc", ".h"):
            check = cpp_findings
        elif name in ("deploy/quickstart.sh", ".ci/run", "tests/run.sh"):
            check = shell_findings
        else:
            continue
        for number, why in check(path.read_text()):
            yield name, number, why


def main():
    root = sys.argv[1] if len(sys.argv) > 1 else pathlib.Path(__file__).resolve().parent.parent
    found = sorted(set(findings(root)))
    for name, number, why in found:
        print(f"{name}:{number}: {why}")
    if found:
        sys.exit(f"gate_rules: {len(found)} lines; see CONTRIBUTING.md")
    print("gate_rules: ok")


if __name__ == "__main__":
    main()
