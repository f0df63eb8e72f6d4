"""Requests in the order of CUDA streams, over one connection: nothing here waits for a GPU."""

import copy
import sys
import threading
import time
from typing import Any, Iterable, Sequence

from . import _device_tensors, _messages
from ._arguments import UINT64, integer, integers, shown, text
from ._device_memory import DeviceMemory, Lent
from ._device_tensors import DeviceTensor, ordinal_of, stream_of, to_torch, use_context
from ._local_connection import BlockingConnection, Call
from ._places import Place, encoded, fits, row_bytes, split
from ._requests import Attention, Question
from ._tensors import WIRE, dtype_name
from .errors import (DeadlineExceeded, Error, FailedPrecondition, ResourceExhausted, Unimplemented,
                     from_status, invalid)

_Response = _messages.message("AttendResponse")
_ALIGNMENT = 256  # bytes, of a tensor in a block
Spec = tuple[str, tuple[int, ...], str]  # of a tensor: its name in AttendRequest, its shape and dtype


class Appended:
    """Rows that a request appends: rows[i] to `layer` of the i-th sequence."""

    def __init__(self, cores: Sequence[Any], layer: int, rows: Sequence[int]) -> None:
        self._cores, self._layer, self._rows = cores, layer, rows

    def __len__(self) -> int:
        return len(self._rows)

    def part(self, spans: slice) -> "Appended":
        """Those of some spans of the request."""
        return Appended(self._cores[spans], self._layer, self._rows[spans])

    def add(self, sign: int) -> None:
        """To the lengths that the sequences know: 1, or -1 to take them back."""
        for core, rows in zip(self._cores, self._rows):
            core.lengths[self._layer] += sign * rows


class _StreamCall(Call):
    """A request in the ring whose results nobody waits for."""

    __slots__ = ("appended",)

    def __init__(self, appended: Appended | None) -> None:
        super().__init__(None)
        self.appended = appended

    def failure(self) -> Error | None:
        """Once it is done."""
        if self.error is not None:
            return self.error
        status = _Response.FromString(self.answer).status
        return from_status(status) if status.code else None


class Streams:
    """The requests of one connection that are in the order of CUDA streams, and their memory.
    Thread-safe."""

    def __init__(self, connection: BlockingConnection) -> None:
        self.connection = connection
        self.memory = DeviceMemory(connection)
        self._lock = threading.Lock()
        self._unanswered: list[_StreamCall] = []
        self._errors: list[Error] = []
        self._ordinals: dict[str, int | None] = {}  # of the GPUs here, by the server's device

    def ordinal(self, device_id: str, stream: int, deadline: float) -> int | None:
        """In this process, of the GPU whose memory the server shares; None: it shares none with it, or none
        now."""
        if device_id not in self._ordinals:
            try:
                lent = self.memory.lend(1, stream, device_id, deadline - time.monotonic())
                self._ordinals[device_id] = lent.block.region.ordinal
            except (Unimplemented, FailedPrecondition):
                self._ordinals[device_id] = None
            except ResourceExhausted:
                return None
        return self._ordinals[device_id]

    def raise_earlier(self) -> None:
        """Raises the first error of the requests that were answered; its text counts the others."""
        if self._unanswered:
            self.connection.take()
            self._sweep()
        if not self._errors:
            return
        with self._lock:
            errors, self._errors = self._errors, []
        if errors:
            error = copy.copy(errors[0])
            more = f"; {len(errors) - 1} requests after it failed, too" if len(errors) > 1 else ""
            error.message = text = f"an earlier request on a CUDA stream: {error.message}{more}"
            error.args = (text,)
            raise error

    def wait(self, deadline: float) -> None:
        """Waits until all requests are answered. Errors are left to raise_earlier."""
        for call in list(self._unanswered):
            if not self.connection.wait_for(call, deadline):
                raise DeadlineExceeded("requests on CUDA streams are unanswered at the timeout")
        self._sweep()

    def attend(self, head: bytes, inputs: dict[str, Any], asked: Question, device_id: str,
               appended: Appended | None, deadline: float) -> Attention:
        """Submits a request. head: the AttendRequest without its tensors; inputs: those, as DeviceArrays.
        Returns O, or (O, LSE), on the stream of q."""
        query = inputs["query"]
        stream, now = stream_of("q", query), time.monotonic
        results = [("output", query.shape, asked.query.dtype), ("lse", query.shape[:2], "float32")]
        if not asked.terms.return_lse:
            del results[1]
        lent = self.memory.lend(bytes_of(results), stream, device_id, deadline - now())
        ordinal, here = ordinal_of(query), lent.block.region.ordinal
        if ordinal not in (None, here):
            raise invalid("q", f"is on GPU {ordinal}",
                          f"the server's GPU, which is {here} in this process")
        use_context(here)
        places, tensors = tensors_in(lent, results, stream)
        staged, more = self._stage(inputs, asked.query.dtype, stream, device_id, deadline)
        places += more
        self.submit(head, encoded(places), places, appended, stream, deadline)
        del staged  # used again in the order of the stream, so after this request
        if asked.layout == "HND":
            tensors = [tensor.swapaxes(0, 1) for tensor in tensors]
        restored = [asked.query.restore(tensor) for tensor in tensors]  # type: ignore[arg-type]
        return tuple(restored) if asked.terms.return_lse else restored[0]

    def _stage(self, inputs: dict[str, Any], dtype: str, stream: int, device_id: str,
               deadline: float) -> tuple[Any, list[Place]]:
        """The places of the inputs: where they are, or in a block to which they are copied; and what keeps
        the block."""
        places, elsewhere = [], []
        for name, array in inputs.items():
            if not len(array):
                continue
            found = self.memory.find(array.address, array.nbytes) if array.dense else None
            if found is None:
                elsewhere.append((name, array.shape, dtype))
            else:
                places.append(Place(name, *found, len(array), array.nbytes // len(array)))
        if not elsewhere:
            return None, places
        lent = self.memory.lend(bytes_of(elsewhere), stream, device_id, deadline - time.monotonic())
        more, tensors = tensors_in(lent, elsewhere, stream)
        for place, tensor in zip(more, tensors):
            _device_tensors.copy(place.name[0], inputs[place.name], tensor)
        return lent, places + more

    def submit(self, head: bytes, ranges: bytes, places: Sequence[Place], appended: Appended | None,
               stream: int, deadline: float) -> None:
        """Submits a request, as several if it does not fit into a slot. ranges: its `places`, encoded."""
        if fits(head, None if appended is None else len(appended)):
            self._submit(head + ranges, appended, stream, deadline)
            return
        for data, spans in split(head, places):
            self._submit(data, appended and appended.part(spans), stream, deadline)

    def _submit(self, data: bytes, appended: Appended | None, stream: int, deadline: float) -> None:
        call, connection = _StreamCall(appended), self.connection
        while connection.submit(call, data, deadline - time.monotonic(), stream) is None:
            turn = connection.turn()
            if not connection.wait_for(turn, deadline):
                connection.forget(turn)
                raise DeadlineExceeded("Attend: the ring was full until the timeout")
        with self._lock:
            self._unanswered.append(call)
            if appended is not None:
                appended.add(1)

    def _sweep(self) -> None:
        """Notes the errors of what has been answered."""
        with self._lock:
            calls, self._unanswered = self._unanswered, []
            for call in calls:
                if not call.done():
                    self._unanswered.append(call)
                    continue
                error = call.failure()
                if error is None:
                    continue
                self._errors.append(error)
                if call.appended is not None and error.refused:
                    call.appended.add(-1)


def bytes_of(tensors: Iterable[Spec]) -> int:
    """The size of a block with these tensors."""
    return sum([_aligned(shape[0] * row_bytes(shape, dtype)) for _, shape, dtype in tensors])


def tensors_in(lent: Lent, tensors: Iterable[Spec], stream: int) -> tuple[list[Place], list[DeviceTensor]]:
    """Tensors in a block of bytes_of(tensors)."""
    region, offset = lent.block.region, lent.block.offset
    places, made = [], []
    for name, shape, dtype in tensors:
        size = row_bytes(shape, dtype)
        places.append(Place(name, region.region_id, offset, shape[0], size))
        made.append(DeviceTensor(lent, region.address + offset, shape, dtype, stream))
        offset += _aligned(shape[0] * size)
    return places, made


def _aligned(size: int) -> int:
    return -(-size // _ALIGNMENT) * _ALIGNMENT


def empty(streams: Streams, shape: Any, dtype: Any, stream: Any, device_id: str, deadline: float) -> Any:
    """Client.device_empty."""
    axes = tuple(integers("shape", shape))
    name = dtype_name(dtype)
    if name not in WIRE:
        raise invalid("dtype", shown(dtype), ", ".join(WIRE))
    if not axes or min(axes) < 1:
        raise invalid("shape", shown(axes), "whole numbers, each at least 1")
    torch: Any = sys.modules.get("torch")
    of_torch = isinstance(dtype, getattr(torch, "dtype", ()))
    stream = torch.cuda.current_stream().cuda_stream if of_torch else integer("stream", stream, 0, UINT64)
    spec = [("", axes, name)]
    lent = streams.memory.lend(bytes_of(spec), stream, text("device_id", device_id),
                               deadline - time.monotonic())
    _, (tensor,) = tensors_in(lent, spec, stream)
    return to_torch(torch.device("cuda", lent.block.region.ordinal), tensor) if of_torch else tensor
