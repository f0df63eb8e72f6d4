"""One step of many sequences, in asyncio: see flashcore.aio."""

from typing import Any

import numpy as np

from . import _requests
from ._requests import Attention, Window
from ._sequence import Append, Sequence, common_shape
from ._tensors import HostTensor, Tensor
from .errors import LengthMismatch, invalid

_SMALL_BYTES = 64 << 10  # requests of at most this may travel together with others


class Plan:
    """The shapes and the mask of a step that is the same for every layer, checked once: see Client.plan."""

    def __init__(self, client: Any, cores: list[Sequence], num_heads: int, query_rows: list[int],
                 kv_rows: list[int], causal: bool, window: Window, softmax_scale: float | None,
                 return_lse: bool, layout: str) -> None:
        shape = cores[0]  # and that of the others, as the caller has checked
        if num_heads < 1 or num_heads % shape.num_kv_heads:
            raise invalid("num_heads", num_heads,
                          f"multiples of the {shape.num_kv_heads} KV heads of the sequences")
        if layout not in ("NHD", "HND"):
            raise invalid("layout", repr(layout), "'NHD', 'HND'")
        self._client, self._cores, self._shape, self._layout = client, cores, shape, layout
        self._return_lse = return_lse
        self._kv_rows, self._appends = kv_rows, any(kv_rows)
        self._query_shape = (sum(query_rows), num_heads, shape.head_dim)
        self._key_shape = (sum(kv_rows), shape.num_kv_heads, shape.head_dim)
        self._fields = _requests.terms(shape.dtype, num_heads, shape.head_dim, causal, window, softmax_scale,
                                       return_lse)
        self._rows = query_rows, kv_rows
        self._spans: dict[bool, list[Any]] = {}  # by whether they append; filled in by requests
        # Requests with the same key can be one request. None: they are too large for that to pay.
        sizes = self._query_shape[0] * num_heads + 2 * self._key_shape[0] * shape.num_kv_heads
        self._key = None if 2 * sizes * shape.head_dim > _SMALL_BYTES else (
            shape.device_id, shape.dtype, num_heads, shape.num_kv_heads, shape.head_dim, bool(causal),
            _requests.bounds(window), softmax_scale, bool(return_lse))

    def __repr__(self) -> str:
        return (f"<flashcore plan of {len(self._cores)} sequences: {self._query_shape[0]} query rows, "
                f"{self._key_shape[0]} K/V rows, {self._query_shape[1]} heads, {self._shape.shape_text()}>")

    async def run(self, layer: int, q: Tensor, k: Tensor | None = None, v: Tensor | None = None, *,
                  timeout: float | None = None) -> Attention:
        """Client.attend_batch of the planned step on `layer`. q, k, v: tensors of the planned shapes, packed
        over the sequences; k and v only if the plan appends."""
        if not 0 <= layer < self._shape.num_layers:
            raise invalid("layer", layer, f"0 to {self._shape.num_layers - 1}")
        if (k is not None, v is not None) != (self._appends, self._appends):
            raise invalid("k, v", "given" if k is not None or v is not None else "None",
                          "both, as planned" if self._appends else "None: the plan appends no rows")
        query = _requests.to_rows("q", q, self._layout, self._shape.dtype)
        if query.array.shape != self._query_shape:
            raise invalid("q", f"is {_requests.describe(query)}",
                          f"what was planned, {self._shape.dtype} {list(self._query_shape)} in layout NHD")
        key = value = _nothing(self._shape)
        if k is not None:
            key, value = _requests.kv_rows(k, v, self._layout, self._shape.dtype, self._key_shape[1:])
            if key.shape != self._key_shape:
                raise invalid("k", f"has {len(key)} rows", f"the {self._key_shape[0]} that were planned")
        return await self.step(layer, query, key, value, timeout)

    async def step(self, layer: int, query: HostTensor, key: np.ndarray, value: np.ndarray,
                   timeout: float | None) -> Attention:
        """With arrays [rows, heads, head_dim] that have been checked."""
        client, cores, rows = self._client, list(self._cores), self._kv_rows
        if len(cores) != len(rows):
            raise invalid("sequences", f"the batch has {len(cores)} now",
                          f"the {len(rows)} that were planned")
        deadline = client.deadline(timeout)
        data = dict(self._fields, num_kv_heads=self._shape.num_kv_heads, layer=layer)
        asked = _requests.Question(query, self._layout, self._return_lse, data)
        together = None if self._key is None else (layer, self._appends, *self._key)

        def request(append: bool) -> Any:
            """With append False, what gets the result if the rows have been appended already."""
            if append not in self._spans:
                self._spans[append] = [_requests.Span(query_rows=n, kv_rows=m if append else 0)
                                       for n, m in zip(*self._rows)]
            made = asked.request(dict(key=key, value=value) if append else {}, spans=self._spans[append])
            for span, core, m in zip(made.message.spans, cores, rows):
                span.sequence_id = core.id
                if m:
                    span.expected_length = core.lengths[layer] + (0 if append else m)
            return made

        async def settle(_: LengthMismatch) -> Any:
            return await client.call("Attend", request(False), deadline, repeatable=True, on_sequence=True)

        async def run() -> Any:
            with Append(cores, layer, key, value, rows) as step:
                reply = await client.call("Attend", request(self._appends), deadline, repeatable=True,
                                          on_sequence=True, settle=settle, unsure=step.repeats,
                                          together=together)
                for core, length in zip(cores, reply.sequence_lengths):
                    core.lengths[layer] = length
            return reply

        return asked.answer(await client.with_reload(cores, run))


def plan_of(client: Any, cores: list[Sequence], layer: int, q: Tensor, k: Tensor | None, v: Tensor | None,
            cu_seqlens_q: Any, cu_seqlens_k: Any, causal: bool, window: Window, softmax_scale: float | None,
            return_lse: bool, layout: str) -> tuple[Plan, HostTensor, np.ndarray, np.ndarray]:
    """The plan that fits these tensors, and the tensors as arrays for Plan.step."""
    shape = common_shape(cores, layer)
    query = _requests.query_rows(q, layout, shape.dtype)
    rows, heads, head_dim = query.array.shape
    if head_dim != shape.head_dim or heads % shape.num_kv_heads:
        raise invalid("q", f"has {heads} heads and head_dim {head_dim}", f"a multiple of the "
                      f"{shape.num_kv_heads} heads of the sequences, and head_dim {shape.head_dim}")
    if (k is None) != (v is None):
        raise invalid("k, v", "one is None", "both, or neither")
    split = (_requests.equal_spans("q", rows, len(cores)) if cu_seqlens_q is None else
             _requests.span_rows("cu_seqlens_q", cu_seqlens_q, rows, 1, len(cores)))
    key = value = _nothing(shape)
    appended = [0] * len(cores)
    if k is not None:
        key, value = _requests.kv_rows(k, v, layout, shape.dtype, (shape.num_kv_heads, head_dim))
        appended = (_requests.equal_spans("k", len(key), len(cores)) if cu_seqlens_k is None else
                    _requests.span_rows("cu_seqlens_k", cu_seqlens_k, len(key), 0, len(cores)))
    plan = Plan(client, cores, heads, split, appended, causal, window, softmax_scale, return_lse, layout)
    return plan, query, key, value


def _nothing(shape: Sequence) -> np.ndarray:
    return np.empty((0, shape.num_kv_heads, shape.head_dim), np.uint16)
