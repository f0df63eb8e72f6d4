"""The attackers of the tests, each once, by name. As a program, one attacks until it is killed:

  attackers.py UID NAME TARGET[,TARGET...] OPTIONS

as that user, with the arguments of the function in JSON. It prints "ready" and how many connections it has,
once it has begun. A target is host:port, unix:PATH or local:PATH."""

import contextlib
import fcntl
import json
import math
import mmap
import os
import select
import signal
import ssl
import struct
import subprocess
import sys
import time

import numpy as np
from flashcore.v1 import attention_pb2 as pb
from flashcore.v1 import local_pb2 as local

import raw_http2
from local_raw_client import (COMPLETED, F_ADD_SEALS, F_SEAL_SHRINK, HEADER_BYTES, HELLO, RECEIVED, SUBMITTED,
                              RawClient, call_frame, frame)
from raw_http2 import (ACK, ATTEND, CANCEL, CONTINUATION, DATA, END_HEADERS, END_STREAM, HANDSHAKE, HEADERS,
                       PING, RST_STREAM, SERVICE, SETTINGS, WINDOW_UPDATE, connect, literal)

CREATE = pb.CreateSequenceRequest(num_layers=1, num_kv_heads=1, head_dim=32, dtype=pb.DTYPE_FLOAT16)
NEVER = math.inf


class Attacker:
    """One in a process of its own, of `user` if one is given. Use as a context manager: it has then begun."""

    def __init__(self, name, *targets, user=None, **options):
        user = os.getuid() if user is None else user
        self.process = subprocess.Popen(
            [sys.executable, "-B", __file__, str(user), name, ",".join(targets), json.dumps(options)],
            stdout=subprocess.PIPE, text=True)

    def __enter__(self):
        self.begun()
        return self

    def __exit__(self, *_):
        self.process.kill()
        self.process.communicate()

    def begun(self):
        """How many connections it has, once it has begun."""
        line = self.process.stdout.readline()
        if not line:
            raise AssertionError(f"{self.process.args} does not attack")
        return int(line.split()[1])


def ready(connections):
    print("ready", connections, flush=True)


def keep(count, start, pause=None):
    """Keeps `count` connections that start(), of their number, makes. `pause` seconds after one is cut off or
    refused, another takes its place; None: then the attack ends."""
    running, due, begun = {}, {number: 0 for number in range(count)}, False
    while True:
        now = time.monotonic()
        for number in [number for number, when in due.items() if when <= now]:
            try:
                one = start(number)
                running[one.connection] = number, one
                del due[number]
            except OSError:
                if pause is None:
                    raise
                due[number] = now + pause
        if not begun:
            ready(len(running))
            begun = True
        readable, writable, _ = select.select(
            [connection for connection, (_, one) in running.items() if one.reads(now)],
            [connection for connection, (_, one) in running.items() if one.sends()], [], 0.05)
        for connection in {*readable, *writable}:
            number, one = running[connection]
            if not one.step(connection in readable):
                if pause is None:
                    return
                connection.close()
                del running[connection]
                due[number] = time.monotonic() + pause


# ---- Over HTTP/2: frames that flow control does not hold back.

UNKNOWN_TYPE = 0x20
MARK = 0x01020304  # a number of a stream, to be replaced
AT_ONCE = 1000  # streams
# The fields of a call, which the first one adds to the table of both sides (RFC 7541), and how others then
# name them.
FIELDS = (b":authority", b"test"), (b"content-type", b"application/grpc"), (b"te", b"trailers")
POST_HTTP = b"\x83\x86"
NEXT_HEADERS = POST_HTTP + b"\xc1\xc0\xbf\xbe"


def first_headers(path):
    fields = (b":path", path.encode()), *FIELDS
    return POST_HTTP + b"".join(b"\x40" + literal(*field)[1:] for field in fields)


def begin(stream, message):
    """Begins a call, which `message` completes."""
    whole = raw_http2.frame(DATA, END_STREAM, stream, b"\0\0\0\0\0") if message else b""
    return raw_http2.frame(HEADERS, END_HEADERS, stream, NEXT_HEADERS) + whole


def reset(stream, message):
    return begin(stream, message) + raw_http2.frame(RST_STREAM, 0, stream, CANCEL)


def on_streams(unit, first, count):
    """The frames that `unit`, a function, makes of `count` streams from `first` on."""
    marked = unit(MARK)
    frames = np.tile(np.frombuffer(marked, np.uint8), (count, 1))
    numbers = (first + 2 * np.arange(count, dtype=np.uint32)).astype(">u4")
    at = marked.find(MARK.to_bytes(4, "big"))
    while at >= 0:
        frames[:, at:at + 4] = numbers.view(np.uint8).reshape(count, 4)
        at = marked.find(MARK.to_bytes(4, "big"), at + 4)
    return frames.tobytes()


def continuations():
    fields = b"".join(literal(b"k%06d" % i, b"v" * 100) for i in range(140))
    return raw_http2.frame(CONTINUATION, 0, 1, fields) * 16


class Flood:
    """`acknowledged`: the client acknowledges the server's settings first. It then sends headers of a call of
    `path`, which are complete if `flags` say so. `unit`: what it sends on each of the other streams; None: on
    no other, but `again`, again and again."""

    def __init__(self, path, unit=None, acknowledged=True, flags=END_HEADERS, again=b""):
        self.acknowledged, self.unit, self.again = acknowledged, unit, again
        self.first = raw_http2.frame(HEADERS, flags, 1, first_headers(path))
        self._chunks = {}

    def chunk(self, first):
        """The frames from stream `first` on."""
        if self.unit is None:
            return self.again
        if first not in self._chunks and len(self._chunks) < 50:
            self._chunks[first] = on_streams(self.unit, first, AT_ONCE)
        return self._chunks.get(first) or on_streams(self.unit, first, AT_ONCE)


FLOODS = {
    "reset": Flood(ATTEND, lambda stream: reset(stream, message=True)),
    "reset_early": Flood(ATTEND, lambda stream: reset(stream, message=False)),
    "reset_stream": Flood(SERVICE + "AttendStream", lambda stream: reset(stream, message=False)),
    "reset_health": Flood("/grpc.health.v1.Health/Check", lambda stream: reset(stream, message=True)),
    "reset_unknown": Flood("/no.Such/Method", lambda stream: reset(stream, message=True)),
    "unacknowledged": Flood(SERVICE + "AttendStream", lambda stream: begin(stream, message=False),
                            acknowledged=False),
    "continuation": Flood(ATTEND, acknowledged=False, flags=0, again=continuations()),
}
# Those that are cut off only if the server does not keep up with them.
FRAME_FLOODS = {
    "unknown_frames": Flood(ATTEND, again=raw_http2.frame(UNKNOWN_TYPE, 0, 0, bytes(64)) * 2000),
    "window_updates": Flood(ATTEND, again=raw_http2.frame(WINDOW_UPDATE, 0, 0, b"\0\0\0\1") * 2000),
    "settings": Flood(ATTEND, again=raw_http2.frame(SETTINGS, 0, 0, b"") * 2000),
    "pings": Flood(ATTEND, again=raw_http2.frame(PING, 0, 0, bytes(8)) * 2000),
}
ALL_FLOODS = {**FLOODS, **FRAME_FLOODS}


class FloodingConnection:
    """One of `flood`, on `connection`, which is connected."""

    def __init__(self, flood, connection):
        self.connection, self._flood, self._stream = connection, flood, 3
        connection.sendall(HANDSHAKE)
        if flood.acknowledged:
            connection.recv(65536)  # the server's settings
            connection.sendall(raw_http2.frame(SETTINGS, ACK, 0, b""))
        connection.sendall(flood.first)
        connection.setblocking(False)
        self._left = b""

    def reads(self, _):
        return True

    def sends(self):
        return True

    def step(self, readable):
        """Reads, or sends what can be sent. False if the server has ended the connection."""
        with contextlib.suppress(BlockingIOError, ssl.SSLWantReadError, ssl.SSLWantWriteError):
            try:
                if readable and not self.connection.recv(65536):
                    return False
                if not self._left:
                    self._left = memoryview(self._flood.chunk(self._stream))
                    self._stream += 2 * AT_ONCE
                self._left = self._left[self.connection.send(self._left):]
            except ConnectionError:
                return False
        return True


def flood_http2(target, flood, count, pause=0.1):
    keep(count, lambda _: FloodingConnection(ALL_FLOODS[flood], connect(target, resets=True)), pause)


def come_and_go(target, flood, count, streams, pause=0.1):
    """Connections that send so many streams and are closed at once."""
    chunk = on_streams(FLOODS[flood].unit, 3, streams)
    ready(count)
    while True:
        with contextlib.ExitStack() as stack:
            for _ in range(count):
                with contextlib.suppress(OSError):
                    connection = stack.enter_context(connect(target, resets=True))
                    FloodingConnection(FLOODS[flood], connection)
                    connection.setblocking(True)
                    connection.sendall(chunk)
        time.sleep(pause)


# ---- At every door.

class IdleConnection:
    """Has sent its first bytes, and has been answered."""

    def __init__(self, target, host):
        if target.startswith("local:"):
            self.connection = connect_local(target)
            self.connection.sendall(frame(1, hello=HELLO))
        else:
            self.connection = connect(target, host)
            self.connection.sendall(HANDSHAKE)
        if not self.connection.recv(65536):
            raise ConnectionError

    def reads(self, _):
        return True

    def sends(self):
        return False

    def step(self, _):
        with contextlib.suppress(ConnectionError):
            return bool(self.connection.recv(65536))
        return False


def idle(*targets, count, host, refill=False):
    """`count` connections at each target that do nothing. `refill`: new ones for those that are closed."""
    keep(count * len(targets), lambda number: IdleConnection(targets[number % len(targets)], host),
         1 if refill else NEVER)


# ---- At the local socket.

class LocalFlood:
    """Sends `data`, again and again or once. `pause`: seconds after which it reads `sip` bytes."""

    def __init__(self, target, data, again=True, pause=0, sip=1 << 18):
        self.connection = connect_local(target)
        self.connection.sendall(frame(1, hello=HELLO))
        self._data, self._sent, self._again = memoryview(data), 0, again
        self._pause, self._sip, self._next_read = pause, sip, time.monotonic() + pause
        if pause == 0 and not self.connection.recv(1 << 16):
            raise ConnectionError
        self.connection.setblocking(False)

    def reads(self, now):
        return now >= self._next_read

    def sends(self):
        return self._sent < len(self._data)

    def step(self, readable):
        try:
            if readable:
                self._next_read = time.monotonic() + self._pause
                if not self.connection.recv(self._sip):
                    return False
            self._sent += self.connection.send(self._data[self._sent:])
            if self._again:
                self._sent %= len(self._data)
        except BlockingIOError:
            pass
        except OSError:
            return False
        return True


def connect_local(target):
    return connect("unix:" + target.removeprefix("local:"))


def call_frames(count, method, message):
    return b"".join(call_frame(1000 + i, method, message) for i in range(count))


CALLS = call_frames(500, "GetServerInfo", pb.GetServerInfoRequest())
HALF = struct.pack("<I", 1 << 20) + bytes((1 << 20) - 1)  # of the largest frame


def raw_client(target):
    return RawClient(target.removeprefix("local:"))


def sequence_of(client):
    return client.call("CreateSequence", CREATE, pb.CreateSequenceResponse).sequence_id


def list_sequences(target, count):
    client = raw_client(target)
    for _ in range(4000):
        sequence_of(client)
    calls = call_frames(1000, "ListSequences", pb.ListSequencesRequest(page_size=1000))
    keep(count, lambda _: LocalFlood(target, calls))


def fork_sequences(target, count):
    client = raw_client(target)
    calls = call_frames(1000, "ForkSequence", pb.ForkSequenceRequest(sequence_id=sequence_of(client)))
    keep(count, lambda _: LocalFlood(target, calls))


def manage_sequences(target, count):
    client = raw_client(target)
    operation = pb.SequenceOperation(get=pb.GetSequenceRequest(sequence_id=sequence_of(client)))
    calls = call_frames(300, "ManageSequences", pb.ManageSequencesRequest(operations=[operation] * 256))
    keep(count, lambda _: LocalFlood(target, calls))


def quick_calls(target, count):
    calls = call_frames(1000, "GetServerInfo", pb.GetServerInfoRequest())
    keep(count, lambda _: LocalFlood(target, calls))


def cancels(target, count):
    keep(count, lambda _: LocalFlood(target, frame(9, cancel=local.LocalCancel()) * 4000))


def unread_replies(target, count, sip=0):
    """Reads `sip` bytes a second, or nothing."""
    keep(count, lambda _: LocalFlood(target, CALLS, pause=1 if sip else NEVER, sip=sip), 0)


def half_frames(target, count):
    keep(count, lambda _: LocalFlood(target, HALF, again=False), 0)


def bad_rings(target, cancels_a_second, slots=4096, number=16, slot_bytes=256):
    """Rings full of bad requests, and cancels of them."""
    client = raw_client(target)
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
    ready(1)
    cancel = [frame(9, cancel=local.LocalCancel(ring=ring, tag=7, in_ring=True)) for ring in opened]
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


def idle_rings(target, count, number=15):
    """Rings that are never used."""
    kept = []
    for _ in range(count):
        client = raw_client(target)
        for i in range(number):
            client.exchange(open_ring=local.LocalOpenRing(
                region_id=client.region_id, offset=65536 + i * 4096, slots=1, slot_bytes=256))
            os.close(client.received_fds.pop())
        kept.append(client)
    ready(len(kept))
    signal.pause()


ATTACKS = {function.__name__: function for function in (
    flood_http2, come_and_go, idle, list_sequences, fork_sequences, manage_sequences, quick_calls, cancels,
    unread_replies, half_frames, bad_rings, idle_rings)}


def main():
    uid, name, targets, options = sys.argv[1:]
    if int(uid) != os.getuid():
        os.setuid(int(uid))
    ATTACKS[name](*targets.split(","), **json.loads(options))


if __name__ == "__main__":
    main()
