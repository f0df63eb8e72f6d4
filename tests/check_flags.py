#!/usr/bin/env python3
"""Compares the flags table of server/README.md with what flashcore-server --help prints.

    tests/check_flags.py SERVER           fails if name, default or help of a flag differ
    tests/check_flags.py SERVER --write   writes the table

SERVER is the binary. Fails too if --help leaves out a flag that server/options.cc defines.
"""

import pathlib
import re
import subprocess
import sys

ROOT = pathlib.Path(__file__).resolve().parents[1]
README = ROOT / "server" / "README.md"
BEGIN = "<!-- flags: written by tests/check_flags.py --write -->\n"
END = "<!-- end of flags -->\n"


def groups(usage):
    """[(title, [(name, default, help)])] of a help text."""
    found = []
    for line in usage.splitlines():
        if flag := re.fullmatch(r"  --(\w+)=(.*)", line):
            found[-1][1].append([*flag.groups(), []])
        elif line.startswith("      "):
            found[-1][1][-1][2].append(line.strip())
        elif line.endswith(":") and not line.startswith(" "):
            found.append((line[:-1], []))
    return [(title, [(name, default, " ".join(text)) for name, default, text in flags])
            for title, flags in found if flags]


def table(usage):
    """The Markdown between the markers."""
    parts = []
    for title, flags in groups(usage):
        rows = [f"| `--{name}` | {default_cell(default)} | {text.replace('|', chr(92) + '|')} |"
                for name, default, text in flags]
        parts.append("\n".join([f"**{title}**\n", "| flag | default | meaning |", "| --- | --- | --- |",
                                *rows]))
    return "\n" + "\n\n".join(parts) + "\n\n"


def default_cell(text):
    value, _, note = text.partition("  ")
    return f"`{value}` {note}".strip() if value else "empty"


def main(server, write):
    usage = subprocess.run([server, "--help"], check=True, capture_output=True, text=True).stdout
    defined = set(re.findall(r"^ABSL_FLAG\([^,]+,\s*(\w+),", (ROOT / "server/options.cc").read_text(),
                             re.MULTILINE))
    printed = [name for _, flags in groups(usage) for name, _, _ in flags]
    if sorted(defined) != sorted(printed):
        sys.exit(f"--help and server/options.cc differ: {sorted(defined ^ set(printed))}")
    text = README.read_text()
    before, found, rest = text.partition(BEGIN)
    _, ended, after = rest.partition(END)
    if not found or not ended:
        sys.exit(f"{README} lacks the markers of the flags table")
    want = before + BEGIN + table(usage) + END + after
    if write:
        README.write_text(want)
    elif want != text:
        sys.exit(f"the flags table of {README} is not that of --help: run {sys.argv[0]} {server} --write")
    print(f"{len(printed)} flags")


if __name__ == "__main__":
    if len(sys.argv) < 2 or sys.argv[2:] not in ([], ["--write"]):
        sys.exit(__doc__)
    main(sys.argv[1], bool(sys.argv[2:]))
