"""Sequences, in asyncio: see flashcore.aio."""

import contextlib
import hashlib
from typing import Any, Callable, Collection, Iterator, Protocol

import numpy as np

from . import _requests
from ._arguments import UINT64, flag, integer, number, optional, shown, text
from ._device_tensors import DeviceArray
from ._requests import Attention
from ._signatures import AsyncSequenceAttend, typed_as
from ._tensors import Tensor
from ._terms import terms_of
from .errors import Error, LengthMismatch, NotFound, invalid
from .messages import SequenceInfo

Progress = Callable[[int, int], Any] | bool | None


class HasSequence(Protocol):
    """A Sequence, of asyncio or blocking."""

    @property
    def core(self) -> "Sequence": ...


class Sequence:
    """K/V that stays on the server: [rows, num_kv_heads, head_dim] for each layer. A context manager that
    deletes it.

    `lengths` has the rows of each layer as far as this object knows, and every call that appends says the
    length that it expects. So an append happens once: if its outcome is unknown, after DeadlineExceeded,
    Unavailable or Cancelled, call again with the same rows, and what took effect is not done twice. With
    other rows, that is a LengthMismatch if the first call took effect: truncate to the length before it.

    Calls on one layer are for one thread or task at a time: of two at once, one is a LengthMismatch.
    """

    def __init__(self, client: Any, info: Any) -> None:
        self.client = client
        self.outer: Any = client.outer(self)
        self._refer_to(info)

    def _refer_to(self, info: Any) -> None:
        self._made = info
        self.id: bytes = info.sequence_id
        self.num_layers: int = info.num_layers
        self.num_kv_heads: int = info.num_kv_heads
        self.head_dim: int = info.head_dim
        self.dtype = _requests.dtype_of(info.dtype)
        self.kv_dtype = _requests.kv_dtype_of(info.kv_dtype)
        self.device_id: str = info.device_id
        # The same for all sequences of one request.
        self.kind = (self.shape, self.dtype, self.kv_dtype, self.device_id)
        self.lengths: list[int] = list(info.layer_lengths)
        self.unfinished: dict[int, bytes] = {}  # layer -> digest of an append whose outcome is unknown

    @property
    def core(self) -> "Sequence":
        return self

    @property
    def shape(self) -> tuple[int, int, int]:
        """(num_layers, num_kv_heads, head_dim)"""
        return self.num_layers, self.num_kv_heads, self.head_dim

    def __repr__(self) -> str:
        return f"<flashcore sequence {self.id.hex()}: {rows_text([self])}, {self.shape_text()}>"

    def shape_text(self) -> str:
        return (f"{self.num_layers} layers, {self.num_kv_heads} KV heads, head_dim {self.head_dim}, "
                f"{self.dtype}{'' if self.kv_dtype == 'same_as_query' else f' stored as {self.kv_dtype}'}, "
                f"on {self.device_id}")

    async def __aenter__(self) -> "Sequence":
        return self

    async def __aexit__(self, *_: Any) -> None:
        await self.delete()

    async def append(self, layer: int, k: Tensor, v: Tensor, *, expected_length: int | None = None,
                     layout: str = "NHD", timeout: float | None = None) -> int:
        """Appends rows to a layer without attending, in messages that the server takes. Returns the layer's
        length.

        k, v: [rows, num_kv_heads, head_dim]. expected_length: rows that the layer has; None: what
        `lengths` says. LengthMismatch if it has another number.
        """
        return await self._append(layer, k, v, expected_length, layout, timeout, lambda done, rows: None)

    async def load(self, layer: int, k: Tensor, v: Tensor, *, progress: Progress = None, layout: str = "NHD",
                   timeout: float | None = None) -> int:
        """Append of many rows that tells its progress. progress: called with (rows appended, rows in all)
        after each message; True shows a bar if tqdm is installed."""
        with _progress(progress, layer) as tell:
            return await self._append(layer, k, v, None, layout, timeout, tell)

    @typed_as(AsyncSequenceAttend)
    async def attend(self, layer: int, q: Tensor, k: Tensor | None = None, v: Tensor | None = None, *,
                     return_lse: bool = False, layout: str = "NHD", timeout: float | None = None,
                     **terms: Any) -> Attention:
        """Appends the rows of k and v, if they are given, then attends to all rows of the layer. Both or none
        happen. Arguments and result are those of Client.attend_batch; the last query row is aligned with the
        last K/V row."""
        asked = terms_of("Sequence.attend", return_lse, terms)
        return await self.client.step([self], layer, q, k, v, None, None, asked, layout, timeout)

    async def fork(self, length: int | None = None, *, pin: bool = False, shared: bool = False,
                   group: str = "", idle_timeout: float = 0, timeout: float | None = None) -> "Sequence":
        """A new sequence with the first `length` rows of every layer, or all. It shares memory with this one.
        Options and safety are those of create_sequence."""
        options = fork_options(length, pin, shared, group, idle_timeout)
        deadline = self.client.deadline(timeout)

        async def run() -> Sequence:
            return Sequence(self.client, await self.client.make(
                "ForkSequence", dict(options, sequence_id=self.id), deadline))

        return await self.client.with_reload([self], run)

    async def recreate(self, *, device_id: str = "", timeout: float | None = None) -> None:
        """Makes this object refer to a new, empty sequence with the shape and options of the one it had,
        which is left alone. For `on_lost` of flashcore.connect, which then appends the K/V again.
        device_id: as in create_sequence."""
        made, device_id = self._made, text("device_id", device_id)
        fields = dict(num_layers=made.num_layers, num_kv_heads=made.num_kv_heads, head_dim=made.head_dim,
                      dtype=made.dtype, kv_dtype=made.kv_dtype, pin=made.pin, shared=made.shared,
                      group=made.group, device_id=device_id, idle_timeout_seconds=made.idle_timeout_seconds)
        self._refer_to(await self.client.make("CreateSequence", fields, self.client.deadline(timeout)))

    async def truncate(self, length: int, *, timeout: float | None = None) -> None:
        """Drops all rows after the first `length` of every layer."""
        length = integer("length", length, 0, UINT64)
        deadline = self.client.deadline(timeout)

        async def settle(error: LengthMismatch) -> Any:
            info = await self.client.sequence_info(self.id, deadline)
            if set(info.layer_lengths) != {length}:
                raise error
            return info

        async def run() -> Any:
            expected = self.certain_length()
            return await self.client.call(
                "TruncateSequence", dict(sequence_id=self.id, length=length, expected_length=expected),
                deadline, repeatable=expected is not None, on_sequence=True, settle=settle)

        reply = await self.client.with_reload([self], run)
        self.adopt(getattr(reply, "sequence", reply))

    async def delete(self, *, timeout: float | None = None) -> None:
        """Deletes the sequence. That it is gone already is no error."""
        with contextlib.suppress(NotFound):
            await self.client.call("DeleteSequence", dict(sequence_id=self.id), self.client.deadline(timeout),
                                   repeatable=True, on_sequence=True)

    async def info(self, *, timeout: float | None = None) -> SequenceInfo:
        """The SequenceInfo message. `lengths` are then those of the server."""
        deadline = self.client.deadline(timeout)
        info = await self.client.with_reload([self], lambda: self.client.sequence_info(self.id, deadline))
        self.adopt(info)
        return info

    def certain_length(self) -> int | None:
        """The length of layer 0. If it is not known for certain, None: a truncation is then not repeated,
        because the server cannot check it."""
        return None if 0 in self.unfinished else self.lengths[0]

    def options(self) -> dict[str, Any]:
        """Fields of ForkSequenceRequest for a fork like this one."""
        made = self._made
        return dict(sequence_id=self.id, pin=made.pin, shared=made.shared, group=made.group,
                    idle_timeout_seconds=made.idle_timeout_seconds)

    def adopt(self, info: Any) -> None:
        self.lengths = list(info.layer_lengths)
        self.unfinished.clear()

    async def _append(self, layer: int, k: Tensor, v: Tensor, expected_length: int | None, layout: str,
                      timeout: float | None, tell: Callable[[int, int], Any]) -> int:
        common_shape([self], layer)
        layer = int(layer)
        expected_length = optional(integer, "expected_length", expected_length, 0, UINT64)
        key, value = _requests.kv_rows(k, v, layout, self.dtype, (self.num_kv_heads, self.head_dim))
        if isinstance(key, DeviceArray) or isinstance(value, DeviceArray):
            raise invalid("k, v", "on a GPU",
                          "tensors in host memory: pass k.cpu(), v.cpu(); or attend with them")
        rows, deadline = len(key), self.client.deadline(timeout)
        if rows == 0:
            raise invalid("k", f"has shape {list(key.shape)}", "at least one row")
        at_once = max(1, await self.client.chunk_bytes(deadline) // (4 * self.num_kv_heads * self.head_dim))

        async def run() -> int:
            with Append([self], layer, key, value, [rows]) as step:
                start = self.lengths[layer] if expected_length is None else expected_length
                done = 0
                if step.repeats:
                    length = await self._length(layer, deadline)
                    done = length - start if start <= length <= start + rows else 0
                while done < rows:
                    chunk = slice(done, min(done + at_once, rows))
                    await self._append_chunk(layer, key[chunk], value[chunk], start + done, deadline)
                    done = chunk.stop
                    step.partial = True
                    tell(done, rows)
                self.lengths[layer] = start + rows
            return start + rows

        return await self.client.with_reload([self], run)

    async def _append_chunk(self, layer: int, key: np.ndarray, value: np.ndarray, expected: int,
                            deadline: float) -> None:
        async def settle(error: LengthMismatch) -> None:
            if await self._length(layer, deadline) != expected + len(key):
                raise error

        message = _requests.LoadSequenceRequest(sequence_id=self.id, expected_length=expected, layer=layer,
                                                layout=_requests.NHD, rows=len(key))
        request = _requests.Request(message, dict(key=key, value=value))
        await self.client.call("LoadSequence", request, deadline, repeatable=True, on_sequence=True,
                               settle=settle)

    async def _length(self, layer: int, deadline: float) -> int:
        return (await self.client.sequence_info(self.id, deadline)).layer_lengths[layer]


class Append:
    """Rows that a call appends to a layer of sequences: rows[i] to the i-th, of the packed key and value. As
    a context, around the call: remembers them if the call fails and may have appended some."""

    def __init__(self, sequences: list[Sequence], layer: int, key: np.ndarray, value: np.ndarray,
                 rows: Collection[int]) -> None:
        self._sequences, self._layer, self._tensors, self._rows = sequences, layer, (key, value), rows
        self.partial = False  # some rows have been appended
        # Whether these are the rows of the call before, whose outcome is unknown.
        self.repeats = any(layer in sequence.unfinished for sequence in sequences) and all(
            sequence.unfinished.get(layer) == digest for sequence, digest in self._digests())

    def __enter__(self) -> "Append":
        return self

    def __exit__(self, _: Any, error: BaseException | None, __: Any) -> None:
        if error is None:
            for sequence, rows in zip(self._sequences, self._rows):
                if rows:
                    sequence.unfinished.pop(self._layer, None)
        elif self.partial or not isinstance(error, Error) or not error.refused:
            for sequence, digest in self._digests():
                sequence.unfinished[self._layer] = digest

    def _digests(self) -> Iterator[tuple[Sequence, bytes]]:
        """Digests of the rows of each sequence that gets some."""
        end = 0
        for sequence, rows in zip(self._sequences, self._rows):
            begin, end = end, end + rows
            if rows:
                digest = hashlib.blake2b(digest_size=16)
                for tensor in self._tensors:
                    digest.update(_requests.to_bytes(tensor[begin:end]))
                yield sequence, digest.digest()


def common_shape(sequences: list[Sequence], layer: int) -> Sequence:
    """One of the sequences, which all have the shape, types and device of it, and a layer `layer`."""
    if not sequences:
        raise invalid("sequences", "none", "at least one")
    first = sequences[0]
    for sequence in sequences:
        if sequence.kind != first.kind:
            raise invalid("sequences", f"{first}, {sequence}", "one shape, dtype, kv_dtype and device")
    if len({sequence.id for sequence in sequences}) != len(sequences):
        raise invalid("sequences", "one comes twice", "each once")
    integer("layer", layer, 0, first.num_layers - 1)
    return first


def cores_of(sequences: Any) -> list[Sequence]:
    """The caller's Sequences, asyncio or blocking, as a list; for a SequenceBatch, its own list."""
    try:
        batch = getattr(sequences, "core", None)
        cores = getattr(batch, "cores", None) or [sequence.core for sequence in sequences]
    except Exception:  # of what holds no sequences, whatever its class raises
        cores = [None]
    if not all(isinstance(core, Sequence) for core in cores):
        raise invalid("sequences", shown(sequences), "Sequences, in a list or a SequenceBatch")
    return cores


def fork_options(length: int | None, pin: bool, shared: bool, group: str,
                 idle_timeout: float) -> dict[str, Any]:
    """Fields of ForkSequenceRequest."""
    return dict(made_options(pin, shared, group, idle_timeout),
                length=optional(integer, "length", length, 0, UINT64))


def made_options(pin: bool, shared: bool, group: str, idle_timeout: float) -> dict[str, Any]:
    """Fields that CreateSequenceRequest and ForkSequenceRequest share."""
    return dict(pin=flag("pin", pin), shared=flag("shared", shared), group=text("group", group),
                idle_timeout_seconds=number("idle_timeout", idle_timeout, "seconds, at least 0", 0))


def rows_text(sequences: list[Sequence]) -> str:
    """The lengths of all their layers, for people."""
    lengths = [length for sequence in sequences for length in sequence.lengths]
    short, long = min(lengths), max(lengths)
    return f"{long} rows" if short == long else f"{short} to {long} rows"


@contextlib.contextmanager
def _progress(progress: Progress, layer: int) -> Any:
    """Yields a function of (rows appended, rows in all)."""
    if progress is not True:
        if progress is not None and progress is not False and not callable(progress):
            raise invalid("progress", shown(progress),
                          "a function of (rows appended, rows in all), True, None")
        yield progress or (lambda done, rows: None)
        return
    try:
        from tqdm.auto import tqdm
    except ImportError:
        yield lambda done, rows: None
        return
    with tqdm(desc=f"layer {layer}", unit=" rows") as bar:
        def show(done: int, rows: int) -> None:
            bar.total = rows
            bar.update(done - bar.n)
        yield show
