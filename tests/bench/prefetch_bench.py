#!/usr/bin/env python3
"""What the prefetch of the next layer gives a decode that walks through the layers of a model.

    PYTHONPATH=build/tests/e2e/generated tests/bench/prefetch_bench.py [--server=...] [--json=FILE]

A frontend computes between the attention of two layers; here it waits. Each step appends a token to
every layer of one sequence and attends to it. The K/V of all layers is much more than the L2 holds,
that of one layer less. Servers with and without prefetch run at the same time, and take turns by step.
"""

import argparse
import contextlib
import json
import os
import statistics
import time

from compare_peer import Server  # first: it sets gRPC up for processes that fork
import grpc
from flashcore.v1 import attention_pb2 as pb
from flashcore.v1 import attention_pb2_grpc

HEADS, KV_HEADS, HEAD_DIM = 32, 8, 128
ROW_BYTES = KV_HEADS * HEAD_DIM * 2  # of K or of V, float16
CHUNK_ROWS = 2048


def finite_halves(count):
    """Bytes of `count` float16 numbers with magnitudes below 2, none of them infinite or NaN."""
    random = bytearray(os.urandom(2 * count))
    random[1::2] = bytes(byte & 0xBF for byte in random[1::2])
    return bytes(random)


class Decode:
    """One sequence on one server, and the times of its requests."""

    def __init__(self, target, layers, tokens):
        self._channel = grpc.insecure_channel(
            target, options=[("grpc.max_send_message_length", -1)])
        self.stub = attention_pb2_grpc.AttentionServiceStub(self._channel)
        self._layers = layers
        self._query = finite_halves(HEADS * HEAD_DIM)
        self._row = finite_halves(KV_HEADS * HEAD_DIM)
        self._sequence = self.stub.CreateSequence(pb.CreateSequenceRequest(
            num_layers=layers, num_kv_heads=KV_HEADS, head_dim=HEAD_DIM,
            dtype=pb.DTYPE_FLOAT16)).sequence_id
        chunk = finite_halves(CHUNK_ROWS * KV_HEADS * HEAD_DIM)
        for layer in range(layers):
            self.stub.LoadSequence(pb.LoadSequenceRequest(
                sequence_id=self._sequence if n == 0 else b"", layer=layer, layout=pb.LAYOUT_NHD,
                rows=CHUNK_ROWS, key=chunk, value=chunk) for n in range(tokens // CHUNK_ROWS))

    def step(self, gap_s):
        """A token through all layers. Returns (kernel us, whole us) of each layer's request."""
        times = []
        for layer in range(self._layers):
            time.sleep(gap_s)
            request = pb.AttendRequest(
                spans=[pb.Span(query_rows=1, kv_rows=1, sequence_id=self._sequence)],
                dtype=pb.DTYPE_FLOAT16, num_heads=HEADS, num_kv_heads=KV_HEADS, head_dim=HEAD_DIM,
                layout=pb.LAYOUT_NHD, layer=layer, query=self._query, key=self._row,
                value=self._row)
            start = time.perf_counter()
            reply = self.stub.Attend(request)
            whole = time.perf_counter() - start
            times.append((reply.timing.kernel_ns / 1e3, whole * 1e6))
        return times


def percentile(values, share):
    """Of a list, by the nearest rank."""
    return sorted(values)[min(len(values) - 1, int(share * len(values)))]


def row_of(prefetch, gap_us, times):
    """A row of the table: the first layer is left out, since nothing comes before it."""
    kernel, whole = zip(*times)
    return {"prefetch": prefetch, "gap_us": gap_us, "requests": len(times),
            "kernel_p50_us": statistics.median(kernel), "kernel_p99_us": percentile(kernel, 0.99),
            "whole_p50_us": statistics.median(whole), "whole_p99_us": percentile(whole, 0.99)}


def measure(args, decodes):
    """Rows of the table, for each gap and server."""
    rows = []
    for gap_us in args.gaps_us:
        times = {name: [] for name in decodes}
        for step in range(args.steps + 1):
            for name, decode in decodes.items():
                layers = decode.step(gap_us * 1e-6)
                if step > 0:  # the first step warms up
                    times[name] += layers[1:]
        rows += [row_of(name, gap_us, times[name]) for name in decodes]
    return rows


def parse_args():
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--server", default="build/server/flashcore-server")
    parser.add_argument("--device", default="cuda:0")
    parser.add_argument("--layers", type=int, default=32)
    parser.add_argument("--tokens", type=int, default=4096, help=f"a multiple of {CHUNK_ROWS}")
    parser.add_argument("--steps", type=int, default=20, help="tokens that are decoded for a row")
    parser.add_argument("--gaps_us", type=lambda text: [float(gap) for gap in text.split(",")],
                        default=[0, 100, 500], help="between two layers, besides the client's own time")
    parser.add_argument("--server_flag", action="append", default=[])
    parser.add_argument("--json", help="write the rows to this file")
    return parser.parse_args()


def main():
    args = parse_args()
    with contextlib.ExitStack() as stack:
        decodes = {}
        for prefetch in ("none", "next_layer"):
            server = stack.enter_context(Server(prefetch, [
                args.server, f"--device={args.device}", f"--prefetch={prefetch}",
                "--metrics_listen=127.0.0.1:0", "--log_format=json", f"--kv_memory_bytes={4 << 30}",
                *args.server_flag]))
            decodes[prefetch] = Decode(server.targets["unix"], args.layers, args.tokens)
        rows = measure(args, decodes)
    print(f"{'prefetch':12}{'gap us':>8}{'requests':>10}{'kernel p50':>12}{'p99':>8}{'whole p50':>11}{'p99':>8}")
    for row in rows:
        print(f"{row['prefetch']:12}{row['gap_us']:8.0f}{row['requests']:10}"
              f"{row['kernel_p50_us']:12.1f}{row['kernel_p99_us']:8.1f}"
              f"{row['whole_p50_us']:11.1f}{row['whole_p99_us']:8.1f}")
    if args.json:
        with open(args.json, "w", encoding="utf-8") as file:
            json.dump(rows, file, indent=1)


if __name__ == "__main__":
    main()
