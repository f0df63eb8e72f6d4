#!/usr/bin/env python3
"""The inputs of the fuzzers: seeds, which scripts make, and what fuzzing found, packed in
corpus/NAME.txt with one input a line in base64.

    inputs.py unpack NAME FOLDER   writes all inputs of NAME_fuzzer into FOLDER, one file each
    inputs.py pack NAME FOLDER     makes corpus/NAME.txt of the files in FOLDER that are no seeds

The seeds of codec and local need the classes that a build generates for the end-to-end tests, in
build-asan/tests/e2e/generated, on PYTHONPATH.
"""
import base64
import hashlib
import importlib
import pathlib
import sys

CORPUS = pathlib.Path(__file__).parent / "corpus"
NAMES = ("codec", "flags", "forwarded_client", "local", "log", "npy", "token_file")


def seeds(name: str) -> dict:
    """The seeds of one fuzzer by their names: bytes."""
    if name in ("codec", "local"):
        return importlib.import_module(f"{name}_seeds").seeds()
    return getattr(importlib.import_module("seeds"), name)()


def unpack(name: str, folder: pathlib.Path) -> None:
    folder.mkdir(parents=True)
    for seed, data in seeds(name).items():
        (folder / seed).write_bytes(data)
    for line in (CORPUS / f"{name}.txt").read_text().splitlines():
        data = base64.b64decode(line, validate=True)
        (folder / hashlib.sha1(data).hexdigest()).write_bytes(data)


def pack(name: str, folder: pathlib.Path) -> None:
    known = set(seeds(name).values())
    found = {path.read_bytes() for path in folder.iterdir()} - known
    lines = [base64.b64encode(data).decode() + "\n" for data in sorted(found)]
    CORPUS.mkdir(exist_ok=True)
    (CORPUS / f"{name}.txt").write_text("".join(lines))


def main() -> None:
    actions = {"unpack": unpack, "pack": pack}
    if len(sys.argv) != 4 or sys.argv[1] not in actions or sys.argv[2] not in NAMES:
        sys.exit(__doc__)
    actions[sys.argv[1]](sys.argv[2], pathlib.Path(sys.argv[3]))


if __name__ == "__main__":
    main()
