"""Where the tensors of a request lie in memory that client and server share, for requests in a ring."""

import itertools
from typing import Iterable, NamedTuple, Sequence

from . import _messages
from ._local_memory import ATTEND_RANGES, MOST_MESSAGE, SLOT_BYTES, encoded_range
from ._tensors import WIRE
from .errors import ResourceExhausted

_AttendRequest = _messages.message("AttendRequest")
# Bytes of a slot that a request on a stream leaves to its ranges and to the moments that order it.
_RESERVED = 512
_MOST_SPANS = (SLOT_BYTES - 1024) // 10  # of one request: a span's length in the answer has at most 10 bytes
_ALIGNMENT = 16  # of a tensor in shared memory


class Place(NamedTuple):
    """A tensor [rows, ...]."""

    name: str  # query, key, value, output, lse
    region_id: bytes
    offset: int
    rows: int
    row_bytes: int


def row_bytes(shape: Sequence[int], dtype: str) -> int:
    size = WIRE[dtype].itemsize
    for length in shape[1:]:
        size *= length
    return size


def encoded(places: Iterable[Place]) -> bytes:
    """Their fields of AttendRequest."""
    return b"".join([encoded_range(ATTEND_RANGES[name], region_id, offset, rows * size)
                     for name, region_id, offset, rows, size in places])


def fits(head: bytes, spans: int | None) -> bool:
    """Whether an AttendRequest without tensors fits into a slot, and its answer, too. spans: how many it has,
    if that is known."""
    if len(head) <= MOST_MESSAGE:
        return True
    if len(head) > SLOT_BYTES - _RESERVED:
        return False
    return (len(_AttendRequest.FromString(head).spans) if spans is None else spans) <= _MOST_SPANS


def split(head: bytes, places: Sequence[Place]) -> list[tuple[bytes, slice]]:
    """Requests that together do what one that does not fit would: each with its ranges, and with the spans
    that it has of them. ResourceExhausted if there are none such."""
    message = _AttendRequest.FromString(head)
    spans = list(message.spans)
    del message.spans[:]
    common = message.SerializeToString()
    queries = [0, *itertools.accumulate(span.query_rows for span in spans)]
    keys = [0, *itertools.accumulate(span.kv_rows for span in spans)]
    # The rows before each span, by tensor.
    rows = [keys if place.name in ("key", "value") else queries for place in places]
    sizes = [span.ByteSize() for span in spans]
    parts, first = [], 0
    while first < len(spans):
        end = _end(first, sizes, len(common), places, rows)
        message = _AttendRequest.FromString(common)
        message.spans.extend(spans[first:end])
        ranges = encoded(
            place._replace(offset=place.offset + before[first] * place.row_bytes,
                           rows=before[end] - before[first])
            for place, before in zip(places, rows) if before[end] > before[first])
        parts.append((message.SerializeToString() + ranges, slice(first, end)))
        first = end
    return parts


def _end(first: int, sizes: list[int], used: int, places: Sequence[Place], rows: list[list[int]]) -> int:
    """How far the spans from `first` go that fit into a slot, and after which all tensors are aligned."""
    end = first
    for last in range(first, min(len(sizes), first + _MOST_SPANS)):
        used += sizes[last] + 4  # its tag and length, at most
        if used > SLOT_BYTES - _RESERVED:
            break
        after = last + 1
        if after == len(sizes) or all(before[after] * place.row_bytes % _ALIGNMENT == 0
                                      for place, before in zip(places, rows)):
            end = after
    if end == first:
        raise ResourceExhausted(f"the request has {len(sizes)} spans, over those of a slot of {SLOT_BYTES} "
                                f"bytes, and cannot be split where each tensor is at a multiple of "
                                f"{_ALIGNMENT} bytes: ask for fewer at once")
    return end
