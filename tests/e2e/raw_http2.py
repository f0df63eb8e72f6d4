"""HTTP/2 by hand, for clients that break its rules, or read only as much as they choose to."""

import socket
import struct

PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
DATA, HEADERS, RST_STREAM, SETTINGS, PING, WINDOW_UPDATE, CONTINUATION = 0, 1, 3, 4, 6, 8, 9
END_STREAM, ACK, END_HEADERS = 1, 1, 4
INITIAL_WINDOW_SIZE = 4
CANCEL = (8).to_bytes(4, "big")
MAX_FRAME = 16384
FIRST_WINDOW = 65535  # bytes of a connection, and of each stream, before the server enlarges it
SERVICE = "/flashcore.v1.AttentionService/"
ATTEND = SERVICE + "Attend"


def frame(kind, flags, stream, payload):
    return len(payload).to_bytes(3, "big") + bytes([kind, flags]) + stream.to_bytes(4, "big") + payload


def literal(name, value):
    """A header field that needs no compression."""
    return b"\0" + bytes([len(name)]) + name + bytes([len(value)]) + value


def call_headers(path):
    """The header block of a call of gRPC."""
    return b"".join(literal(*field) for field in (
        (b":method", b"POST"), (b":scheme", b"http"), (b":path", path.encode()), (b":authority", b"test"),
        (b"content-type", b"application/grpc"), (b"te", b"trailers")))


HANDSHAKE = PREFACE + frame(SETTINGS, 0, 0, b"")


def connect(target, host=None, resets=False):
    """To host:port, from the address `host`, or to unix:PATH. `resets`: its close is that of a killed process
    that has not read everything."""
    if target.startswith("unix:"):
        connection = socket.socket(socket.AF_UNIX)
        connection.connect(target.removeprefix("unix:"))
        connection.settimeout(60)  # after it, lest a full backlog is an error
        return connection
    address, port = target.rsplit(":", 1)
    connection = socket.create_connection((address, int(port)), timeout=60,
                                          source_address=(host, 0) if host else None)
    if resets:
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    return connection


class SilentClient:
    """Many calls on one connection. `window`: bytes of each reply that the server may send until `grant`.
    `host`: the address that it calls from: each of 127.0.0.0/8 may be another client. Use as a context
    manager: the end is that of a killed process."""

    def __init__(self, target, window=0, host="127.0.0.1"):
        self.connection = connect(target, host, resets=True)
        self.window = FIRST_WINDOW  # bytes of messages that the server takes now
        self.next_stream = 1
        self.ended = set()  # streams
        self.unread = b""
        self.connection.sendall(
            PREFACE + frame(SETTINGS, 0, 0, struct.pack(">HI", INITIAL_WINDOW_SIZE, window)))

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.connection.close()

    def call(self, method, message, half_close=True):
        """Sends a request of at most one window; returns the number of its stream."""
        stream = self.open(method)
        self.send(stream, message, half_close)
        return stream

    def open(self, method):
        stream, self.next_stream = self.next_stream, self.next_stream + 2
        self.connection.sendall(frame(HEADERS, END_HEADERS, stream, call_headers(method)))
        return stream

    def send(self, stream, message, half_close=False, missing=0):
        """`missing`: bytes that the message claims to have besides."""
        data = b"\0" + (len(message) + missing).to_bytes(4, "big") + message
        assert len(data) <= FIRST_WINDOW, len(data)
        while self.window < len(data):
            self.read_frame()
        self.window -= len(data)
        pieces = [data[i:i + MAX_FRAME] for i in range(0, len(data), MAX_FRAME)]
        for i, piece in enumerate(pieces):
            ends = half_close and i + 1 == len(pieces)
            self.connection.sendall(frame(DATA, END_STREAM if ends else 0, stream, piece))

    def reset(self, stream):
        self.connection.sendall(frame(RST_STREAM, 0, stream, CANCEL))

    def grant(self, stream, size):
        """Lets the server send `size` more bytes on the stream; 0: on the connection."""
        self.connection.sendall(frame(WINDOW_UPDATE, 0, stream, size.to_bytes(4, "big")))

    def wait_for_end(self, streams):
        """Reads until all `streams` have ended."""
        while not set(streams) <= self.ended:
            self.read_frame()

    def read_message(self, stream, step):
        """The reply's message, read `step` bytes at a time."""
        data, granted = b"", 0
        while len(data) < 5 or len(data) < 5 + int.from_bytes(data[1:5], "big"):
            if len(data) == granted:
                self.grant(stream, step)
                granted += step
            kind, of, payload = self.read_frame()
            if kind == DATA and of == stream:
                data += payload
            if stream in self.ended:
                raise AssertionError(f"the call ended after {len(data)} bytes")
        return data[5:]

    def read_frame(self):
        """(type, stream, payload) of the next frame from the server."""
        header = self._read(9)
        kind, flags, stream = header[3], header[4], int.from_bytes(header[5:9], "big")
        payload = self._read(int.from_bytes(header[:3], "big"))
        if kind == WINDOW_UPDATE and stream == 0:
            self.window += int.from_bytes(payload, "big")
        elif kind == DATA and payload:  # the streams' windows are as large as the test wants
            self.grant(0, len(payload))
        elif kind == PING and not flags & ACK:
            self.connection.sendall(frame(PING, ACK, 0, payload))
        elif kind == RST_STREAM or (kind == HEADERS and flags & END_STREAM):
            self.ended.add(stream)
        return kind, stream, payload

    def _read(self, size):
        while len(self.unread) < size:
            piece = self.connection.recv(65536)
            if not piece:
                raise ConnectionError("the server closed the connection")
            self.unread += piece
        data, self.unread = self.unread[:size], self.unread[size:]
        return data
