#!/usr/bin/env python3
"""Compiles every CUDA kernel and compares its use of an SM with the committed table.

  ptxas_report.py [--nvcc NVCC] [--force | --update]

Compiles nothing if the sources are those of the table, by their hash in it, unless --force asks for it.
Fails if a kernel of any architecture spills registers or uses local memory, or if the table of
sm_89 differs from ptxas_sm_89.md; --update accepts the difference. nvcc versions allocate registers
differently, so a difference from a table of another version is printed and does not fail.

Threads come from __launch_bounds__. The dynamic shared memory of a kernel is kSharedBytes of its
template argument Config, defined in config.cuh in the folder of its family.
"""

import argparse
import collections
import concurrent.futures
import difflib
import functools
import hashlib
import os
import pathlib
import re
import shutil
import subprocess
import sys
import tempfile

ROOT = pathlib.Path(__file__).resolve().parent.parent
TABLE = ROOT / "kernels" / "ptxas_sm_89.md"
TABLE_ARCH = "89"
ARCHS = ["80", TABLE_ARCH, "90a"]

# ptxas's report on one kernel. A function that is not inlined has its own lines.
RESOURCES = {
    "registers": r"Used (\d+) registers",
    "static_shared": r"(\d+) bytes smem",
    "stack": r"(\d+) bytes stack frame",
    "spill_stores": r"(\d+) bytes spill stores",
    "spill_loads": r"(\d+) bytes spill loads",
}
# Names of template arguments in the table.
ARGUMENTS = {"__nv_bfloat16": "bf16", "__half": "half", "__nv_fp8_e4m3": "e4m3",
             "(Arch)1": "sm80", "(Arch)2": "sm89"}
Kernel = collections.namedtuple("Kernel", ["name", "threads", "dynamic_shared", *RESOURCES])

# reports: {arch: {mangled kernel name: {resource: number}}}; ptx: for TABLE_ARCH.
File = collections.namedtuple("File", ["source", "reports", "ptx"])

# Limits of an SM of sm_89.
SM_SCHEDULERS = 4  # each has a quarter of the registers and warps
SM_REGISTERS = 65536
WARP_REGISTERS_UNIT = 256  # a warp's registers are rounded up to a multiple
SM_SHARED_BYTES = 100 * 1024
BLOCK_RESERVED_SHARED_BYTES = 1024
BLOCK_SHARED_UNIT = 128
SM_THREADS = 1536
SM_BLOCKS = 24


def archs_of(source):
    """The architectures that a file is compiled for: files in sm90/ need sm_90a."""
    return ["90a"] if "sm90" in source.parts else ARCHS


def run(command):
    """Returns the output of a command; exits if it fails."""
    done = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
                          check=False)
    if done.returncode != 0:
        sys.exit(f"{' '.join(map(str, command))}\n{done.stdout}")
    return done.stdout


def demangle(name):
    """Returns a kernel's name with template arguments and without parameters."""
    return run(["c++filt", "-p", name]).strip()


def compile_file(nvcc, source):
    """Returns the File of a source, compiled for all of its architectures."""
    with tempfile.TemporaryDirectory() as folder:
        report = run(
            [nvcc, "-std=c++17", "-O3", "-DNDEBUG", f"-I{ROOT}", "-Werror=all-warnings",
             "-Xptxas=-v", *(f"-gencode=arch=compute_{arch},code=sm_{arch}"
                             for arch in archs_of(source)),
             "-fatbin", "--keep", f"--keep-dir={folder}", "-o", f"{folder}/fatbin", source])
        ptx = "".join(path.read_text() for path in pathlib.Path(folder).glob(f"*_{TABLE_ARCH}.ptx"))
    reports = collections.defaultdict(dict)
    entries = re.split(r"Compiling entry function '(\w+)' for 'sm_(\w+)'", report)
    for name, arch, words in zip(entries[1::3], entries[2::3], entries[3::3]):
        reports[arch][name] = {resource: sum(map(int, re.findall(pattern, words)))
                               for resource, pattern in RESOURCES.items()}
    return File(source, reports, ptx)


def launches(nvcc, file):
    """Returns {mangled name: (threads a block, bytes of dynamic shared memory)} of a file."""
    found, configs = {}, {}
    dynamic = re.findall(r"\.extern \.shared .*?(\w+)\[\]", file.ptx)
    for entry in re.split(r"\.entry ", file.ptx)[1:]:
        name = re.match(r"\w+", entry).group()
        threads = re.search(r"\.maxntid (\d+)", entry)
        if not threads:
            sys.exit(f"{file.source}: {demangle(name)} has no __launch_bounds__")
        found[name] = int(threads.group(1)), 0
        if any(re.search(rf"\b{memory}\b", entry) for memory in dynamic):
            configs[name] = config_of(file.source, demangle(name))
    sizes = shared_bytes(nvcc, file.source, configs.values()) if configs else []
    for name, size in zip(configs, sizes):
        found[name] = found[name][0], size
    return found


def config_of(source, kernel):
    """Returns the Config whose kSharedBytes a kernel is launched with."""
    config = re.search(r"flashcore::[\w:]*Config<[^<>]*>", kernel)
    if not config:
        sys.exit(f"{source}: {kernel} has dynamic shared memory, but no Config with kSharedBytes")
    return config.group()


def shared_bytes(nvcc, source, configs):
    """Returns kSharedBytes of each Config, as the compiler evaluates it."""
    with tempfile.TemporaryDirectory() as folder:
        probe = pathlib.Path(folder, "probe.cu")
        probe.write_text(f'#include "{source.parents[1]}/config.cuh"\n' + "".join(
            f"__device__ int probe_{n} = {config}::kSharedBytes;\n"
            for n, config in enumerate(configs)))
        ptx = run([nvcc, "-std=c++17", f"-I{ROOT}", f"-arch=sm_{TABLE_ARCH}", "-ptx", "-o", "-",
                   probe])
    sizes = dict(re.findall(r"probe_(\d+) = (\d+);", ptx))
    return [int(sizes[str(n)]) for n in range(len(configs))]


def resident_blocks(kernel):
    """Returns the number of blocks that fit on an SM of sm_89, and the resource that limits it."""
    warps = -(-kernel.threads // 32)
    warp_registers = round_up(32 * kernel.registers, WARP_REGISTERS_UNIT)
    scheduler_warps = SM_REGISTERS // SM_SCHEDULERS // warp_registers
    shared = round_up(kernel.static_shared + kernel.dynamic_shared + BLOCK_RESERVED_SHARED_BYTES,
                      BLOCK_SHARED_UNIT)
    return min((SM_SCHEDULERS * scheduler_warps // warps, "registers"),
               (SM_SHARED_BYTES // shared, "shared memory"),
               (SM_THREADS // (32 * warps), "threads"),
               (SM_BLOCKS, "blocks"))


def round_up(number, unit):
    return -(-number // unit) * unit


def readable(name):
    """sm80::AttendKernel<Config<half, 64, 16>>"""
    for noise in ("flashcore::kernels::", "(anonymous namespace)::"):
        name = name.replace(noise, "")
    name = re.sub(r"\w+::Config", "Config", name).replace(" >", ">")
    for argument, short in ARGUMENTS.items():
        name = name.replace(argument, short)
    return name


def sources(pattern):
    """The files of the kernels and of their benchmarks that match."""
    return sorted(path for folder in ("kernels", "tests/bench/kernels")
                  for path in ROOT.glob(f"{folder}/**/{pattern}"))


def inputs():
    """A hash of everything that the table is made of, but the compiler."""
    files = [path for path in sources("*") if path.suffix in (".cu", ".cuh", ".h")]
    parts = [part for path in [pathlib.Path(__file__), *files]
             for part in (path.name.encode(), path.read_bytes())]
    return hashlib.sha256(b"\0".join(parts)).hexdigest()[:16]


def table(kernels, nvcc_version, inputs_hash):
    """Returns the text of TABLE."""
    head = ["kernel", "threads", "registers", "static shared", "dynamic shared", "stack",
            "spill stores", "spill loads", "blocks an SM", "limited by"]
    rows = [[k.name, k.threads, k.registers, k.static_shared, k.dynamic_shared, k.stack,
             k.spill_stores, k.spill_loads, *resident_blocks(k)] for k in kernels]
    rows = [[str(cell) for cell in row] for row in [head, *rows]]
    widths = [max(map(len, column)) for column in zip(*rows)]
    left = [True] + 8 * [False] + [True]
    lines = ["| " + " | ".join(cell.ljust(width) if at_left else cell.rjust(width)
                               for cell, width, at_left in zip(row, widths, left)) + " |"
             for row in rows]
    lines.insert(1, "|" + "|".join(":" + "-" * (width + 1) if at_left else "-" * (width + 1) + ":"
                                   for width, at_left in zip(widths, left)) + "|")
    return (f"# Resources of every CUDA kernel on sm_{TABLE_ARCH}\n\n"
            f"Compiled by nvcc {nvcc_version}; written by `kernels/ptxas_report.py --update`. "
            "Registers per thread;\nshared memory, stack and spills in bytes. "
            f"Sources: {inputs_hash}.\n\n" +
            "\n".join(lines) + "\n")


def numerically(kernel):
    """Sort key that puts head_dim 96 before 128."""
    return re.sub(r"\d+", lambda number: number.group().zfill(4), kernel.name)


def check_spills(files):
    """Exits if a kernel of any architecture uses local memory, or if there is no kernel."""
    reports = [(arch, name, numbers) for file in files for arch, of_arch in file.reports.items()
               for name, numbers in of_arch.items()]
    if not reports:
        sys.exit("ptxas reported no kernel")
    bad = [f"sm_{arch} {readable(demangle(name))}: {numbers}" for arch, name, numbers in reports
           if numbers["stack"] + numbers["spill_stores"] + numbers["spill_loads"] > 0]
    if bad:
        sys.exit("\n".join([*bad, f"{len(bad)} of {len(reports)} kernels use local memory"]))
    print(f"no spills and no local memory in {len(reports)} kernels "
          f"({', '.join('sm_' + arch for arch in ARCHS)})")


def compare(produced, update):
    """Exits if the table differs from the committed one and both are from the same compiler."""
    committed = TABLE.read_text() if TABLE.exists() else ""
    where = TABLE.relative_to(ROOT)
    if produced == committed:
        print(f"{where}: no change")
        return
    if not update and without_hash(produced) == without_hash(committed):
        print(f"{where}: the same for other sources; --update notes that")
        return
    sys.stdout.writelines(difflib.unified_diff(
        committed.splitlines(True), produced.splitlines(True), f"{where}, committed", "produced"))
    if update:
        TABLE.write_text(produced)
        print(f"{where}: updated")
    elif compiler_of(committed) not in (None, compiler_of(produced)):
        print(f"{where}: made by {compiler_of(committed)}; the differences may be the compiler's")
    else:
        sys.exit(f"{where} is not up to date; to accept: kernels/ptxas_report.py --update")


def without_hash(text):
    return re.sub(r"Sources: \w+\.", "", text)


def compiler_of(text):
    found = re.search(r"nvcc [\d.]+\d", text)
    return found and found.group()


def main():
    parser = argparse.ArgumentParser(description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--nvcc", default=os.environ.get("CUDACXX", "nvcc"))
    parser.add_argument("--force", action="store_true", help="compile even if no source has changed")
    parser.add_argument("--update", action="store_true", help="write the table to the file")
    args = parser.parse_args()
    sys.stdout.reconfigure(line_buffering=True)  # keeps the order of stdout and stderr
    now = inputs()
    if not args.force and not args.update and f"Sources: {now}." in TABLE.read_text():
        print(f"{TABLE.relative_to(ROOT)}: of these sources")
        return
    if shutil.which(args.nvcc) is None:
        sys.exit(f"no CUDA compiler {args.nvcc}")

    with concurrent.futures.ThreadPoolExecutor(os.cpu_count()) as pool:
        files = list(pool.map(functools.partial(compile_file, args.nvcc), sources("*.cu")))
    check_spills(files)
    version = re.search(r"V([\d.]+)", run([args.nvcc, "--version"])).group(1)
    kernels = [Kernel(readable(demangle(name)), *launch, **file.reports[TABLE_ARCH][name])
               for file in files for name, launch in launches(args.nvcc, file).items()]
    compare(table(sorted(kernels, key=numerically), version, now), args.update)


if __name__ == "__main__":
    main()
