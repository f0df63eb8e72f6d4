#!/usr/bin/env python3
"""Fails if the CPU kernels or the server are slower than on record, on a machine shared with others.

    tests/bench/perf_gate.py [BUILD]                  compares with results/perf_gate.json
    tests/bench/perf_gate.py [BUILD] --record [FILE]  puts the ratios of this CPU on record

BUILD is a release build, by default build/. Needs Debian's libopenblas0.

Each figure is a ratio of two times from one run, in which both sides take turns, call by call or
every 100 ms, so that what slows the machine slows both:

    kernel_d64, kernel_d128  a CPU kernel on one thread to OpenBLAS SGEMM, for as many floating-point
                             operations
    kernel_decode            the same to OpenBLAS SGEMV, for as many bytes of K/V, which fit an L2
    small_to_bare_echo       latency of an Attend with little to compute to that of a bare gRPC echo
    transport_to_bare_echo   latency of an Attend of 512 KiB, outside the kernel, to that of the echo

A ratio is measured REPEATS times. The median counts, and it may be LIMIT times that on record. A failure is
measured again, ATTEMPTS times in all, and passes with the lowest median: a burst of other work on the machine
is over by then, a slower program stays slower.

The ratios depend on the width of the CPU's vectors and on OpenBLAS's code for it, so each kind of CPU
(SIMD target and OpenBLAS core) has a record of its own. Without one nothing is judged.
Exit status: 0 passed, 1 slower, 2 nothing was measured, 77 no record for this kind of CPU.
"""

import argparse
import ctypes
import functools
import json
import pathlib
import statistics
import sys
import time

import cells

ROOT = pathlib.Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "tests/bench/kernels"))
import cpu_libraries  # noqa: E402
import record_file  # noqa: E402
import run_info  # noqa: E402

RECORDS = ROOT / "tests" / "bench" / "results" / "perf_gate.json"
LIMIT = 1.3
REPEATS = 5
ATTEMPTS = 3

# Per repeat. A call takes at most 5 ms: shorter than what the scheduler lets run at a stretch.
KERNEL_SECONDS = 0.6
SERVER_ROUNDS = 6
ROUND_SECONDS = 0.1
SGEMM_N = 384
SGEMV_N = 256
KERNEL_DECODE_BYTES = 2 * 2 * 256 * 128 * 2
# Name -> (shape of the kernel, its floating-point operations; None: compare bytes of K/V).
KERNELS = {"kernel_d64": ("1x2x512x64", 4 * 2 * 512 * 512 * 64),
           "kernel_d128": ("1x1x512x128", 4 * 512 * 512 * 128),
           "kernel_decode": ("1x2x256x128,q=1", None)}
# Name -> (shape of the requests, the percentiles that are divided by those of an echo).
SERVER = {"small_to_bare_echo": ("1x8x16x64", "latency_us"),
          "transport_to_bare_echo": ("1x8x128x64", "outside_kernel_us")}


def fastest(calls, seconds):
    """Runs the calls in turn for `seconds`; the fewest seconds that each took."""
    best = [float("inf")] * len(calls)
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        for i, call in enumerate(calls):
            start = time.perf_counter()
            call()
            best[i] = min(best[i], time.perf_counter() - start)
    return best


def floats(count):
    """Memory for `count` floats, none of them zero."""
    return (ctypes.c_float * count)(*([0.5] * count))


class Kernels:
    """The CPU kernels beside OpenBLAS, each on one thread."""

    def __init__(self, build):
        self.library = cpu_libraries.load_flashcore(
            str(build / "tests/bench/kernels/libflashcore_cpu_bench_c.so"))
        self.openblas = cpu_libraries.load_openblas(1)

    def cpu_kind(self):
        """SIMD target and OpenBLAS core: "AVX2, Zen"."""
        return (f"{self.library.flashcore_bench_simd_target().decode()}, "
                f"{self.openblas.openblas_get_corename().decode()}")

    def blas(self):
        return self.openblas.openblas_get_config().decode()

    def measure(self, name):
        """One repeat. Its memory is new, because the caches treat some pages better than others."""
        shape, flop = KERNELS[name]
        workload = self.library.flashcore_bench_new(shape.encode(), 1)
        if flop is None:
            memory = [floats(SGEMV_N**2), floats(SGEMV_N), floats(SGEMV_N)]
            blas = cpu_libraries.sgemv(self.openblas, SGEMV_N, *memory)
            scale = 4 * SGEMV_N**2 / KERNEL_DECODE_BYTES
        else:
            memory = [floats(SGEMM_N**2) for _ in range(3)]
            blas = cpu_libraries.sgemm(self.openblas, SGEMM_N, *memory)
            scale = 2 * SGEMM_N**3 / flop
        kernel_seconds, blas_seconds = fastest(
            [lambda: self.library.flashcore_bench_run(workload), blas], KERNEL_SECONDS)
        self.library.flashcore_bench_free(workload)
        return kernel_seconds / blas_seconds * scale


def measure_attend(build, target, name):
    """One repeat on the server at `target`."""
    shape, latency = SERVER[name]
    command = [build / "client" / "cli" / "flashcore", "bench", "--json", "--rounds_from_stdin",
               f"--target={target}", f"--shape={shape}", "--warmup=20ms",
               f"--duration={ROUND_SECONDS}s"]
    echo = build / "tests" / "bench" / "flashcore-grpc-api-bench"
    reports, error = cells.run_rounds({name: command}, SERVER_ROUNDS, echo)[name]
    if error:
        raise cells.Failure(f"flashcore bench fails: {error}")
    return statistics.median(report[latency]["p50"] / report["echo_us"]["p50"] for report in reports)


def measured(measure, names):
    """The ratios of each name, REPEATS times in turn."""
    ratios = {name: [] for name in names}
    for _ in range(REPEATS):
        for name in names:
            ratios[name].append(measure(name))
    return ratios


def is_slower(ratios, recorded):
    """Whether the median of `ratios` is beyond LIMIT times the median on record."""
    return statistics.median(ratios) > LIMIT * statistics.median(recorded)


def measure_and_judge(measure, names, recorded):
    """The ratios of each name with the lowest median, and the names of those that are slower than on
    record each time. A name without a record is measured once."""
    best, slower = {}, list(names)
    for _ in range(ATTEMPTS):
        for name, ratios in measured(measure, slower).items():
            if name not in best or statistics.median(ratios) < statistics.median(best[name]):
                best[name] = ratios
        slower = [name for name in slower
                  if name in recorded and is_slower(best[name], recorded[name])]
        if not slower:
            break
    return best, slower


def line(name, ratios, recorded):
    """One line of the report."""
    text = (f"{name:20} {statistics.median(ratios):6.3f}, {min(ratios):.3f} to {max(ratios):.3f} "
            f"in {len(ratios)} repeats")
    if recorded is None:
        return f"{text}; not compared"
    change = statistics.median(ratios) / statistics.median(recorded)
    verdict = "SLOWER" if is_slower(ratios, recorded) else "ok"
    return f"{text}; {change:.2f}x of the record's {statistics.median(recorded):.3f}: {verdict}"


def measure_all(kernels, build, recorded):
    """All ratios of this machine, and the names of those that are slower than `recorded`."""
    ratios, slower = measure_and_judge(kernels.measure, KERNELS, recorded)
    command = [build / "server" / "flashcore-server", "--device=cpu", "--cpu_threads=1",
               "--metrics_listen=127.0.0.1:0", "--log_format=json"]
    with cells.Server("flashcore", command) as server:
        of_server, slow_server = measure_and_judge(
            functools.partial(measure_attend, build, server.targets["tcp"]), SERVER, recorded)
    return {**ratios, **of_server}, slower + slow_server


def read_records(path):
    """{kind of CPU: record}."""
    if not path.exists():
        return {}
    records = json.loads(path.read_text(encoding="utf-8"))["records"]
    return {record["cpu_kind"]: record for record in records}


def write_record(path, kernels, ratios):
    """Puts the ratios in the place of what the file has for this kind of CPU."""
    kind = kernels.cpu_kind()
    records = {**read_records(path), kind: {
        "run": run_info.run_info(), "cpu_kind": kind, "openblas": kernels.blas(),
        "ratios": {name: [round(value, 4) for value in values] for name, values in ratios.items()}}}
    record_file.write(path, {"records": [records[kind] for kind in sorted(records)]})
    print(f"recorded for {kind} in {path}")


def gate(build, record_to):
    """Returns the exit status."""
    kernels = Kernels(build)
    kind = kernels.cpu_kind()
    print(f"{run_info.cpu()['model']}, {kind}; {kernels.blas()}")
    record = None if record_to else read_records(RECORDS).get(kind)
    recorded = {} if record is None else record["ratios"]
    if record is not None:
        print(f"on record: {record['run']['cpu']['model']}, {record['run']['date']}, "
              f"commit {record['run']['commit']}")
    ratios, slower = measure_all(kernels, build, recorded)
    for name, values in ratios.items():
        print(line(name, values, recorded.get(name)))
    if record_to:
        write_record(record_to, kernels, ratios)
    elif record is None:
        print(f"no record for {kind}")
        return 77
    return 1 if slower else 0


def main():
    parser = argparse.ArgumentParser(description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("build", nargs="?", type=pathlib.Path, default=ROOT / "build")
    parser.add_argument("--record", type=pathlib.Path, metavar="FILE", nargs="?", const=RECORDS,
                        help="write the ratios to this file instead of comparing them; "
                        "by default the file with which they are compared")
    args = parser.parse_args()
    try:
        return gate(args.build.resolve(), args.record)
    except (cells.Failure, cpu_libraries.Missing, OSError) as error:
        print(f"perf_gate.py: {error}", file=sys.stderr)
        return 2


if __name__ == "__main__":
    sys.exit(main())
