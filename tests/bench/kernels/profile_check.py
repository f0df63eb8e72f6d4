#!/usr/bin/env python3
"""Checks the hardware counters that Nsight Compute (ncu) read for one shape. Used by profile.sh.

    ncu --query-metrics | profile_check.py --metrics    # the metrics to collect on this GPU
    ncu --csv --page raw --print-units base ... | profile_check.py SHAPE

Prints a line per check. Exit status: 0 if all passed, 1 if one failed, 2 if there is no data.
"""

import csv
import sys

TIME = "gpu__time_duration.sum"
TENSOR = (  # the first that the GPU supports is used
    "sm__pipe_tensor_op_hmma_cycles_active.avg.pct_of_peak_sustained_active",
    "sm__pipe_tensor_cycles_active.avg.pct_of_peak_sustained_active")
CONFLICTS = "l1tex__data_bank_conflicts_pipe_lsu_mem_shared_op_ld.sum"
WAVEFRONTS = "l1tex__data_pipe_lsu_wavefronts_mem_shared_op_ld.sum"
LOCAL = ("l1tex__t_sectors_pipe_lsu_mem_local_op_ld.sum",
         "l1tex__t_sectors_pipe_lsu_mem_local_op_st.sum")
DRAM = "dram__throughput.avg.pct_of_peak_sustained_elapsed"
METRICS = (TIME, *TENSOR, CONFLICTS, WAVEFRONTS, *LOCAL, DRAM)

# The mission shape is 537 MFLOP. PyTorch's FLASH takes 10.1 us, which is 5.4% of an H200's 989
# TFLOP/s. Larger shapes reach far more. A kernel that does not use the tensor cores has 0%.
MIN_TENSOR_PERCENT = 5
# From head_dim 64 on, the rows of a tile are multiples of 128 bytes apart. Without swizzling, the 8
# rows of an ldmatrix would share banks, and 7 of 8 wavefronts would be conflicts.
MAX_CONFLICT_PERCENT = 5
# The goal is 90% of a copy. A copy reaches 87% of an H200's 4.8 TB/s, so the goal is 79% of peak.
# The rest is allowance for ncu's fixed clocks, whose cost has not been measured.
MIN_DRAM_PERCENT = 75


class NothingToJudge(Exception):
    """The output of ncu has no kernel; the message says why."""


def metrics_of(query):
    """The METRICS that are in `query`, the output of `ncu --query-metrics`."""
    known = {line.split()[0] for line in query.splitlines() if line.strip()}
    return [metric for metric in METRICS if metric.split(".")[0] in known]


def parse(output, metrics=METRICS):
    """The profiled kernels in ncu's output: a list of {"name": str, metric: float}.

    The output is CSV: names, units, then one row per kernel. Lines of ncu (==PROF==) and of the
    program stand before and between these rows. Metrics without a number are left out.
    """
    lines = output.splitlines()
    starts = [i for i, line in enumerate(lines) if line.startswith('"ID",')]
    if not starts:
        complaints = [line for line in lines if line.startswith(("==ERROR==", "==WARNING=="))]
        raise NothingToJudge("\n".join(["ncu profiled no kernel", *complaints]))
    kernels = []
    for row in csv.DictReader(line for line in lines[starts[0]:] if line.startswith('"')):
        if not row["ID"].isdigit():
            continue  # units
        kernel = {"name": row["Kernel Name"]}
        for metric in metrics:
            try:
                kernel[metric] = float(row[metric].replace(",", ""))
            except (KeyError, ValueError):
                pass
        kernels.append(kernel)
    if not kernels:
        raise NothingToJudge("ncu's table has no kernel")
    return kernels


def total(kernels, *metrics):
    """Sum of metrics over kernels. Raises KeyError if a kernel lacks a metric."""
    return sum(kernel[metric] for kernel in kernels for metric in metrics)


def tensor_percent(kernels):
    """The utilisation of the longest kernel; the others combine its partial results."""
    kernel = longest(kernels)
    return next((kernel[metric] for metric in TENSOR if metric in kernel), None)


def conflict_percent(kernels):
    wavefronts = total(kernels, WAVEFRONTS)
    return 100 * total(kernels, CONFLICTS) / wavefronts if wavefronts else 0.0


def longest(kernels):
    return max(kernels, key=lambda kernel: kernel[TIME])


# (what is checked, function of the value, unit, minimum, maximum)
CONFLICT_CHECK = ("bank conflicts of shared loads", conflict_percent, "%", None,
                  MAX_CONFLICT_PERCENT)
LOCAL_CHECK = ("local memory traffic", lambda kernels: total(kernels, *LOCAL), " sectors", None, 0)
PREFILL_CHECKS = (("tensor pipe active", tensor_percent, "%", MIN_TENSOR_PERCENT, None),
                  CONFLICT_CHECK, LOCAL_CHECK)
DECODE_CHECKS = (("DRAM throughput of peak", lambda kernels: longest(kernels)[DRAM], "%",
                  MIN_DRAM_PERCENT, None), CONFLICT_CHECK, LOCAL_CHECK)


def checks_of(shape):
    """The checks of a shape. One query row per span is decode, which is memory-bound."""
    return DECODE_CHECKS if shape.startswith("decode") or ",q=1," in shape + "," else PREFILL_CHECKS


def judge(shape, kernels):
    """[(passed, line)], one per check."""
    judgements = []
    for what, value_of, unit, least, most in checks_of(shape):
        try:
            value = value_of(kernels)
        except KeyError:
            value = None
        bound = f"at least {least}{unit}" if least is not None else f"at most {most}{unit}"
        passed = (value is not None and (least is None or value >= least)
                  and (most is None or value <= most))
        measured = "not counted on this GPU" if value is None else f"{value:.1f}{unit}"
        judgements.append((passed, f"{'pass' if passed else 'FAIL'}  {shape:16} {what:32} "
                                   f"{measured}, {bound}"))
    return judgements


def main():
    if len(sys.argv) != 2:
        sys.exit(__doc__)
    if sys.argv[1] == "--metrics":
        print(",".join(metrics_of(sys.stdin.read())))
        return 0
    try:
        kernels = parse(sys.stdin.read())
    except NothingToJudge as error:
        print(f"profile_check.py: {sys.argv[1]}: {error}", file=sys.stderr)
        return 2
    judgements = judge(sys.argv[1], kernels)
    print("\n".join(line for _, line in judgements))
    return 0 if all(passed for passed, _ in judgements) else 1


if __name__ == "__main__":
    sys.exit(main())
