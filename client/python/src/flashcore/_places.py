"""Where the tensors of a request lie in memory that client and server share, for requests in a ring."""

import itertools
from typing import Iterable, Iterator, NamedTuple, Sequence

from . import _messages
from ._local_memory import ATTEND_RANGES, MOST_MESSAGE, SLOT_BYTES, encoded_range
from ._tensors import WIRE
from .errors import ResourceExhausted

_AttendRequest, _Span = _messages.message("AttendRequest"), _messages.message("Span")
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


def split(head: bytes, places: Sequence[Place]) -> Iterator[tuple[bytes, slice]]:
    """Requests that together do what one that does not fit would: each with its ranges, and with the spans
    that it has of them."""
    message = _AttendRequest.FromString(head)
    spans = list(message.spans)
    del message.spans[:]
    common = message.SerializeToString()
    number = _AttendRequest.DESCRIPTOR.fields_by_name["spans"].number
    sizes = [len(span.SerializeToString()) + 4 for span in spans]  # with tag and length
    queries, keys = ([0, *itertools.accumulate(rows)] for rows in
                     ([span.query_rows for span in spans], [span.kv_rows for span in spans]))
    assert number < 16
    first = 0
    while first < len(spans):
        end = _end(first, sizes, len(common), queries, keys, places)
        message.Clear()
        message.MergeFromString(common)
        message.spans.extend(spans[first:end])
        parts = []
        for place in places:
            ends = keys if place.name in ("key", "value") else queries
            begin, rows = ends[first], ends[end] - ends[first]
            if rows:
                parts.append(place._replace(offset=place.offset + begin * place.row_bytes, rows=rows))
        yield message.SerializeToString() + encoded(parts), slice(first, end)
        first = end


def _end(first: int, sizes: list[int], used: int, queries: list[int], keys: list[int],
         places: Sequence[Place]) -> int:
    """How far the spans from `first` go that fit into a slot, and after which all tensors are aligned."""
    end = first
    for last in range(first, min(len(sizes), first + _MOST_SPANS)):
        used += sizes[last]
        if used > SLOT_BYTES - _RESERVED:
            break
        after = last + 1
        if after == len(sizes) or all(
                ((keys if place.name in ("key", "value") else queries)[after] * place.row_bytes) % _ALIGNMENT
                == 0 for place in places):
            end = after
    if end == first:
        raise ResourceExhausted(f"the request has {len(sizes)} spans, over those of a slot of {SLOT_BYTES} "
                                f"bytes, and cannot be split where each tensor is at a multiple of "
                                f"{_ALIGNMENT} bytes: ask for fewer at once")
    return end
