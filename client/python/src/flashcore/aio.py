"""The client in asyncio: the calls of flashcore.Client and flashcore.Sequence as coroutines.

    client = flashcore.aio.connect("127.0.0.1:7070")
    o = await client.attend(q, k, v)

flashcore.client makes the blocking client of the same code.
"""

import contextvars
import inspect
import itertools
import math
from typing import Any, Awaitable, Callable, Hashable, Iterable, Literal, TypeVar

from . import _messages, _requests
from ._arguments import UINT32, integer, integers, shown, text
from ._batch import SequenceBatch, create_batch
from ._coalesce import Coalescer
from ._local import AsyncLocalTransport
from ._plan import Plan, plan_of
from ._device_tensors import on_device
from ._requests import Attention, Question
from ._sequence import HasSequence, Sequence, common_shape, cores_of, made_options
from ._signatures import AsyncBatchAttend, AsyncInlineAttend, MakesPlan, typed_as
from ._streams import Appended, Streams
from ._tensors import Tensor
from ._terms import Terms, terms_of
from ._transport import LOCAL, AsyncTransport, Config, Retry, Tls, Token, seconds_of
from .errors import Error, LengthMismatch, NotFound, SequenceLost, Unimplemented, invalid
from .messages import GetServerInfoResponse, SequenceInfo

__all__ = ["Client", "Plan", "Sequence", "SequenceBatch", "connect"]
T = TypeVar("T")
OnLost = Callable[[Sequence], object]  # returns whether it has restored it

_CHUNK_BYTES = 8 << 20  # of K and V in one message of an append, if the server takes so much
_ID_BYTES = 16
_MESSAGE_OVERHEAD = 4096  # bytes of a message beside its tensors, at most
# Whether this thread or task runs on_lost: what is lost there is not restored again.
_reloading: contextvars.ContextVar[bool] = contextvars.ContextVar("flashcore_reloading", default=False)


def connect(target: str | None = None, *, tls: Tls | bool | None = None, token: Token | None = None,
            timeout: float | None = 30.0, client_name: str | None = None, retry: Retry | None = None,
            on_lost: OnLost | None = None, lease: bool = False, http_proxy: bool = False) -> "Client":
    """A client in asyncio; its arguments are those of flashcore.connect, and on_lost may be a coroutine
    function. It belongs to the event loop of its first call: FailedPrecondition in another.

    Attends of many tasks on sequences travel together: see Client.attend_batch."""
    config = Config.read(target, tls, token, timeout, client_name, retry, http_proxy=http_proxy)
    transport = (AsyncLocalTransport if config.target.startswith(LOCAL) else AsyncTransport)(config)
    return Client(config, transport, on_lost, lease, Coalescer(transport.call))


class Client:
    """A connection to one server. Made by connect; a context manager. Opens with its first call."""

    def __init__(self, config: Config, transport: Any, on_lost: Callable[[Any], object] | None = None,
                 lease: bool = False, coalescer: Coalescer | None = None) -> None:
        self.config = config
        self._transport = transport
        self._on_lost = on_lost
        self._lease = lease
        self._lease_id = b""
        self._coalescer = coalescer
        self.outer: Callable[[Sequence], Any] = lambda core: core  # makes what the user holds of a sequence
        self._info: Any = None  # the last reply to GetServerInfo
        self._reload_lock, self._lease_lock = transport.lock(), transport.lock()

    def __repr__(self) -> str:
        return f"<flashcore client of {self.config.target}{', TLS' if self.config.tls else ''}>"

    async def __aenter__(self) -> "Client":
        return self

    async def __aexit__(self, *_: Any) -> None:
        await self.close()

    async def close(self) -> None:
        """Closes the connection. Sequences stay on the server."""
        await self._transport.close()

    @typed_as(AsyncInlineAttend)
    async def attend(self, q: Tensor, k: Tensor, v: Tensor, *, return_lse: bool = False,
                     cu_seqlens_q: Any = None, cu_seqlens_k: Any = None, layout: str = "NHD",
                     dtype: Any = None, timeout: float | None = None, **terms: Any) -> Attention:
        """Attention of query rows over K/V that is sent along.

        q: [rows, num_heads, head_dim]; k, v: [kv_rows, num_kv_heads, head_dim], where num_kv_heads divides
        num_heads; layout "HND" has the first two axes swapped. All are float16 or all bfloat16, with any
        strides; for bfloat16 as uint16 bits, dtype="bfloat16".
        causal: query row i of n sees K/V rows up to i + kv_rows - n. window: (left, right), the rows
        before and after that one that it sees, too; None or -1 is no bound. softmax_scale: None is
        1/sqrt(head_dim).
        cu_seqlens_q, cu_seqlens_k: offsets [spans + 1] that split the rows into spans; each attends to its
        own K/V.

        Returns O like q. With return_lse, (O, LSE): LSE is float32 [rows, num_heads] ([num_heads, rows] in
        HND), the natural logarithm of the sum of exponentials. A row that sees no K/V has O = 0 and LSE =
        -infinity.
        Safe to repeat, and repeated as Client.config.retry says.
        """
        asked = _requests.question(q, layout, dtype, terms_of("Client.attend", return_lse, terms))
        request = _requests.inline_request(asked, k, v, cu_seqlens_q, cu_seqlens_k)
        if on_device(asked.query.array, request.tensors["key"], request.tensors["value"]):
            return await self.on_stream(request.message.SerializeToString(), request.tensors, asked,
                                        self.deadline(timeout))
        return asked.answer(await self.call("Attend", request, self.deadline(timeout), repeatable=True))

    @typed_as(AsyncBatchAttend)
    async def attend_batch(self, sequences: Iterable[HasSequence], layer: int, q: Tensor,
                           k: Tensor | None = None, v: Tensor | None = None, *, return_lse: bool = False,
                           cu_seqlens_q: Any = None, cu_seqlens_k: Any = None, layout: str = "NHD",
                           timeout: float | None = None, **terms: Any) -> Attention:
        """One step of many sequences in one request: appends the rows of k and v to their `layer`, then
        attends.

        The sequences have one shape, dtype, kv_dtype and device (create_sequence's device_id); each comes
        once. q, k and v hold the rows of all of them, in this order: as many for each, or as cu_seqlens_q and
        cu_seqlens_k say. Without k and v nothing is appended. Everything else is as in Client.attend. The
        request takes effect for all sequences or for none; after a timeout, the same call with the same k
        and v is safe: see Sequence.

        precision: the least precise products to accept over sequences with kv_dtype="int8": "16bit", of
        elements; "int8_qk", of INT8 codes in Q K^T, each row of Q rounded to 1/254 of its largest magnitude;
        or "int8_qk_pv", in P V as well. The server's kernels may be more precise (server_info lists them),
        and over other K/V they are.

        In asyncio, small calls that tasks make in one turn of the event loop, on the same layer and with the
        same mask, are sent as one request; each fails or succeeds by itself.
        """
        asked = terms_of("Client.attend_batch", return_lse, terms)
        return await self.step(cores_of(sequences), layer, q, k, v, cu_seqlens_q, cu_seqlens_k, asked, layout,
                               timeout)

    @typed_as(MakesPlan[Plan[Literal[False]], Plan[Literal[True]], Plan[bool]])
    def plan(self, sequences: Iterable[HasSequence], *, num_heads: int, query_rows: int | Iterable[int] = 1,
             append: bool | Iterable[int] = True, return_lse: bool = False, layout: str = "NHD",
             **terms: Any) -> Plan[Any]:
        """A step of many sequences that is the same for every layer: plan.run(layer, q, k, v) is then
        attend_batch with less to check. For a SequenceBatch, it is about the sequences that the batch has
        when it runs, also after SequenceBatch.reorder.

        query_rows: of each sequence. append: whether as many K/V rows are appended, or how many for each
        sequence. Everything else is as in attend_batch.
        """
        asked = terms_of("Client.plan", return_lse, terms)
        cores = cores_of(sequences)
        common_shape(cores, 0)
        queries = _per_sequence("query_rows", query_rows, len(cores), 1)
        keys = (queries if append is True else [0] * len(cores) if append is False else
                _per_sequence("append", append, len(cores), 0))
        return Plan(self, cores, num_heads, queries, keys, asked, layout)

    async def create_sequence(self, num_layers: int, num_kv_heads: int, head_dim: int, *,
                              dtype: Any = "float16", kv_dtype: str = "same_as_query", pin: bool = False,
                              shared: bool = False, group: str = "", device_id: str = "",
                              idle_timeout: float = 0, timeout: float | None = None) -> Sequence:
        """An empty sequence. dtype: float16 or bfloat16, by name or as a dtype of numpy or torch.

        kv_dtype: how the server stores K/V: "same_as_query", as it comes, or in half the memory: "int8", each
        row of each KV head rounded to 1/254 of its largest magnitude, or "float8_e4m3", each number to 1/16
        of itself.
        pin: asks for a place in the cache of the device. shared, group: who else may read and fork it.
        device_id: where; empty, the server chooses. idle_timeout: seconds without use after which the
        server deletes it; 0: the server's limit. Not safe to repeat: Unavailable may leave a sequence
        behind, which expires.
        """
        fields = _create_fields(num_kv_heads, head_dim, dtype, kv_dtype, pin, shared, group, device_id,
                                idle_timeout)
        fields["num_layers"] = integer("num_layers", num_layers, 1)
        return Sequence(self, await self.make("CreateSequence", fields, self.deadline(timeout)))

    async def create_sequences(self, n: int, num_layers: int, num_kv_heads: int, head_dim: int, *,
                               dtype: Any = "float16", kv_dtype: str = "same_as_query", pin: bool = False,
                               shared: bool = False, group: str = "", device_id: str = "",
                               idle_timeout: float = 0, timeout: float | None = None) -> SequenceBatch:
        """n empty sequences on one device. Options and safety are those of create_sequence. BatchError if
        some were not made; its `results` has the others."""
        fields = _create_fields(num_kv_heads, head_dim, dtype, kv_dtype, pin, shared, group, device_id,
                                idle_timeout)
        return await create_batch(self, n, num_layers, fields, self.deadline(timeout))

    async def open_sequence(self, sequence_id: bytes, *, timeout: float | None = None) -> Sequence:
        """A sequence that exists: of this client, or shared with it. SequenceLost if there is none."""
        is_id = isinstance(sequence_id, (bytes, bytearray, memoryview))
        if not is_id or len(bytes(sequence_id)) != _ID_BYTES:
            raise invalid("sequence_id", shown(sequence_id), f"the {_ID_BYTES} bytes of Sequence.id")
        return Sequence(self, await self.sequence_info(bytes(sequence_id), self.deadline(timeout)))

    async def list_sequences(self, *, timeout: float | None = None) -> list[SequenceInfo]:
        """The SequenceInfo messages of all sequences that this client created or forked."""
        found: list[SequenceInfo] = []
        deadline, token = self.deadline(timeout), ""
        while True:
            page = dict(page_size=1000, page_token=token)
            reply = await self.call("ListSequences", page, deadline, repeatable=True)
            found.extend(reply.sequences)
            token = reply.next_page_token
            if not token:
                return found

    async def server_info(self, *, timeout: float | None = None) -> GetServerInfoResponse:
        """The GetServerInfoResponse message: version, devices, kernels, limits."""
        return await self._ask_info(self.deadline(timeout))

    # The arguments of Sequence.

    def deadline(self, timeout: float | None) -> float:
        """When a call ends that begins now. None: the client's timeout. Every call begins here: refuses those
        of another process or event loop."""
        self._transport.check_here()
        return self._transport.now() + (self.config.timeout if timeout is None else seconds_of(
            timeout, "seconds, at least 0; infinity for no limit; None for the client's",
            at_least_zero=True))

    async def step(self, cores: list[Sequence], layer: int, q: Tensor, k: Tensor | None, v: Tensor | None,
                   cu_seqlens_q: Any, cu_seqlens_k: Any, terms: Terms, layout: str,
                   timeout: float | None) -> Attention:
        """attend_batch of `cores`."""
        plan, query, key, value = plan_of(self, cores, layer, q, k, v, cu_seqlens_q, cu_seqlens_k, terms,
                                          layout)
        return await plan.step(int(layer), query, key, value, timeout)

    async def on_stream(self, head: bytes, tensors: dict[str, Any], asked: Question, deadline: float,
                        device_id: str = "", appended: Appended | None = None) -> Attention:
        """Attention over tensors on a GPU, submitted in the order of q's stream. head: the AttendRequest
        without its tensors."""
        return (await self.streams(deadline)).attend(head, tensors, asked, device_id, appended, deadline)

    @property
    def is_local(self) -> bool:
        """Whether the target is a local socket."""
        return self.config.target.startswith(LOCAL)

    async def streams(self, deadline: float) -> Streams:
        """Raises an error of an earlier request on a stream."""
        if self.is_local:
            await self.known_info(deadline)  # the first connection is tried until the deadline
        found: Streams = self._transport.streams(deadline)
        return found

    def synchronize(self, deadline: float) -> None:
        self._transport.synchronize(deadline)

    async def call(self, method: str, request: Any, deadline: float, *, repeatable: bool = False,
                   on_sequence: bool = False, unsure: bool = False,
                   settle: Callable[[LengthMismatch], Awaitable[Any]] | None = None,
                   together: Hashable = None) -> Any:
        """The reply to a request: a Request, a message, or a dict of the message's fields.

        settle: what to do about a LengthMismatch where an earlier attempt may be the reason. unsure: there
        was one before this call. together: the key of requests that may travel together, if this is one.
        """
        if isinstance(request, dict):
            request = _messages.METHODS[method][0](**request)
        for attempt in itertools.count(1):
            try:
                left = deadline - self._transport.now()
                if together is not None and self._coalescer is not None and left > 0:
                    return await self._coalescer.call(request, left, together)
                return await self._transport.call(method, request, left, on_sequence)
            except LengthMismatch as error:
                if settle is None or not unsure:
                    raise
                return await settle(error)
            except Error as error:
                seconds = self.config.retry.wait(error, attempt, repeatable, deadline - self._transport.now(),
                                                 self._transport.uniform())
                if seconds is None:
                    raise
                unsure = unsure or not error.refused
            await self._transport.sleep(seconds)

    async def ping(self, left: float) -> GetServerInfoResponse:
        """server_info in at most `left` seconds, asked once: not repeated."""
        request = _messages.METHODS["GetServerInfo"][0]()
        info: GetServerInfoResponse = await self._transport.call("GetServerInfo", request, left, False)
        return info

    async def sequence_info(self, sequence_id: bytes, deadline: float) -> Any:
        reply = await self.call("GetSequence", dict(sequence_id=sequence_id), deadline, repeatable=True,
                                on_sequence=True)
        return reply.sequence

    async def make(self, method: str, fields: dict[str, Any], deadline: float) -> Any:
        """The SequenceInfo of a new sequence, under the lease if this client holds one."""
        lease = await self.lease_id(deadline)
        try:
            reply = await self.call(method, dict(fields, lease_id=lease), deadline, on_sequence=True)
        except NotFound:
            renewed = await self.lease_id(deadline)
            if renewed == lease:
                raise
            reply = await self.call(method, dict(fields, lease_id=renewed), deadline, on_sequence=True)
        return reply.sequence

    async def lease_id(self, deadline: float) -> bytes:
        """The id of the lease that this client holds now: a new one if the connection of the last one broke.
        Empty: the client was made without."""
        if not self._lease:
            return b""
        async with self._lease_lock:
            if not self._transport.holds_lease():
                try:
                    reply = await self.call("HoldLease", {}, deadline, repeatable=True, on_sequence=True)
                except Unimplemented:
                    raise Unimplemented(
                        f"lease: True; the server at {self.config.target} has no leases") from None
                self._lease_id = reply.lease_id
            return self._lease_id

    async def with_reload(self, cores: list[Sequence], operation: Callable[[], Awaitable[T]]) -> T:
        """Runs an operation on sequences, once more if some were lost and on_lost has restored them."""
        ids = [core.id for core in cores]
        try:
            return await operation()
        except SequenceLost as error:
            if not await self.reload(cores, ids, error):
                raise
        return await operation()

    async def reload(self, cores: list[Sequence], ids: list[bytes], error: SequenceLost) -> bool:
        """Whether the sequences that were lost when they had `ids` are restored now."""
        if self._on_lost is None or _reloading.get():
            return False
        restored = False
        async with self._reload_lock:
            token = _reloading.set(True)
            try:
                for core, sequence_id, lost in zip(cores, ids, await self._lost(ids, error)):
                    if lost and core.id == sequence_id:  # otherwise another task has done it
                        answer = self._on_lost(core.outer)
                        if not (await answer if inspect.isawaitable(answer) else answer):
                            return False
                    restored |= lost
            finally:
                _reloading.reset(token)
        return restored

    async def _lost(self, ids: list[bytes], error: SequenceLost) -> list[bool]:
        if len(ids) == 1:
            return [True]
        if error.sequence_ids and len(error.sequence_ids) == error.lost:
            return [sequence_id in error.sequence_ids for sequence_id in ids]
        lost = []
        for sequence_id in ids:
            try:
                await self.sequence_info(sequence_id, self.deadline(None))
                lost.append(False)
            except SequenceLost:
                lost.append(True)
        return lost

    async def known_info(self, deadline: float) -> Any:
        """The GetServerInfoResponse message, which may be old."""
        return self._info or await self._ask_info(deadline)

    async def _ask_info(self, deadline: float) -> Any:
        self._info = await self.call("GetServerInfo", {}, deadline, repeatable=True)
        self._transport.max_message_bytes = self._info.limits.max_message_bytes or math.inf
        return self._info

    async def chunk_bytes(self, deadline: float) -> int:
        """Bytes of K and V in one message."""
        limits = (await self.known_info(deadline)).limits
        return min(_CHUNK_BYTES, limits.max_message_bytes - _MESSAGE_OVERHEAD)


def _create_fields(num_kv_heads: int, head_dim: int, dtype: Any, kv_dtype: str, pin: bool, shared: bool,
                   group: str, device_id: str, idle_timeout: float) -> dict[str, Any]:
    """Fields of CreateSequenceRequest, without num_layers."""
    return dict(num_kv_heads=integer("num_kv_heads", num_kv_heads, 1),
                head_dim=integer("head_dim", head_dim, 1), dtype=_requests.dtype_number(dtype),
                kv_dtype=_requests.kv_dtype_number(kv_dtype),
                device_id=text("device_id", device_id), **made_options(pin, shared, group, idle_timeout))


def _per_sequence(name: str, rows: Any, count: int, least: int) -> list[int]:
    """One number for all sequences, or a list of one for each."""
    each = integers(name, rows) if hasattr(rows, "__iter__") else [integer(name, rows, least)] * count
    if len(each) != count or not all(least <= rows <= UINT32 for rows in each):
        raise invalid(name, shown(each), f"{count} numbers, each at least {least}, or one for all")
    return each
