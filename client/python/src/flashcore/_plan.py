"""One step of many sequences, in asyncio: see flashcore.aio."""

import functools
from typing import Any, Generic, Literal, NamedTuple, overload

import numpy as np
from numpy.typing import NDArray

from . import _requests
from ._arguments import choice, integer
from ._device_tensors import on_device
from ._local_memory import varint
from ._requests import Attention
from ._sequence import Append, Sequence, common_shape
from ._signatures import L
from ._streams import Appended
from ._tensors import HostTensor, Lse, N, T, Tensor
from ._terms import Terms
from .errors import LengthMismatch, invalid

_LAYER = varint(_requests.AttendRequest.DESCRIPTOR.fields_by_name["layer"].number << 3)
_SMALL_BYTES = 64 << 10  # requests of at most this may travel together with others


class _Step:
    """Values that are the same for all steps of one shape and terms. Not to be changed."""

    def __init__(self, kind: Any, num_heads: int, query_rows: tuple[int, ...], kv_rows: tuple[int, ...],
                 terms: Terms, layout: str) -> None:
        (_, num_kv_heads, head_dim), dtype, _, device_id = kind
        if num_heads % num_kv_heads:
            raise invalid("num_heads", num_heads,
                          f"multiples of the {num_kv_heads} KV heads of the sequences")
        self.layout, self.terms = layout, terms
        self.kv_rows, self.appends = kv_rows, any(kv_rows)
        self.query_shape = (sum(query_rows), num_heads, head_dim)
        self.key_shape = (sum(kv_rows), num_kv_heads, head_dim)
        fields = _requests.attend_fields(dtype, num_heads, num_kv_heads, head_dim, terms)
        # AttendRequests without layer, sequences and tensors, by whether they append.
        self.messages = {append: self._encode(fields, query_rows, append) for append in (False, True)}
        # Requests with the same key can be one request. None: they are too large for that to pay.
        sizes = self.query_shape[0] * num_heads + 2 * self.key_shape[0] * num_kv_heads
        self.key = None if 2 * sizes * head_dim > _SMALL_BYTES else (
            device_id, dtype, num_heads, num_kv_heads, head_dim, terms, self.appends)

    def _encode(self, fields: dict[str, Any], query_rows: tuple[int, ...], append: bool) -> bytes:
        spans = [_requests.Span(query_rows=n, kv_rows=m if append else 0)
                 for n, m in zip(query_rows, self.kv_rows)]
        return _requests.AttendRequest(**fields, spans=spans).SerializeToString()


_step = functools.lru_cache(_Step)


class Plan(Generic[L]):
    """The shapes and the mask of a step that is the same for every layer, checked once: see Client.plan."""

    def __init__(self, client: Any, cores: list[Sequence], num_heads: int, query_rows: list[int],
                 kv_rows: list[int], terms: Terms, layout: str) -> None:
        self._client, self._cores, self._shape = client, cores, cores[0]  # as the caller has checked
        self._heads: dict[bool, _Head] = {}  # the last ones, by whether they append
        self._step = _step(cores[0].kind, integer("num_heads", num_heads, 1), tuple(query_rows),
                           tuple(kv_rows), terms, choice("layout", layout, _requests.LAYOUTS))

    def __repr__(self) -> str:
        step = self._step
        return (f"<flashcore plan of {len(self._cores)} sequences: {step.query_shape[0]} query rows, "
                f"{step.key_shape[0]} K/V rows, {step.query_shape[1]} heads, {self._shape.shape_text()}>")

    @overload
    async def run(self: "Plan[Literal[False]]", layer: int, q: T, k: Tensor | None = None,
                  v: Tensor | None = None, *, timeout: float | None = None) -> T: ...

    @overload  # type: ignore[misc]
    async def run(self: "Plan[Literal[True]]", layer: int, q: NDArray[N], k: Tensor | None = None,
                  v: Tensor | None = None, *, timeout: float | None = None) -> tuple[NDArray[N], Lse]: ...

    @overload
    async def run(self: "Plan[Literal[True]]", layer: int, q: T, k: Tensor | None = None,
                  v: Tensor | None = None, *, timeout: float | None = None) -> tuple[T, T]: ...

    @overload
    async def run(self: "Plan[bool]", layer: int, q: T, k: Tensor | None = None, v: Tensor | None = None,
                  *, timeout: float | None = None) -> T | tuple[T, T]: ...

    async def run(self, layer: int, q: Tensor, k: Tensor | None = None, v: Tensor | None = None, *,
                  timeout: float | None = None) -> Attention:
        """Client.attend_batch of the planned step on `layer`. q, k, v: tensors of the planned shapes, packed
        over the sequences; k and v only if the plan appends."""
        step, shape = self._step, self._shape
        layer = integer("layer", layer, 0, shape.num_layers - 1)
        if (k is not None, v is not None) != (step.appends, step.appends):
            raise invalid("k, v", "given" if k is not None or v is not None else "None",
                          "both, as planned" if step.appends else "None: the plan appends no rows")
        query = _requests.to_rows("q", q, step.layout, shape.dtype)
        if query.array.shape != step.query_shape:
            raise invalid("q", f"is {_requests.describe(query)}",
                          f"what was planned, {shape.dtype} {list(step.query_shape)} in layout NHD")
        if k is None:
            key = value = _nothing(shape)
        else:
            key, value = _requests.kv_rows(k, v, step.layout, shape.dtype, step.key_shape[1:])
            if key.shape != step.key_shape:
                raise invalid("k", f"has {len(key)} rows", f"the {step.key_shape[0]} that were planned")
        return await self.step(layer, query, key, value, timeout)

    async def step(self, layer: int, query: HostTensor, key: np.ndarray, value: np.ndarray,
                   timeout: float | None) -> Attention:
        """With arrays [rows, heads, head_dim] that have been checked."""
        client, cores, step, rows = self._client, self.now(), self._step, self._step.kv_rows
        deadline = client.deadline(timeout)
        asked = _requests.Question(query, step.layout, step.terms)
        tensors: dict[str, Any] = dict(query=query.array, key=key, value=value)
        if on_device(query.array, key, value):
            return await client.on_stream(self.head(cores, layer, step.appends), tensors, asked, deadline,
                                          self._shape.device_id, Appended(cores, layer, rows))

        def request(append: bool) -> Any:
            """With append False, what gets the result if the rows have been appended already."""
            message = _requests.AttendRequest.FromString(self.head(cores, layer, append))
            return _requests.Request(message, tensors if append else dict(query=query.array))

        async def settle(_: LengthMismatch) -> Any:
            return await client.call("Attend", request(False), deadline, repeatable=True, on_sequence=True)

        async def run() -> Any:
            with Append(cores, layer, key, value, rows) as append:
                reply = await client.call("Attend", request(step.appends), deadline, repeatable=True,
                                          on_sequence=True, settle=settle, unsure=append.repeats,
                                          together=step.key and (layer, step.key))
                for core, length in zip(cores, reply.sequence_lengths):
                    core.lengths[layer] = length
            return reply

        return asked.answer(await client.with_reload(cores, run))

    @property
    def client(self) -> Any:
        return self._client

    @property
    def device_id(self) -> str:
        return self._shape.device_id

    @property
    def kv_rows(self) -> tuple[int, ...]:
        """Those that each sequence gets."""
        return self._step.kv_rows

    def now(self) -> list[Sequence]:
        """The sequences, as the batch has them now."""
        cores = list(self._cores)
        if len(cores) != len(self._step.kv_rows):
            raise invalid("sequences", f"the batch has {len(cores)} now",
                          f"the {len(self._step.kv_rows)} that were planned")
        return cores

    def head(self, cores: list[Sequence], layer: int, append: bool) -> bytes:
        """The AttendRequest without its tensors, for the lengths that the sequences have now. append: whether
        it appends; with False, what asks the same once the planned rows have been appended."""
        ids = [core.id for core in cores]
        lengths = [core.lengths[layer] for core in cores]
        head = self._heads.get(append)
        if head is None or head.ids != ids or head.lengths != lengths:  # as a rule, the same for all layers
            head = self._heads[append] = _Head(ids, lengths, self._encode(append, ids, lengths))
        return head.data + _LAYER + varint(layer)

    def _encode(self, append: bool, ids: list[bytes], lengths: list[int]) -> bytes:
        message = _requests.AttendRequest.FromString(self._step.messages[append])
        for span, sequence_id, length, rows in zip(message.spans, ids, lengths, self._step.kv_rows):
            span.sequence_id = sequence_id
            if rows:
                span.expected_length = length if append else length + rows
        return message.SerializeToString()


class _Head(NamedTuple):
    """A message but for its layer and tensors, and what it is made of."""

    ids: list[bytes]
    lengths: list[int]
    data: bytes


def plan_of(client: Any, cores: list[Sequence], layer: int, q: Tensor, k: Tensor | None, v: Tensor | None,
            cu_seqlens_q: Any, cu_seqlens_k: Any, terms: Terms,
            layout: str) -> tuple[Plan[Any], HostTensor, np.ndarray, np.ndarray]:
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
    if k is None:
        key = value = _nothing(shape)
        appended = [0] * len(cores)
    else:
        key, value = _requests.kv_rows(k, v, layout, shape.dtype, (shape.num_kv_heads, head_dim))
        appended = (_requests.equal_spans("k", len(key), len(cores)) if cu_seqlens_k is None else
                    _requests.span_rows("cu_seqlens_k", cu_seqlens_k, len(key), 0, len(cores)))
    plan: Plan[Any] = Plan(client, cores, heads, split, appended, terms, layout)
    return plan, query, key, value


def _nothing(shape: Sequence) -> np.ndarray:
    return np.empty((0, shape.num_kv_heads, shape.head_dim), np.uint16)
