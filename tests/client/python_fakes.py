"""For tests of the Python client without a server: a transport, tensors and errors."""

import flashcore
import numpy as np
from flashcore import _messages, _requests
from flashcore._transport import BlockingTransport, Config

HEADS, KV_HEADS, DIM = 4, 2, 32
UNAVAILABLE = flashcore.Unavailable("Connection reset by peer")
NOT_REACHED = flashcore.Unavailable("failed to connect to all addresses")


def random(rows, heads=HEADS, seed=1, dtype=np.float16):
    return np.random.default_rng(seed).standard_normal((rows, heads, DIM)).astype(dtype)


class FakeTransport:
    """A transport to a server that serve() is. Its clock moves when the client waits. `faults` are of the
    next calls: None, or (error, whether the call takes effect all the same)."""

    def __init__(self, faults):
        self.faults = list(faults)
        self.calls, self.requests = [], []
        self.time = 0.0
        self.waits = []

    def check_here(self):
        pass

    def now(self):
        return self.time

    def uniform(self):
        return 1.0

    def lock(self):
        return BlockingTransport.lock(self)

    async def sleep(self, seconds):
        self.waits.append(seconds)
        self.time += seconds

    async def close(self):
        pass

    async def call(self, method, request, left, on_sequence):
        self.calls.append(method)
        if isinstance(request, _requests.Request):
            request = request.inline()
        self.requests.append(request)
        error, works = (self.faults.pop(0) if self.faults else None) or (None, True)
        reply = _messages.METHODS[method][1]()
        if works:
            self.serve(method, request, reply)
        if error is not None:
            raise error
        return reply

    @staticmethod
    def config(timeout=30.0, retry=None):
        return Config.read("fake:1", None, None, timeout, None, retry, {})


class Refuses:
    """A mixin of a TestCase."""

    def refuses(self, server, call, *words):
        """`call` is refused before anything is sent, by a message with `words`."""
        before = len(server.calls)
        with self.subTest(words), self.assertRaises(flashcore.InvalidArgument) as caught:
            call()
        self.assertIsInstance(caught.exception, ValueError)
        for word in words:
            self.assertIn(word, str(caught.exception))
        self.assertEqual(len(server.calls), before)
