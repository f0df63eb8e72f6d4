#!/usr/bin/env python3
"""Writes the performance figures of the documents from the records, or checks that they agree.

    tests/bench/figures.py            exit status 1, with the difference, if a document says something else
    tests/bench/figures.py --write    writes them

A document has a place for figures between the lines `<!-- figures: NAME -->` and
`<!-- end of figures -->`. BLOCKS has a function for each name. The records are results/gpu.json and
results/cpu.json; record.py writes them. All parts of a record come from one commit and one machine.
Outside such places the documents of DOCUMENTS quote no time, rate or speed.
"""

import argparse
import difflib
import json
import pathlib
import re
import sys

import figure_tables

RECORDS = pathlib.Path(__file__).resolve().parent / "results"
ROOT = RECORDS.parents[2]
DOCUMENTS = ("README.md", "CONTRIBUTING.md", "client/README.md", "deploy/README.md", "deploy/L2_WINDOW.md",
             "deploy/kubernetes/README.md", "deploy/prometheus/RUNBOOK.md", "kernels/README.md",
             "kernels/KV_8BIT.md", "kernels/RESULTS.md", "server/README.md", "server/RESULTS.md",
             "server/IMPLEMENTATION.md", "tests/README.md", "tests/fuzz/README.md")
BLOCK = re.compile(r"(<!-- figures: ([a-z0-9-]+) -->\n).*?(<!-- end of figures -->\n)", re.DOTALL)
# Only a measurement can say these: 1.2x, 3 to 5% faster, 8.5 us, 100 requests/s, 4 TB/s, 0.7 to 0.9 of a
# call.
QUOTED = re.compile(r"\b\d[\d.,]*(x(?!\w)|% (faster|slower)| us\b| requests/s| TB/s"
                    r"| TFLOP/s| times (as|the))|\b0\.\d+ (to [\d.]+ )?of (an?|the|its)\b")


def without_code(text):
    """`text` without fenced code, inline code and figure blocks."""
    text = BLOCK.sub("", text)
    text = re.sub(r"^```.*?^```$", "", text, flags=re.DOTALL | re.MULTILINE)
    return re.sub(r"`[^`\n]*`", "", text)


def quoted_figures(text):
    """The figures in prose of a document: a list of str."""
    return [match.group(0) for match in QUOTED.finditer(without_code(text))]


def load(path):
    """A record. Ends the program if its parts are not of one commit and machine."""
    record = json.loads(path.read_text(encoding="utf-8"))
    problem = figure_tables.why_not_one_run(record)
    if problem:
        sys.exit(f"figures.py: {path}: {problem}")
    return record


def with_figures(text, records):
    """The document with its figures from the records."""
    def replace(match):
        table = figure_tables.BLOCKS[match.group(2)](records)
        return f"{match.group(1)}{table}\n{match.group(3)}"

    return BLOCK.sub(replace, text)


def main():
    parser = argparse.ArgumentParser(description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--write", action="store_true")
    args = parser.parse_args()
    records = {name: load(RECORDS / f"{name}.json") for name in ("gpu", "cpu")}
    status, found = 0, set()
    for document in DOCUMENTS:
        path = ROOT / document
        before = path.read_text(encoding="utf-8")
        found.update(name for _, name, _ in BLOCK.findall(before))
        after = with_figures(before, records)
        if args.write:
            path.write_text(after, encoding="utf-8")
        elif after != before:
            status = 1
            sys.stdout.writelines(difflib.unified_diff(
                before.splitlines(True), after.splitlines(True), document, "the records say"))
        for figure in quoted_figures(after):
            status = 1
            print(f"{document}: '{figure}' is quoted outside of a figures block")
    for name in set(figure_tables.BLOCKS) - found:
        status = 1
        print(f"no document has the figures '{name}'")
    return status


if __name__ == "__main__":
    sys.exit(main())
