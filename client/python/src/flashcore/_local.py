"""The transport of "local:/path": tensors in memory that client and server share, and requests in a ring, by
the C library. Blocking, and in asyncio.
"""

import asyncio
import collections
import concurrent.futures
import copy
import ctypes
import functools
import math
import os
import threading
import time
from typing import Any, Callable

import grpc
import numpy as np

from . import _c_library, _messages
from ._requests import AttendRequest, LoadSequenceRequest, Reply, Request
from ._transport import AsyncTransport, BlockingTransport, Config, closed
from .errors import Cancelled, DeadlineExceeded, Error, Unavailable, from_status, no_thread

_Response = _messages.message("AttendResponse")
_Status = _messages.message("Status")
_SLOTS, _SLOT_BYTES = 64, 16384
# Bytes of a request in the ring without its ranges. Then the answer fits, too: a span's length takes at most
# 10 bytes there, and the span itself at least 4 here.
_MOST_MESSAGE = (_SLOT_BYTES - 1024) * 4 // 10
_INTERRUPTIBLE_NS = 200_000_000  # Python handles signals between waits
_ALIGNMENT = 64  # of a tensor in shared memory
_REGION_BYTES = 2 << 20  # of a region with many blocks
_SMALL_BYTES = 256 << 10  # larger blocks have a region of their own
_MOST_IDLE_BYTES = 256 << 20  # of large blocks that are kept for reuse
_MOST_SHAPES = 16  # of requests, whose places a block remembers
_UNAVAILABLE = grpc.StatusCode.UNAVAILABLE.value[0]
_RESOURCE_EXHAUSTED = grpc.StatusCode.RESOURCE_EXHAUSTED.value[0]
_BYTES = np.dtype(np.uint8)


def _ranges(message: Any) -> dict[str, int]:
    """The numbers of the fields query_range and so on, by the tensors' names."""
    return {field.name.removesuffix("_range"): field.number for field in message.DESCRIPTOR.fields
            if field.name.endswith("_range")}


_ATTEND_RANGES, _LOAD_RANGES = _ranges(AttendRequest), _ranges(LoadSequenceRequest)


def _nanoseconds(left: float) -> int:
    return -1 if left == math.inf else max(1, int(left * 1e9))


def _varint(value: int) -> bytes:
    encoded = bytearray()
    while value > 0x7F:
        encoded.append(value & 0x7F | 0x80)
        value >>= 7
    encoded.append(value)
    return bytes(encoded)


class _Shape:
    """The tensors of requests of one kind: of what is sent, then of the results."""

    def __init__(self, names: tuple[str, ...], return_lse: bool, dtype: np.dtype,
                 shapes: tuple[tuple[int, ...], ...]) -> None:
        fields = _ATTEND_RANGES if "query" in names else _LOAD_RANGES
        self.tensors = [(fields[name], dtype, shape, math.prod(shape) * dtype.itemsize)
                        for name, shape in zip(names, shapes)]
        self.sent = len(self.tensors)
        if "query" in names:
            query = shapes[names.index("query")]
            results = [(query, 2), (query[:2], 4)][:2 if return_lse else 1]
            self.tensors += [(fields[name], _BYTES, (math.prod(shape) * size,), math.prod(shape) * size)
                             for name, (shape, size) in zip(("output", "lse"), results)]
        self.bytes = sum(_aligned(size) for *_, size in self.tensors)


_shape = functools.lru_cache(_Shape)


class _Block:
    """A piece of a registered region. One call at a time has it."""

    def __init__(self, region_id: bytes, buffer: Any, offset: int, size: int, alone: bool) -> None:
        self.region_id, self.buffer, self.size, self.alone = region_id, buffer, size, alone
        self._offset = offset  # in the region and in the buffer
        self._places: dict[_Shape, tuple[bytes, list[np.ndarray]]] = {}

    def places(self, shape: _Shape) -> tuple[bytes, list[np.ndarray]]:
        """The encoded MemoryRange fields of the tensors, and the memory of each as an array."""
        found = self._places.get(shape)
        if found is None:
            if len(self._places) >= _MOST_SHAPES:
                self._places.clear()
            found = self._places[shape] = self._make(shape)
        return found

    def _make(self, shape: _Shape) -> tuple[bytes, list[np.ndarray]]:
        encoded, at = b"", self._offset
        views: list[np.ndarray] = []
        for field, dtype, dimensions, size in shape.tensors:
            place = b"\x0a\x10" + self.region_id + b"\x10" + _varint(at) + b"\x18" + _varint(size)
            encoded += _varint(field << 3 | 2) + _varint(len(place)) + place
            views.append(np.ndarray(dimensions, dtype, self.buffer, at))
            at += _aligned(size)
        return encoded, views


def _aligned(size: int) -> int:
    return -(-size // _ALIGNMENT) * _ALIGNMENT


def _size_class(size: int) -> int:
    """Blocks have 4 sizes in each power of two, so that most are reused."""
    step = 1 << max((size - 1).bit_length() - 3, 10)
    return -(-size // step) * step


class _Call:
    """A request in the ring."""

    __slots__ = ("block", "answer", "error", "wake", "abandoned")

    def __init__(self, block: _Block | None) -> None:
        self.block = block
        self.answer: bytes | None = None
        self.error: Error | None = None
        self.wake: Any = None  # called when it has an answer or an error; None: nobody sleeps
        self.abandoned = False  # nobody waits; its memory is the server's until its answer comes

    def done(self) -> bool:
        return self.answer is not None or self.error is not None


class _Link:
    """One connection with its memory and its ring. Ends with the server, or by shutdown; what it has is freed
    with the last reference to it, so never while a function of the library runs. Thread-safe."""

    _handle: Any = None
    _spin_us = 0  # before the thread that receives sleeps: beside an event loop it would take a core

    def __init__(self, target: str, name: str | None, left: float) -> None:
        self._library = _c_library.load()
        self._handle = ctypes.c_void_p()
        self._process = os.getpid()
        options = _c_library.Options(_SLOTS, _SLOT_BYTES, _nanoseconds(left), self._spin_us)
        code = self._library.connect(target.encode(), (name or "python").encode(), options,
                                     ctypes.byref(self._handle))
        if code:
            raise self._not_connected() if code == _UNAVAILABLE else self._last_error()
        self.lock = threading.Lock()
        self._growing = threading.Lock()  # one registration at a time
        # By size, and whether they have regions of their own.
        self._free: dict[tuple[int, bool], list[_Block]] = collections.defaultdict(list)
        self._idle_bytes = 0  # of blocks in _free with regions of their own
        self._calls: dict[int, _Call] = {}  # by tag
        self._tags = 0
        self._turns: collections.deque[_Call] = collections.deque()  # wait for a slot
        self._completion = _c_library.Completion()

    def __del__(self) -> None:
        if self._handle and self._process == os.getpid():
            self._library.close(self._handle)

    def ended(self) -> bool:
        return self._library.ended(self._handle) != 0

    def shutdown(self) -> None:
        self._library.shutdown(self._handle)

    def event_fd(self) -> int:
        fd = ctypes.c_int()
        self._check(self._library.event_fd(self._handle, fd))
        return fd.value

    # Memory.

    def free_block(self, size: int, alone: bool) -> _Block | None:
        """One of at least `size` bytes, if there is one already. alone: with a region of its own."""
        size = _size_class(size)
        with self.lock:
            blocks = self._free.get((size, alone or size > _SMALL_BYTES))
            if not blocks:
                return None
            block = blocks.pop()
            self._idle_bytes -= block.size if block.alone else 0
            return block

    def block(self, size: int, alone: bool, left: float) -> _Block:
        """The same, made if there is none: may wait for the server."""
        while (block := self.free_block(size, alone)) is None:
            self.grow(size, alone, left)
        return block

    def grow(self, size: int, alone: bool, left: float) -> None:
        """Makes blocks of at least `size` bytes, if there are none."""
        size, alone = _size_class(size), alone or size > _SMALL_BYTES
        with self._growing:
            if not self._free.get((size, alone)):
                made = self._register(size, alone, left)
                with self.lock:
                    self._free[size, alone] += made
                    self._idle_bytes += size if alone else 0

    def _register(self, size: int, alone: bool, left: float) -> list[_Block]:
        memory = _c_library.Memory()
        arguments = (self._handle, size if alone else _REGION_BYTES, 0, _nanoseconds(left), memory)
        code = self._library.register_memory(*arguments)
        if code == _RESOURCE_EXHAUSTED and self._drop_idle():
            code = self._library.register_memory(*arguments)
        self._check(code)
        buffer = (ctypes.c_char * memory.bytes).from_address(memory.data)
        region_id = bytes(memory)[-16:]  # it may have zero bytes
        return [_Block(region_id, buffer, offset, size, alone)
                for offset in range(0, 1 if alone else memory.bytes - size + 1, size)]

    def give_back(self, block: _Block) -> None:
        with self.lock:
            keep = not block.alone or self._idle_bytes + block.size <= _MOST_IDLE_BYTES
            if keep:
                self._free[block.size, block.alone].append(block)
                self._idle_bytes += block.size if block.alone else 0
        if not keep:
            self.drop(block)

    def drop(self, block: _Block) -> None:
        """Drops a block that has a region of its own: the server unmaps it when it does not use it any
        more."""
        self._library.unregister_memory(self._handle, block.region_id)

    def _drop_idle(self) -> bool:
        with self.lock:
            idle = []
            for (_, alone), blocks in self._free.items():
                if alone:
                    idle += blocks
                    blocks.clear()
            self._idle_bytes = 0
        for block in idle:
            self.drop(block)
        return bool(idle)

    # Requests.

    def call(self, method: str, request: bytes, left: float) -> bytes:
        """A call on the socket; waits."""
        reply = _c_library.Bytes()
        self._check(self._library.call(self._handle, method.encode(), request, len(request),
                                       _nanoseconds(left), reply))
        try:
            return ctypes.string_at(reply.data, reply.size) if reply.size else b""
        finally:
            self._library.free(reply)

    def submit(self, call: _Call, request: bytes, left: float) -> int | None:
        """Puts a request into the ring. Returns its tag; None if the ring is full."""
        with self.lock:
            self._tags += 1
            tag = self._tags
            self._calls[tag] = call
            code = self._library.submit(self._handle, tag, request, len(request), _nanoseconds(left))
            if code:
                del self._calls[tag]
        if code > 0:
            raise self._not_connected() if self.ended() else self._last_error()
        return None if code else tag

    def turn(self) -> _Call:
        """Is done when the ring has room again, maybe."""
        turn = _Call(None)
        with self.lock:
            if self._calls:
                self._turns.append(turn)
            else:
                turn.answer = b""
        return turn

    def wait(self, nanoseconds: int) -> None:
        """Takes one answer; for one thread at a time."""
        completion = self._completion
        self._took(self._library.wait(self._handle, nanoseconds, completion), completion)

    def poll(self) -> bool:
        """Takes one answer if there is one; for one thread at a time."""
        completion = self._completion
        return self._took(self._library.poll(self._handle, completion), completion)

    def _took(self, code: int, completion: Any) -> bool:
        if code == _c_library.AGAIN:
            return False
        if code:
            self.fail(self._last_error())
            return False
        with self.lock:
            call = self._calls.pop(completion.tag, None)
            turn = self._turns.popleft() if self._turns else None
            if call is not None:
                call.answer = ctypes.string_at(completion.response, completion.response_bytes)
            if turn is not None:
                turn.answer = b""
        if call is not None and call.abandoned:
            self.give_back(call.block)  # type: ignore[arg-type]
        elif call is not None and call.wake is not None:
            call.wake()
        if turn is not None and turn.wake is not None:
            turn.wake()
        return True

    def fail(self, error: Error) -> None:
        """The connection has ended: no more answers come, and no memory is used again."""
        with self.lock:
            calls = [*self._calls.values(), *self._turns]
            self._calls.clear()
            self._turns.clear()
            for call in calls:
                call.error = error
        for call in calls:
            if call.wake is not None:
                call.wake()

    def abandon(self, tag: int | None, call: _Call) -> None:
        """Nobody waits for a call any more. tag: None if it was not submitted."""
        with self.lock:
            call.abandoned = tag in self._calls
        if call.abandoned:
            self._library.cancel(self._handle, tag)
        elif call.error is None:
            self.give_back(call.block)  # type: ignore[arg-type]

    def finish(self, call: _Call, message: "_Message") -> Reply:
        """The reply to a call that is done. Raises its error."""
        if call.error is not None:
            raise copy.copy(call.error)  # each thread adds its own traceback
        try:
            answer = _Response.FromString(call.answer)
            if answer.status.code:
                raise from_status(answer.status)
            return message.reply(answer)
        finally:
            self.give_back(message.block)

    def forget(self, turn: _Call) -> None:
        """Nobody waits for a turn any more: the next one has it."""
        with self.lock:
            if turn in self._turns:
                self._turns.remove(turn)
                return
            if not self._turns:
                return
            turn = self._turns.popleft()
            turn.answer = b""
        if turn.wake is not None:
            turn.wake()

    def _check(self, code: int) -> None:
        if code:
            raise self._last_error()

    def _last_error(self) -> Error:
        size = ctypes.c_uint64()
        data = self._library.last_status(size)
        return from_status(_Status.FromString(ctypes.string_at(data, size.value)))

    def _not_connected(self) -> Error:
        """The error of a request that reached no server."""
        return Unavailable(f"failed to connect: {self._last_error().message}")


class _BlockingLink(_Link):
    """One of the threads that wait for their answers receives for all: alone, a thread is never switched."""

    _spin_us = 50

    def __init__(self, target: str, name: str | None, left: float) -> None:
        super().__init__(target, name, left)
        self._received = False  # a thread receives
        self._sleepers: collections.deque[_Call] = collections.deque()

    def wait_for(self, call: _Call, deadline: float) -> bool:
        """Whether it is done by the deadline."""
        receives = False
        try:
            while not call.done() and (left := deadline - time.monotonic()) > 0:
                event = None
                with self.lock:
                    if call.done():
                        break
                    if self._received:
                        event = threading.Event()
                        call.wake = event.set
                        self._sleepers.append(call)
                    else:
                        receives = self._received = True
                        call.wake = None
                if event is not None:  # set with the answer, or when this thread shall receive
                    event.wait(None if left == math.inf else left)
                while receives and not call.done() and (left := deadline - time.monotonic()) > 0:
                    self.wait(_INTERRUPTIBLE_NS if left > 0.2 else _nanoseconds(left))
            return call.done()
        finally:
            with self.lock:
                if receives:
                    self._received = False
                if call in self._sleepers:
                    self._sleepers.remove(call)
                heir = self._sleepers.popleft() if self._sleepers and not self._received else None
            if heir is not None:
                heir.wake()


class _Message:
    """A request as bytes, whose tensors will be in a block."""

    __slots__ = ("_tensors", "_data", "shape", "in_ring", "block", "data", "_results")

    def __init__(self, request: Request) -> None:
        message, tensors = request
        tensors = {name: tensor for name, tensor in tensors.items() if tensor.size}
        self._data = message.SerializeToString()
        self._tensors = list(tensors.values())
        attends = "query" in tensors
        self.shape = _shape(tuple(tensors), attends and message.return_lse, self._tensors[0].dtype,
                            tuple([tensor.shape for tensor in self._tensors]))
        self.in_ring = attends and len(self._data) <= _MOST_MESSAGE

    def place(self, block: _Block) -> None:
        """Copies the tensors into the block."""
        encoded, views = block.places(self.shape)
        for view, tensor in zip(views, self._tensors):
            view[...] = tensor
        self.data = self._data + encoded
        self.block, self._results = block, views[self.shape.sent:]

    def reply(self, answer: Any) -> Reply:
        """The reply for an AttendResponse; the tensors are copied out of the block."""
        return Reply(self._results[0].copy(), self._results[1].copy() if len(self._results) > 1 else b"",
                     answer.sequence_lengths)


def _late(method: str) -> DeadlineExceeded:
    return DeadlineExceeded(f"{method}: no answer within the timeout")


def _invoke(link: _Link, method: str, data: bytes, left: float) -> Any:
    """A call on the socket; waits."""
    return _messages.METHODS[method][1].FromString(link.call(method, data, left))


def _invoke_placed(link: _Link, method: str, message: _Message, left: float) -> Any:
    """The same, for a message in a block with a region of its own."""
    try:
        reply = _messages.METHODS[method][1].FromString(link.call(method, message.data, left))
        result = message.reply(reply) if method == "Attend" else reply
    except BaseException:
        link.drop(message.block)  # the server may still use it
        raise
    link.give_back(message.block)
    return result


class LocalTransport(BlockingTransport):
    """Blocking. Thread-safe."""

    def __init__(self, config: Config) -> None:
        super().__init__(config)
        _c_library.load()
        self._link: _BlockingLink | None = None

    async def call(self, method: str, request: Any, left: float, on_sequence: bool) -> Any:
        if left <= 0:
            raise _late(method)
        deadline = self.now() + left
        link = self._connected(deadline)
        if not isinstance(request, Request):
            reply = _invoke(link, method, request.SerializeToString(), deadline - self.now())
            if method == "HoldLease":  # it lives as long as the connection
                self._lease = link
            return reply
        message = _Message(request)
        message.place(link.block(message.shape.bytes, not message.in_ring, deadline - self.now()))
        if not message.in_ring:
            return _invoke_placed(link, method, message, deadline - self.now())
        return self._attend(link, message, deadline)

    def holds_lease(self) -> bool:
        lease = self._lease
        return lease is not None and not lease.ended() and lease is self._link

    def _connected(self, deadline: float) -> _BlockingLink:
        self.check_here()
        with self._lock:
            if self._closed:
                raise closed()
            if self._link is None or self._link.ended():
                self._link = None
                self._opens()
                self._link = _BlockingLink(self._config.target, self._config.client_name,
                                           deadline - self.now())
            return self._link

    def _attend(self, link: _BlockingLink, message: _Message, deadline: float) -> Reply:
        call = _Call(message.block)
        tag = None
        try:
            while (tag := link.submit(call, message.data, deadline - self.now())) is None:
                turn = link.turn()
                if not link.wait_for(turn, deadline):
                    link.forget(turn)
                    raise _late("Attend")
            if not link.wait_for(call, deadline):
                raise _late("Attend")
        except BaseException:
            link.abandon(tag, call)
            raise
        return link.finish(call, message)

    async def close(self) -> None:
        self._forget()
        link, self._link, self._lease = self._link, None, None
        if link is not None and self._process == os.getpid():
            link.shutdown()


class AsyncLocalTransport(AsyncTransport):
    """In asyncio. For the event loop of the first call."""

    def __init__(self, config: Config) -> None:
        super().__init__(config)
        _c_library.load()
        self._link: _Link | None = None
        self._opening = asyncio.Lock()
        self._fd = -1  # of the link, while the loop waits for it
        # For what blocks: connecting, registering memory, and calls that are no attention.
        self._executor = concurrent.futures.ThreadPoolExecutor(8, "flashcore")

    async def call(self, method: str, request: Any, left: float, on_sequence: bool) -> Any:
        if left <= 0:
            raise _late(method)
        deadline = self.now() + left
        link = await self._connected(deadline)
        if not isinstance(request, Request):
            data = request.SerializeToString()
            reply = await self._run(_invoke, link, method, data, deadline - self.now())
            if method == "HoldLease":  # it lives as long as the connection
                self._lease = link
            return reply
        message = _Message(request)
        size, alone = message.shape.bytes, not message.in_ring
        while (block := link.free_block(size, alone)) is None:
            await self._run(link.grow, size, alone, deadline - self.now())
        message.place(block)
        if alone:
            return await self._run(_invoke_placed, link, method, message, deadline - self.now())
        return await self._attend(link, message, deadline)

    def holds_lease(self) -> bool:
        lease = self._lease
        return lease is not None and not lease.ended() and lease is self._link

    def _run(self, function: Callable[..., Any], *args: Any) -> Any:
        try:
            return asyncio.get_running_loop().run_in_executor(self._executor, function, *args)
        except RuntimeError as error:
            if "thread" not in str(error):
                raise
            raise no_thread(error) from None

    async def _connected(self, deadline: float) -> _Link:
        self.check_here()
        link = self._link
        if self._closed:
            raise closed()
        if link is not None and not link.ended():
            return link
        async with self._opening:
            if self._link is None or self._link.ended():
                self._opens()
                if self._link is not None:
                    self._take(self._link)  # its calls see its end
                link = await self._run(_Link, self._config.target, self._config.client_name,
                                       deadline - self.now())
                if self._closed:
                    raise closed()
                self._link, self._fd = link, link.event_fd()
                asyncio.get_running_loop().add_reader(self._fd, self._take, link)
            return self._link

    def _take(self, link: _Link) -> None:
        while link.poll():
            pass
        if link.ended() and link is self._link:
            self._stop_watching()

    def _stop_watching(self) -> None:
        if self._fd >= 0 and self._loop is not None and not self._loop.is_closed():
            self._loop.remove_reader(self._fd)
        self._fd, self._link = -1, None

    async def _attend(self, link: _Link, message: _Message, deadline: float) -> Reply:
        call = _Call(message.block)
        tag = None
        try:
            while (tag := link.submit(call, message.data, deadline - self.now())) is None:
                turn = link.turn()
                try:
                    if not await self._wait_for(turn, deadline):
                        raise _late("Attend")
                except BaseException:
                    link.forget(turn)
                    raise
            if not await self._wait_for(call, deadline):
                raise _late("Attend")
        except BaseException:
            link.abandon(tag, call)
            raise
        return link.finish(call, message)

    async def _wait_for(self, call: _Call, deadline: float) -> bool:
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
        link = self._link
        if link is not None:
            self._stop_watching()
            link.shutdown()
            link.fail(Cancelled("the client was closed"))
            self._lease = None
        self._executor.shutdown(wait=False)


def _wake(future: asyncio.Future) -> None:
    if not future.done():
        future.set_result(None)
