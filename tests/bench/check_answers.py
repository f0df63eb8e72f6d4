#!/usr/bin/env python3
"""Sends the same random requests to several servers and compares their answers.

    PYTHONPATH=GENERATED tests/bench/check_answers.py --seed=1 flashcore=127.0.0.1:7070 peer=HOST:PORT

Prints {name: {"version", "largest_difference"}}: of its answers from those of the first server, null
if one has a NaN. Needs grpcio, NumPy and the modules generated from attention.proto.
"""

import argparse
import json
import math

import grpc
import numpy as np
from flashcore.v1 import attention_pb2 as pb
from flashcore.v1 import attention_pb2_grpc


def random_elements(generator, *shape):
    return generator.uniform(-1, 1, shape).astype(np.float16).tobytes()


def attend(stub, generator, spans, heads, kv_heads, head_dim, mask):
    """O of one request with random FP16 tensors, in float32, flat."""
    query_rows, kv_rows = (sum(getattr(span, name) for span in spans)
                           for name in ("query_rows", "kv_rows"))
    reply = stub.Attend(pb.AttendRequest(
        spans=spans, dtype=pb.DTYPE_FLOAT16, num_heads=heads, num_kv_heads=kv_heads,
        head_dim=head_dim, layout=pb.LAYOUT_NHD, mask=pb.Mask(kind=mask),
        query=random_elements(generator, query_rows, heads, head_dim),
        key=random_elements(generator, kv_rows, kv_heads, head_dim),
        value=random_elements(generator, kv_rows, kv_heads, head_dim)))
    return np.frombuffer(reply.output, np.float16).astype(np.float32)


def load_sequence(stub, generator, rows, kv_heads, head_dim):
    """The id of a new sequence of random FP16 rows."""
    created = stub.CreateSequence(pb.CreateSequenceRequest(
        num_layers=1, num_kv_heads=kv_heads, head_dim=head_dim, dtype=pb.DTYPE_FLOAT16))
    stub.LoadSequence(iter([pb.LoadSequenceRequest(
        sequence_id=created.sequence_id, expected_length=0, layout=pb.LAYOUT_NHD, rows=rows,
        key=random_elements(generator, rows, kv_heads, head_dim),
        value=random_elements(generator, rows, kv_heads, head_dim))]))
    return created.sequence_id


def answers(target, seed):
    """O of requests that depend only on the seed: mission, mission causal, two decode steps."""
    generator = np.random.default_rng(seed)
    with grpc.insecure_channel(target, [("grpc.enable_http_proxy", 0)]) as channel:
        stub = attention_pb2_grpc.AttentionServiceStub(channel)
        span = [pb.Span(query_rows=512, kv_rows=512)]
        outputs = [attend(stub, generator, span, 8, 8, 64, mask)
                   for mask in (pb.Mask.KIND_NONE, pb.Mask.KIND_CAUSAL)]
        ids = [load_sequence(stub, generator, 300, 8, 128) for _ in range(4)]
        for length in (300, 301):
            spans = [pb.Span(query_rows=1, kv_rows=1, sequence_id=i, expected_length=length)
                     for i in ids]
            outputs.append(attend(stub, generator, spans, 32, 8, 128, pb.Mask.KIND_CAUSAL))
        for sequence_id in ids:
            stub.DeleteSequence(pb.DeleteSequenceRequest(sequence_id=sequence_id))
        return outputs


def describe(target):
    """The server's description of itself."""
    with grpc.insecure_channel(target, [("grpc.enable_http_proxy", 0)]) as channel:
        info = attention_pb2_grpc.AttentionServiceStub(channel).GetServerInfo(
            pb.GetServerInfoRequest())
    return ", ".join([info.version, *(f"{d.id} {d.name}".strip() for d in info.devices)])


def cross_check(ours, theirs):
    """The largest difference between two servers' answers; NaN if one of them has a NaN."""
    return float(np.max([np.abs(a - b).max() for a, b in zip(ours, theirs, strict=True)]))


def main():
    parser = argparse.ArgumentParser(description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seed", type=int, required=True)
    parser.add_argument("servers", nargs="+", metavar="NAME=HOST:PORT")
    args = parser.parse_args()
    first, result = None, {}
    for server in args.servers:
        name, _, target = server.partition("=")
        outputs = answers(target, args.seed)
        first = first or outputs
        difference = cross_check(first, outputs)
        result[name] = {"version": describe(target),
                        "largest_difference": None if math.isnan(difference) else difference}
    print(json.dumps(result))


if __name__ == "__main__":
    main()
