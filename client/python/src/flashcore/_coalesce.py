"""Requests of many tasks that travel as one, in asyncio."""

import asyncio
import copy
from typing import Any, Awaitable, Callable, Hashable

import numpy as np

from . import _messages
from ._requests import Reply, Request
from .errors import (Error, FailedPrecondition, InvalidArgument, KvFull, MessageTooLarge, NotFound,
                     PermissionDenied, QuotaExceeded)

_AttendRequest = _messages.message("AttendRequest")
_MOST_SPANS = 32  # of one request that was put together: more, and the client waits while the server computes
# Errors that one span can cause; the others may succeed without it.
_OF_ONE_SPAN = (InvalidArgument, NotFound, FailedPrecondition, PermissionDenied, KvFull, QuotaExceeded,
                MessageTooLarge)


class _Group:
    """Requests that will be one."""

    def __init__(self) -> None:
        self.requests: list[Any] = []
        self.replies: list[asyncio.Future] = []
        self.ids: set[bytes] = set()
        self.left = 0.0  # seconds
        self.task: asyncio.Task | None = None
        self.started = False

    def admits(self, ids: list[bytes], left: float) -> bool:
        """Whether a request on these sequences can join. A sequence comes once in a request. Timeouts that
        differ are not mixed: nobody's shrinks by more than a hundredth."""
        return (not self.started and len(self.ids) + len(ids) <= _MOST_SPANS and self.ids.isdisjoint(ids)
                and (left == self.left or abs(left - self.left) <= self.left / 100))

    def add(self, request: Any, ids: list[bytes], left: float, reply: asyncio.Future) -> None:
        self.left = min(self.left, left) if self.requests else left
        self.requests.append(request)
        self.replies.append(reply)
        self.ids.update(ids)


class Coalescer:
    """Sends Attend requests that tasks make in one turn of the event loop as one request; each task gets its
    own part of the reply. If the request is refused, each is sent alone, so that a task sees only its own
    error. Outputs do not change: the bits of a span do not depend on the rest of its request.

    send: of a transport. For one event loop."""

    def __init__(self, send: Callable[[str, Any, float, bool], Awaitable[Any]]) -> None:
        self._send = send
        self._open: dict[Hashable, _Group] = {}

    async def call(self, request: Any, left: float, key: Hashable) -> Any:
        """The reply to an Attend on sequences. key: the same for requests that differ only in spans
        and tensors."""
        loop = asyncio.get_running_loop()
        ids = [span.sequence_id for span in request.message.spans]
        group = self._open.get(key)
        if group is None or not group.admits(ids, left):
            group = self._open[key] = _Group()
            loop.call_soon(self._start, key, group)
        reply = loop.create_future()
        group.add(request, ids, left, reply)
        try:
            return await reply
        except asyncio.CancelledError:
            if group.task is not None and all(other.done() for other in group.replies):
                group.task.cancel()
            raise

    def _start(self, key: Hashable, group: _Group) -> None:
        group.started = True
        if self._open.get(key) is group:
            del self._open[key]
        group.task = asyncio.get_running_loop().create_task(self._run(group))

    async def _run(self, group: _Group) -> None:
        waiting = [(request, reply) for request, reply in zip(group.requests, group.replies)
                   if not reply.done()]
        if not waiting:
            return
        requests = [request for request, _ in waiting]
        try:
            joined = requests[0] if len(requests) == 1 else _join(requests)
            answer = await self._send("Attend", joined, group.left, True)
            parts = [answer] if len(requests) == 1 else _split(requests, answer)
        except BaseException as error:
            if len(requests) > 1 and isinstance(error, _OF_ONE_SPAN):
                await asyncio.gather(*(self._alone(request, group.left, reply) for request, reply in waiting))
                return
            for _, reply in waiting:
                _fail(reply, error)
            if not isinstance(error, Exception):
                raise
            return
        for (_, reply), part in zip(waiting, parts):
            if not reply.done():
                reply.set_result(part)

    async def _alone(self, request: Any, left: float, reply: asyncio.Future) -> None:
        try:
            answer = await self._send("Attend", request, left, True)
        except BaseException as error:
            _fail(reply, error)
            if not isinstance(error, Exception):
                raise
            return
        if not reply.done():
            reply.set_result(answer)


def _fail(reply: asyncio.Future, error: BaseException) -> None:
    if reply.done():
        return
    if isinstance(error, asyncio.CancelledError):
        reply.cancel()
    else:  # a copy for each task, which adds its own traceback
        reply.set_exception(copy.copy(error) if isinstance(error, Error) else error)


def _join(requests: list[Any]) -> Any:
    joined = _AttendRequest()
    joined.CopyFrom(requests[0].message)
    joined.ClearField("spans")
    for request in requests:
        joined.spans.extend(request.message.spans)
    return Request(joined, {name: np.concatenate([request.tensors[name] for request in requests])
                            for name in requests[0].tensors})


def _split(requests: list[Any], answer: Any) -> list[Any]:
    output, lse, lengths = answer.output, answer.lse, answer.sequence_lengths
    rows = [len(request.tensors["query"]) for request in requests]
    wide, narrow = len(output) // sum(rows), len(lse) // sum(rows)  # bytes of a row
    parts, row, span = [], 0, 0
    for request, count in zip(requests, rows):
        spans = len(request.message.spans)
        parts.append(Reply(
            output=output[row * wide:(row + count) * wide], lse=lse[row * narrow:(row + count) * narrow],
            sequence_lengths=lengths[span:span + spans]))
        row, span = row + count, span + spans
    return parts
