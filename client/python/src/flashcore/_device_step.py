"""A step of a batch of PyTorch on the server's GPU: Q, K and V of a layer go into memory that both sides map,
by one copy in the order of the stream, and O lies there. The host waits for nothing."""

import time
from typing import Any

import torch

from ._device_memory import Lent
from ._device_tensors import torch_tensor, use_context
from ._packing import Packing, shared_memory
from ._places import Place, encoded, row_bytes
from ._streams import Appended, Streams
from ._tensors import dtype_name
from .client import Client, Plan
from .errors import ResourceExhausted


class DeviceStep:
    """A step of the layers that have one mask, scale, and shape of Q and of K. For one thread."""

    def __init__(self, streams: Streams, plan: Plan[Any], packing: Packing, dtype: torch.dtype,
                 q: torch.Tensor, k: torch.Tensor) -> None:
        self._streams, self._packing = streams, packing
        self._plan, self._client = plan.core, plan.core.client
        self._cores, self._dtype, self._torch_dtype = plan.core.now(), dtype_name(dtype), dtype
        batch, heads, rows, head_dim = q.shape
        self._packed = sum(packing.counts)
        self._whole = self._packed == batch * rows
        self._shape = (batch, rows, heads, head_dim) if self._whole else (self._packed, heads, head_dim)
        self._heads = heads, k.shape[1], k.shape[1]
        self._row_bytes = row_bytes((0, head_dim), self._dtype)  # of one head
        self._take_memory(torch.cuda.current_stream(q.device).cuda_stream)
        self._lend_output(self._client.deadline(None))  # now, or this step is not for the GPU

    def attend(self, layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        """Appends K and V and attends, in one request. Returns [batch, rows, heads, head_dim] like q."""
        streams, plan = self._streams, self._plan
        streams.raise_earlier()
        stream = torch.cuda.current_stream(q.device).cuda_stream
        if stream != self._stream:
            self._take_memory(stream)
        # With out, autocast leaves it alone.
        torch.cat([self._packing.rows_of(tensor) for tensor in (q, k, v)], out=self._flat)
        deadline = self._client.deadline(None)
        lent = self._lend_output(deadline)
        region, offset = lent.block.region, lent.block.offset
        place = Place("output", region.region_id, offset, self._packed, self._heads[0] * self._row_bytes)
        streams.submit(plan.head(self._cores, layer, True), self._ranges + encoded([place]),
                       (*self._inputs, place), Appended(self._cores, layer, plan.kv_rows), stream, deadline)
        found = torch_tensor(lent, region.ordinal, region.address + offset, self._shape, self._dtype)
        if found.dtype != q.dtype:
            found = found.to(q.dtype)
        return found if self._whole else self._packing.spread(found)

    def _lend_output(self, deadline: float) -> Lent:
        size = self._packed * self._heads[0] * self._row_bytes
        return self._streams.memory.lend(size, self._stream, self._plan.device_id,
                                         deadline - time.monotonic())

    def _take_memory(self, stream: int) -> None:
        """For the inputs of all layers in the order of a stream: Q, then K, then V, each dense."""
        sizes = [self._packed * heads * self._row_bytes for heads in self._heads]
        left = self._client.deadline(None) - time.monotonic()
        lent = self._streams.memory.lend(sum(sizes), stream, self._plan.device_id, left)
        region, offset = lent.block.region, lent.block.offset
        use_context(region.ordinal)
        self._inputs: list[Place] = []
        for name, size in zip(("query", "key", "value"), sizes):
            self._inputs.append(Place(name, region.region_id, offset, self._packed, size // self._packed))
            offset += size
        self._ranges = encoded(self._inputs)
        self._flat = torch_tensor(lent, region.ordinal, lent.block.address,
                                  (sum(sizes) // self._torch_dtype.itemsize,), self._dtype)
        self._stream = stream


def step_on_gpu(client: Client, plan: Plan[Any], packing: Packing, dtype: torch.dtype, q: torch.Tensor,
                k: torch.Tensor) -> DeviceStep | None:
    """None: the step goes through host memory, also because the server shares too little for it."""
    streams = shared_memory(client, q.device, plan.core.device_id)
    if streams is None:
        return None
    try:
        return DeviceStep(streams, plan, packing, dtype, q, k)
    except ResourceExhausted:
        return None
