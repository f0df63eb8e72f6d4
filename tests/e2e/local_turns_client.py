"""Clients of the local socket, each a process of a user of its own: one that measures its calls, and those
that attack the server meanwhile.

Usage: local_turns_client.py UID SOCKET honest|ATTACK [NUMBER]. An attack prints "ready" when it has begun.
"""

import datetime
import fcntl
import json
import mmap
import os
import select
import signal
import socket
import struct
import sys
import threading
import time

import numpy as np
from flashcore.v1 import attention_pb2 as pb
from flashcore.v1 import local_pb2 as local

from local_raw_client import (COMPLETED, F_ADD_SEALS, F_SEAL_SHRINK, HEADER_BYTES, RECEIVED, SUBMITTED,
                              RawClient)

QUIET = "quiet\n"
CREATE = pb.CreateSequenceRequest(num_layers=1, num_kv_heads=1, head_dim=32, dtype=pb.DTYPE_FLOAT16)


def frame(request):
    message = request.SerializeToString()
    return struct.pack("<I", len(message)) + message


def call_frame(number, method, message):
    return frame(local.LocalRequest(id=number, call=local.LocalCall(
        method=method, message=message.SerializeToString())))


class Honest(RawClient):
    """One call and one step through the ring at a time, with a pause."""

    def __init__(self, path):
        super().__init__(path)
        self.sequence = self.call("CreateSequence", CREATE, pb.CreateSequenceResponse).sequence_id
        self.request = pb.AttendRequest(
            dtype=pb.DTYPE_FLOAT16, num_heads=1, num_kv_heads=1, head_dim=32, layout=pb.LAYOUT_NHD,
            spans=[pb.Span(query_rows=1, kv_rows=1)], query=bytes(64), key=bytes(64), value=bytes(64))

    def receive(self):
        while self.counter(COMPLETED) == self.received:
            time.sleep(2e-5)
        return super().receive()

    def step(self, times):
        start = time.monotonic()
        self.call("GetServerInfo", pb.GetServerInfoRequest(), pb.GetServerInfoResponse)
        middle = time.monotonic()
        self.submit(7, self.request)
        status = self.receive()[1].status
        times["call"].append(middle - start)
        times["ring"].append(time.monotonic() - middle)
        if status.code != 0:
            raise RuntimeError(str(status))


def measure(path, quiet_steps):
    client, ended = Honest(path), threading.Event()
    results = {"quiet": {"call": [], "ring": []}, "attacked": {"call": [], "ring": []}, "errors": []}
    while len(results["quiet"]["call"]) < quiet_steps:
        client.step(results["quiet"])
        time.sleep(0.002)
    threading.Thread(target=lambda: (sys.stdin.read(), ended.set()), daemon=True).start()
    print(QUIET, end="", flush=True)
    while not ended.is_set():
        try:
            client.step(results["attacked"])
        except (RuntimeError, OSError) as error:
            results["errors"].append(f"{datetime.datetime.now():%T}: {error}")
            break
        time.sleep(0.002)
    print(json.dumps(results), flush=True)


def greet(path):
    client = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    client.connect(path)
    client.sendall(frame(local.LocalRequest(id=1, hello=local.LocalHello(
        min_version=1, max_version=1, client="flood"))))
    client.recv(1 << 16)
    return client


def flood(path, connections, burst):
    """Sends burst(client's number) again and again on each connection, and reads the replies."""
    clients = [greet(path) for _ in range(connections)]
    poll = select.epoll()
    left = {}
    for i, client in enumerate(clients):
        client.setblocking(False)
        poll.register(client.fileno(), select.EPOLLIN | select.EPOLLOUT)
        left[client.fileno()] = [client, memoryview(burst(i)), 0]
    print("ready", flush=True)
    while True:
        for fd, events in poll.poll():
            entry = left[fd]
            client, data, sent = entry
            try:
                if events & select.EPOLLIN and not client.recv(1 << 18):
                    return
                if events & select.EPOLLOUT:
                    entry[2] = (sent + client.send(data[sent:])) % len(data)
            except BlockingIOError:
                pass


def make_sequences(path, count):
    client = RawClient(path)
    for _ in range(count):
        sequence = client.call("CreateSequence", CREATE, pb.CreateSequenceResponse).sequence_id
    return client, sequence


def listing(path, connections):
    keep = make_sequences(path, 4000)
    request = pb.ListSequencesRequest(page_size=1000)
    calls = [call_frame(1000 + i, "ListSequences", request) for i in range(1000)]
    flood(path, connections, lambda _: b"".join(calls))
    del keep


def forking(path, connections):
    keep = make_sequences(path, 1)
    request = pb.ForkSequenceRequest(sequence_id=keep[1])
    calls = [call_frame(1000 + i, "ForkSequence", request) for i in range(1000)]
    flood(path, connections, lambda _: b"".join(calls))


def managing(path, connections):
    keep = make_sequences(path, 1)
    operation = pb.SequenceOperation(get=pb.GetSequenceRequest(sequence_id=keep[1]))
    request = pb.ManageSequencesRequest(operations=[operation] * 256)
    calls = [call_frame(1000 + i, "ManageSequences", request) for i in range(300)]
    flood(path, connections, lambda _: b"".join(calls))


def calling(path, connections):
    request = pb.GetServerInfoRequest()
    calls = [call_frame(1000 + i, "GetServerInfo", request) for i in range(1000)]
    flood(path, connections, lambda _: b"".join(calls))


def cancelling(path, connections):
    cancels = frame(local.LocalRequest(id=9, cancel=local.LocalCancel())) * 4000
    flood(path, connections, lambda _: cancels)


def rings(path, cancels_a_second, slots=4096, number=16, slot_bytes=256):
    """Rings full of bad requests, and cancels of them."""
    client = RawClient(path)
    size = HEADER_BYTES + 2 * slots * slot_bytes
    fd = os.memfd_create("rings", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    whole = (number * size + mmap.PAGESIZE - 1) // mmap.PAGESIZE * mmap.PAGESIZE
    os.ftruncate(fd, whole)
    fcntl.fcntl(fd, F_ADD_SEALS, F_SEAL_SHRINK)
    memory = mmap.mmap(fd, whole)
    region = client.exchange(fd, register_memory=local.LocalRegisterMemory(
        bytes=whole)).register_memory.region_id
    opened = [client.exchange(open_ring=local.LocalOpenRing(
        region_id=region, offset=i * size, slots=slots, slot_bytes=slot_bytes)).open_ring.ring
        for i in range(number - 1)]
    opened.append(client.ring)
    slot = struct.pack("<QQII", 7, 0, 4, 0) + b"\xff" * 4
    for i in range(number - 1):
        for j in range(slots):
            at = i * size + HEADER_BYTES + j * slot_bytes
            memory[at:at + len(slot)] = slot
    counters = np.frombuffer(memory, np.uint64)
    print("ready", flush=True)
    cancel = [frame(local.LocalRequest(id=9, cancel=local.LocalCancel(ring=ring, tag=7, in_ring=True)))
              for ring in opened]
    turn, begun, sent = 0, time.monotonic(), 0
    while True:
        for i in range(number - 1):
            completed = counters[(i * size + COMPLETED) // 8]
            counters[(i * size + RECEIVED) // 8] = completed
            counters[(i * size + SUBMITTED) // 8] = completed + np.uint64(slots)
        os.write(client.doorbell, struct.pack("<Q", 1))
        while sent < (time.monotonic() - begun) * cancels_a_second:
            client.socket.sendall(cancel[turn % len(cancel)])
            turn, sent = turn + 1, sent + 1
        time.sleep(0.001)


def idle_rings(path, connections, number=15):
    """Rings that are never used."""
    keep = []
    for _ in range(connections):
        client = RawClient(path)
        for i in range(number):
            client.exchange(open_ring=local.LocalOpenRing(
                region_id=client.region_id, offset=65536 + i * 4096, slots=1, slot_bytes=256))
            os.close(client.received_fds.pop())
        keep.append(client)
    print("ready", flush=True)
    signal.pause()


ATTACKS = {"list": listing, "fork": forking, "manage": managing, "call": calling,
           "cancel": cancelling, "rings": rings, "idle": idle_rings}


def main():
    uid, path, what = int(sys.argv[1]), sys.argv[2], sys.argv[3]
    number = int(sys.argv[4])
    if uid != os.getuid():
        os.setuid(uid)
    if what == "honest":
        measure(path, number)
    else:
        ATTACKS[what](path, number)


if __name__ == "__main__":
    main()
