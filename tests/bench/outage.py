#!/usr/bin/env python3
"""How long a client stays out after its server is back: for each API and transport, seconds from the server's
record "serving" to the first call that succeeds. Calls begin while there is no server.

  outage.py [--runs 5] [--away 8]

It needs the environment of the end-to-end tests: `ctest --test-dir build -R e2e.outage_test -V` shows it."""

import argparse
import asyncio
import ctypes
import datetime
import pathlib
import sys
import tempfile
import threading
import time

sys.path.insert(0, str(pathlib.Path(__file__).parents[1] / "e2e"))

import flashcore  # noqa: E402
from flashcore import _c_library, aio  # noqa: E402

import harness  # noqa: E402
from outage_test import Caller  # noqa: E402

PATIENCE = 60
CPP = ("info", "attend", "async", "stream", "create", "manage", "append", "health")


def until_ok(call):
    """Repeats a call that fails with UNAVAILABLE, as an application does. Returns when it succeeded."""
    while not call():
        time.sleep(0.05)
    return time.time()


def cpp(target, name, *options):
    """Prepares a client, which has been connected; returns what measures it."""
    caller = Caller(target, *options)
    caller.call("create")

    def measure():
        # After a restart the sequence is gone, which is an answer.
        return until_ok(lambda: caller.call(name, PATIENCE) in ("OK", "NOT_FOUND"))
    return measure, lambda: caller.__exit__()


def python(target, **options):
    client = flashcore.connect(target, timeout=PATIENCE, **options)
    client.server_info()

    def call():
        try:
            return client.server_info()
        except flashcore.Unavailable:
            return None
    return lambda: until_ok(call), client.close


def python_aio(target, **options):
    async def run(ready):
        async with aio.connect(target, timeout=PATIENCE, **options) as client:
            await client.server_info()
            ready.wait()
            while True:
                try:
                    await client.server_info()
                    return time.time()
                except flashcore.Unavailable:
                    await asyncio.sleep(0.05)
    ready, result = threading.Event(), []
    thread = threading.Thread(target=lambda: result.append(asyncio.run(run(ready))))
    thread.start()

    def measure():
        ready.set()
        thread.join()
        return result[0]
    return measure, ready.set


def c_library(target):
    library = _c_library.load()

    def call():
        handle = ctypes.c_void_p()
        options = _c_library.Options(64, 16384, int(PATIENCE * 1e9), 0)
        if library.connect(target.encode(), b"outage", options, ctypes.byref(handle)):
            return False
        library.close(handle)
        return True
    return lambda: until_ok(call), lambda: None


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--runs", type=int, default=5)
    parser.add_argument("--away", type=float, default=8.0)
    arguments = parser.parse_args()
    once = flashcore.Retry(attempts=1)
    with tempfile.TemporaryDirectory() as folder:
        port = harness.free_port()
        targets = dict(tcp=f"127.0.0.1:{port}", unix=f"unix:{folder}/grpc", local=f"local:{folder}/local")

        def serve():
            return harness.Server(f"--listen=127.0.0.1:{port}", f"--listen=unix:{folder}/grpc",
                                  f"--local_listen={folder}/local")

        results = {}
        for _ in range(arguments.runs):
            with serve():
                time.sleep(0.5)
                ways = {}
                for transport, target in targets.items():
                    for name in CPP:
                        ways[f"C++ {name}", transport] = cpp(target, name)
                    ways["C++ attend, no retries", transport] = cpp(target, "attend", "once")
                    ways["C++ create, lease", transport] = cpp(target, "create", "lease")
                    ways["Python", transport] = python(target)
                    ways["Python, no retries", transport] = python(target, retry=once)
                    ways["Python asyncio", transport] = python_aio(target)
                ways["C library", "local"] = c_library(targets["local"])
            threads, ends = [], {}
            for way, (measure, _) in ways.items():
                threads.append(threading.Thread(target=lambda way=way, measure=measure:
                                                ends.update({way: measure()})))
                threads[-1].start()
            time.sleep(arguments.away)
            with serve() as server:
                back = datetime.datetime.fromisoformat(server.wait_for_record("serving")["ts"]).timestamp()
                for thread in threads:
                    thread.join()
                for way, (_, close) in ways.items():
                    results.setdefault(way, []).append(ends[way] - back)
                    close()
        print("| API | transport | s from serving to success, by run | most |\n| --- | --- | --- | --- |")
        for (api, transport), seconds in sorted(results.items()):
            print(f"| {api} | {transport} | {', '.join(f'{s:.2f}' for s in seconds)} | {max(seconds):.2f} |")
        print(f"most of all: {max(max(seconds) for seconds in results.values()):.2f} s")


if __name__ == "__main__":
    main()
