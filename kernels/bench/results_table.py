#!/usr/bin/env python3
"""Prints the results of compare_torch.py as a Markdown table.

    kernels/bench/results_table.py RESULTS.json > RESULTS.md
"""

import json
import sys

COLUMNS = ("shape", "kernel", "ours, us", "FLASH", "cuDNN", "EFFICIENT", "FLASH / ours",
           "cuDNN / ours", "TFLOP/s", "of matmul", "GB/s", "of copy", "max error")


def number(value, digits):
    """`value` with `digits` digits after the point, or a dash for None."""
    return "-" if value is None else f"{value:.{digits}f}"


def ratio(theirs, ours):
    """Our speed relative to theirs, as text."""
    return "-" if theirs is None else f"{theirs / ours:.2f}x"


def cells(result):
    """The cells of one result, in the order of COLUMNS."""
    ours, run = result["p50_us"], result["run"]
    flash, cudnn = result["torch_flash_us"], result["torch_cudnn_us"]
    return (result["shape"], result["kernel"], number(ours, 2), number(flash, 2), number(cudnn, 2),
            number(result["torch_efficient_us"], 2), ratio(flash, ours), ratio(cudnn, ours),
            number(result["tflops"], 1), f"{result['tflops'] / run['matmul_tflops']:.0%}",
            number(result["gbps"], 0), f"{result['gbps'] / run['copy_gbps']:.0%}",
            f"{result['max_err']:.1e}")


def heading(result):
    """GPU, versions, method and ceilings of the run that `result` belongs to."""
    run = result["run"]
    return (f"{result['gpu']}, PyTorch {run['torch']}, CUDA {run['cuda']}, cuDNN {run['cudnn']}, "
            f"{run['date']}. Median of {run['rounds']} replays of a CUDA graph of "
            f"{run['launches']} calls, in us. Ceilings measured in the same run: matmul "
            f"{run['matmul_tflops']:.0f} TFLOP/s, copy {run['copy_gbps']:.0f} GB/s.")


def table(results):
    """The lines of the tables: one heading and one table per run."""
    lines, last_run = [], None
    for result in results:
        if result["run"] != last_run:
            last_run = result["run"]
            lines += [*([""] if lines else []), heading(result), "",
                      "| " + " | ".join(COLUMNS) + " |", "|---|---" + "|---:" * 11 + "|"]
        lines.append("| " + " | ".join(cells(result)) + " |")
    return lines


def main():
    if len(sys.argv) != 2:
        sys.exit(__doc__)
    with open(sys.argv[1], encoding="utf-8") as file:
        print("\n".join(table(json.load(file))))


if __name__ == "__main__":
    main()
