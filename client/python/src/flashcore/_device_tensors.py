"""Tensors in memory of a GPU: those of the caller, whose elements nothing here touches, and DeviceTensor.

Read: CUDA tensors of PyTorch, and arrays with __cuda_array_interface__, such as those of CuPy and Numba.
"""

import ctypes
import dataclasses
import functools
import math
import sys
import threading
from typing import Any

import numpy as np

from ._tensors import WIRE, HostTensor, dtype_name
from .errors import Internal, InvalidArgument, invalid

_TYPES = {"float16": "<f2", "bfloat16": "<u2", "float32": "<f4"}  # bfloat16 as its bits
_NAMES = {"<f2": "float16", "<u2": "uint16", "<f4": "float32"}
_thread = threading.local()
_LEGACY = 1  # __cuda_array_interface__'s number for stream 0


@dataclasses.dataclass(slots=True)
class DeviceArray:
    """Says where a tensor lies on a GPU, with what checks of arguments need of a numpy array."""

    address: int
    shape: tuple[int, ...]
    strides: tuple[int, ...]  # bytes
    dtype: np.dtype  # of WIRE
    owner: Any  # the caller's tensor

    def __len__(self) -> int:
        return self.shape[0]

    @property
    def ndim(self) -> int:
        return len(self.shape)

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize

    @property
    def dense(self) -> bool:
        """Whether it is C-contiguous."""
        return all(n == 1 or stride == dense
                   for n, stride, dense in zip(self.shape, self.strides, _strides(self.shape, self.dtype)))

    def swapaxes(self, a: int, b: int) -> "DeviceArray":
        return DeviceArray(self.address, _swapped(self.shape, a, b), _swapped(self.strides, a, b), self.dtype,
                           self.owner)


class DeviceTensor:
    """A tensor in memory of the server's GPU, which requests use in place. It speaks version 3 of
    __cuda_array_interface__: cupy.asarray(tensor) and torch.as_tensor(tensor, device="cuda") share its memory
    and keep it. bfloat16 is uint16 with its bits there.

    shape, strides (bytes), dtype ("float16", "bfloat16" or "float32"), address (a CUdeviceptr). stream: the
    CUDA stream, as an int, in whose order it is valid. Once nobody has the tensor, its memory is used again
    in the order of that stream: before, it must have awaited work on the tensor in other streams.
    """

    def __init__(self, memory: Any, address: int, shape: tuple[int, ...], dtype: str, stream: int,
                 strides: tuple[int, ...] | None = None) -> None:
        self._memory = memory  # lent as long as this lives
        self.address, self.shape, self.dtype, self.stream = address, shape, dtype, stream
        self.strides = strides or _strides(shape, WIRE[dtype])

    def __repr__(self) -> str:
        return f"<flashcore device tensor: {self.dtype} {list(self.shape)}, stream {self.stream:#x}>"

    @property
    def __cuda_array_interface__(self) -> dict[str, Any]:
        return dict(shape=self.shape, typestr=_TYPES[self.dtype], data=(self.address, False), version=3,
                    strides=None if self.strides == _strides(self.shape, WIRE[self.dtype]) else self.strides,
                    stream=self.stream or _LEGACY)

    def swapaxes(self, a: int, b: int) -> "DeviceTensor":
        return DeviceTensor(self._memory, self.address, _swapped(self.shape, a, b), self.dtype, self.stream,
                            _swapped(self.strides, a, b))


def is_device(tensor: Any) -> bool:
    if isinstance(tensor, np.ndarray):
        return False
    if is_torch(tensor):
        return bool(tensor.is_cuda)
    try:
        return hasattr(tensor, "__cuda_array_interface__")
    except Exception:  # whatever its class raises
        return False


def on_device(*arrays: Any) -> bool:
    """Whether the tensors q, k and v of a call are on a GPU; empty ones do not count. InvalidArgument if only
    some are."""
    given = [(name, isinstance(array, DeviceArray)) for name, array in zip("qkv", arrays) if len(array)]
    for name, device in given:
        if device != given[0][1]:
            raise invalid(name, "is on a GPU" if device else "is in host memory",
                          f"all tensors of a call where {given[0][0]} is")
    return given[0][1]


def to_device(name: str, tensor: Any, dtype: str | None) -> HostTensor:
    """Argument `name`, for which is_device is true, like to_host; `restore` takes a DeviceTensor. Raises
    InvalidArgument."""
    try:
        return _read(name, tensor, dtype)
    except InvalidArgument:
        raise
    except Exception as error:  # of a tensor without memory of its own, such as a sparse one
        raise invalid(name, f"is a {type(tensor).__name__} that is not read: {error}",
                      "CUDA tensors of PyTorch, arrays with __cuda_array_interface__; dense") from error


def _read(name: str, tensor: Any, dtype: str | None) -> HostTensor:
    if is_torch(tensor):
        if tensor.requires_grad:
            raise invalid(name, "requires a gradient", f"no backward pass: pass {name}.detach()")
        found, shape = _torch_name(tensor.dtype), tuple(tensor.shape)
        size, address = tensor.element_size(), tensor.data_ptr()
        strides = tuple([stride * size for stride in tensor.stride()])
        restore: Any = functools.partial(to_torch, tensor.device)
    else:
        interface = tensor.__cuda_array_interface__
        found, shape = _NAMES.get(interface["typestr"], interface["typestr"]), tuple(interface["shape"])
        if isinstance(tensor, DeviceTensor):
            found = tensor.dtype
        strides, address, restore = interface.get("strides"), interface["data"][0], _same
        if interface.get("mask") is not None:
            raise invalid(name, "has a mask", "arrays without")
    if found == "uint16" and dtype == "bfloat16":
        found = dtype
    wanted = (dtype,) if dtype else ("float16", "bfloat16")
    if found not in wanted:
        hint = ', and uint16 with dtype="bfloat16"' if found == "uint16" else ""
        raise invalid(name, f"has dtype {found}", ", ".join(wanted) + hint)
    wire = WIRE[found]
    array: Any = DeviceArray(address, shape, tuple(strides or _strides(shape, wire)), wire, tensor)
    return HostTensor(array, found, restore)


def stream_of(name: str, array: DeviceArray) -> int:
    """The stream in whose order a call on this tensor runs, as an int; 0: the legacy default stream."""
    tensor = array.owner
    if is_torch(tensor):
        return int(sys.modules["torch"].cuda.current_stream(tensor.device).cuda_stream)
    stream = tensor.__cuda_array_interface__.get("stream")
    if stream is not None and (not isinstance(stream, int) or stream < 1):
        raise invalid(name, f"has stream {stream!r} in its __cuda_array_interface__",
                      "an int, at least 1; None")
    return 0 if stream is None or stream == _LEGACY else stream


def ordinal_of(array: DeviceArray) -> int | None:
    """The GPU of a tensor in this process; None: it does not say."""
    return array.owner.device.index if is_torch(array.owner) else None


def to_torch(device: Any, tensor: DeviceTensor) -> Any:
    """A tensor of PyTorch with the same memory, which it keeps."""
    size = WIRE[tensor.dtype].itemsize
    return torch_tensor(tensor, device.index, tensor.address, tensor.shape, tensor.dtype,
                        [stride // size for stride in tensor.strides])


class _Tensor(ctypes.Structure):
    """DLTensor of DLPack."""

    _fields_ = [("data", ctypes.c_void_p), ("device_type", ctypes.c_int32), ("device_id", ctypes.c_int32),
                ("axes", ctypes.c_int32), ("kind", ctypes.c_uint8), ("bits", ctypes.c_uint8),
                ("lanes", ctypes.c_uint16), ("shape", ctypes.c_void_p), ("strides", ctypes.c_void_p),
                ("offset", ctypes.c_uint64)]


class _Managed(ctypes.Structure):
    """DLManagedTensor."""

    _fields_ = [("tensor", _Tensor), ("context", ctypes.c_void_p), ("deleter", ctypes.c_void_p)]


_CUDA = 2  # kDLCUDA
_KINDS = {"float16": (2, 16), "bfloat16": (4, 16), "float32": (2, 32)}  # kDLFloat, kDLBfloat, and bits
_kept: dict[int, Any] = {}  # what tensors of PyTorch keep, by the address of their _Managed


@ctypes.CFUNCTYPE(None, ctypes.c_void_p)
def _drop(managed: int, kept: dict[int, Any] = _kept) -> None:  # kept: also while the interpreter ends
    del kept[managed]


ctypes.pythonapi.Py_IncRef(ctypes.py_object(_drop))  # the last tensors may go after this module
_DROP = ctypes.cast(_drop, ctypes.c_void_p)
_capsule = ctypes.PYFUNCTYPE(ctypes.py_object, ctypes.c_void_p, ctypes.c_char_p, ctypes.c_void_p)(
    ("PyCapsule_New", ctypes.pythonapi))


def torch_tensor(owner: Any, ordinal: int, address: int, shape: tuple[int, ...], dtype: str,
                 strides: list[int] | None = None) -> Any:
    """A tensor of PyTorch over memory of a GPU, which keeps `owner` until nobody has it or a part of it.
    strides: in elements; None: it is C-contiguous."""
    # DLPack: PyTorch reads __cuda_array_interface__ in many times the time, and has no bfloat16 there.
    axes = len(shape)
    numbers = (ctypes.c_int64 * (2 * axes))(*shape, *(strides or ()))
    begin = ctypes.addressof(numbers)
    managed = _Managed(_Tensor(address, _CUDA, ordinal, axes, *_KINDS[dtype], 1, begin,
                               begin + 8 * axes if strides else None, 0), None, _DROP)
    place = ctypes.addressof(managed)
    _kept[place] = managed, numbers, owner
    try:
        return sys.modules["torch"].from_dlpack(_capsule(place, b"dltensor", None))
    except BaseException:
        del _kept[place]
        raise


def copy(name: str, array: DeviceArray, to: DeviceTensor) -> None:
    """Enqueues a copy on the stream of `to`, which is dense; of any strides if it is PyTorch's."""
    if array.dense:
        driver = _driver()
        _check("cuMemcpyDtoDAsync", driver.cuMemcpyDtoDAsync_v2(
            ctypes.c_uint64(to.address), ctypes.c_uint64(array.address), ctypes.c_size_t(array.nbytes),
            ctypes.c_void_p(to.stream)))
        return
    if not is_torch(array.owner):
        raise invalid(name, f"has strides {list(array.strides)} for shape {list(array.shape)}",
                      "C-contiguous arrays [rows, heads, head_dim]; any strides of PyTorch's tensors")
    torch, source = sys.modules["torch"], array.owner
    size = array.dtype.itemsize
    stream = (torch.cuda.ExternalStream(to.stream, source.device) if to.stream else
              torch.cuda.default_stream(source.device))
    with torch.cuda.stream(stream), torch.no_grad():
        rows = source.as_strided(array.shape, [stride // size for stride in array.strides])
        to_torch(source.device, to).copy_(rows, non_blocking=True)


def use_context(ordinal: int) -> None:
    """Lets this thread have a current context: if it has none, the primary one of a GPU, as CUDA's runtime
    does. Once a thread."""
    if getattr(_thread, "has_context", False):
        return
    driver, context, device = _driver(), ctypes.c_void_p(), ctypes.c_int()
    _check("cuCtxGetCurrent", driver.cuCtxGetCurrent(ctypes.byref(context)))
    if not context.value:
        _check("cuDeviceGet", driver.cuDeviceGet(ctypes.byref(device), ordinal))
        # Never released, like the runtime's.
        _check("cuDevicePrimaryCtxRetain", driver.cuDevicePrimaryCtxRetain(ctypes.byref(context), device))
        _check("cuCtxSetCurrent", driver.cuCtxSetCurrent(context))
    _thread.has_context = True


def synchronize() -> None:
    """Waits for the work of the GPU of the current context."""
    _check("cuCtxSynchronize", _driver().cuCtxSynchronize())


@functools.cache
def _driver() -> Any:
    try:
        return ctypes.CDLL("libcuda.so.1")
    except OSError as error:
        raise Internal(f"the driver of the GPU: {error}") from None


def _check(function: str, code: int) -> None:
    if code:
        text = ctypes.c_char_p()
        _driver().cuGetErrorString(code, ctypes.byref(text))
        raise Internal(f"{function}: {(text.value or b'').decode() or f'error {code}'}")


def is_torch(tensor: Any) -> bool:
    return isinstance(tensor, getattr(sys.modules.get("torch"), "Tensor", ()))


def _same(tensor: DeviceTensor) -> DeviceTensor:
    return tensor


_torch_name = functools.cache(dtype_name)


@functools.lru_cache
def _strides(shape: tuple[int, ...], dtype: np.dtype) -> tuple[int, ...]:
    return tuple([math.prod(shape[i + 1:]) * dtype.itemsize for i in range(len(shape))])


def _swapped(values: tuple[int, ...], a: int, b: int) -> tuple[int, ...]:
    order = list(values)
    order[a], order[b] = order[b], order[a]
    return tuple(order)
