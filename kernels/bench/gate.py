#!/usr/bin/env python3
"""Holds results against the best ones on record; fails if one is slower.

    kernels/bench/gate.py RESULTS.json [--leaderboard FILE] [--record] [--commit HASH]

RESULTS.json is what flashcore-kernel-bench or compare_torch.py wrote. Per shape, GPU and kernel the
leaderboard has the best p50. A result more than 3% above it fails (exit status 1); with --record,
one more than 3% below it replaces it, and one that has no record becomes it. In between is noise.
Exit status 2: a file cannot be read or is not what it should be.
"""

import argparse
import datetime
import json
import os
import sys

TOLERANCE = 0.03  # smaller differences are taken for noise
KEY = ("shape", "gpu", "kernel")
DEFAULT_LEADERBOARD = os.path.join(os.path.dirname(os.path.abspath(__file__)), "leaderboard.json")


class BadFile(Exception):
    """What is wrong with a file."""


def key_of(entry):
    """(shape, gpu, kernel) of a result or a record."""
    return tuple(entry[name] for name in KEY)


def is_entry(entry):
    """Whether a value from a file has a key and a p50_us that is a positive, finite number."""
    if not isinstance(entry, dict) or not all(isinstance(entry.get(name), str) for name in KEY):
        return False
    p50 = entry.get("p50_us")
    return isinstance(p50, (int, float)) and not isinstance(p50, bool) and 0 < p50 < float("inf")


def parse(text, name):
    """The list of entries that `text`, the content of file `name`, holds. Raises BadFile."""
    try:
        entries = json.loads(text)
    except ValueError as error:
        raise BadFile(f"{name} is no JSON: {error}") from error
    if not isinstance(entries, list):
        raise BadFile(f"{name} is no list")
    for i, entry in enumerate(entries):
        if not is_entry(entry):
            raise BadFile(f"{name}: entry {i} lacks {', '.join(KEY)} or a positive p50_us")
    keys = [key_of(entry) for entry in entries]
    for key in keys:
        if keys.count(key) > 1:
            raise BadFile(f"{name} has {', '.join(key)} twice")
    return entries


def judge(results, records):
    """Sorts results by how they compare with their records.

    Returns {"slower", "within", "faster", "new"}: lists of (result, record), where the record of a
    new one is None.
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
    """The leaderboard with what is new or faster recorded, in order of key."""
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
    """Replaces the file, whole or not at all."""
    with open(path + ".new", "w", encoding="utf-8") as file:
        json.dump(records, file, indent=1)
        file.write("\n")
    os.replace(path + ".new", path)


def main(arguments=None):
    parser = argparse.ArgumentParser(description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("results")
    parser.add_argument("--leaderboard", default=DEFAULT_LEADERBOARD)
    parser.add_argument("--record", action="store_true", help="record what is new or faster")
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
