#!/usr/bin/env python3
"""Measures what the documents publish, and writes it to one record.

    tests/bench/record.py gpu --programs build/gpu --out h200.json   on a GPU machine
    tests/bench/record.py cpu --programs build --out cpu.json

`--parts` names some of the parts; the others stay as the record has them. A part has "run"
(run_info.py: date, commit, CPU, GPU, driver, clocks) and "results". Parts of several commits or
machines are no record: tests/figures.py refuses them. Needs PyTorch, grpcio, protobuf and numpy.
With a bundle of tests/gpu_bundle.sh, its file COMMIT names the commit.
"""

import argparse
import json
import os
import pathlib
import subprocess
import sys
import tempfile

ROOT = pathlib.Path(__file__).resolve().parents[2]
KERNEL_BENCH = ROOT / "kernels" / "bench"
sys.path.insert(0, str(KERNEL_BENCH))
import run_info  # noqa: E402


def json_of(command, json_flag="--json"):
    """Runs a command that writes JSON to the file of `json_flag`; returns the value. Ends the
    program if the command fails."""
    with tempfile.TemporaryDirectory() as folder:
        file = pathlib.Path(folder, "out.json")
        print("+", *command, flush=True)
        done = subprocess.run([*map(str, command), f"{json_flag}={file}"], check=False)
        if done.returncode != 0:
            sys.exit(f"record.py: {command[0]} ended with status {done.returncode}")
        return json.loads(file.read_text(encoding="utf-8"))


def part(results):
    return {"run": run_info.run_info(), "results": results}


def gpu_kernels(programs):
    """Each named shape: beside PyTorch, and alone with the other kinds of kernels."""
    torch = [sys.executable, "-B", KERNEL_BENCH / "compare_torch.py",
             programs / "libflashcore_kernel_bench_c.so"]
    alone = [programs / "flashcore-kernel-bench"]
    beside = json_of(torch)
    ceilings = {name: beside[0]["run"][name]
                for name in ("torch", "cudnn", "matmul_tflops", "copy_gbps", "rounds")}
    results = [*beside, *json_of([*torch, "--dtype=bfloat16"]),
               *(result for flags in ([], ["--dtype=bfloat16"], ["--accumulate=float16"],
                                      ["--kv_dtype=float8_e4m3"])
                 for result in json_of([*alone, *flags]))]
    for result in results:
        result.pop("run", None)
    return {**part(results), "torch": ceilings}


GPU_PARTS = {"kernels": gpu_kernels}
CPU_PARTS = {}


def main():
    parser = argparse.ArgumentParser(description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("device", choices=("gpu", "cpu"))
    parser.add_argument("--programs", type=pathlib.Path, required=True)
    parser.add_argument("--out", type=pathlib.Path, required=True)
    parser.add_argument("--parts", help="a comma-separated list; default: all")
    args = parser.parse_args()
    parts = GPU_PARTS if args.device == "gpu" else CPU_PARTS
    names = args.parts.split(",") if args.parts else list(parts)
    if unknown := set(names) - set(parts):
        parser.error(f"no part {', '.join(unknown)}: want some of {','.join(parts)}")
    built_from = args.programs / "COMMIT"
    if built_from.exists():
        os.environ["FLASHCORE_COMMIT"] = built_from.read_text(encoding="utf-8").strip()
    for name in names:
        record = json.loads(args.out.read_text(encoding="utf-8")) if args.out.exists() else {}
        record[name] = parts[name](args.programs)
        args.out.write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
