#!/usr/bin/env python3
"""Counts the tests that a stage of the gate really executed, in the log that ctest leaves of it.

  executed.py STAGE LOG          prints the number; fails if it is below minimum_tests.txt
  executed.py --slowest N LOG... prints the N slowest tests
  executed.py --skipped LOG...   prints the tests that skipped themselves, but those of a GPU

A GoogleTest case and a method of unittest each count one, those that skipped themselves none. A ctest test of
neither kind, such as a check of the documents, counts one.
"""

import os
import pathlib
import re
import shutil
import sys

MINIMUM = pathlib.Path(__file__).with_name("minimum_tests.txt")
ENTRY = re.compile(r"^\d+/\d+ Test: (\S+)$", re.MULTILINE)
GTEST_RAN = re.compile(r"^\[==========\] (\d+) tests? from \d+ test suites? ran", re.MULTILINE)
GTEST_SKIPPED = re.compile(r"^\[  SKIPPED \] (\d+) tests?, listed below", re.MULTILINE)
UNITTEST_RAN = re.compile(r"^Ran (\d+) tests? in ", re.MULTILINE)
UNITTEST_SKIPPED = re.compile(r"^OK \(.*skipped=(\d+)", re.MULTILINE)
SKIPPED_NAMES = re.compile(
    r"^\[  SKIPPED \] (\S+?)(?:, where .*)? \(\d+ ms\)$|^\[ skip \] (\S+):|^(left out: .*)$", re.MULTILINE)
TIMED = re.compile(r"^\[(?:       OK | ran )\] (\S+?)(?:, where .*)? \((\d+) ms\)$", re.MULTILINE)


def entries(log):
    """Yields (name, output) of each ctest test in a log of ctest."""
    parts = ENTRY.split(pathlib.Path(log).read_text(errors="replace"))
    yield from zip(parts[1::2], parts[2::2])


def total(pattern, text):
    return sum(map(int, pattern.findall(text)))


def count(log):
    """(executed, skipped) tests of a log."""
    executed = skipped = 0
    for _, output in entries(log):
        ran = total(GTEST_RAN, output) + total(UNITTEST_RAN, output)
        left = total(GTEST_SKIPPED, output) + total(UNITTEST_SKIPPED, output)
        if not GTEST_RAN.search(output) and not UNITTEST_RAN.search(output):
            ran, left = (0, 1) if "\nTest Skipped" in output or "left out: " in output else (1, 0)
        executed += ran - left
        skipped += left
    return executed, skipped


def slowest(logs, number):
    """[(milliseconds, name)] of the slowest tests, slowest first."""
    timed = [(int(ms), f"{entry} {case}") for log in logs for entry, output in entries(log)
             for case, ms in TIMED.findall(output)]
    return sorted(timed, reverse=True)[:number]


def skipped_names(logs):
    return ["".join(groups) for log in logs for entry, output in entries(log)
            if ".gpu" not in entry for groups in SKIPPED_NAMES.findall(output)]


def main():
    if sys.argv[1] == "--skipped":
        print("\n".join(skipped_names(sys.argv[2:])))
        return
    if sys.argv[1] == "--slowest":
        for milliseconds, name in slowest(sys.argv[3:], int(sys.argv[2])):
            print(f"{milliseconds / 1e3:6.1f} s  {name}")
        return
    stage, log = sys.argv[1:]
    minimum = dict(line.split() for line in MINIMUM.read_text().splitlines()
                   if line and not line.startswith("#"))
    executed, skipped = count(log)
    print(f"{stage}: {executed} tests executed, {skipped} skipped")
    if shutil.which(os.environ.get("CUDACXX", "nvcc")) is None:
        return  # there is no fake GPU without the headers of a CUDA toolkit
    if executed < int(minimum[stage]):
        sys.exit(f"executed.py: {stage} must execute at least {minimum[stage]} tests ({MINIMUM.name})")


if __name__ == "__main__":
    main()
