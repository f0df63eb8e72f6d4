#!/usr/bin/env python3
"""Measures layers of a model whose tensors lie in memory of the server's GPU, submitted ahead in the order
of a CUDA stream. Needs PyTorch with CUDA, and the generated modules of the contract in PYTHONPATH.

    device_tensors.py LIBFLASHCORE_C TARGET

TARGET is "local:/path" of a server with --local_device_tensors --device_tensor_bytes=4GiB
--client_kv_bytes=0.
"""

import ctypes
import math
import statistics
import sys
import time

import torch
from flashcore.v1 import attention_pb2 as pb

TIMEOUT_NS = 60 * 10**9
HEADS, KV_HEADS, DIM, ROWS = 32, 8, 128, 4096
WARM = 10  # rounds that do not count
U64 = ctypes.c_uint64


class Options(ctypes.Structure):
    _fields_ = [("slots", ctypes.c_uint32), ("slot_bytes", ctypes.c_uint32), ("timeout_ns", ctypes.c_int64),
                ("spin_us", ctypes.c_uint32)]


class DeviceMemory(ctypes.Structure):
    _fields_ = [("address", U64), ("bytes", U64), ("ordinal", ctypes.c_int32),
                ("region_id", ctypes.c_uint8 * 16)]


class Completion(ctypes.Structure):
    _fields_ = [("tag", U64), ("response", ctypes.c_void_p), ("response_bytes", U64)]


class Bytes(ctypes.Structure):
    _fields_ = [("data", ctypes.c_void_p), ("size", U64)]


class View:
    """FP16 memory of the GPU, for torch.as_tensor."""

    def __init__(self, address, shape):
        self.__cuda_array_interface__ = {"shape": shape, "typestr": "<f2", "data": (address, False),
                                         "version": 3}


class Client:
    def __init__(self, library, target):
        self.library = ctypes.CDLL(library)
        self.library.flashcore_last_error.restype = ctypes.c_char_p
        self.client = ctypes.c_void_p()
        self.check(self.library.flashcore_connect(
            target.encode(), b"device_tensors", ctypes.byref(Options(256, 16384, TIMEOUT_NS, 50)),
            ctypes.byref(self.client)))
        torch.cuda.set_stream(torch.cuda.Stream())
        self.stream = torch.cuda.current_stream()
        self.memory = DeviceMemory()
        self.check(self.library.flashcore_allocate_device_memory(
            self.client, U64(1 << 30), b"", ctypes.c_int64(TIMEOUT_NS), ctypes.byref(self.memory)))
        self.used = 0

    def check(self, code):
        if code != 0:
            raise RuntimeError(self.library.flashcore_last_error().decode())

    def tensor(self, *shape):
        """Its range and a view of it."""
        size = 2 * math.prod(shape)
        place = pb.MemoryRange(region_id=bytes(self.memory.region_id), offset=self.used, bytes=size)
        view = torch.as_tensor(View(self.memory.address + self.used, shape), device="cuda")
        self.used += -(-size // 256) * 256
        return place, view

    def call(self, method, request, response):
        data, out = request.SerializeToString(), Bytes()
        self.check(self.library.flashcore_call(self.client, method.encode(), data, U64(len(data)),
                                               ctypes.c_int64(TIMEOUT_NS), ctypes.byref(out)))
        return response.FromString(ctypes.string_at(out.data, out.size))

    def submit(self, message):
        self.check(self.library.flashcore_submit_on_stream(
            self.client, U64(1), message, U64(len(message)), ctypes.c_int64(TIMEOUT_NS),
            ctypes.c_void_p(self.stream.cuda_stream)))

    def receive(self):
        completion = Completion()
        self.check(self.library.flashcore_wait(self.client, ctypes.c_int64(TIMEOUT_NS),
                                               ctypes.byref(completion)))
        response = pb.AttendResponse.FromString(
            ctypes.string_at(completion.response, completion.response_bytes))
        if response.status.code != 0:
            raise RuntimeError(response.status.message)
        return response

    def load(self, sequences, layers):
        """Sequences of ROWS rows."""
        used = self.used
        (key, keys), (value, values) = (self.tensor(ROWS, KV_HEADS, DIM) for _ in range(2))
        keys.normal_()
        values.normal_()
        torch.cuda.synchronize()
        ids = []
        for _ in range(sequences):
            ids.append(self.call("CreateSequence", pb.CreateSequenceRequest(
                num_layers=layers, num_kv_heads=KV_HEADS, head_dim=DIM, dtype=pb.DTYPE_FLOAT16),
                pb.CreateSequenceResponse).sequence_id)
            for layer in range(layers):
                self.call("LoadSequence", pb.LoadSequenceRequest(
                    sequence_id=ids[-1], layer=layer, layout=pb.LAYOUT_NHD, rows=ROWS, key_range=key,
                    value_range=value), pb.LoadSequenceResponse)
        self.used = used
        return ids


def report(what, times, hosts, responses):
    timings = [response.timing for response in responses]
    phases = {name: statistics.median(getattr(timing, f"{name}_ns") / 1e3 for timing in timings)
              for name in ("receive", "queue", "copy_in", "kernel")}
    print(f"{what}: {statistics.median(times):.1f} us, client host {statistics.median(hosts):.1f} us, "
          + ", ".join(f"{name} {us:.1f}" for name, us in phases.items()), flush=True)


def measure(client, what, messages, rounds):
    """Submits the messages, and waits for the stream. The times are for one of them."""
    times, hosts, responses = [], [], []
    for number in range(WARM + rounds):
        torch.cuda.synchronize()
        begin = time.perf_counter()
        for message in messages:
            client.submit(message)
        submitted = time.perf_counter()
        client.stream.synchronize()
        end = time.perf_counter()
        answers = [client.receive() for _ in messages]
        if number >= WARM:
            times.append((end - begin) / len(messages) * 1e6)
            hosts.append((submitted - begin) / len(messages) * 1e6)
            responses += answers
    report(what, times, hosts, responses)


def decode(client, sequences, layers):
    used = client.used
    ids = client.load(sequences, layers)
    (query, _), (output, _) = (client.tensor(sequences, HEADS, DIM) for _ in range(2))
    (key, _), (value, _) = (client.tensor(sequences, KV_HEADS, DIM) for _ in range(2))
    spans = [pb.Span(query_rows=1, kv_rows=1, sequence_id=sequence) for sequence in ids]
    messages = [pb.AttendRequest(
        spans=spans, dtype=pb.DTYPE_FLOAT16, num_heads=HEADS, num_kv_heads=KV_HEADS, head_dim=DIM,
        layout=pb.LAYOUT_NHD, layer=layer, query_range=query, key_range=key, value_range=value,
        output_range=output).SerializeToString() for layer in range(layers)]
    what = f"decode, {sequences} sequences of {ROWS} rows, {layers} layers chained, a layer"
    measure(client, what, messages, 50)
    for sequence in ids:
        client.call("DeleteSequence", pb.DeleteSequenceRequest(sequence_id=sequence),
                    pb.DeleteSequenceResponse)
    client.used = used


def inline(client, heads, kv_heads, rows, dim, mask, rounds):
    used = client.used
    (query, q), (output, _) = (client.tensor(rows, heads, dim) for _ in range(2))
    (key, k), (value, v) = (client.tensor(rows, kv_heads, dim) for _ in range(2))
    for tensor in (q, k, v):
        tensor.normal_()
    message = pb.AttendRequest(
        spans=[pb.Span(query_rows=rows, kv_rows=rows)], dtype=pb.DTYPE_FLOAT16, num_heads=heads,
        num_kv_heads=kv_heads, head_dim=dim, layout=pb.LAYOUT_NHD, mask=pb.Mask(kind=mask), query_range=query,
        key_range=key, value_range=value, output_range=output).SerializeToString()
    measure(client, f"1x{heads}/{kv_heads}x{rows}x{dim}, {pb.Mask.Kind.Name(mask)}", [message], rounds)
    client.used = used


def main():
    if len(sys.argv) != 3:
        sys.exit(__doc__)
    client = Client(*sys.argv[1:])
    for sequences, layers in ((1, 32), (16, 32), (64, 8)):
        decode(client, sequences, layers)
    inline(client, 8, 8, 512, 64, pb.Mask.KIND_NONE, 50)
    inline(client, 32, 8, 8192, 128, pb.Mask.KIND_CAUSAL, 15)


if __name__ == "__main__":
    main()
