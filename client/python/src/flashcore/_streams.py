"""Requests in the order of CUDA streams, over one connection: nothing here waits for a GPU."""

import copy
import math
import sys
import threading
import time
from typing import Any, Sequence

from . import _device_tensors, _messages
from ._arguments import UINT64, integer, integers, shown, text
from ._device_memory import DeviceMemory
from ._device_tensors import DeviceTensor, ordinal_of, stream_of, to_torch
from ._local_connection import BlockingConnection, Call
from ._requests import Attention, Question, Request
from ._tensors import WIRE, dtype_name
from .errors import DeadlineExceeded, Error, from_status, invalid

_Response = _messages.message("AttendResponse")
_ALIGNMENT = 256  # bytes, of a tensor in a block


class Appended:
    """Rows that a request appends: rows[i] to `layer` of the i-th sequence."""

    def __init__(self, cores: Sequence[Any], layer: int, rows: Sequence[int]) -> None:
        self._cores, self._layer, self._rows = cores, layer, rows

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

    def attend(self, request: Request, asked: Question, device_id: str, appended: Appended | None,
               deadline: float) -> Attention:
        """Submits a request whose tensors are DeviceArrays. Returns O, or (O, LSE), on the stream of q."""
        query: Any = request.tensors["query"]
        stream, now = stream_of("q", query), time.monotonic
        shape, names = query.shape, ("output", "lse")
        results = [(shape, asked.query.dtype), (shape[:2], "float32")][:2 if asked.terms.return_lse else 1]
        lent, tensors = self._lend(results, stream, device_id, deadline - now())
        ordinal = ordinal_of(query)
        if ordinal not in (None, lent.block.region.ordinal):
            raise invalid("q", f"is on GPU {ordinal}",
                          f"the server's GPU, which is {lent.block.region.ordinal} in this process")
        message = request.message
        for name, tensor in zip(names, tensors):
            self._place(message, name, tensor.address, math.prod(tensor.shape) * WIRE[tensor.dtype].itemsize)
        inputs = {name: array for name, array in request.tensors.items() if len(array)}
        staged = self._stage(message, inputs, asked.query.dtype, stream, device_id, deadline - now())
        self._submit(message.SerializeToString(), appended, stream, deadline)
        del staged  # used again in the order of the stream, so after this request
        if asked.layout == "HND":
            tensors = [tensor.swapaxes(0, 1) for tensor in tensors]
        restored = [asked.query.restore(tensor) for tensor in tensors]  # type: ignore[arg-type]
        return tuple(restored) if asked.terms.return_lse else restored[0]

    def _lend(self, tensors: Sequence[tuple[tuple[int, ...], str]], stream: int, device_id: str,
              left: float) -> tuple[Any, list[DeviceTensor]]:
        """A block with tensors of these shapes and dtypes."""
        offsets = [0]
        for shape, dtype in tensors:
            size = math.prod(shape) * WIRE[dtype].itemsize
            offsets.append(offsets[-1] + -(-size // _ALIGNMENT) * _ALIGNMENT)
        lent = self.memory.lend(offsets[-1], stream, device_id, left)
        return lent, [DeviceTensor(lent, lent.block.address + offset, shape, dtype, stream)
                      for offset, (shape, dtype) in zip(offsets, tensors)]

    def _stage(self, message: Any, inputs: dict[str, Any], dtype: str, stream: int, device_id: str,
               left: float) -> Any:
        """Sets the inputs' places: where they are, or in a block to which they are copied. Returns what keeps
        the block."""
        elsewhere = {}
        for name, array in inputs.items():
            if not array.dense or not self._place(message, name, array.address, array.nbytes):
                elsewhere[name] = array
        if not elsewhere:
            return None
        shapes = [(array.shape, dtype) for array in elsewhere.values()]
        lent, tensors = self._lend(shapes, stream, device_id, left)
        for (name, array), tensor in zip(elsewhere.items(), tensors):
            _device_tensors.copy(name[0], array, tensor)
            self._place(message, name, tensor.address, array.nbytes)
        return lent, tensors

    def _place(self, message: Any, name: str, address: int, size: int) -> bool:
        """Sets the MemoryRange of a tensor, if it lies in memory of this connection."""
        found = self.memory.find(address, size)
        if found is None:
            return False
        place = getattr(message, f"{name}_range")
        place.region_id, place.offset = found
        place.bytes = size
        return True

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
    size = math.prod(axes) * WIRE[name].itemsize
    lent = streams.memory.lend(size, stream, text("device_id", device_id), deadline - time.monotonic())
    tensor = DeviceTensor(lent, lent.block.address, axes, name, stream)
    return to_torch(torch.device("cuda", lent.block.region.ordinal), tensor) if of_torch else tensor
