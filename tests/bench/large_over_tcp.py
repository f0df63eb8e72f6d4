#!/usr/bin/env python3
"""Large tensors over TCP and a Unix socket, on one connection or several: does more than one pay?

    tests/bench/large_over_tcp.py --server=FILE --bench=FILE [--megabytes=160] [--rounds=9]
        [--workers=1,2,4,8] [-- FLAGS OF THE SERVER]

The files are flashcore-server and flashcore-large-tensors-bench. Each row sends as many megabytes in all,
with as many threads as workers: on a connection each, or on one that they share. "load" is LoadSequence,
"attend" an Attend with inline K/V. Prints medians in milliseconds: of a round, and its best; the CPU time of
both sides in a round, that of the server for both kinds together; and of the last Attend of one worker the
server's phases "receive", which copies the message to staging memory, and "kernel".
"""

import argparse
import contextlib
import json
import os
import pathlib
import subprocess
import tempfile
import time

MIB = 1 << 20


@contextlib.contextmanager
def running(program, flags, folder):
    """The server's process and its addresses."""
    log = pathlib.Path(folder, "log")
    with log.open("wb") as out:
        process = subprocess.Popen([program, "--listen=127.0.0.1:0", f"--listen=unix:{folder}/socket",
                                    "--metrics_listen=127.0.0.1:0", "--log_format=json", *flags],
                                   stdout=out, stderr=out)
    try:
        while True:
            text = log.read_text(encoding="utf-8")
            lines = text[:text.rfind("\n") + 1].splitlines()
            records = [json.loads(line) for line in lines if line.startswith("{")]
            serving = [record for record in records if record["msg"] == "serving"]
            if serving:
                break
            if process.poll() is not None:
                raise SystemExit(text)
            time.sleep(0.05)
        yield process, serving[0]["addresses"].split(",")
    finally:
        process.kill()
        process.wait()


def cpu_ms(process):
    fields = pathlib.Path(f"/proc/{process.pid}/stat").read_text(encoding="utf-8").rpartition(") ")[2].split()
    return 1e3 * (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def measure(options, process, target, workers, share):
    """A row for each kind, with the CPU time of the server."""
    before = cpu_ms(process)
    done = subprocess.run([options.bench, f"--target={target}", f"--workers={workers}",
                           f"--share={str(share).lower()}", f"--megabytes={options.megabytes}",
                           f"--rounds={options.rounds}"], check=True, stdout=subprocess.PIPE, text=True)
    server_cpu_ms = (cpu_ms(process) - before) / (options.rounds + 1)
    return [{**json.loads(line), "server_cpu_ms": server_cpu_ms} for line in done.stdout.splitlines()]


def main():
    parser = argparse.ArgumentParser(usage=__doc__)
    parser.add_argument("--server", required=True)
    parser.add_argument("--bench", required=True)
    parser.add_argument("--megabytes", type=int, default=160)
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--workers", default="1,2,4,8")
    parser.add_argument("flags", nargs="*")
    options = parser.parse_args()
    flags = ["--client_kv_bytes=0", f"--kv_memory_bytes={4 * options.megabytes * MIB}",
             f"--staging_memory_bytes={2048 * MIB}", f"--client_staging_bytes={1024 * MIB}",
             f"--max_message_bytes={256 * MIB}", f"--transport_memory_bytes={2048 * MIB}", *options.flags]
    columns = ("ms", "best_ms", "client_cpu_ms", "server_cpu_ms", "receive_ms", "kernel_ms")
    print(f"{os.cpu_count()} cores, {options.megabytes} MB a round, median of {options.rounds}")
    print(f"{'':6}{'kind':8}{'workers':>8}{'connections':>12}{'MB/s':>7}{'ratio':>7}"
          + "".join(f"{column:>14}" for column in columns))
    with tempfile.TemporaryDirectory() as folder, \
            running(options.server, flags, folder) as (process, addresses):
        for target in addresses:
            alone = {}
            for workers in map(int, options.workers.split(",")):
                for share in [False, True] if workers > 1 else [False]:
                    for row in measure(options, process, target, workers, share):
                        ratio = row["mb_per_s"] / alone.setdefault(row["kind"], row["mb_per_s"])
                        print(f"{'unix' if target.startswith('unix') else 'tcp':6}{row['kind']:8}{workers:8}"
                              f"{1 if share else workers:12}{row['mb_per_s']:7.0f}{ratio:7.2f}"
                              + "".join(f"{row[column]:14.1f}" for column in columns), flush=True)


if __name__ == "__main__":
    main()
