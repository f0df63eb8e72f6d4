#!/usr/bin/env python3
"""The peer that compare_peer.py compares FlashCore with: gRPC for Python and PyTorch's attention.

    PYTHONPATH=GENERATED tests/bench/peer_server.py --listen=127.0.0.1:0 --device=cuda:0

Serves the part of flashcore.v1.AttentionService that `flashcore bench` uses: spans of one length in
a request, resident sequences of one layer, no LSE, no sliding window, no forks. A missing feature is
UNIMPLEMENTED. Needs PyTorch, NumPy, grpcio, and the modules generated from the .proto.

Each thread of the pool has a CUDA stream, pinned staging memory and device memory of its own; a
request is one copy in, one call of scaled_dot_product_attention, one copy out. The K/V of sequences
that are stepped together is moved side by side at their first step, so that further steps attend to
a view and copy nothing. No locks on sequences: a client waits for the answer of one request before
it names the same sequences in another.
"""

import argparse
import functools
import json
import threading
import uuid
from concurrent import futures

import grpc
import numpy as np
import torch
from flashcore.v1 import attention_pb2 as pb
from flashcore.v1 import attention_pb2_grpc
from torch.nn.functional import scaled_dot_product_attention

DTYPES = {pb.DTYPE_FLOAT16: torch.float16, pb.DTYPE_BFLOAT16: torch.bfloat16}
ELEMENT_BYTES = 2
MIN_STAGING_BYTES = 4 << 20
BACKENDS = ("flash", "cudnn", "mem_efficient")


class Refusal(Exception):
    """An RPC's status other than OK: a grpc.StatusCode and a message."""

    def __init__(self, code, message):
        super().__init__(message)
        self.code = code


def unimplemented(what):
    return Refusal(grpc.StatusCode.UNIMPLEMENTED, f"this server has no {what}")


def answered(method):
    """An RPC method(self, request) without autograd, whose Refusal becomes the RPC's status."""

    @functools.wraps(method)
    def call(self, request, context):
        try:
            with torch.inference_mode():
                return method(self, request)
        except Refusal as refusal:
            context.abort(refusal.code, str(refusal))

    return call


class HostBuffer:
    """Bytes on the host, pinned if there is a GPU: a tensor and an array over the same memory."""

    def __init__(self, pinned):
        self._pinned = pinned
        self.tensor = torch.empty(0, dtype=torch.uint8)
        self.reserve(MIN_STAGING_BYTES)

    def reserve(self, size):
        """Makes room for `size` bytes. Growing loses the content."""
        if size > len(self.tensor):
            self.tensor = torch.empty(1 << (size - 1).bit_length(), dtype=torch.uint8,
                                      pin_memory=self._pinned)
            self.array = self.tensor.numpy()


class Lane:
    """The CUDA stream of one thread and its staging memory. Made and used by that thread."""

    def __init__(self, device):
        self._device = device
        self._stream = None
        if device.type == "cuda":
            self._stream = torch.cuda.Stream(device)
            torch.cuda.set_stream(self._stream)  # the current one of this thread
        self._in = HostBuffer(pinned=self._stream is not None)
        self._out = HostBuffer(pinned=self._stream is not None)

    def copy_in(self, *parts):
        """The bytes of `parts`, packed, on the device: uint8 [size], valid until the next call.

        The stream has been waited for since the last call."""
        size = sum(map(len, parts))
        self._in.reserve(size)
        start = 0
        for part in parts:
            if part:
                self._in.array[start:start + len(part)] = np.frombuffer(part, np.uint8)
            start += len(part)
        return self._in.tensor[:size].to(self._device, non_blocking=True)

    def copy_out(self, tensor):
        """The elements of `tensor`, row-major, as bytes. Waits for the stream."""
        flat = tensor.reshape(-1).view(torch.uint8)
        size = len(flat)
        self._out.reserve(size)
        self._out.tensor[:size].copy_(flat, non_blocking=True)
        self.synchronize()
        return self._out.array[:size].tobytes()

    def synchronize(self):
        if self._stream is not None:
            self._stream.synchronize()


class Sequence:
    """A resident sequence: rows [0, length) of block[:, index]. A block is K, then V, of sequences
    that are stepped together: [2, sequences, kv_heads, capacity, head_dim]."""

    def __init__(self, block, dtype):
        self.id = uuid.uuid4().bytes
        self.block, self.index, self.length = block, 0, 0
        self.dtype = dtype

    def info(self):
        _, _, kv_heads, capacity, head_dim = self.block.shape
        return pb.SequenceInfo(
            sequence_id=self.id, num_layers=1, num_kv_heads=kv_heads, head_dim=head_dim,
            dtype=self.dtype, layer_lengths=[self.length], device_id=str(self.block.device),
            kv_bytes=2 * kv_heads * capacity * head_dim * ELEMENT_BYTES)

    def check_length(self, holder):
        """`holder` is a message with an optional expected_length."""
        if holder.HasField("expected_length") and holder.expected_length != self.length:
            raise Refusal(grpc.StatusCode.FAILED_PRECONDITION,
                          f"expected_length: {holder.expected_length}; the sequence has "
                          f"{self.length} rows")


def side_by_side(sequences, lane):
    """The block of `sequences`, in their order: [2, sequences, kv_heads, capacity, head_dim].

    A view if they already lie in that order; else they are moved into a new block."""
    block, first = sequences[0].block, sequences[0].index
    if any(s.block is not block or s.index != first + i for i, s in enumerate(sequences)):
        block, first = block.new_empty((2, len(sequences), *block.shape[2:])), 0
        for index, s in enumerate(sequences):
            block[:, index, :, :s.length] = s.block[:, s.index, :, :s.length]
        lane.synchronize()  # before another thread gets the memory of the old blocks
        for index, s in enumerate(sequences):
            s.block, s.index = block, index
    return block[:, first:first + len(sequences)]


def append(block, length, rows):
    """Writes `rows` [2, sequences, kv_heads, new, head_dim] behind the first `length`. All rows."""
    end = length + rows.shape[3]
    if end > block.shape[3]:
        raise Refusal(grpc.StatusCode.RESOURCE_EXHAUSTED,
                      f"sequence: {end} rows; at most --capacity={block.shape[3]}")
    block[:, :, :, length:end] = rows
    return block[:, :, :, :end]


def heads_first(elements, layout, *shape):
    """A view [..., heads, rows, head_dim] of packed elements; `shape` is ..., heads, rows, head_dim
    whatever the layout."""
    *outer, heads, rows, head_dim = shape
    if layout == pb.LAYOUT_HND:
        return elements.view(*outer, heads, rows, head_dim)
    return elements.view(*outer, rows, heads, head_dim).transpose(-3, -2)


def check(request):
    """Refuses an AttendRequest that this server does not serve."""
    spans = request.spans
    if not spans or request.dtype not in DTYPES:
        raise Refusal(grpc.StatusCode.INVALID_ARGUMENT, "spans, dtype: unset")
    rows, kv_rows, resident = spans[0].query_rows, spans[0].kv_rows, bool(spans[0].sequence_id)
    if any(s.query_rows != rows or s.kv_rows != kv_rows or bool(s.sequence_id) != resident
           for s in spans):
        raise unimplemented("spans of different kinds or lengths in one request")
    if request.return_lse or request.layer != 0 or kv_rows == 0:
        raise unimplemented("LSE, layer other than 0, or span without K/V rows")


def copy_in(request, lane):
    """On the device: query [spans, heads, rows, head_dim], and K and V in one [2, spans, kv_heads,
    kv_rows, head_dim]."""
    spans, layout, head_dim = len(request.spans), request.layout, request.head_dim
    rows, kv_rows = request.spans[0].query_rows, request.spans[0].kv_rows
    query_elements = spans * request.num_heads * rows * head_dim
    kv_elements = 2 * spans * request.num_kv_heads * kv_rows * head_dim
    staged = lane.copy_in(request.query, request.key, request.value)
    want = (query_elements + kv_elements) * ELEMENT_BYTES
    if len(staged) != want:
        raise Refusal(grpc.StatusCode.INVALID_ARGUMENT,
                      f"query, key, value: {len(staged)} bytes; want {want}")
    elements = staged.view(DTYPES[request.dtype])
    return (heads_first(elements[:query_elements], layout,
                        spans, request.num_heads, rows, head_dim),
            heads_first(elements[query_elements:], layout,
                        2, spans, request.num_kv_heads, kv_rows, head_dim))


def is_causal(request, rows, kv_rows):
    """PyTorch's is_causal, which is aligned to the top left."""
    if request.mask.kind == pb.Mask.KIND_NONE:
        return False
    if request.mask.kind != pb.Mask.KIND_CAUSAL or rows not in (1, kv_rows):
        raise unimplemented("such mask: causal has one query row, or as many as K/V rows")
    return rows > 1


def attend(request, query, key_value):
    """O [spans, heads, rows, head_dim] of query, likewise, and [2, spans, kv_heads, kv_rows,
    head_dim]."""
    return scaled_dot_product_attention(
        query, key_value[0], key_value[1],
        is_causal=is_causal(request, query.shape[2], key_value.shape[3]),
        scale=request.softmax_scale if request.HasField("softmax_scale") else None,
        enable_gqa=request.num_heads != request.num_kv_heads)


class PeerService(attention_pb2_grpc.AttentionServiceServicer):
    """Every thread that calls an RPC has called open_lane."""

    def __init__(self, device, capacity):
        self._device = device
        self._capacity = capacity  # rows of a sequence
        self._sequences = {}  # by id
        self._local = threading.local()

    def open_lane(self):
        self._local.lane = Lane(self._device)

    @answered
    def Attend(self, request):
        check(request)
        sequences = self._find_all(request.spans)
        lane = self._local.lane
        query, key_value = copy_in(request, lane)
        if sequences:
            key_value = append(side_by_side(sequences, lane), sequences[0].length, key_value)
        output = attend(request, query, key_value)
        if request.layout == pb.LAYOUT_NHD:
            output = output.transpose(1, 2)
        reply = pb.AttendResponse(request_id=request.request_id, output=lane.copy_out(output))
        for sequence in sequences:
            sequence.length += request.spans[0].kv_rows
            reply.sequence_lengths.append(sequence.length)
        return reply

    @answered
    def GetServerInfo(self, request):
        del request
        name = torch.cuda.get_device_name(self._device) if self._device.type == "cuda" else ""
        return pb.GetServerInfoResponse(version=f"peer, PyTorch {torch.__version__}",
                                        devices=[pb.DeviceInfo(id=str(self._device), name=name)])

    @answered
    def CreateSequence(self, request):
        if request.num_layers != 1:
            raise unimplemented("sequence of more than one layer")
        if request.dtype not in DTYPES:
            raise Refusal(grpc.StatusCode.INVALID_ARGUMENT, "dtype: unset")
        block = torch.empty((2, 1, request.num_kv_heads, self._capacity, request.head_dim),
                            dtype=DTYPES[request.dtype], device=self._device)
        sequence = Sequence(block, request.dtype)
        self._sequences[sequence.id] = sequence
        return pb.CreateSequenceResponse(sequence_id=sequence.id, sequence=sequence.info())

    @answered
    def LoadSequence(self, request):
        sequence = None
        for chunk in request:
            sequence = sequence or self._find(chunk.sequence_id)
            self._load(sequence, chunk)
        if sequence is None:
            raise Refusal(grpc.StatusCode.INVALID_ARGUMENT, "no message")
        return pb.LoadSequenceResponse(sequence=sequence.info())

    @answered
    def TruncateSequence(self, request):
        sequence = self._find(request.sequence_id)
        sequence.check_length(request)
        if request.length > sequence.length:
            raise Refusal(grpc.StatusCode.INVALID_ARGUMENT,
                          f"length: {request.length}; the sequence has {sequence.length} rows")
        sequence.length = request.length
        return pb.TruncateSequenceResponse(sequence=sequence.info())

    @answered
    def GetSequence(self, request):
        return pb.GetSequenceResponse(sequence=self._find(request.sequence_id).info())

    @answered
    def DeleteSequence(self, request):
        del self._sequences[self._find(request.sequence_id).id]
        return pb.DeleteSequenceResponse()

    def _find(self, sequence_id):
        if sequence_id not in self._sequences:
            raise Refusal(grpc.StatusCode.NOT_FOUND, f"no sequence {sequence_id.hex()}")
        return self._sequences[sequence_id]

    def _find_all(self, spans):
        """The sequences of resident spans, as long as expected and equally long; [] if inline."""
        sequences = [self._find(span.sequence_id) for span in spans if span.sequence_id]
        for span, sequence in zip(spans, sequences):
            sequence.check_length(span)
            if sequence.length != sequences[0].length:
                raise unimplemented("sequences of different lengths in one request")
        return sequences

    def _load(self, sequence, chunk):
        sequence.check_length(chunk)
        _, _, kv_heads, _, head_dim = sequence.block.shape
        elements = self._local.lane.copy_in(chunk.key, chunk.value).view(sequence.block.dtype)
        rows = heads_first(elements, chunk.layout, 2, 1, kv_heads, chunk.rows, head_dim)
        append(sequence.block[:, sequence.index:sequence.index + 1], sequence.length, rows)
        self._local.lane.synchronize()
        sequence.length += chunk.rows

    def warm_up(self):
        """Loads CUDA's modules by one request of each kind, on the calling thread."""
        self.open_lane()

        def attend_once(rows, heads, kv_heads, head_dim, sequence_id):
            query, rows_of_kv = (bytes(rows * n * head_dim * ELEMENT_BYTES)
                                 for n in (heads, kv_heads))
            span = pb.Span(query_rows=rows, kv_rows=rows, sequence_id=sequence_id)
            self.Attend(pb.AttendRequest(
                spans=[span], dtype=pb.DTYPE_FLOAT16, layout=pb.LAYOUT_NHD, num_heads=heads,
                num_kv_heads=kv_heads, head_dim=head_dim, query=query, key=rows_of_kv,
                value=rows_of_kv), None)

        attend_once(512, 8, 8, 64, b"")
        sequence = self.CreateSequence(pb.CreateSequenceRequest(
            num_layers=1, num_kv_heads=8, head_dim=128, dtype=pb.DTYPE_FLOAT16), None)
        attend_once(1, 32, 8, 128, sequence.sequence_id)
        self.DeleteSequence(pb.DeleteSequenceRequest(sequence_id=sequence.sequence_id), None)


def choose_backend(name):
    """PyTorch's own choice among its fused backends, or one of them; never the unfused one."""
    torch.backends.cuda.enable_math_sdp(False)
    for backend in BACKENDS:
        if name not in ("default", backend):
            getattr(torch.backends.cuda, f"enable_{backend}_sdp")(False)


def serve(service, args):
    """A started grpc.Server and its addresses."""
    pool = futures.ThreadPoolExecutor(args.workers, initializer=service.open_lane)
    server = grpc.server(pool, options=[("grpc.max_receive_message_length", -1),
                                        ("grpc.max_send_message_length", -1),
                                        ("grpc.so_reuseport", 0)])
    attention_pb2_grpc.add_AttentionServiceServicer_to_server(service, server)
    addresses = []
    for address in args.listen:
        port = server.add_insecure_port(address)
        unix = address.startswith("unix:")
        addresses.append(address if unix else f"{address.rpartition(':')[0]}:{port}")
    server.start()
    return server, addresses


def parse_arguments():
    parser = argparse.ArgumentParser(description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--listen", action="append", required=True,
                        help="host:port or unix:path; repeatable")
    parser.add_argument("--device", default="cuda:0", help="as PyTorch names it")
    parser.add_argument("--workers", type=int, default=8, help="threads that serve RPCs")
    parser.add_argument("--capacity", type=int, default=4160, help="rows of a sequence at most")
    parser.add_argument("--backend", default="default", choices=("default", *BACKENDS),
                        help="of scaled_dot_product_attention on a GPU")
    return parser.parse_args()


def main():
    args = parse_arguments()
    device = torch.device(args.device)
    if device.type == "cuda":
        choose_backend(args.backend)
    service = PeerService(device, args.capacity)
    service.warm_up()
    server, addresses = serve(service, args)
    print(json.dumps({"msg": "serving", "addresses": ",".join(addresses)}), flush=True)
    server.wait_for_termination()


if __name__ == "__main__":
    main()
