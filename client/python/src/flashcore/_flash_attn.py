"""Functions with the signatures of the package flash-attn 2, for code that is written for it.

The masks are the same. A row that sees no K/V has O = 0 and LSE = -infinity, which merges; flash-attn has
+infinity. A feature that the server lacks is Unimplemented, with the name and value of the argument.
"""

import math
import sys
from typing import Any, Iterable

import numpy as np

from . import _tensors
from ._arguments import flag, integer, integers, shown
from ._batch import Layer
from ._device_tensors import is_device, is_torch, to_device
from ._requests import Attention
from ._signatures import KvcacheFunc, VarlenFunc, typed_as
from ._tensors import HostTensor, Tensor
from .client import SequenceBatch, default_client
from .errors import InvalidArgument, Unimplemented, invalid, length_mismatch


@typed_as(VarlenFunc)
def flash_attn_varlen_func(
        q: Tensor, k: Tensor, v: Tensor, cu_seqlens_q: Any, cu_seqlens_k: Any, max_seqlen_q: int,
        max_seqlen_k: int, dropout_p: float = 0.0, softmax_scale: float | None = None, causal: bool = False,
        window_size: Any = (-1, -1), softcap: float = 0.0, alibi_slopes: None = None,
        deterministic: bool = False, return_attn_probs: bool = False, block_table: None = None) -> Any:
    """Attention of many spans over K/V that is sent along: Client.attend of the default client, in the terms
    of flash-attn.

    q: [total_q, nheads, headdim]; k, v: [total_k, nheads_k, headdim], float16 or bfloat16, in host memory, or
    all of PyTorch on a GPU that the server shares.
    cu_seqlens_q, cu_seqlens_k: int32 [batch + 1]. max_seqlen_q, max_seqlen_k: at least the longest.
    window_size: (left, right), -1 for no bound. dropout_p and softcap: 0. deterministic: always.

    Returns out like q; with return_attn_probs (out, softmax_lse, None): float32 [nheads, total_q]. Forward
    only.
    """
    _refuse_unless_none(alibi_slopes=alibi_slopes, block_table=block_table)
    _refuse_unless_zero(dropout_p=dropout_p, softcap=softcap)
    return_attn_probs = flag("return_attn_probs", return_attn_probs)
    query, key, value = _read("q", q), _read("k", k), _read("v", v)
    offsets_q, offsets_k = _integers("cu_seqlens_q", cu_seqlens_q), _integers("cu_seqlens_k", cu_seqlens_k)
    rows_q, rows_k = np.diff(offsets_q), np.diff(offsets_k)
    for name, most, rows in (("max_seqlen_q", max_seqlen_q, rows_q), ("max_seqlen_k", max_seqlen_k, rows_k)):
        if integer(name, most, 0, math.inf) < rows.max(initial=0):
            raise invalid(name, most, f"at least the longest, {rows.max()}")
    used = rows_q > 0
    if len(rows_q) == len(rows_k) and not used.all() and min(rows_q) >= 0 and min(rows_k) >= 0:
        # The server takes only spans with query rows.
        if not used.any():
            return _nothing(query, return_attn_probs)
        key, value = (x._replace(array=_rows(x.array, offsets_k, used))
                      if len(x.array) == rows_k.sum() else x for x in (key, value))
        offsets_q, offsets_k = _offsets(rows_q[used]), _offsets(rows_k[used])
    out: Any = default_client().attend(
        query.array, key.array, value.array, causal=causal, window=_window(window_size),
        softmax_scale=softmax_scale, return_lse=return_attn_probs, cu_seqlens_q=offsets_q,
        cu_seqlens_k=offsets_k, dtype=query.dtype)
    if not return_attn_probs:
        return query.restore(out)
    return query.restore(out[0]), query.restore(_contiguous(out[1].T)), None


@typed_as(KvcacheFunc)
def flash_attn_with_kvcache(
        q: Tensor, k_cache: Any, v_cache: Any, k: Tensor | None = None, v: Tensor | None = None,
        rotary_cos: None = None, rotary_sin: None = None, cache_seqlens: Any = None,
        cache_batch_idx: Any = None, cache_leftpad: None = None, block_table: None = None,
        softmax_scale: float | None = None, causal: bool = False, window_size: Any = (-1, -1),
        softcap: float = 0.0, rotary_interleaved: bool = True, alibi_slopes: None = None, num_splits: int = 0,
        return_softmax_lse: bool = False) -> Attention:
    """Appends k and v to a cache, if they are given, then attends to all of it.

    q: [batch, seqlen_q, nheads, headdim]; k, v: [batch, seqlen_new, nheads_k, headdim].
    k_cache: a layer of sequences, SequenceBatch.layer(i), and v_cache None or the same: the K/V stays on the
    server, and the batch's own client is used. cache_seqlens, if given, are the lengths before the append:
    LengthMismatch if a sequence has another one.
    Or k_cache, v_cache: [batch_cache, seqlen_cache, nheads_k, headdim], and cache_seqlens the
    rows in use; None: all. k and v are written to them in place, and the rows in use are sent with each call
    of the default client.
    cache_seqlens: int or int32 [batch]. cache_batch_idx: int32 [batch], the places in the cache; None: 0, 1,
    ... window_size: (left, right), -1 for no bound. softcap: 0. num_splits, rotary_interleaved: ignored.

    Returns out like q; with return_softmax_lse (out, softmax_lse): float32 [batch, nheads, seqlen_q].
    """
    _refuse_unless_none(rotary_cos=rotary_cos, rotary_sin=rotary_sin, cache_leftpad=cache_leftpad,
                        block_table=block_table, alibi_slopes=alibi_slopes)
    _refuse_unless_zero(softcap=softcap)
    if (k is None) != (v is None):
        raise invalid("k, v", "one is None", "both, or neither")
    query = _read("q", q, 4, "[batch, seqlen_q, nheads, headdim]")
    new = [] if k is None else [_read(name, x, 4, "[batch, seqlen_new, nheads_k, headdim]")
                                for name, x in (("k", k), ("v", v))]
    batch, seqlen_q, heads, head_dim = query.array.shape
    for name, x in zip("kv", new):
        _check_place(name, x, query)
        if len(x.array) != batch:
            raise invalid(name, f"has shape {list(x.array.shape)}", f"a batch of {batch}, as q")
    return_softmax_lse = flag("return_softmax_lse", return_softmax_lse)
    options = dict(causal=causal, window=_window(window_size), softmax_scale=softmax_scale,
                   return_lse=return_softmax_lse)
    flat = query._replace(array=query.array.reshape(batch * seqlen_q, heads, head_dim))
    if isinstance(k_cache, Layer):
        out = _attend_layer(k_cache, v_cache, flat, new, batch, cache_seqlens, cache_batch_idx, options)
    else:
        out = _attend_cache(k_cache, v_cache, flat, new, batch, cache_seqlens, cache_batch_idx, options)
    if not return_softmax_lse:
        return query.restore(out.reshape(query.array.shape))
    lse = out[1].reshape(batch, seqlen_q, heads).swapaxes(1, 2)
    return query.restore(out[0].reshape(query.array.shape)), query.restore(_contiguous(lse))


def _attend_layer(layer: Layer, v_cache: Any, flat: HostTensor, new: list[HostTensor], batch: int,
                  cache_seqlens: Any, cache_batch_idx: Any, options: dict) -> Any:
    if not isinstance(layer.batch, SequenceBatch):
        raise invalid("k_cache", layer, "a layer of a flashcore.SequenceBatch, of the blocking client")
    if v_cache is not None and not (isinstance(v_cache, Layer) and
                                    (v_cache.batch, v_cache.index) == (layer.batch, layer.index)):
        raise invalid("v_cache", shown(v_cache), "None, or the layer that is k_cache")
    places = _places(cache_batch_idx, batch, len(layer.batch), distinct=True)
    sequences = [layer.batch[place] for place in places]
    for name, x in zip("qkv", (flat, *new)):
        if x.dtype != sequences[0].dtype:
            raise invalid(name, f"has dtype {x.dtype}", f"{sequences[0].dtype}, as the sequences")
    if cache_seqlens is not None:
        for sequence, expected in zip(sequences, _lengths(cache_seqlens, batch)):
            actual = sequence.lengths[layer.index]
            if actual != expected:
                raise length_mismatch(f"cache_seqlens: {expected}; {sequence} has {actual} rows in layer "
                                      f"{layer.index}", expected, actual)
    packed = [x.array.reshape(-1, *x.array.shape[2:]) for x in new]
    chosen = layer.batch if places == list(range(len(layer.batch))) else SequenceBatch(sequences)
    return chosen.attend(layer.index, flat.array, *packed, **options)


def _attend_cache(k_cache: Tensor, v_cache: Tensor, flat: HostTensor, new: list[HostTensor], batch: int,
                  cache_seqlens: Any, cache_batch_idx: Any, options: dict) -> Any:
    key, value = (_read(name, x, 4, "[batch_cache, seqlen_cache, nheads_k, headdim]")
                  for name, x in (("k_cache", k_cache), ("v_cache", v_cache)))
    for name, x in (("k_cache", key), ("v_cache", value)):
        _check_place(name, x, flat)
    if key.array.shape != value.array.shape:
        raise invalid("v_cache", f"has shape {list(value.array.shape)}",
                      f"that of k_cache, {list(key.array.shape)}")
    places = _places(cache_batch_idx, batch, len(key.array), distinct=bool(new))
    room = key.array.shape[1]
    if cache_seqlens is None and new:
        raise invalid("cache_seqlens", None, "the rows in use, because k and v are appended to them")
    lengths = [room] * batch if cache_seqlens is None else _lengths(cache_seqlens, batch)
    rows = new[0].array.shape[1] if new else 0
    for length in lengths:
        if length + rows > room:
            raise invalid("cache_seqlens", f"{length}, and {rows} rows of k", f"at most {room} in k_cache")
    for name, cache, x in zip(("k", "v"), (key, value), new):
        if (x.dtype, x.array.shape[2:]) != (cache.dtype, cache.array.shape[2:]):
            raise invalid(name, f"is {x.dtype} {list(x.array.shape)}", f"{cache.dtype} [batch, seqlen_new, "
                          f"{cache.array.shape[2]}, {cache.array.shape[3]}]")
        if x.array.shape != new[0].array.shape:
            raise invalid(name, f"has shape {list(x.array.shape)}", f"that of k, {list(new[0].array.shape)}")
        if isinstance(cache.array, np.ndarray) and not cache.array.flags.writeable:
            raise invalid(f"{name}_cache", "is read-only", "a writable tensor, to append to")
    for cache, x in zip((key, value), new):
        for i, (place, length) in enumerate(zip(places, lengths)):
            cache.array[place, length:length + rows] = x.array[i]
    packed = [_joined([cache.array[place, :length + rows] for place, length in zip(places, lengths)])
              for cache in (key, value)]
    return default_client().attend(
        flat.array, *packed, **options, dtype=flat.dtype,
        cu_seqlens_q=_offsets([len(flat.array) // batch] * batch),
        cu_seqlens_k=_offsets([length + rows for length in lengths]))


def _read(name: str, tensor: Any, axes: int = 3, wanted: str = "[rows, heads, head_dim]") -> HostTensor:
    """On a GPU its `array` is the caller's tensor, of PyTorch."""
    if is_device(tensor):
        if not is_torch(tensor):
            raise invalid(name, f"is a {type(tensor).__name__} on a GPU", "there tensors of PyTorch")
        host = HostTensor(tensor, to_device(name, tensor, None).dtype, _same)
    else:
        host = _tensors.to_host(name, tensor)
    if host.array.ndim != axes or (axes == 4 and 0 in host.array.shape):
        raise invalid(name, f"has shape {list(host.array.shape)}", wanted)
    return host


def _check_place(name: str, x: HostTensor, query: HostTensor) -> None:
    if is_torch(x.array) != is_torch(query.array):
        raise invalid(name, "is on a GPU" if is_torch(x.array) else "is in host memory",
                      "all tensors of a call where q is")


def _nothing(query: HostTensor, with_lse: bool) -> Any:
    """The result without query rows."""
    array: Any = query.array
    if is_torch(array):
        out, lse = array.clone(), array.new_zeros(array.shape[1], 0).float()
    else:
        out, lse = np.zeros(array.shape, array.dtype), np.zeros((array.shape[1], 0), np.float32)
    return (query.restore(out), query.restore(lse), None) if with_lse else query.restore(out)


def _same(tensor: Any) -> Any:
    return tensor


def _joined(arrays: list[Any]) -> Any:
    return sys.modules["torch"].cat(arrays) if is_torch(arrays[0]) else np.concatenate(arrays)


def _contiguous(array: Any) -> Any:
    return array.contiguous() if is_torch(array) else np.ascontiguousarray(array)


def _rows(array: Any, offsets: np.ndarray, used: np.ndarray) -> Any:
    """Those of the spans that are used."""
    return _joined([array[:0], *(array[begin:end] for begin, end, use in zip(offsets, offsets[1:], used)
                                 if use)])


def _integers(name: str, values: Any) -> np.ndarray:
    """[n], of an array, a tensor on the host or a list."""
    try:
        return np.asarray(integers(name, values), np.int64)
    except OverflowError:  # of uint64
        raise invalid(name, shown(values), "int32 [n]") from None


def _lengths(cache_seqlens: Any, batch: int) -> list[int]:
    try:
        numbers = integers("cache_seqlens", cache_seqlens)
    except InvalidArgument:
        numbers = [integer("cache_seqlens", cache_seqlens)] * batch
    if len(numbers) != batch or min(numbers) < 0:
        raise invalid("cache_seqlens", numbers, f"a number, or {batch} of them, each at least 0")
    return numbers


def _places(cache_batch_idx: Any, batch: int, cached: int, distinct: bool) -> list[int]:
    places = (list(range(batch)) if cache_batch_idx is None else
              _integers("cache_batch_idx", cache_batch_idx).tolist())
    if cache_batch_idx is None and batch > cached:
        raise invalid("q", f"has a batch of {batch}", f"at most the {cached} of k_cache")
    if len(places) != batch or not all(0 <= place < cached for place in places) or (
            distinct and len(set(places)) != batch):
        raise invalid("cache_batch_idx", shown(places),
                      f"{batch} {'different ' if distinct else ''}indices from 0 to {cached - 1}")
    return places


def _offsets(rows: Iterable[int]) -> np.ndarray:
    return np.concatenate([[0], np.cumsum(list(rows))]).astype(np.int64)


def _window(window_size: Any) -> tuple[int, int] | None:
    """flash-attn has -1, and any other negative number, for no bound."""
    try:
        left, right = (max(integer("window_size", rows, -math.inf, math.inf), -1) for rows in window_size)
    except Exception:  # of what is no pair, whatever its class raises
        raise invalid("window_size", shown(window_size), "(left, right), -1 for no bound") from None
    return None if left == right == -1 else (left, right)


def _refuse_unless_none(**arguments: Any) -> None:
    for name, value in arguments.items():
        if value is not None:
            found = f"shape {list(value.shape)}" if isinstance(value, np.ndarray) else shown(value)
            raise Unimplemented(f"{name}: {found}; allowed: None")


def _refuse_unless_zero(**arguments: float) -> None:
    for name, value in arguments.items():
        if not isinstance(value, (int, float)) or isinstance(value, bool):
            raise invalid(name, shown(value), "0")
        if value != 0:
            raise Unimplemented(f"{name}: {value}; allowed: 0")
