"""A client of the local socket written from proto/flashcore/v1/local.proto and proto/wire/ring.h
alone: no library of ours, only sockets, mmap and struct.

Usage: local_raw_client.py SOCKET. Makes a sequence, loads it, decodes some steps over a ring and checks
them. It has no memory fences, so it always rings the doorbell, and it polls for answers.
"""

import ctypes
import fcntl
import mmap
import os
import socket
import struct
import sys
import time

import numpy as np
from flashcore.v1 import attention_pb2 as pb
from flashcore.v1 import local_pb2 as local

VERSION = 1
LINE = 64  # bytes of a cache line: each counter of the header has one
SUBMITTED, TAKEN, COMPLETED, RECEIVED, SERVER_SLEEPS, CLIENT_SLEEPS = (LINE * i for i in range(6))
HEADER_BYTES = 6 * LINE
SLOTS, SLOT_BYTES = 4, 1024
TENSORS = 64 * 1024  # offset of the tensors in the region, behind the ring
REGION_BYTES = 1 << 20
F_ADD_SEALS, F_SEAL_SHRINK = 1033, 2
PATIENCE = 60  # seconds
HELLO = local.LocalHello(min_version=VERSION, max_version=VERSION, client="raw")


def frame(number, **action):
    """A LocalRequest with that id, as it goes over the socket."""
    message = local.LocalRequest(id=number, **action).SerializeToString()
    return struct.pack("<I", len(message)) + message


def call_frame(number, method, message):
    return frame(number, call=local.LocalCall(method=method, message=message.SerializeToString()))


class RawClient:
    """One connection, one region, one ring at its start."""

    def __init__(self, path):
        self.socket = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self.socket.settimeout(PATIENCE)
        self.socket.connect(path)
        self.next_id = 1
        self.identity = self.exchange(hello=HELLO).hello.identity
        fd = os.memfd_create("raw", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        os.ftruncate(fd, REGION_BYTES)
        fcntl.fcntl(fd, F_ADD_SEALS, F_SEAL_SHRINK)
        self.memory = mmap.mmap(fd, REGION_BYTES)
        self.region_id = self.exchange(
            fd, register_memory=local.LocalRegisterMemory(bytes=REGION_BYTES)
        ).register_memory.region_id
        os.close(fd)
        self.ring = self.exchange(open_ring=local.LocalOpenRing(
            region_id=self.region_id, offset=0, slots=SLOTS, slot_bytes=SLOT_BYTES)).open_ring.ring
        self.doorbell = self.received_fds.pop()
        self.submitted = self.received = 0

    def exchange(self, fd=None, **action):
        """Sends a LocalRequest, with a descriptor if there is one; returns its LocalReply."""
        data = frame(self.next_id, **action)
        sent = 0 if fd is None else socket.send_fds(self.socket, [data], [fd])
        self.socket.sendall(data[sent:])
        self.received_fds = []
        reply = local.LocalReply.FromString(self.read(*struct.unpack("<I", self.read(4))))
        if reply.id != self.next_id or reply.status.code != 0:
            raise RuntimeError(f"{next(iter(action))}: {reply}")
        self.next_id += 1
        return reply

    def read(self, size):
        data = b""
        while len(data) < size:
            more, fds, _, _ = socket.recv_fds(self.socket, size - len(data), 1)
            if not more:
                raise RuntimeError("the server has closed the connection")
            self.received_fds += fds
            data += more
        return data

    def call(self, method, request, response):
        reply = self.exchange(call=local.LocalCall(
            method=method, message=request.SerializeToString(), timeout_ns=PATIENCE * 10**9))
        return response.FromString(reply.message)

    def counter(self, offset):
        return struct.unpack_from("<Q", self.memory, offset)[0]

    def store(self, offset, count):
        """In one piece, for the server reads it at any time; struct.pack_into would write zeros first."""
        ctypes.c_uint64.from_buffer(self.memory, offset).value = count

    def submit(self, tag, request):
        assert self.submitted - self.received < SLOTS
        message = request.SerializeToString()
        slot = HEADER_BYTES + self.submitted % SLOTS * SLOT_BYTES
        header = struct.pack("<QQII", tag, PATIENCE * 10**9, len(message), 0)
        self.memory[slot:slot + len(header) + len(message)] = header + message
        self.submitted += 1
        self.store(SUBMITTED, self.submitted)
        os.write(self.doorbell, struct.pack("<Q", 1))

    def receive(self):
        end = time.monotonic() + PATIENCE
        while self.counter(COMPLETED) == self.received:
            if time.monotonic() > end:
                raise RuntimeError("no answer")
        slot = HEADER_BYTES + (SLOTS + self.received % SLOTS) * SLOT_BYTES
        tag, size, reserved = struct.unpack_from("<QII", self.memory, slot)
        assert reserved == 0
        response = pb.AttendResponse.FromString(self.memory[slot + 16:slot + 16 + size])
        self.received += 1
        self.store(RECEIVED, self.received)
        return tag, response

    def put(self, offset, array):
        data = array.tobytes()
        self.memory[TENSORS + offset:TENSORS + offset + len(data)] = data
        return self.range(offset, len(data))

    def range(self, offset, size):
        return pb.MemoryRange(region_id=self.region_id, offset=TENSORS + offset, bytes=size)


def reference(q, k, v):
    """Attention in float64 of q [heads, d] over k and v [rows, kv_heads, d]."""
    q, k, v = (x.astype(np.float64) for x in (q, k, v))
    group = q.shape[0] // k.shape[1]
    k, v = (np.repeat(x, group, axis=1) for x in (k, v))
    scores = np.einsum("hd,jhd->hj", q, k) / np.sqrt(q.shape[1])
    weights = np.exp(scores - scores.max(axis=-1, keepdims=True))
    return np.einsum("hj,jhd->hd", weights / weights.sum(axis=-1, keepdims=True), v)


def decode(client, rows=100, steps=6, heads=4, kv_heads=2, head_dim=64):
    """Returns the largest error of the outputs."""
    rng = np.random.default_rng(int(os.environ.get("FLASHCORE_TEST_SEED", "1")))
    k, v = (rng.standard_normal((rows + steps, kv_heads, head_dim)).astype(np.float16)
            for _ in range(2))
    sequence_id = client.call("CreateSequence", pb.CreateSequenceRequest(
        num_layers=1, num_kv_heads=kv_heads, head_dim=head_dim, dtype=pb.DTYPE_FLOAT16),
        pb.CreateSequenceResponse).sequence_id
    client.call("LoadSequence", pb.LoadSequenceRequest(
        sequence_id=sequence_id, layout=pb.LAYOUT_NHD, rows=rows,
        key_range=client.put(0, k[:rows]), value_range=client.put(200_000, v[:rows])),
        pb.LoadSequenceResponse)
    error = 0.0
    for step in range(steps):
        q = rng.standard_normal((heads, head_dim)).astype(np.float16)
        length = rows + step
        client.submit(1000 + step, pb.AttendRequest(
            request_id=f"step-{step}", dtype=pb.DTYPE_FLOAT16, num_heads=heads,
            num_kv_heads=kv_heads, head_dim=head_dim, layout=pb.LAYOUT_NHD,
            spans=[pb.Span(query_rows=1, kv_rows=1, sequence_id=sequence_id, expected_length=length)],
            query_range=client.put(0, q), key_range=client.put(4096, k[length]),
            value_range=client.put(8192, v[length]), output_range=client.range(12288, q.nbytes)))
        tag, response = client.receive()
        assert tag == 1000 + step, tag
        assert response.status.code == 0, response.status
        assert list(response.sequence_lengths) == [length + 1], response
        output = np.frombuffer(client.memory, np.float16, q.size, TENSORS + 12288).reshape(q.shape)
        error = max(error, np.abs(output - reference(q, k[:length + 1], v[:length + 1])).max())
    client.call("DeleteSequence", pb.DeleteSequenceRequest(sequence_id=sequence_id),
                pb.DeleteSequenceResponse)
    return error


def main():
    client = RawClient(sys.argv[1])
    error = decode(client)
    print(f"{client.identity}: decoded, largest error {error:.1e}")
    return 0 if error < 2e-3 else 1


if __name__ == "__main__":
    sys.exit(main())
