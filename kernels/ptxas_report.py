#!/usr/bin/env python3
"""Prints what every kernel needs of an SM, as ptxas reports it; fails on spills and local memory.

  ptxas_report.py [--nvcc NVCC] [--arch sm_89] [--include DIR] FILE.cu...
"""

import argparse
import concurrent.futures
import os
import re
import subprocess
import sys
import tempfile

FIELDS = {
    "stack": r"(\d+) bytes stack frame",
    "spill_stores": r"(\d+) bytes spill stores",
    "spill_loads": r"(\d+) bytes spill loads",
    "registers": r"Used (\d+) registers",
    "static_shared": r"(\d+) bytes smem",
}


def report_of(nvcc, arch, include, source):
    """ptxas' words about one file."""
    with tempfile.TemporaryDirectory() as folder:
        result = subprocess.run(
            [nvcc, "-std=c++17", "-O3", f"-I{include}", f"-arch={arch}", "-cubin", "-Xptxas=-v",
             "-o", os.path.join(folder, "cubin"), source],
            stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=False)
    if result.returncode != 0:
        sys.exit(f"{source} does not compile:\n{result.stdout}")
    return result.stdout


def kernels_in(report):
    """Yields (mangled name, {field: number}) of each kernel."""
    for part in report.split("Compiling entry function '")[1:]:
        numbers = {}
        for field, pattern in FIELDS.items():
            match = re.search(pattern, part)
            numbers[field] = int(match.group(1)) if match else 0
        yield part.split("'", 1)[0], numbers


def readable(name):
    """The kernel's name and its template's numbers: AttendKernel<half, 64, 16>."""
    kernel = re.search(r"\d([A-Z][A-Za-z]*Kernel)", name)
    words = [kernel.group(1)] if kernel else [name]
    words += ["bf16"] if "bfloat16" in name else ["f16"] if "half" in name else []
    words += re.findall(r"Li(\d+)E", name)
    return " ".join(words)


def main():
    parser = argparse.ArgumentParser(description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--nvcc", default="nvcc")
    parser.add_argument("--arch", default="sm_89")
    parser.add_argument("--include", default=".")
    parser.add_argument("sources", nargs="+", metavar="FILE.cu")
    args = parser.parse_args()

    with concurrent.futures.ThreadPoolExecutor(os.cpu_count()) as pool:
        reports = list(pool.map(
            lambda source: report_of(args.nvcc, args.arch, args.include, source), args.sources))
    rows = [row for report in reports for row in kernels_in(report)]
    if not rows:
        sys.exit("ptxas reported no kernel")

    print(f"{'kernel, ' + args.arch:32}" + "".join(f"{field:>14}" for field in FIELDS))
    failures = 0
    for name, numbers in rows:
        bad = numbers["stack"] + numbers["spill_stores"] + numbers["spill_loads"] > 0
        failures += bad
        print(f"{readable(name):32}" + "".join(f"{numbers[field]:14}" for field in FIELDS) +
              ("  SPILLS" if bad else ""))
    if failures:
        sys.exit(f"{failures} of {len(rows)} kernels use local memory")
    print(f"no spills in {len(rows)} kernels")


if __name__ == "__main__":
    main()
