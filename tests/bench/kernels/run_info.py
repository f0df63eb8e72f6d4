"""A record's facts about the run it comes from: when, what was measured, and on which machine.

    import run_info; record["run"] = run_info.run_info()
    tests/bench/kernels/run_info.py    # prints it as JSON
"""

import datetime
import json
import os
import pathlib
import platform
import subprocess

GPU_FIELDS = ("name", "driver_version", "clocks.max.sm", "clocks.max.mem", "clocks.sm",
              "clocks.mem", "power.limit", "temperature.gpu")


def output_of(*command):
    """The output of a command, or None where it is missing or fails."""
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=True,
                              env=dict(os.environ, LC_ALL="C"))
    except (OSError, subprocess.SubprocessError):
        return None
    return done.stdout.strip()


def commit():
    """The commit that is measured: $FLASHCORE_COMMIT for programs that were built elsewhere (a bundle
    of tests/gpu_bundle.sh has it in the file COMMIT), else that of the checkout, with "-dirty" if it
    has changes."""
    given = os.environ.get("FLASHCORE_COMMIT")
    if given:
        return given
    folder = str(pathlib.Path(__file__).resolve().parent)
    return output_of("git", "-C", folder, "describe", "--always", "--dirty", "--abbrev=12",
                     "--exclude=*") or "unknown"


def cpu():
    """The model, cores and SIMD level of the CPU."""
    fields = dict(line.split(":", 1) for line in (output_of("lscpu") or "").splitlines()
                  if ":" in line)
    return {"model": fields.get("Model name", "unknown").strip(),
            "cores": len(os.sched_getaffinity(0)), "kernel": platform.release()}


def gpus():
    """GPU_FIELDS of each GPU, as nvidia-smi prints them: MHz, W and degrees Celsius."""
    lines = output_of("nvidia-smi", "--query-gpu=" + ",".join(GPU_FIELDS),
                      "--format=csv,noheader,nounits")
    return [dict(zip(GPU_FIELDS, (cell.strip() for cell in line.split(","))))
            for line in (lines or "").splitlines()]


def run_info():
    """{"date", "commit", "cpu", "gpus"}; the date is UTC."""
    now = datetime.datetime.now(datetime.timezone.utc)
    return {"date": now.strftime("%Y-%m-%dT%H:%MZ"), "commit": commit(), "cpu": cpu(),
            "gpus": gpus()}


if __name__ == "__main__":
    print(json.dumps(run_info()))
