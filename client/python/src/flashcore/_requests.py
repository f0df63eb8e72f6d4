"""Arguments to messages and messages to results: shapes, masks, spans, and the rule that merges results."""

import functools
import math
import sys
from typing import Any, NamedTuple, Sequence, overload

import numpy as np
from numpy.typing import NDArray

from . import _messages
from ._arguments import choice, integers, shown
from ._device_tensors import is_device, to_device
from ._tensors import WIRE, HostTensor, Lse, N, T, Tensor, dtype_name, from_float32, to_float32, to_host
from ._terms import Terms
from .errors import Internal, invalid

AttendRequest = _messages.message("AttendRequest")
Span = _messages.message("Span")
LoadSequenceRequest = _messages.message("LoadSequenceRequest")
_DTYPES = _messages.enum("DType")
_KV_DTYPES = _messages.enum("KvDType")
NHD = _messages.enum("Layout")["LAYOUT_NHD"]

LAYOUTS = ("NHD", "HND")

Attention = Any  # a Tensor, O; or with return_lse a tuple (O, LSE)


def dtype_number(dtype: Any) -> int:
    found = _DTYPES.get(f"DTYPE_{dtype_name(dtype).upper()}")
    if not found:
        raise invalid("dtype", shown(dtype), "float16, bfloat16")
    return found


def dtype_of(number: int) -> str:
    """The name of a DType of the contract."""
    return next(name for name, value in _DTYPES.items() if value == number).removeprefix("DTYPE_").lower()


def kv_dtype_number(name: str) -> int:
    choice("kv_dtype", name, ("same_as_query", "int8", "float8_e4m3"))
    return _KV_DTYPES[f"KV_DTYPE_{name.upper()}"]


def kv_dtype_of(number: int) -> str:
    """The name of a KvDType of the contract."""
    name = next(name for name, value in _KV_DTYPES.items() if value == number)
    return name.removeprefix("KV_DTYPE_").lower()


def to_rows(name: str, tensor: Tensor, layout: str, dtype: str | None = None) -> HostTensor:
    """A tensor as [rows, heads, head_dim]; on a GPU its `array` is a DeviceArray."""
    choice("layout", layout, LAYOUTS)
    host = to_device(name, tensor, dtype) if is_device(tensor) else to_host(name, tensor, dtype)
    shape = host.array.shape
    if host.array.ndim != 3 or 0 in (shape[2], shape[1 if layout == "NHD" else 0]):
        wanted = "[rows, heads, head_dim]" if layout == "NHD" else "[heads, rows, head_dim]"
        raise invalid(name, f"has shape {list(shape)}", f"{wanted} with at least one head; for a batch, "
                      f"the packed rows of its members, and cu_seqlens_q and cu_seqlens_k")
    return host if layout == "NHD" else host._replace(array=host.array.swapaxes(0, 1))


def kv_rows(k: Any, v: Any, layout: str, dtype: str | None,
            heads_and_dim: tuple[int, int] | None = None) -> tuple[np.ndarray, np.ndarray]:
    """K and V as arrays [rows, num_kv_heads, head_dim] of the same shape and dtype."""
    key, value = to_rows("k", k, layout, dtype), to_rows("v", v, layout, dtype)
    if (value.array.shape, value.dtype) != (key.array.shape, key.dtype):
        raise invalid("v", f"is {describe(value)}", f"the same as k, {describe(key)}")
    if heads_and_dim is not None and key.array.shape[1:] != heads_and_dim:
        raise invalid("k", f"is {describe(key)}", f"[rows, {heads_and_dim[0]}, {heads_and_dim[1]}]")
    return key.array, value.array


def to_bytes(array: np.ndarray) -> bytes:
    """Elements in C order, whatever the strides, little-endian."""
    if sys.byteorder == "big":
        array = array.astype(array.dtype.newbyteorder("<"))
    return array.tobytes()


def span_rows(name: str, offsets: Any, rows: int, least: int, spans: int | None = None) -> list[int]:
    """Rows of each span, from offsets 0, ..., rows as FlashAttention has them: [spans + 1]."""
    bounds = integers(name, offsets, "offsets: whole numbers, a list or an array [spans + 1]")
    counts = [end - begin for begin, end in zip(bounds, bounds[1:])]
    if not counts or bounds[0] != 0 or bounds[-1] != rows or min(counts) < least:
        raise invalid(name, _shorten(bounds),
                      f"offsets from 0 to the {rows} rows, each at least {least} more than the one before it")
    if spans is not None and len(counts) != spans:
        raise invalid(name, f"has {len(counts)} spans", str(spans))
    return counts


def equal_spans(name: str, rows: int, spans: int) -> list[int]:
    """Rows of each span where the caller gives no offsets."""
    if rows == 0 or rows % spans:
        raise invalid(name, f"has {rows} rows for {spans} sequences", "as many for each, or cu_seqlens")
    return [rows // spans] * spans


class Request(NamedTuple):
    """A request whose tensors are still arrays: a transport places them."""

    message: Any  # an AttendRequest or a LoadSequenceRequest, without tensors
    tensors: dict[str, np.ndarray]  # by field: query, key, value

    def inline(self) -> Any:
        """The message with its tensors."""
        for name, tensor in self.tensors.items():
            setattr(self.message, name, to_bytes(tensor))
        return self.message


class Reply(NamedTuple):
    """An AttendResponse whose tensors are arrays of bytes, which belong to the caller."""

    output: np.ndarray
    lse: Any
    sequence_lengths: Any


class Question(NamedTuple):
    """A request without its K/V: what query rows ask, and how their answer is read."""

    query: HostTensor  # [rows, num_heads, head_dim]
    layout: str
    terms: Terms

    def answer(self, reply: Any) -> Attention:
        shape = self.query.array.shape
        output = self._restore(reply.output, WIRE[self.query.dtype], shape)
        if not self.terms.return_lse:
            return output
        return output, self._restore(reply.lse, WIRE["float32"], shape[:2])

    def _restore(self, data: Any, dtype: np.dtype, shape: Sequence[int]) -> Tensor:
        if len(data) != math.prod(shape) * dtype.itemsize:
            raise Internal(f"the reply has {len(data)} bytes for a tensor {list(shape)} of {dtype}")
        array = np.frombuffer(data, dtype).reshape(shape)
        if self.layout == "HND":
            array = array.swapaxes(0, 1)
        if isinstance(data, bytes) or not array.flags.c_contiguous:
            array = np.array(array, dtype.newbyteorder("="), order="C")  # writable
        return self.query.restore(array)


def question(q: Tensor, layout: str, dtype: Any, terms: Terms) -> Question:
    return Question(query_rows(q, layout, None if dtype is None else dtype_of(dtype_number(dtype))), layout,
                    terms)


def query_rows(q: Tensor, layout: str, dtype: str | None) -> HostTensor:
    """Q as [rows, num_heads, head_dim], at least one row."""
    query = to_rows("q", q, layout, dtype)
    if len(query.array) == 0:
        raise invalid("q", f"has shape {list(query.array.shape)}", "at least one row")
    return query


@functools.lru_cache
def attend_fields(dtype: str, num_heads: int, num_kv_heads: int, head_dim: int,
                  terms: Terms) -> dict[str, Any]:
    """The fields of AttendRequest beside its tensors, spans and layer. Not to be changed."""
    return dict(dtype=dtype_number(dtype), num_heads=num_heads, num_kv_heads=num_kv_heads, head_dim=head_dim,
                layout=NHD, **terms.fields())


def inline_request(asked: Question, k: Tensor, v: Tensor, cu_seqlens_q: Any, cu_seqlens_k: Any) -> Request:
    """The request whose K/V comes with it."""
    rows, heads, head_dim = asked.query.array.shape
    key, value = kv_rows(k, v, asked.layout, asked.query.dtype)
    num_kv_heads = key.shape[1]
    if key.shape[2] != head_dim or heads % num_kv_heads:
        raise invalid("k", f"has {num_kv_heads} heads and head_dim {key.shape[2]}",
                      f"a number of heads that divides the {heads} of q, and head_dim {head_dim}")
    if (cu_seqlens_q is None) != (cu_seqlens_k is None):
        raise invalid("cu_seqlens_q, cu_seqlens_k", "one is None", "both, or neither")
    queries, keys = [rows], [key.shape[0]]
    if cu_seqlens_q is not None:
        queries = span_rows("cu_seqlens_q", cu_seqlens_q, rows, 1)
        keys = span_rows("cu_seqlens_k", cu_seqlens_k, key.shape[0], 0, len(queries))
    spans = [dict(query_rows=n, kv_rows=m) for n, m in zip(queries, keys)]
    fields = attend_fields(asked.query.dtype, heads, num_kv_heads, head_dim, asked.terms)
    return Request(AttendRequest(**fields, spans=spans), dict(key=key, value=value, query=asked.query.array))


@overload  # type: ignore[misc]
def merge(o_a: NDArray[N], lse_a: Tensor, o_b: Tensor, lse_b: Tensor) -> tuple[NDArray[N], Lse]: ...


@overload
def merge(o_a: T, lse_a: Tensor, o_b: Tensor, lse_b: Tensor) -> tuple[T, T]: ...


def merge(o_a: Tensor, lse_a: Tensor, o_b: Tensor, lse_b: Tensor) -> tuple[Tensor, Tensor]:
    """Merges attention over two disjoint sets of K/V rows into attention over both, for the same query rows:

        LSE = log(exp(LSE_a) + exp(LSE_b));  O = exp(LSE_a - LSE) * O_a + exp(LSE_b - LSE) * O_b

    The rule is that of online softmax (Milakov and Gimelshein, 2018), as FlashAttention and the contract
    have it. An operand with an infinite LSE is empty and contributes nothing, whatever its O holds: LSE =
    -infinity here, +infinity of flash-attn 2. Two such give O = 0, LSE = -infinity. A NaN of LSE gives NaN.

    o_a, o_b: [..., head_dim] of float16, bfloat16 (uint16 has its bits) or float32; lse_a, lse_b: float32
    [...], natural logarithms. Computes in float32. Returns (O, LSE) in the framework of o_a, O in its
    dtype. Raises InvalidArgument.
    """
    outputs = [_any_output(name, o) for name, o in (("o_a", o_a), ("o_b", o_b))]
    lses = [to_host(name, lse, "float32").array for name, lse in (("lse_a", lse_a), ("lse_b", lse_b))]
    shape = outputs[0].array.shape
    if [x.array.shape for x in outputs] != [shape] * 2 or [x.shape for x in lses] != [shape[:-1]] * 2:
        found = [list(x.shape) for x in (outputs[0].array, lses[0], outputs[1].array, lses[1])]
        raise invalid("o_a, lse_a, o_b, lse_b", f"have shapes {found}",
                      "o_a and o_b alike, lse_a and lse_b without the last axis")
    empty = [np.isinf(lse) for lse in lses]
    lses = [np.where(none, np.float32(-np.inf), lse) for none, lse in zip(empty, lses)]
    top = np.maximum(*lses)
    top = np.where(np.isneginf(top), np.float32(0), top)
    weights = [np.exp(lse - top) for lse in lses]
    total = weights[0] + weights[1]
    with np.errstate(divide="ignore"):
        lse = top + np.log(total)
    share = np.where(total > 0, total, np.float32(1))[..., None]
    output = sum(weight[..., None] / share * np.where(none[..., None], np.float32(0), to_float32(o))
                 for weight, none, o in zip(weights, empty, outputs))
    return outputs[0].restore(from_float32(output, outputs[0].dtype)), outputs[0].restore(lse)


def _any_output(name: str, o: Tensor) -> HostTensor:
    bits = isinstance(o, np.ndarray) and o.dtype == np.uint16
    return to_host(name, o, "bfloat16" if bits else None, allowed=("float16", "bfloat16", "float32"))


def describe(host: HostTensor) -> str:
    return f"{host.dtype} {list(host.array.shape)}"


def _shorten(values: list) -> str:
    return str(values) if len(values) <= 8 else f"[{', '.join(map(str, values[:3]))}, ..., {values[-1]}]"
