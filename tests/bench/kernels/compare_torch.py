#!/usr/bin/env python3
"""Compares the CUDA kernels with PyTorch's attention backends, in one process on the same inputs.

    tests/bench/kernels/compare_torch.py build/tests/bench/kernels/libflashcore_kernel_bench_c.so

Needs PyTorch with CUDA, and a GPU. A shape is measured twice. With a cold L2, calls take in turn
input sets of three times the L2's size together. With a warm L2, all calls take the same set; this
is left out where a set does not fit in half the L2. First, every output element of every set is
checked against float64. A wrong kernel is not timed, and the exit status is 1. Then each
contender's calls are captured in a CUDA graph. A round replays the graphs one after the other and
takes the mean time of a call. Reported: the median of the rounds; for ours also least and most.

The JSON is a list of results. Each has: tool, gpu, shape, kernel, l2 ("cold" or "warm"), us,
us_least, us_most, torch_flash_us, torch_cudnn_us, torch_efficient_us (null: the backend refuses the
shape), tflops, gbps (Q, K, V and O, once), max_err, sets, set_bytes, and run, which all share.
"""

import argparse
import ctypes
import math
import os
import statistics
import sys
import warnings

import record_file
import run_info
import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention

BACKENDS = {"flash": SDPBackend.FLASH_ATTENTION, "cudnn": SDPBackend.CUDNN_ATTENTION,
            "efficient": SDPBackend.EFFICIENT_ATTENTION}
DTYPES = {"float16": torch.float16, "bfloat16": torch.bfloat16}
ERROR_BOUNDS = {("float16", "float32"): 1e-3, ("bfloat16", "float32"): 8e-3,
                ("float16", "float16"): 2e-2, ("bfloat16", "float16"): 2e-2}
COLD_L2S = 3  # sizes of the L2 that cold input sets have together
UNBOUNDED = 2**31 - 1
WARM_UP_ROUNDS = 5
CEILING_ROUNDS = 20
MATMUL_N = 8192
COPY_BYTES = 1 << 30


class Shape(ctypes.Structure):
    """FlashcoreBenchShape of kernel_bench_c.cc."""

    _fields_ = [(name, ctypes.c_int32) for name in (
        "spans", "num_heads", "num_kv_heads", "query_rows", "kv_rows", "head_dim",
        "mask_left", "mask_right", "paged")] + [("flops", ctypes.c_double)]

    def query_shape(self):
        """Shape of Q and O: [spans, heads, query_rows, head_dim]."""
        return self.spans, self.num_heads, self.query_rows, self.head_dim

    def kv_shape(self):
        """Shape of K and V: [spans, kv_heads, kv_rows, head_dim]."""
        return self.spans, self.num_kv_heads, self.kv_rows, self.head_dim

    def is_causal(self):
        return self.mask_right == 0

    def set_bytes(self):
        """Bytes of Q, K, V and O."""
        row = 2 * self.head_dim * self.spans
        return 2 * row * (self.num_heads * self.query_rows + self.num_kv_heads * self.kv_rows)

    def sets(self, l2):
        """Input sets for an L2 state; 0 if the shape is never warm. As SetsFor of input_sets.h."""
        l2_bytes = torch.cuda.get_device_properties(0).L2_cache_size
        if l2 == "warm":
            return 1 if 2 * self.set_bytes() <= l2_bytes else 0
        return max(2, -(-COLD_L2S * l2_bytes // self.set_bytes()))

    def why_not_torch(self):
        """Why PyTorch's backends cannot compute the shape; None if they can."""
        if self.paged:
            return "PyTorch has no paged K/V"
        if self.mask_left != UNBOUNDED or self.mask_right not in (0, UNBOUNDED):
            return "PyTorch's fused backends have no sliding window"
        if self.is_causal() and self.query_rows != self.kv_rows:
            return "PyTorch's is_causal is aligned to the top left"
        return None


class Library:
    """libflashcore_kernel_bench_c.so."""

    def __init__(self, path):
        self.calls = ctypes.CDLL(os.path.abspath(path))
        pointer, text, integer = ctypes.c_void_p, ctypes.c_char_p, ctypes.c_int
        pointers = ctypes.POINTER(pointer)
        self._declare("error", text)
        self._declare("shape_name", text, integer)
        self._declare("parse_shape", integer, text, ctypes.POINTER(Shape))
        self._declare("new", pointer, ctypes.POINTER(text), integer, integer, *[pointers] * 4)
        self._declare("free", None, pointer)
        self._declare("kernel_name", text, pointer)
        self._declare("launch", integer, pointer, integer, pointer)

    def _declare(self, name, result, *arguments):
        function = getattr(self.calls, "flashcore_kernel_bench_" + name)
        function.restype, function.argtypes = result, arguments
        setattr(self, name, function)

    def shape_names(self):
        """The named shapes, as a list of str."""
        names = []
        while (name := self.shape_name(len(names))) is not None:
            names.append(name.decode())
        return names

    def shape(self, text):
        """The Shape of a name or a text in the grammar; ends the program if it is wrong."""
        shape = Shape()
        if self.parse_shape(text.encode(), ctypes.byref(shape)) != 0:
            sys.exit(self.error().decode())
        return shape


class InputSet:
    """Random Q, K and V, uniform in [-1, 1], and our O, which starts as NaN."""

    def __init__(self, shape, dtype):
        def uniform(size):
            return torch.empty(size, dtype=dtype, device="cuda").uniform_(-1, 1)

        self.query = uniform(shape.query_shape())
        self.key, self.value = uniform(shape.kv_shape()), uniform(shape.kv_shape())
        self.output = torch.full_like(self.query, float("nan"))


class Ours:
    """Our kernel on a list of InputSet. Keeps the list alive."""

    def __init__(self, library, text, sets, args):
        self.library, self.sets = library, sets
        arrays = [(ctypes.c_void_p * len(sets))(*(getattr(s, name).data_ptr() for s in sets))
                  for name in ("query", "key", "value", "output")]
        flags = [f"--shape={text}", f"--arch={args.arch}", f"--dtype={args.dtype}",
                 f"--accumulate={args.accumulate}"]
        flag_array = (ctypes.c_char_p * len(flags))(*(flag.encode() for flag in flags))
        self.handle = library.new(flag_array, len(flags), len(sets), *arrays)
        if not self.handle:
            raise RuntimeError(library.error().decode())
        self.name = library.kernel_name(self.handle).decode()

    def __call__(self, index):
        stream = torch.cuda.current_stream().cuda_stream
        if self.library.launch(self.handle, index, stream) != 0:
            raise RuntimeError(self.library.error().decode())
        return self.sets[index].output

    def close(self):
        torch.cuda.synchronize()
        self.library.free(self.handle)


def torch_call(backend, shape, sets):
    """A function that attends on input set `index` and returns O."""

    def call(index):
        s = sets[index]
        with sdpa_kernel(backend):
            return scaled_dot_product_attention(
                s.query, s.key, s.value, is_causal=shape.is_causal(),
                enable_gqa=shape.num_heads != shape.num_kv_heads)

    return call


def why_refused(call):
    """Why PyTorch refuses call(0), in short; None if it runs."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        try:
            call(0)
            torch.cuda.synchronize()
            return None
        except RuntimeError as error:
            reasons = [str(w.message).split(" (Triggered")[0] for w in caught]
            reasons = [r for r in reasons
                       if "not used because" not in r and "runtime disabled" not in r]
            return (reasons or str(error).splitlines())[0][:120]


def largest_error(shape, inputs, output):
    """The largest difference of `output` to float64 attention; NaN if any element is NaN."""
    group = shape.num_heads // shape.num_kv_heads
    hidden = torch.ones(shape.query_rows, shape.kv_rows, dtype=torch.bool,
                        device="cuda").triu(1) if shape.is_causal() else None
    largest = torch.zeros((), dtype=torch.float64, device="cuda")
    for span in range(shape.spans):
        for head in range(shape.num_heads):
            query = inputs.query[span, head].double()
            key = inputs.key[span, head // group].double()
            value = inputs.value[span, head // group].double()
            scores = query @ key.T * shape.head_dim**-0.5
            if hidden is not None:
                scores.masked_fill_(hidden, -torch.inf)
            expected = scores.softmax(-1) @ value
            error = (output[span, head].double() - expected).abs().max()
            largest = torch.maximum(largest, error)  # keeps a NaN
    return largest.item()


def capture(call, sets, launches):
    """A CUDA graph of `launches` calls on the sets in turn, and the outputs, to keep them alive."""
    outputs = [None] * sets
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for n in range(launches):
            outputs[n % sets] = call(n % sets)
    return graph, outputs


def time_once(work):
    """Device seconds of work(). A first, untimed work() keeps the device busy while the timed one
    is enqueued, so that no wait for the host is timed."""
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    work()
    begin.record()
    work()
    end.record()
    end.synchronize()
    return begin.elapsed_time(end) * 1e-3


def measure(calls, sets, launches, rounds):
    """Seconds of one call in each round, per contender: {name: callable} to {name: [seconds]}."""
    graphs = {name: capture(call, sets, launches) for name, call in calls.items()}
    samples = {name: [] for name in calls}
    order = list(calls)
    for n in range(WARM_UP_ROUNDS + rounds):
        order.reverse()  # so that a contender does not always follow the same one
        for name in order:
            seconds = time_once(graphs[name][0].replay)
            if n >= WARM_UP_ROUNDS:
                samples[name].append(seconds / launches)
    return samples


def measure_ceilings():
    """{"matmul_tflops", "copy_gbps"}: a large float16 matmul; a copy, bytes read + written."""
    a, b = (torch.rand(MATMUL_N, MATMUL_N, device="cuda").half() for _ in range(2))
    product = torch.empty_like(a)
    source = torch.zeros(COPY_BYTES, dtype=torch.uint8, device="cuda")
    target = torch.empty_like(source)

    def median(work):
        return statistics.median([time_once(work) for _ in range(CEILING_ROUNDS)][2:])

    return {"matmul_tflops": 2 * MATMUL_N**3 / median(lambda: torch.mm(a, b, out=product)) / 1e12,
            "copy_gbps": 2 * COPY_BYTES / median(lambda: target.copy_(source)) / 1e9}


def describe_run(args):
    """The fields that all results of a run share."""
    return {**run_info.run_info(), "torch": torch.__version__,
            "cuda": torch.version.cuda, "cudnn": torch.backends.cudnn.version(),
            "dtype": args.dtype, "accumulate": args.accumulate, "launches": args.launches,
            "rounds": args.rounds, **measure_ceilings()}


def compare(library, text, shape, l2, args):
    """Checks and times one shape. Returns its result, or raises RuntimeError with what is wrong."""
    reason = shape.why_not_torch()
    if reason is not None:
        raise RuntimeError(reason)
    count = shape.sets(l2)
    sets = [InputSet(shape, DTYPES[args.dtype]) for _ in range(count)]
    ours = Ours(library, text, sets, args)
    try:
        errors = [largest_error(shape, inputs, ours(i)) for i, inputs in enumerate(sets)]
        max_err = max(errors, key=lambda error: (math.isnan(error), error))
        if not max_err <= ERROR_BOUNDS[args.dtype, args.accumulate]:
            raise RuntimeError(f"{ours.name}: largest error to float64 is {max_err:.2e}")
        calls = {"ours": ours}
        for name, backend in BACKENDS.items():
            call = torch_call(backend, shape, sets)
            refused = why_refused(call)
            if refused is None:
                calls[name] = call
            else:
                print(f"  {text}: {name} refuses: {refused}")
        if "flash" in calls:
            flash_err = largest_error(shape, sets[0], calls["flash"](0))
            print(f"  {text}: largest error to float64: ours {max_err:.2e}, flash {flash_err:.2e}")
        rounds = measure(calls, count, max(args.launches, count), args.rounds)
    finally:
        ours.close()
    seconds = {name: statistics.median(times) for name, times in rounds.items()}
    torch_us = {f"torch_{name}_us": seconds[name] * 1e6 if name in seconds else None
                for name in BACKENDS}
    return {"tool": "compare_torch.py", "gpu": torch.cuda.get_device_name(), "shape": text,
            "kernel": ours.name, "l2": l2, "us": seconds["ours"] * 1e6,
            "us_least": min(rounds["ours"]) * 1e6, "us_most": max(rounds["ours"]) * 1e6, **torch_us,
            "tflops": shape.flops / seconds["ours"] / 1e12,
            "gbps": shape.set_bytes() / seconds["ours"] / 1e9, "max_err": max_err,
            "sets": count, "set_bytes": shape.set_bytes()}


def print_result(result):
    """One line of the table."""

    def number(value, width, digits):
        return f"{'-' if value is None else format(value, f'.{digits}f'):>{width}}"

    def ratio(name):
        return None if result[name] is None else result[name] / result["us"]

    names = ("us", "torch_flash_us", "torch_cudnn_us", "torch_efficient_us")
    print(f"{result['shape']:20} {result['l2']:4} {' '.join(number(result[n], 10, 2) for n in names)} "
          f"{number(ratio('torch_flash_us'), 10, 2)} {number(ratio('torch_cudnn_us'), 10, 2)} "
          f"{result['tflops']:8.1f} {result['gbps']:8.1f} {result['max_err']:9.2e}", flush=True)


def parse_arguments():
    parser = argparse.ArgumentParser(description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("library", help="libflashcore_kernel_bench_c.so")
    parser.add_argument("--shape", action="append",
                        help="as in flashcore-kernel-bench; repeatable; default: all named shapes")
    parser.add_argument("--arch", default="sm80")
    parser.add_argument("--dtype", default="float16", choices=DTYPES)
    parser.add_argument("--accumulate", default="float32", choices=("float32", "float16"))
    parser.add_argument("--launches", type=int, default=20,
                        help="calls in a graph, at least; one or more of each input set")
    parser.add_argument("--rounds", type=int, default=40, help="timed replays of each graph")
    parser.add_argument("--json", help="write the results to this file")
    return parser.parse_args()


def main():
    args = parse_arguments()
    if not torch.cuda.is_available():
        print("compare_torch.py: no GPU that PyTorch can use", file=sys.stderr)
        return 2
    library = Library(args.library)
    shapes = {text: library.shape(text) for text in args.shape or library.shape_names()}
    run = describe_run(args)
    print(f"{torch.cuda.get_device_name()}, PyTorch {run['torch']}, CUDA {run['cuda']}, cuDNN "
          f"{run['cudnn']}; ceilings: matmul {run['matmul_tflops']:.0f} TFLOP/s, copy "
          f"{run['copy_gbps']:.0f} GB/s")
    print(f"{'shape, us':20} {'L2':4} {'ours':>10} {'flash':>10} {'cudnn':>10} {'efficient':>10} "
          f"{'flash/ours':>10} {'cudnn/ours':>10} {'TFLOP/s':>8} {'GB/s':>8} {'max err':>9}")
    results, failures = [], 0
    for text, shape in shapes.items():
        for l2 in ("cold", "warm") if shape.sets("warm") else ("cold",):
            try:
                results.append(compare(library, text, shape, l2, args))
                print_result(results[-1])
            except RuntimeError as error:
                failures += 1
                print(f"{text:20} {l2:4} FAILED: {error}", flush=True)
    if args.json:
        record_file.write(args.json, [{**result, "run": run} for result in results])
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main())
