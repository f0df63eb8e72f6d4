#!/usr/bin/env python3
"""The cost of TLS: flashcore bench on a plaintext server and on one with TLS, in turns of one run.

    tests/bench/tls_cost.py BUILD [--rounds=5] [--seconds=3]

BUILD is the build folder. Prints the medians of the rounds as JSON: latencies in microseconds, CPU time of
server and client in microseconds per request, and the ratios.
"""

import argparse
import json
import os
import pathlib
import resource
import statistics
import sys
import tempfile

ROOT = pathlib.Path(__file__).resolve().parents[2]
KINDS = {"mission": ["--shape=1x8x512x64"],
         "decode": ["--mode=decode", "--shape=1x8x512x64", "--sequences=4"]}


def server_cpu(server):
    fields = pathlib.Path(f"/proc/{server.process.pid}/stat").read_text().rpartition(") ")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def client_cpu():
    usage = resource.getrusage(resource.RUSAGE_CHILDREN)
    return usage.ru_utime + usage.ru_stime


def measure(harness, server, flags):
    """One round: figures by name."""
    before = server_cpu(server), client_cpu()
    report = json.loads(harness.cli("bench", f"--target={server.target}", "--concurrency=1",
                                    "--warmup=200ms", "--json", *flags).stdout)
    return {"latency_p50_us": report["latency_us"]["p50"],
            "server_cpu_us": (server_cpu(server) - before[0]) * 1e6 / report["ok"],
            "client_cpu_us": (client_cpu() - before[1]) * 1e6 / report["ok"]}


def main():
    parser = argparse.ArgumentParser(usage=__doc__)
    parser.add_argument("build", type=pathlib.Path)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--seconds", type=int, default=3)
    options = parser.parse_args()
    os.environ["FLASHCORE_SERVER"] = str(options.build / "server/flashcore-server")
    os.environ["FLASHCORE_CLI"] = str(options.build / "client/cli/flashcore")
    sys.path[:0] = [str(ROOT / "tests/e2e"), str(options.build / "tests/e2e/generated")]
    import certificates
    import harness
    result = {}
    with tempfile.TemporaryDirectory() as folder:
        authority = certificates.Authority(folder)
        certificate, key = authority.issue("server")
        with harness.Server() as plaintext, harness.Server(
                f"--tls_cert_file={certificate}", f"--tls_key_file={key}") as tls:
            sides = {"plaintext": (plaintext, []), "tls": (tls, [f"--tls_ca_file={authority.file}"])}
            for kind, flags in KINDS.items():
                rounds = {side: [] for side in sides}
                for _ in range(options.rounds):
                    for side, (server, tls_flags) in sides.items():
                        rounds[side].append(measure(harness, server, [
                            *flags, *tls_flags, f"--duration={options.seconds}s"]))
                median = {side: {name: round(statistics.median(one[name] for one in all_), 1)
                                 for name in all_[0]} for side, all_ in rounds.items()}
                ratio = {name: round(median["tls"][name] / median["plaintext"][name], 2)
                         for name in median["tls"]}
                result[kind] = {**median, "ratio": ratio}
    print(json.dumps(result, indent=1))


if __name__ == "__main__":
    main()
