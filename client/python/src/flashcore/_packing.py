"""Batches of PyTorch as the client takes them: the rows of all members, one after the other, without padding."""

import functools
import itertools
from typing import Any

import torch

from ._tensors import HostTensor, to_host
from .client import Client


class Packing:
    """Which rows of tensors [batch, heads, rows, head_dim] are packed. Made once, for all layers of a step.

    columns: bool [batch, rows], in host memory: the rows that are packed.
    """

    def __init__(self, columns: torch.Tensor) -> None:
        self.counts: list[int] = columns.sum(1).tolist()  # packed rows of each member
        self._shape = columns.shape
        # Numbers of the packed rows among batch * rows, on the device that used them last. None: all rows.
        self._places = (None if sum(self.counts) == columns.numel() else
                        columns.flatten().nonzero().flatten())

    def pack(self, dtype: torch.dtype, *tensors: torch.Tensor) -> list[HostTensor]:
        """Each tensor as [packed rows, heads, head_dim] of `dtype` in host memory. From a GPU, all tensors
        come with one copy, and one wait for it."""
        batch, _, length, head_dim = tensors[0].shape
        heads = [tensor.shape[1] for tensor in tensors]
        joined = tensors[0].new_empty((batch, length, sum(heads), head_dim), dtype=dtype)
        torch.cat(tensors, 1, out=joined.transpose(1, 2))  # with out, autocast leaves it alone
        rows = joined.flatten(0, 1)
        if self._places is not None:
            rows = rows.index_select(0, self._places_on(rows.device))
        host = to_host("query", rows.cpu())
        parts, end = [], 0
        for count in heads:
            begin, end = end, end + count
            parts.append(HostTensor(host.array[:, begin:end], host.dtype, host.restore))
        return parts

    def unpack(self, packed: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
        """[batch, rows, heads, head_dim] with the dtype and device of `like`: the packed rows [packed rows,
        heads, head_dim], which are in host memory, and 0 elsewhere. Does not wait for the copy to a GPU."""
        if not like.is_cpu:  # CUDA has read pageable memory when a copy from it returns
            packed = packed.to(like.device, non_blocking=like.is_cuda)
        if packed.dtype != like.dtype:
            packed = packed.to(like.dtype)
        if self._places is not None:
            whole = packed.new_zeros(self._shape.numel(), *packed.shape[1:])
            packed = whole.index_copy_(0, self._places_on(packed.device), packed)
        return packed.view(*self._shape, *packed.shape[1:])

    def _places_on(self, device: torch.device) -> torch.Tensor:
        assert self._places is not None
        if self._places.device != device:
            self._places = self._places.to(device, non_blocking=device.type == "cuda")
        return self._places


@functools.lru_cache(maxsize=16)
def whole(batch: int, rows: int) -> Packing:
    """Of a batch without padding."""
    return Packing(torch.ones(batch, rows, dtype=torch.bool, device="cpu"))


def attend(client: Client, queries: Packing, keys: Packing, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor,
           dtype: torch.dtype, **terms: Any) -> torch.Tensor:
    """Attention of the packed query rows of each member over its packed K/V rows, in one request.

    q: [batch, heads, L, head_dim]; k, v: [batch, kv_heads, S, head_dim]; they are rounded to `dtype`. queries,
    keys: of Q's rows, and of those of K and V; a member without query rows has none of K/V. terms: of
    Client.attend. Returns [batch, L, heads, head_dim] like q, with 0 in the other rows.
    """
    rows = [counts for counts in zip(queries.counts, keys.counts) if counts[0]]
    if not rows:
        return q.new_zeros(q.shape[0], q.shape[2], q.shape[1], q.shape[3])
    query, key, value = (queries.pack(dtype, q, k, v) if queries is keys else
                         [*queries.pack(dtype, q), *keys.pack(dtype, k, v)])
    ends_q, ends_k = ([0, *itertools.accumulate(counts)] for counts in zip(*rows))
    output = client.attend(query.array, key.array, value.array, dtype=query.dtype, cu_seqlens_q=ends_q,
                           cu_seqlens_k=ends_k, **terms)
    return queries.unpack(query.restore(output), q)
