#!/usr/bin/env python3
"""Compares server/FLAGS.md with what flashcore-server --help prints.

    tests/check_flags.py SERVER           fails if they differ
    tests/check_flags.py SERVER --write   writes server/FLAGS.md

SERVER is the binary. Fails too if --help leaves out a flag that server/*options.cc define.
"""

import pathlib
import re
import subprocess
import sys

ROOT = pathlib.Path(__file__).resolve().parents[1]
DOCUMENT = ROOT / "server" / "FLAGS.md"
HEAD = """# Flags of flashcore-server

<!-- Written by tests/check_flags.py --write from flashcore-server --help. -->

Each flag can also be set in the environment, as `FLASHCORE_` and its name in capitals: `FLASHCORE_LISTEN`.
The command line wins. Bytes and times take a plain number or one with a unit: B, kB, MB, GB, TB, KiB, MiB,
GiB, TiB; us, ms, s, m, h. Whatever is not allowed, a flag that does not exist included, ends the start with
exit status 2. A `FLASHCORE_` variable of no flag is warned about. How the flags work together:
[README.md](README.md).
"""
UNITS = {"_mode": "octal mode", "_bytes": "bytes", "_gflop": "10^9 operations", "_ms": "ms", "_us": "us",
         "_s": "s"}
TYPES = {"bool": "true, false", "std::string": "text", "std::vector<std::string>": "list",
         "CredentialPath": "file"}


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


def document(usage, types):
    """The Markdown. `types`: the C++ type of each flag."""
    parts = [HEAD]
    for title, flags in groups(usage):
        rows = [f"| `--{name}` | {value_cell(name, types[name])} | {default_cell(default)} | "
                f"{text.replace('|', chr(92) + '|')} |" for name, default, text in flags]
        parts.append("\n".join([f"## {title}\n", "| flag | value | default | meaning |",
                                "| --- | --- | --- | --- |", *rows, ""]))
    return "\n".join(parts)


def value_cell(name, cpp_type):
    units = (unit for suffix, unit in UNITS.items() if name.endswith(suffix))
    return next(units, TYPES.get(cpp_type, "number"))


def default_cell(text):
    value, _, note = text.partition("  ")
    return f"`{value}` {note}".strip() if value else "empty"


def main(server, write):
    usage = subprocess.run([server, "--help"], check=True, capture_output=True, text=True).stdout
    types = {name: cpp_type.strip() for source in (ROOT / "server").glob("*options.cc") for cpp_type, name in
             re.findall(r"^ABSL_FLAG\(([^,]+),\s*(\w+),", source.read_text(), re.MULTILINE)}
    printed = [name for _, flags in groups(usage) for name, _, _ in flags]
    if sorted(types) != sorted(printed):
        sys.exit(f"--help and server/*options.cc differ: {sorted(set(types) ^ set(printed))}")
    want = document(usage, types)
    if write:
        DOCUMENT.write_text(want)
    elif not DOCUMENT.exists() or DOCUMENT.read_text() != want:
        sys.exit(f"{DOCUMENT} is not what --help says: run {sys.argv[0]} {server} --write")
    print(f"{len(printed)} flags")


if __name__ == "__main__":
    if len(sys.argv) < 2 or sys.argv[2:] not in ([], ["--write"]):
        sys.exit(__doc__)
    main(sys.argv[1], bool(sys.argv[2:]))
