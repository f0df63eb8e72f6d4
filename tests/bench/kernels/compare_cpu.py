#!/usr/bin/env python3
"""Compares the CPU kernel with PyTorch and OpenBLAS in one interleaved run.

    pip install torch          # PyTorch's scaled_dot_product_attention in float32
    apt install libopenblas0   # the machine's measured float32 SGEMM rate
    tests/bench/kernels/compare_cpu.py build/tests/bench/kernels/libflashcore_cpu_bench_c.so

The contenders run in turn, for many rounds. A round of a contender is a pause, in which spinning
threads of the previous one fall asleep, one warm-up call and a few timed calls. Reported: the
median and the minimum over all timed calls, and ratios of both. Our kernel reads and writes float16
and sums in float32. PyTorch computes the same values in float32.
"""

import argparse
import ctypes
import os
import statistics
import sys
import time

import cpu_libraries
import record_file
import run_info
import torch

PAUSE_SECONDS = 0.03
SHAPES = [(1, 8, 512, 64), (1, 8, 2048, 128)]  # batch, heads, rows, head_dim
SGEMM_N = 1536


def name_of(shape):
    """The shape in the grammar of shape.h."""
    return "x".join(map(str, shape))


def pointer(tensor):
    return ctypes.cast(tensor.data_ptr(), ctypes.POINTER(ctypes.c_float))


class FlashCore:
    """One workload of the kernel library."""

    def __init__(self, library, shape, threads):
        self.library = library
        self.shape = shape
        self.handle = library.flashcore_bench_new(name_of(shape).encode(), threads)

    def inputs(self):
        tensors = [torch.empty(self.shape) for _ in range(3)]
        self.library.flashcore_bench_inputs(self.handle, *(pointer(t) for t in tensors))
        return tensors

    def output(self):
        tensor = torch.empty(self.shape)
        self.library.flashcore_bench_output(self.handle, pointer(tensor))
        return tensor

    def run(self):
        self.library.flashcore_bench_run(self.handle)


def sgemm(library, n):
    matrices = [torch.rand(n, n) for _ in range(3)]
    run = cpu_libraries.sgemm(library, n, *(m.data_ptr() for m in matrices))
    return lambda: run() or matrices  # which keeps their memory


def check(ours, expected, shape):
    """The correctness gate: a wrong kernel is not timed."""
    ours.run()
    error = (ours.output() - expected).abs().max().item()
    if not error < 2e-3:
        sys.exit(f"{shape}: largest difference to PyTorch is {error}")


def contenders(library, openblas, threads):
    """Name -> (callable, floating point operations)."""
    result = {"openblas_sgemm": (sgemm(openblas, SGEMM_N), 2 * SGEMM_N**3)}
    for shape in SHAPES:
        batch, heads, rows, head_dim = shape
        ours = FlashCore(library, shape, threads)
        query, key, value = ours.inputs()

        def theirs(q=query, k=key, v=value):
            return torch.nn.functional.scaled_dot_product_attention(q, k, v)

        check(ours, theirs(), shape)
        name = name_of(shape)
        flops = 4 * batch * heads * rows * rows * head_dim
        result[f"flashcore_f16_{name}"] = (ours.run, flops)
        result[f"torch_f32_{name}"] = (theirs, flops)
    return result


def measure(runs, seconds):
    """Interleaves all contenders for about `seconds`; returns name -> list of seconds per call."""
    samples = {name: [] for name in runs}
    end = time.monotonic() + seconds
    order = list(runs)
    while time.monotonic() < end:
        order.reverse()  # so that a contender does not always follow the same one
        for name in order:
            run, flops = runs[name]
            calls = max(1, min(8, int(2e10 / flops)))
            time.sleep(PAUSE_SECONDS)
            run()
            for _ in range(calls):
                start = time.perf_counter()
                run()
                samples[name].append(time.perf_counter() - start)
    return samples


def summarise(runs, samples, threads):
    result = {"threads": threads, "contenders": {}, "ratios": {}}
    for name, times in samples.items():
        flops = runs[name][1]
        median, least = statistics.median(times), min(times)
        result["contenders"][name] = {
            "calls": len(times), "median_seconds": median, "minimum_seconds": least,
            "median_gflops": flops / median / 1e9, "best_gflops": flops / least / 1e9}
    stats = result["contenders"]
    for shape in SHAPES:
        name = name_of(shape)
        ours, theirs = stats[f"flashcore_f16_{name}"], stats[f"torch_f32_{name}"]
        blas = stats["openblas_sgemm"]
        result["ratios"][name] = {
            "speed_over_torch_median": theirs["median_seconds"] / ours["median_seconds"],
            "speed_over_torch_minimum": theirs["minimum_seconds"] / ours["minimum_seconds"],
            "fraction_of_sgemm_median": ours["median_gflops"] / blas["median_gflops"],
            "fraction_of_sgemm_minimum": ours["best_gflops"] / blas["best_gflops"]}
    return result


def print_table(result):
    print(f"\nthreads: {result['threads']}")
    print(f"{'contender':34} {'calls':>6} {'median ms':>10} {'min ms':>9} "
          f"{'GFLOP/s (median, best)':>24}")
    for name, s in sorted(result["contenders"].items()):
        print(f"{name:34} {s['calls']:6} {s['median_seconds'] * 1e3:10.3f} "
              f"{s['minimum_seconds'] * 1e3:9.3f} {s['median_gflops']:13.1f} "
              f"{s['best_gflops']:10.1f}")
    for name, r in result["ratios"].items():
        print(f"{name}: {r['speed_over_torch_median']:.2f}x PyTorch float32 "
              f"(by minima {r['speed_over_torch_minimum']:.2f}x), "
              f"{r['fraction_of_sgemm_median']:.0%} of OpenBLAS SGEMM "
              f"(by minima {r['fraction_of_sgemm_minimum']:.0%})")


def main():
    parser = argparse.ArgumentParser(description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("library", help="libflashcore_cpu_bench_c.so")
    parser.add_argument("--threads", type=int, nargs="+", default=[1, os.cpu_count()])
    parser.add_argument("--seconds", type=float, default=30, help="per number of threads")
    parser.add_argument("--json", help="write the results to this file")
    args = parser.parse_args()

    try:
        library = cpu_libraries.load_flashcore(args.library)
        cpu_libraries.load_openblas(1)
    except cpu_libraries.Missing as error:
        sys.exit(f"compare_cpu.py: {error}")
    report = {"cpu": run_info.cpu()["model"], "torch": torch.__version__, "sgemm_n": SGEMM_N,
              "simd_target": library.flashcore_bench_simd_target().decode(), "runs": []}
    print(f"{report['cpu']}, {report['simd_target']}, PyTorch {report['torch']}")
    for threads in dict.fromkeys(args.threads):
        torch.set_num_threads(threads)
        openblas = cpu_libraries.load_openblas(threads)
        report["openblas"] = openblas.openblas_get_config().decode()
        runs = contenders(library, openblas, threads)
        result = summarise(runs, measure(runs, args.seconds), threads)
        print_table(result)
        report["runs"].append(result)
    if args.json:
        record_file.write(args.json, report)


if __name__ == "__main__":
    main()
