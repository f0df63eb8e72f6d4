#!/usr/bin/env python3
"""Checks that the gate's tests can fail for a defect only. Fails on any finding.

In the gate no test may compare elapsed time, memory readings, rates or percentiles, sleep, draw a fresh seed
or start a third party's server. Tests for `tests/run.sh --stress` may: methods and classes marked
@harness.stress, GoogleTest cases with Stress in their name. A comment `gate: REASON` on the line or the one
before it excuses a line.

  gate_rules.py [ROOT]
"""

import ast
import pathlib
import re
import subprocess
import sys

EXCUSE = "gate: "
# What a line of the gate may not have, and why.
PYTHON = [
    (r"\btime\.sleep\(", "sleeps: wait for a state or an event"),
    (r"\bdefault_rng\(\)|\bRandom\(\)|\bSystemRandom\b|\brandom\.seed\(\)", "draws a fresh seed"),
]
PYTHON_TESTS = [
    (r"\btime\.(monotonic|time|perf_counter)\(", "reads the time"),
    (r"\bstatus_bytes\(|VmRSS|VmHWM|getrusage", "reads memory"),
    (r"\bassert_unhurt\(|\bp99\b|\bp50\b", "measures latency"),
    (r"[\"'/](haproxy|nginx|prometheus|envoy)[\"']", "starts a third party's server"),
]
CPP = [
    (r"\bsleep_for\(|\bsleep_until\(|\bSleepFor\(|\busleep\(|\bnanosleep\(",
     "sleeps: wait for a state or an event"),
    (r"\brandom_device\b", "draws a fresh seed"),
    (r"\bVmRSS\b|\bVmHWM\b|\bgetrusage\(|/proc/self/statm", "reads memory"),
    (r"\b(EXPECT|ASSERT)_[LG][TE]\(.*(\bNow\(|\belapsed|\bduration\b|\bseconds\b)", "compares elapsed time"),
]
# Scripts of the gate.
SHELL = [
    (r"\bpip3? install\b|\btorch\b|\btransformers\b", "downloads more than 20 MB"),
    (r"\bhaproxy\b|\bnginx\b", "installs a third party's server"),
]
CASE = re.compile(r"^(TYPED_)?TEST(_F|_P)?\((\w+),?\s*(\w*)")


def excused(lines, number):
    """Whether line `number` (from 1) has a reason."""
    return any(EXCUSE in line for line in lines[max(0, number - 2):number])


def matches(rules, lines, numbers):
    return [(number, why) for number in numbers for pattern, why in rules
            if re.search(pattern, lines[number - 1].split("  # ")[0]) and not excused(lines, number)]


def is_stress(node):
    return any("stress" in ast.unparse(decorator) for decorator in node.decorator_list)


def python_findings(text):
    """Findings of a test script: everything but what is marked @harness.stress; tests more strictly."""
    lines, tree = text.splitlines(), ast.parse(text)
    free, tests = set(), set()
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
