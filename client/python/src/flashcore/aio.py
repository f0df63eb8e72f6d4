"""The client in asyncio: the calls of flashcore.Client and flashcore.Sequence as coroutines.

    client = flashcore.aio.connect("127.0.0.1:7070")
    o = await client.attend(q, k, v)

flashcore.client makes the blocking client of the same code.
"""

import contextlib
import itertools
from typing import Any, Awaitable, Callable, Iterable

import numpy as np

from . import _messages, _requests
from ._requests import Attention, Window
from ._sequence import Append, HasSequence, Sequence, common_shape
from ._tensors import Tensor
from ._transport import AsyncTransport, Config, Retry, Tls, Token
from .errors import Error, LengthMismatch, invalid

_CHUNK_BYTES = 8 << 20  # of K and V in one message of an append, if the server takes so much
_MESSAGE_OVERHEAD = 4096  # bytes of a message beside its tensors, at most


def connect(target: str | None = None, *, tls: Tls | bool | None = None, token: Token | None = None,
            timeout: float | None = 30.0, client_name: str | None = None,
            retry: Retry | None = None) -> "Client":
    """A client in asyncio; its arguments are those of flashcore.connect. For one event loop."""
    config = Config.read(target, tls, token, timeout, client_name, retry)
    return Client(config, AsyncTransport(config))


class Client:
    """A connection to one server. Made by connect; a context manager. Opens with its first call."""

    def __init__(self, config: Config, transport: Any) -> None:
        self.config = config
        self._transport = transport
        self._max_message_bytes: int | None = None

    def __repr__(self) -> str:
        return f"<flashcore client of {self.config.target}{', TLS' if self.config.tls else ''}>"

    async def __aenter__(self) -> "Client":
        return self

    async def __aexit__(self, *_: Any) -> None:
        await self.close()

    async def close(self) -> None:
        """Closes the connection. Sequences stay on the server."""
        await self._transport.close()

    async def attend(self, q: Tensor, k: Tensor, v: Tensor, *, causal: bool = False, window: Window = None,
                     softmax_scale: float | None = None, return_lse: bool = False, cu_seqlens_q: Any = None,
                     cu_seqlens_k: Any = None, layout: str = "NHD", dtype: Any = None,
                     timeout: float | None = None) -> Attention:
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
        asked = _requests.question(q, causal=causal, window=window, softmax_scale=softmax_scale,
                                   return_lse=return_lse, layout=layout, dtype=dtype)
        request = _requests.inline_request(asked, k, v, cu_seqlens_q, cu_seqlens_k)
        return asked.answer(await self.call("Attend", request, self.deadline(timeout), repeatable=True))

    async def attend_batch(self, sequences: Iterable[HasSequence], layer: int, q: Tensor,
                           k: Tensor | None = None, v: Tensor | None = None, *, causal: bool = False,
                           window: Window = None, softmax_scale: float | None = None,
                           return_lse: bool = False, cu_seqlens_q: Any = None, cu_seqlens_k: Any = None,
                           layout: str = "NHD", timeout: float | None = None) -> Attention:
        """One step of many sequences in one request: appends the rows of k and v to their `layer`, then
        attends.

        The sequences have one shape, dtype and device (create_sequence's device_id); each comes once. q, k
        and v hold
        the rows of all of them, in this order: as many for each, or as cu_seqlens_q and cu_seqlens_k say.
        Without k and v nothing is appended. Everything else is as in Client.attend. The request takes
        effect for all sequences or for none; after a timeout, the same call with the same k and v is safe:
        see Sequence.
        """
        cores = [sequence.core for sequence in sequences]
        shape = common_shape(cores, layer)
        asked = _requests.question(q, causal=causal, window=window, softmax_scale=softmax_scale,
                                   return_lse=return_lse, layout=layout, dtype=shape.dtype)
        rows, heads, head_dim = asked.query.array.shape
        if head_dim != shape.head_dim or heads % shape.num_kv_heads:
            raise invalid("q", f"has {heads} heads and head_dim {head_dim}", f"a multiple of the "
                          f"{shape.num_kv_heads} heads of the sequences, and head_dim {shape.head_dim}")
        if (k is None) != (v is None):
            raise invalid("k, v", "one is None", "both, or neither")
        split = (_requests.equal_spans("q", rows, len(cores)) if cu_seqlens_q is None else
                 _requests.span_rows("cu_seqlens_q", cu_seqlens_q, rows, 1, len(cores)))
        key = value = np.empty((0, shape.num_kv_heads, head_dim), np.uint16)
        appended = [0] * len(cores)
        if k is not None:
            key, value = _requests.kv_rows(k, v, layout, shape.dtype, (shape.num_kv_heads, head_dim))
            appended = (_requests.equal_spans("k", len(key), len(cores)) if cu_seqlens_k is None else
                        _requests.span_rows("cu_seqlens_k", cu_seqlens_k, len(key), 0, len(cores)))
        ends = list(itertools.accumulate(appended))
        steps = [Append(core, layer, key[end - n:end], value[end - n:end])
                 for core, n, end in zip(cores, appended, ends) if n]

        def request(append: bool) -> Any:
            """With append False, what gets the result if the rows have been appended already."""
            spans = [dict(query_rows=n, kv_rows=m if append else 0, sequence_id=core.id,
                          expected_length=core.lengths[layer] + (0 if append else m) if m else None)
                     for core, n, m in zip(cores, split, appended)]
            sent = dict(key=_requests.to_bytes(key), value=_requests.to_bytes(value)) if append else {}
            return asked.request(num_kv_heads=shape.num_kv_heads, spans=spans, layer=layer, **sent)

        deadline = self.deadline(timeout)

        async def settle(_: LengthMismatch) -> Any:
            return await self.call("Attend", request(False), deadline, repeatable=True, on_sequence=True)

        with contextlib.ExitStack() as stack:
            for step in steps:
                stack.enter_context(step)
            reply = await self.call(
                "Attend", request(True), deadline, repeatable=True, on_sequence=True, settle=settle,
                unsure=bool(steps) and all(step.repeats for step in steps))
            for core, length in zip(cores, reply.sequence_lengths):
                core.lengths[layer] = length
        return asked.answer(reply)

    async def create_sequence(self, num_layers: int, num_kv_heads: int, head_dim: int, *,
                              dtype: Any = "float16", pin: bool = False, shared: bool = False,
                              group: str = "", device_id: str = "", idle_timeout: float = 0,
                              timeout: float | None = None) -> Sequence:
        """An empty sequence. dtype: float16 or bfloat16, by name or as a dtype of numpy or torch.

        pin: asks for a place in the cache of the device. shared, group: who else may read and fork it.
        device_id: where; empty, the server chooses. idle_timeout: seconds without use after which the
        server deletes it; 0: the server's limit. Not safe to repeat: Unavailable may leave a sequence
        behind, which expires.
        """
        request = dict(num_layers=num_layers, num_kv_heads=num_kv_heads, head_dim=head_dim,
                       dtype=_requests.dtype_number(dtype), pin=pin, shared=shared, group=group,
                       device_id=device_id, idle_timeout_seconds=idle_timeout)
        reply = await self.call("CreateSequence", request, self.deadline(timeout), on_sequence=True)
        return Sequence(self, reply.sequence)

    async def open_sequence(self, sequence_id: bytes, *, timeout: float | None = None) -> Sequence:
        """A sequence that exists: of this client, or shared with it. SequenceLost if there is none."""
        return Sequence(self, await self.sequence_info(sequence_id, self.deadline(timeout)))

    async def list_sequences(self, *, timeout: float | None = None) -> list[Any]:
        """The SequenceInfo messages of all sequences that this client created or forked."""
        found: list[Any] = []
        deadline, token = self.deadline(timeout), ""
        while True:
            page = dict(page_size=1000, page_token=token)
            reply = await self.call("ListSequences", page, deadline, repeatable=True)
            found.extend(reply.sequences)
            token = reply.next_page_token
            if not token:
                return found

    async def server_info(self, *, timeout: float | None = None) -> Any:
        """The GetServerInfoResponse message: version, devices, kernels, limits."""
        return await self.call("GetServerInfo", {}, self.deadline(timeout), repeatable=True)

    # What Sequence is made of.

    def deadline(self, timeout: float | None) -> float:
        """When a call ends that begins now. None: the client's timeout."""
        return self._transport.now() + (self.config.timeout if timeout is None else timeout)

    async def call(self, method: str, request: Any, deadline: float, *, repeatable: bool = False,
                   on_sequence: bool = False, unsure: bool = False,
                   settle: Callable[[LengthMismatch], Awaitable[Any]] | None = None) -> Any:
        """The reply to a request, a message or a dict of its fields.

        settle: what to do about a LengthMismatch where an earlier attempt may be the reason. unsure: there
        was one before this call.
        """
        if isinstance(request, dict):
            request = _messages.METHODS[method][0](**request)
        for attempt in itertools.count(1):
            try:
                left = deadline - self._transport.now()
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

    async def sequence_info(self, sequence_id: bytes, deadline: float) -> Any:
        reply = await self.call("GetSequence", dict(sequence_id=sequence_id), deadline, repeatable=True,
                                on_sequence=True)
        return reply.sequence

    async def chunk_bytes(self, deadline: float) -> int:
        """Of K and V in one message."""
        if self._max_message_bytes is None:
            info = await self.call("GetServerInfo", {}, deadline, repeatable=True)
            self._max_message_bytes = info.limits.max_message_bytes
        return min(_CHUNK_BYTES, self._max_message_bytes - _MESSAGE_OVERHEAD)
