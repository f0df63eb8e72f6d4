#!/usr/bin/env python3
"""Holds kernel times against the published record; fails if one is slower.

    tests/bench/kernels/gate.py RESULTS.json [--record FILE]

RESULTS.json is the output of flashcore-kernel-bench or compare_torch.py. The record is the one that
the documents publish; it holds the results of one run of both (part "kernels"). A result is held
against the same tool's result of the same shape, GPU, kernel and L2 state. More than 3% slower
fails (exit status 1). Smaller differences are noise. Exit status 2: a file cannot be read or has the
wrong format.
"""

import argparse
import json
import pathlib
import sys

TOLERANCE = 0.03  # smaller differences are noise
KEY = ("tool", "gpu", "shape", "kernel", "l2")
RECORD = pathlib.Path(__file__).resolve().parents[1] / "results" / "gpu.json"


class BadFile(Exception):
    """A file cannot be read or has the wrong format."""


def key_of(result):
    """(tool, gpu, shape, kernel, l2) of a result."""
    return tuple(result[name] for name in KEY)


def is_result(result):
    """Whether a value has KEY as strings and a `us` that is a positive, finite number."""
    if not isinstance(result, dict) or not all(isinstance(result.get(n), str) for n in KEY):
        return False
    us = result.get("us")
    return isinstance(us, (int, float)) and not isinstance(us, bool) and 0 < us < float("inf")


def check(results, name):
    """`results`, the content of file `name`, if it is a list of results. Raises BadFile."""
    if not isinstance(results, list):
        raise BadFile(f"{name} is not a list")
    keys = set()
    for i, result in enumerate(results):
        if not is_result(result):
            raise BadFile(f"{name}: entry {i} lacks {', '.join(KEY)} or a positive us")
        if key_of(result) in keys:
            raise BadFile(f"{name} has {', '.join(key_of(result))} twice")
        keys.add(key_of(result))
    return results


def read(path):
    """The JSON value of a file. Raises BadFile."""
    try:
        return json.loads(pathlib.Path(path).read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError) as error:
        raise BadFile(f"cannot read {path}: {error}") from error
    except ValueError as error:
        raise BadFile(f"{path} is not JSON: {error}") from error


def read_record(path):
    """The kernels' results of a record. Raises BadFile."""
    record = read(path)
    if not isinstance(record, dict) or "kernels" not in record:
        raise BadFile(f"{path} has no part kernels")
    return check(record["kernels"].get("results"), f"{path}, kernels, results")


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
        elif result["us"] > record["us"] * (1 + TOLERANCE):
            verdict = "slower"
        elif result["us"] < record["us"] * (1 - TOLERANCE):
            verdict = "faster"
        else:
            verdict = "within"
        verdicts[verdict].append((result, record))
    return verdicts


def describe(verdict, result, record):
    """One line about a result."""
    line = (f"{verdict:7} {result['shape']:20} {result['l2']:4} {result['kernel']:28} "
            f"{result['us']:9.2f} us")
    if record is None:
        return f"{line}, no record on {result['gpu']}"
    change = result["us"] / record["us"] - 1
    return f"{line}, record {record['us']:.2f} us ({change:+.1%}) on {result['gpu']}"


def main():
    parser = argparse.ArgumentParser(description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("results")
    parser.add_argument("--record", default=RECORD)
    args = parser.parse_args()
    try:
        verdicts = judge(check(read(args.results), args.results), read_record(args.record))
    except BadFile as error:
        print(f"gate.py: {error}", file=sys.stderr)
        return 2
    for verdict, pairs in verdicts.items():
        for result, record in pairs:
            print(describe(verdict, result, record))
    print(", ".join(f"{len(pairs)} {verdict}" for verdict, pairs in verdicts.items()))
    return 1 if verdicts["slower"] else 0


if __name__ == "__main__":
    sys.exit(main())
