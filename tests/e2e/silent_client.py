"""A client of many calls on one HTTP/2 connection that never lets the server send a reply."""

import functools
import socket
import struct

import harness
from harness import MIB, by_address, wait_until
from raw_http2 import (ACK, DATA, END_HEADERS, END_STREAM, HEADERS, INITIAL_WINDOW_SIZE, MAX_FRAME,
                       PREFACE, SETTINGS, WINDOW_UPDATE, frame, literal)

PING, RST_STREAM = 6, 3
CANCEL = 8
FIRST_WINDOW = 65535  # of a connection, and of each stream, from client to server
ATTEND = "/flashcore.v1.AttentionService/Attend"


@functools.cache
def window_request():
    """A request of nearly one window: 84 KiB of staging memory, of which its reply keeps 20 KiB."""
    rng = harness.numpy_rng()
    q, k, v = (harness.random_tensor(rng, 150, 1, 64) for _ in range(3))
    return harness.request(q, k, v, "r").SerializeToString()


class SilentClient:
    """`window`: bytes of each reply that the server may send. `host`: the address that it calls from:
    each of 127.0.0.0/8 is another client. Use as a context manager: the end is that of a killed
    process."""

    def __init__(self, port, window=0, host="127.0.0.1"):
        self.connection = socket.create_connection(("127.0.0.1", port), timeout=60,
                                                   source_address=(host, 0))
        # Closing then resets the connection, as the kernel does for data that nobody has read.
        self.connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
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
        headers = b"".join(literal(*field) for field in (
            (b":method", b"POST"), (b":scheme", b"http"), (b":path", method.encode()),
            (b":authority", b"test"), (b"content-type", b"application/grpc"), (b"te", b"trailers")))
        self.connection.sendall(frame(HEADERS, END_HEADERS, stream, headers))
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
        self.connection.sendall(frame(RST_STREAM, 0, stream, CANCEL.to_bytes(4, "big")))

    def wait_for_end(self, streams):
        """Reads until all `streams` have ended."""
        while not set(streams) <= self.ended:
            self.read_frame()

    def read_frame(self):
        header = self._read(9)
        kind, flags, stream = header[3], header[4], int.from_bytes(header[5:9], "big")
        payload = self._read(int.from_bytes(header[:3], "big"))
        if kind == WINDOW_UPDATE and stream == 0:
            self.window += int.from_bytes(payload, "big")
        elif kind == DATA and payload:  # the streams' windows are as large as the test wants
            self.connection.sendall(frame(WINDOW_UPDATE, 0, 0, len(payload).to_bytes(4, "big")))
        elif kind == PING and not flags & ACK:
            self.connection.sendall(frame(PING, ACK, 0, payload))
        elif kind == RST_STREAM or (kind == HEADERS and flags & END_STREAM):
            self.ended.add(stream)

    def _read(self, size):
        while len(self.unread) < size:
            piece = self.connection.recv(65536)
            if not piece:
                raise ConnectionError("the server closed the connection")
            self.unread += piece
        data, self.unread = self.unread[:size], self.unread[size:]
        return data


class HeldStaging:
    """All staging memory of a server, with FLAGS among its flags, is in unread replies until `release`:
    requests of window_request's size or more wait for it, however long that takes. Each reply is another
    client's, which has too little to give it back. Use as a context manager."""

    REPLY, REQUEST, STAGING = 20 << 10, 84 << 10, MIB
    REPLIES = (STAGING - REQUEST) // REPLY + 1
    HOSTS = tuple(f"127.0.1.{number + 1}" for number in range(REPLIES))
    FLAGS = (f"--staging_memory_bytes={STAGING}", f"--client_staging_bytes={STAGING}",
             f"--max_message_bytes={MIB}", "--staging_wait_ms=3600000", "--reply_timeout_s=3600",
             by_address(*HOSTS))

    def __init__(self, server):
        self._clients = [SilentClient(server.port, host=host) for host in self.HOSTS]
        replies = self.REPLIES
        used = 'flashcore_staging_bytes{state="used"}'
        before = server.metric(harness.COMPUTED)
        for client in self._clients:
            client.call(ATTEND, window_request())
        waiting = "flashcore_staging_waiting_requests"

        def is_held():  # by replies alone; a GPU's memory is one block: its last piece may be too small
            held = server.metric(harness.COMPUTED) - before
            return (held + server.metric(waiting) == replies and
                    server.metric(used) == held * self.REPLY)

        wait_until(is_held, "replies hold the memory")

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.release()

    def release(self):
        """Ends the clients like killed processes. May be called again."""
        for client in self._clients:
            client.connection.close()
