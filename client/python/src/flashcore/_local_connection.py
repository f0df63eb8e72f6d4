"""One connection to the local socket, with its memory and its ring, by the C library."""

import collections
import copy
import ctypes
import math
import os
import threading
import time
from typing import Any

import grpc

from . import _c_library, _messages
from ._local_memory import SLOT_BYTES, SLOTS, Block, Message, size_class
from ._requests import Reply
from .errors import Error, Unavailable, from_status

_Response = _messages.message("AttendResponse")
_Status = _messages.message("Status")
_INTERRUPTIBLE_NS = 200_000_000  # Python handles signals between waits
_REGION_BYTES = 2 << 20  # of a region with many blocks
_SMALL_BYTES = 256 << 10  # larger blocks have a region of their own
_MOST_IDLE_BYTES = 256 << 20  # of large blocks that are kept for reuse
_UNAVAILABLE = grpc.StatusCode.UNAVAILABLE.value[0]
_RESOURCE_EXHAUSTED = grpc.StatusCode.RESOURCE_EXHAUSTED.value[0]


def _nanoseconds(left: float) -> int:
    return -1 if left == math.inf else max(1, int(left * 1e9))


class Call:
    """A request in the ring."""

    __slots__ = ("block", "answer", "error", "wake", "abandoned")

    def __init__(self, block: Block | None) -> None:
        self.block = block
        self.answer: bytes | None = None
        self.error: Error | None = None
        self.wake: Any = None  # called when it has an answer or an error; None: nobody sleeps
        self.abandoned = False  # nobody waits; its memory is the server's until its answer comes

    def done(self) -> bool:
        return self.answer is not None or self.error is not None


class Connection:
    """One connection with its memory and its ring. Ends with the server, or by shutdown; what it has is freed
    with the last reference to it, so never while a function of the library runs. Thread-safe."""

    _handle: Any = None
    _spin_us = 0  # before the thread that receives sleeps: beside an event loop it would take a core

    def __init__(self, target: str, name: str | None, left: float) -> None:
        self._library = _c_library.load()
        self._handle = ctypes.c_void_p()
        self._process = os.getpid()
        options = _c_library.Options(SLOTS, SLOT_BYTES, _nanoseconds(left), self._spin_us)
        code = self._library.connect(target.encode(), (name or "python").encode(), options,
                                     ctypes.byref(self._handle))
        if code:
            raise self._not_connected() if code == _UNAVAILABLE else self._last_error()
        self.lock = threading.Lock()
        self._growing = threading.Lock()  # one registration at a time
        # By size, and whether they have regions of their own.
        self._free: dict[tuple[int, bool], list[Block]] = collections.defaultdict(list)
        self._idle_bytes = 0  # of blocks in _free with regions of their own
        self._calls: dict[int, Call] = {}  # by tag
        self._tags = 0
        self._turns: collections.deque[Call] = collections.deque()  # wait for a slot
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

    def free_block(self, size: int, alone: bool) -> Block | None:
        """One of at least `size` bytes, if there is one already. alone: with a region of its own."""
        size = size_class(size)
        with self.lock:
            blocks = self._free.get((size, alone or size > _SMALL_BYTES))
            if not blocks:
                return None
            block = blocks.pop()
            self._idle_bytes -= block.size if block.alone else 0
            return block

    def block(self, size: int, alone: bool, left: float) -> Block:
        """The same, made if there is none: may wait for the server."""
        while (block := self.free_block(size, alone)) is None:
            self.grow(size, alone, left)
        return block

    def grow(self, size: int, alone: bool, left: float) -> None:
        """Makes blocks of at least `size` bytes, if there are none."""
        size, alone = size_class(size), alone or size > _SMALL_BYTES
        with self._growing:
            if not self._free.get((size, alone)):
                made = self._register(size, alone, left)
                with self.lock:
                    self._free[size, alone] += made
                    self._idle_bytes += size if alone else 0

    def _register(self, size: int, alone: bool, left: float) -> list[Block]:
        memory = _c_library.Memory()
        arguments = (self._handle, size if alone else _REGION_BYTES, 0, _nanoseconds(left), memory)
        code = self._library.register_memory(*arguments)
        if code == _RESOURCE_EXHAUSTED and self._drop_idle():
            code = self._library.register_memory(*arguments)
        self._check(code)
        buffer = (ctypes.c_char * memory.bytes).from_address(memory.data)
        region_id = bytes(memory)[-16:]  # it may have zero bytes
        return [Block(region_id, buffer, offset, size, alone)
                for offset in range(0, 1 if alone else memory.bytes - size + 1, size)]

    def allocate(self, size: int, device_id: str, left: float) -> Any:
        """The _c_library.DeviceMemory of a new region of at least `size` bytes."""
        memory = _c_library.DeviceMemory()
        self._check(self._library.allocate_device_memory(self._handle, size, device_id.encode(),
                                                         _nanoseconds(left), memory))
        return memory

    def unregister(self, region_id: bytes) -> None:
        """Unmaps a region that nothing uses."""
        self._check(self._library.unregister_memory(self._handle, region_id))

    def give_back(self, block: Block) -> None:
        with self.lock:
            keep = not block.alone or self._idle_bytes + block.size <= _MOST_IDLE_BYTES
            if keep:
                self._free[block.size, block.alone].append(block)
                self._idle_bytes += block.size if block.alone else 0
        if not keep:
            self.drop(block)

    def drop(self, block: Block) -> None:
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

    def submit(self, call: Call, request: bytes, left: float, stream: int | None = None) -> int | None:
        """Puts a request into the ring; with a CUDA stream, in its order. Returns its tag; None if the
        ring is full."""
        with self.lock:
            self._tags += 1
            tag = self._tags
            self._calls[tag] = call
            arguments = self._handle, tag, request, len(request), _nanoseconds(left)
            code = (self._library.submit(*arguments) if stream is None else
                    self._library.submit_on_stream(*arguments, stream))
            if code:
                del self._calls[tag]
        if code > 0:
            raise self._not_connected() if self.ended() else self._last_error()
        return None if code else tag

    def turn(self) -> Call:
        """Is done when the ring has room again, maybe."""
        turn = Call(None)
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

    def abandon(self, tag: int | None, call: Call) -> None:
        """Nobody waits for a call any more. tag: None if it was not submitted."""
        with self.lock:
            call.abandoned = tag in self._calls
        if call.abandoned:
            self._library.cancel(self._handle, tag)
        elif call.error is None:
            self.give_back(call.block)  # type: ignore[arg-type]

    def finish(self, call: Call, message: Message) -> Reply:
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

    def forget(self, turn: Call) -> None:
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


class BlockingConnection(Connection):
    """One of the threads that wait for their answers receives for all: alone, a thread is never switched."""

    _spin_us = 50

    def __init__(self, target: str, name: str | None, left: float) -> None:
        super().__init__(target, name, left)
        self._received = False  # a thread receives
        self._sleepers: collections.deque[Call] = collections.deque()

    def wait_for(self, call: Call, deadline: float) -> bool:
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
            self._stop_receiving(receives, call)

    def take(self) -> None:
        """Takes the answers that are there, unless another thread receives."""
        with self.lock:
            if self._received:
                return
            self._received = True
        try:
            while self.poll():
                pass
        finally:
            self._stop_receiving(True)

    def _stop_receiving(self, receives: bool, call: Call | None = None) -> None:
        """This thread no longer waits, for `call`, nor receives: a sleeper does in its place."""
        with self.lock:
            if receives:
                self._received = False
            if call in self._sleepers:
                self._sleepers.remove(call)  # type: ignore[arg-type]
            heir = self._sleepers.popleft() if self._sleepers and not self._received else None
        if heir is not None:
            heir.wake()
