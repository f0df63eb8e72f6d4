"""Batches of PyTorch, packed: the rows of all members, one after the other, without padding."""

import functools
import itertools
import math
import time
from typing import Any

import numpy as np
import torch

from ._device_tensors import torch_tensor, use_context
from ._streams import Streams
from ._tensors import HostTensor, dtype_name, to_host
from .client import Client, run
from .errors import ResourceExhausted


class Packing:
    """Which rows of tensors [batch, heads, rows, head_dim] are packed.

    columns: bool [batch, rows], in host memory: the rows that are packed.
    """

    def __init__(self, columns: torch.Tensor) -> None:
        self.counts: list[int] = columns.sum(1).tolist()  # packed rows of each member
        self._shape = tuple(columns.shape)
        # On the device that used them last.
        self._places = (None if sum(self.counts) == columns.numel() else
                        columns.flatten().nonzero().flatten())

    def places(self, device: torch.device) -> torch.Tensor | None:
        """int64 [packed rows], on `device`: numbers among batch * rows. None: all rows are packed."""
        if self._places is not None and self._places.device != device:
            self._places = self._places.to(device, non_blocking=device.type == "cuda")
        return self._places

    def rows_of(self, tensor: torch.Tensor) -> torch.Tensor:
        """The packed rows of a tensor [batch, heads, rows, head_dim], flat, on its device: a view if it can
        be one."""
        places, rows = self.places(tensor.device), tensor.transpose(1, 2)
        return rows.reshape(-1) if places is None else rows.flatten(0, 1).index_select(0, places).flatten()

    def unpack(self, packed: np.ndarray, query: HostTensor, like: torch.Tensor) -> torch.Tensor:
        """[batch, rows, heads, head_dim] with the dtype and device of `like`: the packed rows [packed rows,
        heads, head_dim], with elements like those of `query`, and 0 elsewhere. Does not wait for a GPU."""
        rows: torch.Tensor = query.restore(packed)  # type: ignore[assignment]
        if not like.is_cpu:  # CUDA has read pageable memory when a copy from it returns
            rows = rows.to(like.device, non_blocking=like.is_cuda)
        if rows.dtype != like.dtype:
            rows = rows.to(like.dtype)
        return self.spread(rows)

    def spread(self, rows: torch.Tensor) -> torch.Tensor:
        """[batch, rows, heads, head_dim]: the packed rows [packed rows, heads, head_dim], or those if all are
        packed, and 0 elsewhere."""
        places = self.places(rows.device)
        if places is None:
            return rows.reshape(*self._shape, *rows.shape[-2:])
        output = rows.new_zeros(*self._shape, *rows.shape[1:])
        output.flatten(0, 1).index_copy_(0, places, rows)
        return output


class Packer:
    """Packs tensors of the shapes and the device of `like`, for the layers of a step: always into the same
    memory. dtype: what they are rounded to."""

    def __init__(self, packing: Packing, dtype: torch.dtype, *like: torch.Tensor) -> None:
        batch, _, rows, head_dim = like[0].shape
        ends = [0, *itertools.accumulate(tensor.shape[1] for tensor in like)]
        joined = like[0].new_empty((batch, rows, ends[-1], head_dim), dtype=dtype)
        self._joined, self._rows = joined.transpose(1, 2), joined.flatten(0, 1)
        self._places = packing.places(joined.device)
        self._host = self._rows
        if not joined.is_cpu or self._places is not None:
            self._host = torch.empty((sum(packing.counts), ends[-1], head_dim), dtype=dtype, device="cpu")
        host = to_host("query", self._host)
        self._packed = [HostTensor(host.array[:, begin:end], host.dtype, host.restore)
                        for begin, end in zip(ends, ends[1:])]

    def pack(self, *tensors: torch.Tensor) -> list[HostTensor]:
        """Each tensor as [packed rows, heads, head_dim] in host memory, until the next call. From a GPU, all
        of them come with one copy, and one wait for it."""
        torch.cat(tensors, 1, out=self._joined)  # with out, autocast leaves it alone
        if self._host is not self._rows:
            self._host.copy_(self._rows if self._places is None else
                             self._rows.index_select(0, self._places))
        return self._packed


def shared_memory(client: Client, device: torch.device, device_id: str = "") -> Streams | None:
    """The streams that take tensors on this device; None: they go through host memory, because the server
    shares no memory of this GPU. device_id: the server's device; empty: its first."""
    if device.type != "cuda" or not client.core.is_local:
        return None
    deadline = client.core.deadline(None)
    streams: Streams = run(client.core.streams(deadline))
    stream = torch.cuda.current_stream(device).cuda_stream
    return streams if streams.ordinal(device_id, stream, deadline) == device.index else None


def share(client: Client, streams: Streams, dtype: torch.dtype,
          *tensors: tuple[Packing, torch.Tensor]) -> list[torch.Tensor] | None:
    """The packed rows of each tensor, [packed rows, heads, head_dim] of `dtype`, by one copy into memory that
    the server shares; None: there is too little. For work in the order of the current stream."""
    device = tensors[0][1].device
    stream, deadline = torch.cuda.current_stream(device).cuda_stream, client.core.deadline(None)
    shapes = [(sum(packing.counts), tensor.shape[1], tensor.shape[3]) for packing, tensor in tensors]
    sizes = [math.prod(shape) for shape in shapes]
    try:
        lent = streams.memory.lend(sum(sizes) * dtype.itemsize, stream, "", deadline - time.monotonic())
    except ResourceExhausted:
        return None
    region = lent.block.region
    use_context(region.ordinal)
    flat = torch_tensor(lent, region.ordinal, lent.block.address, (sum(sizes),), dtype_name(dtype))
    torch.cat([packing.rows_of(tensor) for packing, tensor in tensors], out=flat)
    return [part.view(shape) for part, shape in zip(flat.split(sizes), shapes)]


@functools.lru_cache(maxsize=16)
def whole(batch: int, rows: int) -> Packing:
    """The packing of a batch without padding."""
    return Packing(torch.ones(batch, rows, dtype=torch.bool, device="cpu"))


def attend(client: Client, queries: Packing, keys: Packing, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor,
           dtype: torch.dtype, **terms: Any) -> torch.Tensor:
    """Attention of the packed query rows of each member over its packed K/V rows, in one request.

    q: [batch, heads, L, head_dim]; k, v: [batch, kv_heads, S, head_dim]; they are rounded to `dtype`.
    queries, keys: the packings of Q, and of K and V; a member without query rows has no K/V rows.
    terms: those of Client.attend. Returns [batch, L, heads, head_dim] like q, with 0 in the other rows.
    """
    rows = [counts for counts in zip(queries.counts, keys.counts) if counts[0]]
    if not rows:
        return q.new_zeros(q.shape[0], q.shape[2], q.shape[1], q.shape[3])
    ends_q, ends_k = ([0, *itertools.accumulate(counts)] for counts in zip(*rows))
    streams = shared_memory(client, q.device)
    packed = None if streams is None else share(client, streams, dtype, (queries, q), (keys, k), (keys, v))
    if packed is not None:
        found: Any = client.attend(*packed, cu_seqlens_q=ends_q, cu_seqlens_k=ends_k, **terms)
        return queries.spread(found.to(q.dtype))
    query, key, value = (Packer(queries, dtype, q, k, v).pack(q, k, v) if queries is keys else
                         [*Packer(queries, dtype, q).pack(q), *Packer(keys, dtype, k, v).pack(k, v)])
    output = client.attend(query.array, key.array, value.array, dtype=query.dtype, cu_seqlens_q=ends_q,
                           cu_seqlens_k=ends_k, **terms)
    return queries.unpack(output, query, q)
