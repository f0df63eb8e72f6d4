#!/usr/bin/env python3
"""Measures what the documents publish, and writes it to one record.

    tests/bench/record.py gpu --programs build/gpu --out gpu.json   on a GPU machine
    tests/bench/record.py cpu --programs build --out cpu.json

`--parts` names some of the parts; the others stay as the record has them. A part has "run"
(run_info.py: date, commit, CPU, GPU, driver, clocks) and "results". Parts of several commits or
machines are no record: figures.py refuses them. Needs PyTorch, and for a GPU grpcio, protobuf
and numpy, with the modules of attention.proto in PYTHONPATH (folder e2e of a bundle). A bundle of
tests/gpu_bundle.sh says in its file COMMIT what it was built from. Exit status 1: a part failed and
is as it was.
"""

import argparse
import json
import os
import pathlib
import subprocess
import sys
import tempfile

ROOT = pathlib.Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "tests/bench/kernels"))
import record_file  # noqa: E402
import run_info  # noqa: E402


class Failure(Exception):
    """A measuring program failed."""


def json_of(*command):
    """Runs a command that writes JSON to the file of --json; returns the value. Raises Failure."""
    command = [str(part) for part in command]
    print("+", *command, flush=True)
    with tempfile.TemporaryDirectory() as folder:
        file = pathlib.Path(folder, "out.json")
        done = subprocess.run([*command, f"--json={file}"], check=False)
        if done.returncode != 0:
            raise Failure(f"{command[0]} ended with status {done.returncode}")
        return json.loads(file.read_text(encoding="utf-8"))


def python(script, *arguments):
    return json_of(sys.executable, "-B", ROOT / script, *arguments)


def part(results):
    """A part of a record."""
    return {"run": run_info.run_info(), "results": results}


def gpu_kernels(programs):
    """Each named shape: beside PyTorch, and alone with the other kinds of kernels."""
    library = programs / "libflashcore_kernel_bench_c.so"
    beside = python("tests/bench/kernels/compare_torch.py", library)
    torch = {name: beside[0]["run"][name]
             for name in ("torch", "cudnn", "matmul_tflops", "copy_gbps", "rounds")}
    results = [*beside, *python("tests/bench/kernels/compare_torch.py", library, "--dtype=bfloat16")]
    for flags in ([], ["--dtype=bfloat16"], ["--accumulate=float16"], ["--kv_dtype=float8_e4m3"],
                  *(["--kv_dtype=int8", f"--precision={precision}"]
                    for precision in ("16bit", "int8_qk", "int8_qk_pv"))):
        results += json_of(programs / "flashcore-kernel-bench", *flags)
    for result in results:
        result.pop("run", None)
    return {**part(results), "torch": torch}


def gpu_l2_window(programs):
    """Decode over hot K/V with and without an L2 window."""
    return part(json_of(programs / "flashcore-l2-window-bench"))


def server(programs, device, *flags):
    """Sections of record_server.py."""
    binary, cli = programs / "flashcore-server", programs / "flashcore"
    echo = programs / "flashcore-grpc-api-bench"
    if not binary.exists():  # a build folder, not a bundle
        binary, cli = programs / "server" / binary.name, programs / "client" / "cli" / cli.name
        echo = programs / "tests" / "bench" / echo.name
    return part(python("tests/bench/record_server.py", f"--server={binary}", f"--cli={cli}",
                       f"--echo={echo}", f"--device={device}", *flags))


def gpu_server(programs):
    return server(programs, "cuda:0", "--sections=peer,transports", "--peer_backend=flash")


def gpu_tuning(programs):
    return server(programs, "cuda:0", "--sections=tuning", "--rounds=5")


def cpu_kernels(programs):
    """The CPU kernel beside PyTorch and OpenBLAS."""
    library = programs / "tests/bench/kernels/libflashcore_cpu_bench_c.so"
    return part(python("tests/bench/kernels/compare_cpu.py", library))


def cpu_server(programs):
    return server(programs, "cpu", "--sections=cpu", "--rounds=9")


GPU_PARTS = {"kernels": gpu_kernels, "l2_window": gpu_l2_window, "server": gpu_server,
             "tuning": gpu_tuning}
CPU_PARTS = {"kernels": cpu_kernels, "server": cpu_server}


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
    status = 0
    for name in names:
        try:
            measured = parts[name](args.programs)
        except Failure as failure:
            print(f"record.py: {name}: {failure}", file=sys.stderr)
            status = 1
            continue
        record = json.loads(args.out.read_text(encoding="utf-8")) if args.out.exists() else {}
        record[name] = measured
        record_file.write(args.out, record)
    return status


if __name__ == "__main__":
    sys.exit(main())
