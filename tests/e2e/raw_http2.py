"""A unary call over a raw HTTP/2 connection, by a client that reads only as much of the reply as it
chooses to: flow control is in the hands of the test."""

import socket
import struct

PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
DATA, HEADERS, SETTINGS, WINDOW_UPDATE = 0, 1, 4, 8
END_STREAM, ACK, END_HEADERS = 1, 1, 4
INITIAL_WINDOW_SIZE = 4
STREAM = 1  # of the call
MAX_FRAME = 16384
MAX_REQUEST = 65535  # bytes that may be sent before the server enlarges the window


def frame(kind, flags, stream, payload):
    return len(payload).to_bytes(3, "big") + bytes([kind, flags]) + stream.to_bytes(4, "big") + payload


def literal(name, value):
    """A header field that needs no compression."""
    return b"\0" + bytes([len(name)]) + name + bytes([len(value)]) + value


class UnaryCall:
    """Sends one message when it is made. The server may send `window` bytes of the reply until `grant`
    allows more. Use as a context manager: the end is that of a killed process."""

    def __init__(self, port, method, message, window=0):
        data = b"\0" + len(message).to_bytes(4, "big") + message
        assert len(data) <= MAX_REQUEST, len(data)
        self.connection = socket.create_connection(("127.0.0.1", port), timeout=60)
        # Closing then resets the connection, as the kernel does for data that nobody has read.
        self.connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        headers = b"".join(literal(*field) for field in (
            (b":method", b"POST"), (b":scheme", b"http"), (b":path", method.encode()),
            (b":authority", b"test"), (b"content-type", b"application/grpc"), (b"te", b"trailers")))
        out = PREFACE + frame(SETTINGS, 0, 0, struct.pack(">HI", INITIAL_WINDOW_SIZE, window))
        out += frame(SETTINGS, ACK, 0, b"") + frame(HEADERS, END_HEADERS, STREAM, headers)
        pieces = [data[i:i + MAX_FRAME] for i in range(0, len(data), MAX_FRAME)]
        for i, piece in enumerate(pieces):
            out += frame(DATA, END_STREAM if i + 1 == len(pieces) else 0, STREAM, piece)
        self.connection.sendall(out)

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.connection.close()

    def grant(self, size):
        """Lets the server send `size` more bytes."""
        for stream in (0, STREAM):
            self.connection.sendall(frame(WINDOW_UPDATE, 0, stream, size.to_bytes(4, "big")))

    def read_frame(self):
        """(type, flags, stream, payload) of the next frame from the server."""
        header = self._read(9)
        return (header[3], header[4], int.from_bytes(header[5:9], "big"),
                self._read(int.from_bytes(header[:3], "big")))

    def read_message(self, step):
        """The reply's message, read `step` bytes at a time."""
        data = b""
        while len(data) < 5 or len(data) < 5 + int.from_bytes(data[1:5], "big"):
            self.grant(step)
            size = 0
            while size < step and (len(data) < 5 or
                                   len(data) < 5 + int.from_bytes(data[1:5], "big")):
                kind, flags, stream, payload = self.read_frame()
                if kind == DATA and stream == STREAM:
                    data, size = data + payload, size + len(payload)
                elif kind == HEADERS and flags & END_STREAM:
                    raise AssertionError(f"the call ended after {len(data)} bytes")
        return data[5:]

    def _read(self, size):
        data = b""
        while len(data) < size:
            piece = self.connection.recv(size - len(data))
            if not piece:
                raise ConnectionError("the server closed the connection")
            data += piece
        return data
