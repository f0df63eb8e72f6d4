"""The transport of "local:/path": tensors in memory that client and server share, and requests in a ring, by
the C library. Blocking, and in asyncio.
"""

import asyncio
import concurrent.futures
import functools
import math
import os
from typing import Any, Callable

from . import _c_library, _messages
from ._local_connection import BlockingConnection, Call, Connection
from ._local_memory import Message
from ._requests import Reply, Request
from ._streams import Streams
from ._transport import AsyncTransport, BlockingTransport, Config, closed
from .errors import Cancelled, DeadlineExceeded, Unimplemented, no_thread

_NEW = ("CreateSequence", "HoldLease")  # calls that concern no sequence that exists


def _late(method: str) -> DeadlineExceeded:
    return DeadlineExceeded(f"{method}: no answer within the timeout")


def _invoke(connection: Connection, method: str, data: bytes, left: float) -> Any:
    """A call on the socket; waits."""
    return _messages.METHODS[method][1].FromString(connection.call(method, data, left))


def _invoke_placed(connection: Connection, method: str, message: Message, left: float) -> Any:
    """The same, for a message in a block with a region of its own."""
    try:
        reply = _messages.METHODS[method][1].FromString(connection.call(method, message.data, left))
        result = message.reply(reply) if method == "Attend" else reply
    except BaseException:
        connection.drop(message.block)  # the server may still use it
        raise
    connection.give_back(message.block)
    return result


class LocalTransport(BlockingTransport):
    """Blocking. Thread-safe."""

    def __init__(self, config: Config) -> None:
        super().__init__(config)
        _c_library.load()
        self._connection: BlockingConnection | None = None
        self._streams: Streams | None = None  # of the last connection that had any

    async def call(self, method: str, request: Any, left: float, on_sequence: bool) -> Any:
        if left <= 0:
            raise _late(method)
        deadline = self.now() + left
        if on_sequence and self._streams is not None and method not in _NEW:
            self._streams.wait(deadline)  # the server knows no order between a stream and this
        connection = self._connected(deadline)
        if not isinstance(request, Request):
            reply = _invoke(connection, method, request.SerializeToString(), deadline - self.now())
            if method == "HoldLease":  # it lives as long as the connection
                self._lease = connection
            return reply
        message = Message(request)
        message.place(connection.block(message.shape.bytes, not message.in_ring, deadline - self.now()))
        if not message.in_ring:
            return _invoke_placed(connection, method, message, deadline - self.now())
        return self._attend(connection, message, deadline)

    def holds_lease(self) -> bool:
        lease = self._lease
        return lease is not None and not lease.ended() and lease is self._connection

    def _connected(self, deadline: float) -> BlockingConnection:
        self.check_here()
        with self._lock:
            if self._closed:
                raise closed()
            if self._connection is None or self._connection.ended():
                self._connection = None
                self._opens()
                self._connection = BlockingConnection(self._config.target, self._config.client_name,
                                                      deadline - self.now())
            return self._connection

    def streams(self, deadline: float) -> Streams:
        earlier = self._streams
        if earlier is not None:
            if earlier.connection.ended():
                earlier.wait(deadline)
            earlier.raise_earlier()
        connection = self._connected(deadline)
        with self._lock:
            if self._streams is None or self._streams.connection is not connection:
                self._streams = Streams(connection)
            return self._streams

    def synchronize(self, deadline: float) -> None:
        if self._streams is not None:
            self._streams.wait(deadline)
            self._streams.raise_earlier()

    def _attend(self, connection: BlockingConnection, message: Message, deadline: float) -> Reply:
        call = Call(message.block)
        tag = None
        try:
            while (tag := connection.submit(call, message.data, deadline - self.now())) is None:
                turn = connection.turn()
                if not connection.wait_for(turn, deadline):
                    connection.forget(turn)
                    raise _late("Attend")
            if not connection.wait_for(call, deadline):
                raise _late("Attend")
        except BaseException:
            connection.abandon(tag, call)
            raise
        return connection.finish(call, message)

    async def close(self) -> None:
        self._forget()
        connection, self._connection, self._lease = self._connection, None, None
        self._streams = None  # its memory stays until its tensors are gone
        if connection is not None and self._process == os.getpid():
            connection.shutdown()


class AsyncLocalTransport(AsyncTransport):
    """In asyncio. For the event loop of the first call."""

    def __init__(self, config: Config) -> None:
        super().__init__(config)
        _c_library.load()
        self._connection: Connection | None = None
        self._opening = asyncio.Lock()
        self._fd = -1  # of the connection, while the loop waits for it
        # For what blocks: connecting, registering memory, and calls that are no attention.
        self._executor = concurrent.futures.ThreadPoolExecutor(8, "flashcore")

    async def call(self, method: str, request: Any, left: float, on_sequence: bool) -> Any:
        if left <= 0:
            raise _late(method)
        deadline = self.now() + left
        connection = await self._connected(deadline)
        if not isinstance(request, Request):
            data = request.SerializeToString()
            reply = await self._run(_invoke, connection, method, data, deadline - self.now())
            if method == "HoldLease":  # it lives as long as the connection
                self._lease = connection
            return reply
        message = Message(request)
        size, alone = message.shape.bytes, not message.in_ring
        while (block := connection.free_block(size, alone)) is None:
            await self._run(connection.grow, size, alone, deadline - self.now())
        message.place(block)
        if alone:
            return await self._run(_invoke_placed, connection, method, message, deadline - self.now())
        return await self._attend(connection, message, deadline)

    def holds_lease(self) -> bool:
        lease = self._lease
        return lease is not None and not lease.ended() and lease is self._connection

    def _run(self, function: Callable[..., Any], *args: Any) -> Any:
        try:
            return asyncio.get_running_loop().run_in_executor(self._executor, function, *args)
        except RuntimeError as error:
            if "thread" not in str(error):
                raise
            raise no_thread(error) from None

    async def _connected(self, deadline: float) -> Connection:
        self.check_here()
        connection = self._connection
        if self._closed:
            raise closed()
        if connection is not None and not connection.ended():
            return connection
        async with self._opening:
            if self._connection is None or self._connection.ended():
                self._opens()
                if self._connection is not None:
                    self._take(self._connection)  # its calls see its end
                connection = await self._run(Connection, self._config.target, self._config.client_name,
                                             deadline - self.now())
                if self._closed:
                    raise closed()
                self._connection, self._fd = connection, connection.event_fd()
                asyncio.get_running_loop().add_reader(self._fd, self._take, connection)
            return self._connection

    def _take(self, connection: Connection) -> None:
        while connection.poll():
            pass
        if connection.ended() and connection is self._connection:
            self._stop_watching()

    def _stop_watching(self) -> None:
        if self._fd >= 0 and self._loop is not None and not self._loop.is_closed():
            self._loop.remove_reader(self._fd)
        self._fd, self._connection = -1, None

    async def _attend(self, connection: Connection, message: Message, deadline: float) -> Reply:
        call = Call(message.block)
        tag = None
        try:
            while (tag := connection.submit(call, message.data, deadline - self.now())) is None:
                turn = connection.turn()
                try:
                    if not await self._wait_for(turn, deadline):
                        raise _late("Attend")
                except BaseException:
                    connection.forget(turn)
                    raise
            if not await self._wait_for(call, deadline):
                raise _late("Attend")
        except BaseException:
            connection.abandon(tag, call)
            raise
        return connection.finish(call, message)

    def streams(self, deadline: float) -> Any:
        raise Unimplemented("flashcore.aio: takes no tensors on a GPU: use flashcore.connect, whose "
                            "calls with them wait for no GPU, or pass tensors in host memory, q.cpu()")

    async def _wait_for(self, call: Call, deadline: float) -> bool:
        """Whether it is done by the deadline."""
        if call.done():
            return True
        loop = asyncio.get_running_loop()
        woken = loop.create_future()
        call.wake = timeout = functools.partial(_wake, woken)
        timer = None if deadline == math.inf else loop.call_later(deadline - self.now(), timeout)
        try:
            await woken
        finally:
            if timer is not None:
                timer.cancel()
        return call.done()

    async def close(self) -> None:
        if self._process not in (0, os.getpid()):
            return
        if self._loop is not None and not self._loop.is_closed():
            self.check_here()
        self._forget()
        connection = self._connection
        if connection is not None:
            self._stop_watching()
            connection.shutdown()
            connection.fail(Cancelled("the client was closed"))
            self._lease = None
        self._executor.shutdown(wait=False)


def _wake(future: asyncio.Future) -> None:
    if not future.done():
        future.set_result(None)
