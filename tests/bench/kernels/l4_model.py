#!/usr/bin/env python3
"""Predicts the times of the CUDA kernels on an NVIDIA L4, which none of them was measured on.

  tests/bench/kernels/l4_model.py FLASHCORE_KERNEL_PLAN [--products=PRODUCTS] [SHAPE ...]
  tests/bench/kernels/l4_model.py FLASHCORE_KERNEL_PLAN --check

A prediction, not a measurement. FP16 queries, inputs in DRAM; PRODUCTS: fp16 (dense K/V), or those of INT8
pages: int8_16bit, int8_qk or int8_qk_pv. Two columns: at the L4's boost clock, and at the clock that its 72 W
leave under load, estimated from public matmul figures.
--check compares the same model with times that were measured on an H100 and an H200, and with
experiments on an H100 whose tensor cores were slowed to the L4's rate; it prints the mean errors, and
fails if one is above 10%.

The model. flashcore-kernel-plan says which blocks a launch has. Blocks start in their order, each in
the first free place of an SM; an SM has as many places as registers and shared memory allow
(ptxas_sm_89.md). A warp's time for a K/V tile is the sum of its parts, because so few warps share a
scheduler that little overlaps:

  mma instructions * clocks of one + scores of a lane * SCORE + rows * head_dim * OUTPUT + TILE

INT8 K/V add scores of a lane * SCALED, and codes of a lane that become FP16 * CODE. Products of
codes take half as many mma; those of PV add sums of a lane * SUM for a tile. A block makes codes of Q:
rows * head_dim * QUERY.

If a scheduler has one warp, nothing hides barriers and loads: times ALONE. A block costs BLOCK
beside its tiles, a launch LAUNCH. A launch takes at least as long as Q, K, V and O take from and to
DRAM. Partial results are written and read. The constants were fitted to the measured times, most to
the H100's.
"""

import argparse
import dataclasses
import heapq
import json
import math
import pathlib
import re
import subprocess
import sys

SCORE, OUTPUT, TILE, ALONE = 3.1, 0.25, 20, 1.22  # clocks; a factor
CODE, SCALED, SUM, QUERY = 0.6, 3.0, 3.5, 0.4  # clocks
BLOCK, LAUNCH, COMBINE = 0.02, 4.5, 2.5  # us
DRAM_SHARE = 0.99  # of the bandwidth that a copy reaches


@dataclasses.dataclass
class Device:
    """The model's parameters of a device. Bandwidth: GB/s that a copy reaches."""

    name: str
    sms: int
    ghz: float
    mma_clocks: float  # of an m16n8k16 with float32 sums, on one of an SM's four tensor cores
    dram_gbps: float
    sm_shared_kb: int
    arch: str  # whose blocks it gets


# Measured: 636 TFLOP/s of mma.sync at 1.755 GHz, and copies.
H100 = Device("H100", 132, 1.755, 6.0, 3000, 228, "sm80")
H200 = Device("H200", 132, 1.755, 6.0, 4280, 228, "sm80")
SLOWED = dataclasses.replace(H100, name="H100 slowed, sm80", mma_clocks=15, sm_shared_kb=100)
SLOWED_SM89 = dataclasses.replace(SLOWED, name="H100 slowed, sm89", arch="sm89")
# By its data sheet: 121 TFLOP/s dense at 2.04 GHz, 300 GB/s (a copy: about 0.9). Public FP16 matmuls
# on an L4 reach 54.8 TFLOP/s at 1,024, 68.8 at 2,048 and 52 to 54 beyond. If a large one would
# reach 95% of the peak, the clock under load is 2.04 * 53 / 121 / 0.95 = 0.94 GHz.
L4 = Device("L4", 58, 2.04, 16, 270, 100, "sm89")
L4_LOADED = dataclasses.replace(L4, name="L4 under load", ghz=0.94)

SHAPES = ("mission", "canon_3", "b8", "32x8x512x64", "16x12x256x64", "long", "8x16x2048x64",
          "8x12x77x32", "canon_1", "canon_1_causal", "prefill", "3x20/5x999x128",
          "4x16x2048x96", "1x16x4096x256,causal", "decode1", "decode16", "decode64",
          "1x32/8x32768x128,q=1", "4x32/8x8192x128,q=16", "1x32/8x32768x128,q=64")

# Measured, us: cold L2, FP16, dense (notes/2026-11-24-sm80-splits.md,
# 2026-11-25-sm80-streams-and-runs.md, 2026-11-25-sm80-branches-and-sm89.md,
# 2026-11-26-h100-kernels.md, 2026-11-26-small-runs.md and 2026-11-26-head-dim-256.md).
MEASURED = {
    "H100": {
        "mission": 6.27, "canon_3": 8.12, "b8": 19.7, "32x8x512x64": 71.9, "16x12x256x64": 21.4,
        "long": 31.0, "8x16x2048x64": 476, "8x12x77x32": 5.03, "4x8x512x64": 11.6,
        "1x16x1024x64": 18.2, "6x20x100x64": 6.97, "canon_1": 418, "canon_1_causal": 223,
        "3x20/5x999x128": 107, "4x16x2048x96": 313, "1x16x4096x256,causal": 462,
        "2x8x512x128": 14.0, "4x8x512x128": 20.2, "1x8x2048x128": 55.8, "1x24x700x128": 22.4,
        "1x32/8x512x128,causal": 15.7, "1x32/8x2048x128,q=512": 55.2,
        "16x32/8x8192x128,q=64": 483, "32x32/8x4096x128,q=256": 1831, "decode1": 11.2,
        "decode16": 94.2, "decode64": 358, "64x32/8x4096x64,q=1": 181,
        "256x32/8x1024x128,q=1": 354, "8x24/3x3001x96,q=1": 17.0, "1x32/8x32768x128,q=1": 50.2,
        "4x32/8x8192x128,q=16": 65.4, "16x32/8x8192x128,q=16": 238},
    "H200": {
        "mission": 6.46, "canon_1": 412, "canon_1_causal": 220, "prefill": 1515,
        "3x20/5x999x128": 106, "4x16x2048x96": 305,
        "4x32/8x8192x128,q=16": 53.6, "8x32/8x4096x128,q=16": 53.3,
        "1x32/8x32768x128,q=64": 108},
    # As many blocks an SM as on an L4.
    "H100 slowed, sm80": {"canon_1": 934, "canon_1_causal": 487, "3x20/5x999x128": 234,
                          "1x16x2048x128": 224},
    "H100 slowed, sm89": {"canon_1": 790, "canon_1_causal": 401, "3x20/5x999x128": 198,
                          "1x16x2048x128": 189},
}

# Over INT8 pages, on an H200 (notes/2026-11-27-int8-kv.md).
MEASURED_INT8 = {
    "int8_16bit": {
        "64x32/8x4096x128,q=1": 143, "64x8x4096x64,q=1": 74.0, "1x32/8x32768x128,q=1": 22.3,
        "8x32/8x4096x128,q=16": 53.9, "1x8x512x64": 7.22, "8x16x4096x64": 2340,
        "16x32/8x512x128": 317, "4x32/8x4096x128": 4340},
    "int8_qk": {
        "8x32/8x4096x128,q=16": 47.8, "1x8x512x64": 6.74, "8x16x4096x64": 1960,
        "16x32/8x512x128": 236, "4x32/8x4096x128": 2960},
    "int8_qk_pv": {
        "8x32/8x4096x128,q=16": 46.1, "1x8x512x64": 6.64, "8x16x4096x64": 1910,
        "16x32/8x512x128": 228, "4x32/8x4096x128": 2740},
}


@dataclasses.dataclass(frozen=True)
class Products:
    """How K/V are stored and multiplied: flags of flashcore-kernel-plan, names in ptxas_sm_89.md."""

    flags: tuple
    element: str
    precision: int = 0

    @property
    def has_codes(self):
        """Whether K/V are INT8 codes."""
        return self.element == "signed char"


PRODUCTS = {
    "fp16": Products((), "half"),
    "int8_16bit": Products(("--kv_dtype=int8",), "signed char"),
    "int8_qk": Products(("--kv_dtype=int8", "--precision=int8_qk"), "signed char", 1),
    "int8_qk_pv": Products(("--kv_dtype=int8", "--precision=int8_qk_pv"), "signed char", 2),
}
FLOAT16_KERNEL = re.compile(
    r"\| sm80::AttendKernel<Config<half, (\d+), (\d+), float, ([a-z ]+), (sm\d+), "
    r"\(sm80::Items\)([01]), \(Precision\)(\d)>, \d+ul>"
    r"\s*"
    r"\|\s*(\d+) \|\s*(\d+) \|\s*\d+ \|\s*(\d+) \|")


def read_kernels(table, products):
    """Returns {(head_dim, rows, arch, has_runs): (threads, registers, shared bytes)} of
    ptxas_sm_89.md."""
    rows = [match.groups() for match in map(FLOAT16_KERNEL.match, table.splitlines()) if match]
    found = {}
    for wanted in sorted({0, products.precision}):  # tiles of 16 rows have 16-bit products only
        for head_dim, rows_of_tile, element, arch, items, precision, *resources in rows:
            if element == products.element and int(precision) == wanted:
                key = int(head_dim), int(rows_of_tile), arch, items == "1"
                found[key] = tuple(map(int, resources))
    return found


def read_plans(program, device, shapes, products):
    """Returns {shape: what flashcore-kernel-plan prints of it} for a device."""
    done = subprocess.run([program, f"--workers={device.sms}", f"--arch={device.arch}",
                           *products.flags, *shapes],
                          stdout=subprocess.PIPE, text=True, check=False)
    if done.returncode != 0:
        sys.exit(f"{program} ended with {done.returncode}")
    return {plan["shape"]: plan for plan in map(json.loads, done.stdout.splitlines())}


def places_on_sm(device, threads, registers, shared_bytes):
    """Blocks that an SM holds at a time."""
    by_registers = 65536 // (math.ceil(registers / 8) * 8 * threads)
    by_shared = device.sm_shared_kb * 1024 // (shared_bytes + 1024)
    return max(1, min(by_registers, by_shared))


def tile_clocks(device, head_dim, launch, products):
    """Clocks of a warp for a K/V tile, if it never waits."""
    tokens = launch["tile_tokens"]
    row_tiles = launch["row_tiles"] * min(1, launch["rows"] / 16)  # 8 rows: half an mma's work
    precision = products.precision if launch["rows"] > 16 else 0
    codes_qk, codes_pv = precision >= 1, precision == 2
    mmas = tokens // 8 * (head_dim // (32 if codes_qk else 16))
    if codes_pv:
        mmas += head_dim // 8 * (tokens // 32)
    else:
        mmas += (head_dim // 8 + 1) * (tokens // 16)  # and one column of ones
    scores, sums = tokens / 2, head_dim / 2  # of a lane and a row tile
    clocks = mmas * device.mma_clocks + scores * SCORE + 32 * sums * OUTPUT + codes_pv * sums * SUM
    if not products.has_codes:
        return row_tiles * clocks + TILE
    converted = (2 - codes_qk - codes_pv) * tokens * head_dim / 32  # codes of K and V
    return row_tiles * (clocks + scores * SCALED) + TILE + converted * CODE


def launch_time(device, head_dim, launch, kernels, products):
    """Returns the time of a launch's blocks in us, and the blocks an SM."""
    count = sum(number for _, number in launch["blocks"])
    resources = kernels[head_dim, launch["rows"], launch["arch"], launch["has_runs"]]
    places = min(places_on_sm(device, *resources), math.ceil(count / device.sms))
    warps = places * launch["row_warps"] * launch["warp_groups"] / 4  # of a scheduler
    clocks = tile_clocks(device, head_dim, launch, products) * places * (ALONE if warps < 2 else 1)
    query_codes = launch["rows"] * head_dim if products.has_codes else 0
    per_block = BLOCK + query_codes * QUERY / device.ghz / 1000
    free_at = [0.0] * (device.sms * places)
    for kv_rows, number in launch["blocks"]:
        tiles = math.ceil(kv_rows / launch["tile_tokens"])
        duration = tiles * launch["row_warps"] / 4 * clocks / device.ghz / 1000 + per_block
        for _ in range(number):
            heapq.heapreplace(free_at, free_at[0] + duration)
    return max(free_at), places


@dataclasses.dataclass
class Prediction:
    """us: time. bound: what limits it. kernels: rows of the tiles and blocks an SM."""

    us: float
    bound: str
    kernels: str


def predict(device, plan, kernels, products):
    """Returns the Prediction of one plan."""
    compute, names = 0, []
    for launch in plan["launches"]:
        time, places = launch_time(device, plan["head_dim"], launch, kernels, products)
        compute += time
        names.append(f"{launch['rows']}x{places}")
    gbps = device.dram_gbps * DRAM_SHARE
    memory = plan["bytes"] / gbps / 1000
    partials = 2 * plan["partial_bytes"] / gbps / 1000 + (COMBINE if plan["combine"] else 0)
    bound = "DRAM" if memory > compute else "blocks" if compute > LAUNCH else "launch"
    return Prediction(LAUNCH + max(compute, memory) + partials, bound, "+".join(names))


def check(program, table):
    """Prints measured beside predicted, and the mean errors. Returns whether they are small."""
    rows = [(device, "fp16", MEASURED[device.name]) for device in (H100, H200, SLOWED, SLOWED_SM89)]
    rows += [(H200, name, measured) for name, measured in MEASURED_INT8.items()]
    good = True
    for device, name, measured in rows:
        products = PRODUCTS[name]
        kernels = read_kernels(table, products)
        plans = read_plans(program, device, measured, products)
        errors = []
        print(f"{device.name + ', ' + name + ', us':32} measured predicted")
        for shape, us in measured.items():
            predicted = predict(device, plans[shape], kernels, products).us
            errors.append(abs(predicted / us - 1))
            print(f"  {shape:30} {us:8g} {predicted:9.1f} {predicted / us - 1:+7.0%}")
        mean = sum(errors) / len(errors)
        print(f"  mean error {mean:.1%}, largest {max(errors):.0%}")
        good = good and mean < 0.1
    return good


def main():
    """Parses the command line, and prints a table."""
    parser = argparse.ArgumentParser(description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("program", help="path of flashcore-kernel-plan")
    parser.add_argument("shapes", nargs="*", metavar="SHAPE", help="names, or as it takes them")
    parser.add_argument("--products", choices=list(PRODUCTS), default="fp16")
    parser.add_argument("--check", action="store_true", help="compare with measured times")
    args = parser.parse_intermixed_args()
    table = (pathlib.Path(__file__).parents[3] / "kernels/ptxas_sm_89.md").read_text(encoding="utf-8")
    if args.check:
        sys.exit(0 if check(args.program, table) else 1)
    products = PRODUCTS[args.products]
    kernels = read_kernels(table, products)
    has_kernel = {head_dim for head_dim, *_ in kernels}
    plans = read_plans(args.program, L4, args.shapes or SHAPES, products)
    print("PREDICTED for an L4 (no FlashCore kernel was measured on one). us, TFLOP/s")
    print(f"{'shape':26} {'tiles x an SM':14} {'bound':7} {'boost':>9} {'loaded':>9} {'TFLOP/s':>8}")
    for shape, plan in plans.items():
        if plan["head_dim"] not in has_kernel:
            continue
        boost, loaded = (predict(device, plan, kernels, products) for device in (L4, L4_LOADED))
        print(f"{shape:26} {loaded.kernels:14} {loaded.bound:7} {boost.us:9.1f} {loaded.us:9.1f} "
              f"{plan['flop'] / loaded.us / 1e6:8.1f}")


if __name__ == "__main__":
    main()
