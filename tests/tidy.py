#!/usr/bin/env python3
"""Runs clang-tidy with the checks of .clang-tidy. Fails on any finding.

  tests/tidy.py          all sources of server/, client/ and proto/, kernels/*.cc and kernels/oracle/*.cc, but
                         those that passed as they are
  tests/tidy.py --all    those, too (nine minutes on two cores)
  tests/tidy.py FILE...  only these, passed or not

tidy_passed.txt records what passed: a hash of the file, the project's headers that it includes, .clang-tidy,
the compiler's flags and clang-tidy's version. Commit it with your change: CI then need not check the file.

kernels/cpu and tests/bench/kernels are left out: SIMD templates take the analyzer minutes, and a benchmark's
loop variable is a finding. CUDA files and generated code are left out, too. TIDY_JOBS sets how many files are
checked at a time (default: one a core).
"""

import concurrent.futures
import functools
import hashlib
import json
import os
import pathlib
import re
import shlex
import subprocess
import sys

ROOT = pathlib.Path(__file__).resolve().parent.parent
BUILD = ROOT / "build-tidy"  # only configured: its compile_commands.json has each file alone
PASSED = ROOT / "tests" / "tidy_passed.txt"
SOURCES = ["server/*.cc", "client/*.cc", "proto/*.cc", ":(glob)kernels/*.cc", "kernels/oracle/*.cc"]
INCLUDE = re.compile(r'^\s*#\s*include\s+["<]([^">]+)[">]', re.MULTILINE)


def output_of(*command):
    return subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True, cwd=ROOT).stdout


def configure():
    """Writes the compile commands and the generated headers. Returns {file: its compile flags}."""
    output_of("cmake", "--preset", "tidy")
    headers = re.findall(r"^(\S+\.pb\.h): ", output_of("ninja", "-C", str(BUILD), "-t", "targets", "all"),
                         re.MULTILINE)
    output_of("ninja", "-C", str(BUILD), *sorted(set(headers)))
    commands = json.loads((BUILD / "compile_commands.json").read_text())
    return {os.path.relpath(entry["file"], ROOT):
            [flag for flag in shlex.split(entry["command"]) if re.match("-([DWfO]|std)", flag)]
            for entry in commands}


@functools.cache
def includes(path):
    """The project's files that a file includes, by name. A generated header stands for its .proto."""
    found = set()
    for name in INCLUDE.findall((ROOT / path).read_text()):
        for candidate in (name, f"client/include/{name}",
                          re.sub(r"^(.*?)(\.grpc)?\.pb\.h$", r"proto/\1.proto", name)):
            if (ROOT / candidate).is_file():
                found.add(candidate)
    return found


def with_headers(path):
    """The file and everything of the project that it includes, directly or not."""
    reached, ahead = set(), {path}
    while ahead:
        reached |= ahead
        ahead = set().union(*map(includes, ahead)) - reached
    return sorted(reached)


def digest(path, flags, config):
    parts = [config, *flags]
    for name in with_headers(path):
        parts += [name, (ROOT / name).read_text()]
    return hashlib.sha256("\0".join(parts).encode()).hexdigest()[:16]


def check(path):
    """(whether the file has no finding, what clang-tidy said)."""
    done = subprocess.run(
        ["clang-tidy", "--quiet", "-p", str(BUILD), "--extra-arg=-Wno-unknown-warning-option", path],
        cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, check=False)
    return done.returncode == 0, done.stdout + (done.stderr if done.returncode != 0 else "")


def main():
    arguments = sys.argv[1:]
    if any(arg.startswith("-") and arg != "--all" for arg in arguments):
        sys.exit(__doc__)
    flags = configure()
    version = re.search(r"version \S+", output_of("clang-tidy", "--version")).group()
    config = (ROOT / ".clang-tidy").read_text() + version
    names = [arg for arg in arguments if arg != "--all"] or output_of("git", "ls-files", *SOURCES).split()
    missing = [name for name in names if name not in flags]
    if missing:
        # Without a CUDA compiler, the CUDA device is not part of the build.
        print(f"tidy: not in the build, left out: {', '.join(missing)}")
    hashes = {name: digest(name, flags[name], config) for name in names if name in flags}
    passed = {}
    if PASSED.exists():
        passed = dict(reversed(line.split()) for line in PASSED.read_text().splitlines())
    to_check = [name for name in hashes if arguments or passed.get(name) != hashes[name]]

    failed = []
    with concurrent.futures.ThreadPoolExecutor(int(os.environ.get("TIDY_JOBS", os.cpu_count()))) as pool:
        for name, (clean, said) in zip(to_check, pool.map(check, to_check)):
            sys.stdout.write(said)
            if clean:
                passed[name] = hashes[name]
            else:
                failed.append(name)
                passed.pop(name, None)
    kept = sorted((name, value) for name, value in passed.items() if (ROOT / name).is_file())
    PASSED.write_text("".join(f"{value} {name}\n" for name, value in kept))
    if failed:
        sys.exit(f"tidy: findings in {', '.join(failed)}")
    print(f"tidy: ok, {len(to_check)} of {len(hashes)} files checked, the others passed as they are")


if __name__ == "__main__":
    main()
