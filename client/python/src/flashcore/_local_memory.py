"""Memory that a client shares with the server, and the tensors of requests in it."""

import functools
import math
from typing import Any

import numpy as np

from ._requests import AttendRequest, LoadSequenceRequest, Reply, Request

SLOTS, SLOT_BYTES = 64, 16384  # of a ring
# Bytes of a request in the ring without its ranges. Then the answer fits, too: a span's length takes at most
# 10 bytes there, and the span itself at least 4 here.
MOST_MESSAGE = (SLOT_BYTES - 1024) * 4 // 10
_ALIGNMENT = 64  # of a tensor in shared memory
_MOST_SHAPES = 16  # of requests, whose places a block remembers
_BYTES = np.dtype(np.uint8)


def _ranges(message: Any) -> dict[str, int]:
    """The numbers of the fields query_range and so on, by the tensors' names."""
    return {field.name.removesuffix("_range"): field.number for field in message.DESCRIPTOR.fields
            if field.name.endswith("_range")}


ATTEND_RANGES, _LOAD_RANGES = _ranges(AttendRequest), _ranges(LoadSequenceRequest)


def varint(value: int) -> bytes:
    """An encoded number of a message."""
    encoded = bytearray()
    while value > 0x7F:
        encoded.append(value & 0x7F | 0x80)
        value >>= 7
    encoded.append(value)
    return bytes(encoded)


def encoded_range(field: int, region_id: bytes, offset: int, size: int) -> bytes:
    """A field with a MemoryRange."""
    place = b"\x0a\x10" + region_id + b"\x10" + varint(offset) + b"\x18" + varint(size)
    return varint(field << 3 | 2) + varint(len(place)) + place


class Shape:
    """The tensors of requests of one kind: of what is sent, then of the results."""

    def __init__(self, names: tuple[str, ...], return_lse: bool, dtype: np.dtype,
                 shapes: tuple[tuple[int, ...], ...]) -> None:
        fields = ATTEND_RANGES if "query" in names else _LOAD_RANGES
        self.tensors = [(fields[name], dtype, shape, math.prod(shape) * dtype.itemsize)
                        for name, shape in zip(names, shapes)]
        self.sent = len(self.tensors)
        if "query" in names:
            query = shapes[names.index("query")]
            results = [(query, 2), (query[:2], 4)][:2 if return_lse else 1]
            self.tensors += [(fields[name], _BYTES, (math.prod(shape) * size,), math.prod(shape) * size)
                             for name, (shape, size) in zip(("output", "lse"), results)]
        self.bytes = sum(_aligned(size) for *_, size in self.tensors)


_shape = functools.lru_cache(Shape)


class Block:
    """A piece of a registered region. One call at a time has it."""

    def __init__(self, region_id: bytes, buffer: Any, offset: int, size: int, alone: bool) -> None:
        self.region_id, self.buffer, self.size, self.alone = region_id, buffer, size, alone
        self._offset = offset  # in the region and in the buffer
        self._places: dict[Shape, tuple[bytes, list[np.ndarray]]] = {}

    def places(self, shape: Shape) -> tuple[bytes, list[np.ndarray]]:
        """The encoded MemoryRange fields of the tensors, and the memory of each as an array."""
        found = self._places.get(shape)
        if found is None:
            if len(self._places) >= _MOST_SHAPES:
                self._places.clear()
            found = self._places[shape] = self._make(shape)
        return found

    def _make(self, shape: Shape) -> tuple[bytes, list[np.ndarray]]:
        encoded, at = b"", self._offset
        views: list[np.ndarray] = []
        for field, dtype, dimensions, size in shape.tensors:
            encoded += encoded_range(field, self.region_id, at, size)
            views.append(np.ndarray(dimensions, dtype, self.buffer, at))
            at += _aligned(size)
        return encoded, views


def _aligned(size: int) -> int:
    return -(-size // _ALIGNMENT) * _ALIGNMENT


def size_class(size: int) -> int:
    """Blocks have 4 sizes in each power of two, so that most are reused."""
    step = 1 << max((size - 1).bit_length() - 3, 10)
    return -(-size // step) * step


class Message:
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
        self.in_ring = attends and len(self._data) <= MOST_MESSAGE

    def place(self, block: Block) -> None:
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
