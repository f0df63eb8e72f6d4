#!/usr/bin/env python3
"""Compares results with the best on record; fails if one is slower.

    kernels/bench/gate.py RESULTS.json [--leaderboard FILE] [--record] [--commit HASH]

RESULTS.json is the output of flashcore-kernel-bench or compare_torch.py. The leaderboard holds the
best p50 of each shape, GPU and kernel. A result more than 3% slower fails (exit status 1). With
--record, a result more than 3% faster replaces the record, and a result without a record becomes
one. Smaller differences are noise. Exit status 2: a file cannot be read or has the wrong format.
"""

import argparse
import datetime
import json
import os
import sys

TOLERANCE = 0.03  # smaller differences are noise
KEY = ("shape", "gpu", "kernel")
DEFAULT_LEADERBOARD = os.path.join(os.path.dirname(os.path.abspath(__file__)), "leaderboard.json")


class BadFile(Exception):
    """A file cannot be read or has the wrong format."""


def key_of(entry):
    """(shape, gpu, kernel) of a result or a record."""
    return tuple(entry[name] for name in KEY)


def is_entry(entry):
    """Whether a value has KEY as strings and a p50_us that is a positive, finite number."""
    if not isinstance(entry, dict) or not all(isinstance(entry.get(name), str) for name in KEY):
        return False
    p50 = entry.get("p50_us")
    return isinstance(p50, (int, float)) and not isinstance(p50, bool) and 0 < p50 < float("inf")


def parse(text, name):
    """The entries in `text`, the content of file `name`. Raises BadFile."""
    try:
        entries = json.loads(text)
    except ValueError as error:
        raise BadFile(f"{name} is not JSON: {error}") from error
    if not isinstance(entries, list):
        raise BadFile(f"{name} is not a list")
    for i, entry in enumerate(entries):
        if not is_entry(entry):
            raise BadFile(f"{name}: entry {i} lacks {', '.join(KEY)} or a positive p50_us")
    keys = [key_of(entry) for entry in entries]
    for key in keys:
        if keys.count(key) > 1:
            raise BadFile(f"{name} has {', '.join(key)} twice")
    return entries


def judge(results, records):
    """Compares results with their records.

    Returns {"slower", "within", "faster", "new"}: lists of (result, record). The record of a new
    result is None.
    """
    known = {key_of(record): record for record in records}
    verdicts = {"slower": [], "within": [], "faster": [], "new": []}
    for result in results:
        record = known.get(key_of(result))
        if record is None:
            verdict = "new"
        elif result["p50_us"] > record["p50_us"] * (1 + TOLERANCE):
            verdict = "slower"
        elif result["p50_us"] < record["p50_us"] * (1 - TOLERANCE):
            verdict = "faster"
        else:
            verdict = "within"
        verdicts[verdict].append((result, record))
    return verdicts


def updated(records, verdicts, date, commit=None):
    """The leaderboard with new and faster results recorded, sorted by key."""
    board = {key_of(record): record for record in records}
    for result, _ in verdicts["new"] + verdicts["faster"]:
        record = {name: result[name] for name in (*KEY, "p50_us")}
        record["date"] = date
        if commit is not None:
            record["commit"] = commit
        board[key_of(result)] = record
    return [board[key] for key in sorted(board)]


def describe(verdict, result, record):
    """One line about a result."""
    line = f"{verdict:7} {result['shape']:20} {result['kernel']:28} {result['p50_us']:9.2f} us"
    if record is None:
        return f"{line}, no record on {result['gpu']}"
    change = result["p50_us"] / record["p50_us"] - 1
    return f"{line}, record {record['p50_us']:.2f} us ({change:+.1%}) on {result['gpu']}"


def read(path):
    """The entries of a file. Raises BadFile."""
    try:
        with open(path, encoding="utf-8") as file:
            return parse(file.read(), path)
    except (OSError, UnicodeDecodeError) as error:
        raise BadFile(f"cannot read {path}: {error}") from error


def write(path, records):
    """Replaces the file atomically."""
    with open(path + ".new", "w", encoding="utf-8") as file:
        json.dump(records, file, indent=1)
        file.write("\n")
    os.replace(path + ".new", path)


def main(arguments=None):
    parser = argparse.ArgumentParser(description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("results")
    parser.add_argument("--leaderboard", default=DEFAULT_LEADERBOARD)
    parser.add_argument("--record", action="store_true", help="record new and faster results")
    parser.add_argument("--commit", help="the commit that was measured, for the record")
    args = parser.parse_args(arguments)
    try:
        results, records = read(args.results), read(args.leaderboard)
    except BadFile as error:
        print(f"gate.py: {error}", file=sys.stderr)
        return 2
    verdicts = judge(results, records)
    for verdict, pairs in verdicts.items():
        for result, record in pairs:
            print(describe(verdict, result, record))
    print(", ".join(f"{len(pairs)} {verdict}" for verdict, pairs in verdicts.items()))
    if args.record:
        date = datetime.date.today().isoformat()
        write(args.leaderboard, updated(records, verdicts, date, args.commit))
    return 1 if verdicts["slower"] else 0


if __name__ == "__main__":
    sys.exit(main())
