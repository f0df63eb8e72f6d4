"""Tensors of the caller's framework, as numpy arrays in host memory and back.

Read in place: numpy arrays, CPU tensors of PyTorch, and other arrays in host memory that speak DLPack.
bfloat16 is the dtype of ml_dtypes or of the framework, or plain uint16 with the bits, of which the caller
says dtype="bfloat16". Any strides do, negative ones too: the only copy is the one into the message.
"""

import sys
from typing import Any, Callable, Iterable, NamedTuple, Protocol, TypeVar

import numpy as np
from numpy.typing import NDArray

from .errors import InvalidArgument, invalid


class Tensor(Protocol):
    """A numpy array, a torch tensor, or an array that speaks DLPack."""

    def __dlpack_device__(self) -> tuple[object, int]: ...


T = TypeVar("T", bound=Tensor)
N = TypeVar("N", bound=np.generic)  # elements of an array of numpy
Lse = NDArray[np.float32]

# Array elements on the wire, little-endian; numpy has no bfloat16, so it has the bits.
WIRE: dict[str, np.dtype] = {
    "float16": np.dtype("<f2"), "bfloat16": np.dtype("<u2"), "float32": np.dtype("<f4")}
# numpy makes a dtype's name anew each time, which takes longer than all else here.
_NAMES = {np.dtype(name): name for name in ("float16", "float32", "uint16")}
_TENSORS = "numpy arrays, torch tensors, arrays with __dlpack__; dense, in host memory"
_HOST_DEVICES = (1, 3)  # DLPack's kDLCPU and kDLCUDAHost


class HostTensor(NamedTuple):
    """A tensor as numpy sees it: `array` has the elements WIRE[dtype]. `restore` makes a C-contiguous array
    of elements like these, or of float32, a tensor of the caller's framework."""

    array: np.ndarray
    dtype: str
    restore: Callable[[np.ndarray], Tensor]


def dtype_name(dtype: Any) -> str:
    """The name of a dtype of numpy, ml_dtypes or torch, or of a name: "float16", "bfloat16", ..."""
    try:
        name = str(dtype).rpartition(".")[2]  # torch.bfloat16
        return name if name in WIRE else np.dtype(dtype).name
    except Exception:  # of what is no dtype, whatever its class raises
        return type(dtype).__name__


def to_host(name: str, tensor: Tensor, dtype: str | None = None,
            allowed: Iterable[str] = ("float16", "bfloat16")) -> HostTensor:
    """Argument `name` as a HostTensor of `dtype`, or of any in `allowed`. Raises InvalidArgument."""
    kind = type(tensor)
    try:
        if isinstance(tensor, np.ndarray) and not isinstance(tensor, np.ma.MaskedArray):
            host = _from_numpy(tensor)
        elif isinstance(tensor, getattr(sys.modules.get("torch"), "Tensor", ())):  # or of a subclass
            host = _from_torch(name, tensor)
        elif hasattr(kind, "__dlpack_device__") and not isinstance(tensor, np.ndarray):
            host = _from_dlpack(name, tensor)
        else:
            raise invalid(name, f"is a {kind.__name__}", _TENSORS)
    except InvalidArgument:
        raise
    except Exception as error:  # of a tensor without memory of its own, such as a sparse one
        raise invalid(name, f"is a {kind.__name__} that is not read: {error}", _TENSORS) from error
    if host.dtype == "uint16" and dtype == "bfloat16":
        return HostTensor(host.array, dtype, host.restore)
    wanted = (dtype,) if dtype else tuple(allowed)
    if host.dtype not in wanted or not host.array.dtype.isnative:
        hint = ', and uint16 with dtype="bfloat16"' if host.dtype == "uint16" else ""
        raise invalid(name, f"has dtype {host.array.dtype}", ", ".join(wanted) + hint)
    return host


def to_float32(host: HostTensor) -> np.ndarray:
    if host.dtype == "bfloat16":
        return (host.array.astype(np.uint32) << 16).view(np.float32)
    return host.array.astype(np.float32)


def from_float32(values: np.ndarray, dtype: str) -> np.ndarray:
    """`values`, rounded to nearest, ties to even. A NaN becomes a NaN."""
    if dtype != "bfloat16":
        return values.astype(WIRE[dtype])
    bits = np.ascontiguousarray(values, np.float32).view(np.uint32)
    rounded = (bits + 0x7FFF + (bits >> 16 & 1)) >> 16
    return np.where(np.isnan(values), 0x7FC0, rounded).astype(np.uint16)


def _from_numpy(array: np.ndarray, outer: Callable[[np.ndarray], Tensor] = lambda array: array) -> HostTensor:
    """`outer` makes a tensor of the caller's framework of an array like `array`."""
    name = _NAMES.get(array.dtype) or array.dtype.name
    if name != "bfloat16":  # of ml_dtypes
        return HostTensor(array, name, outer)

    def restore(result: np.ndarray) -> Tensor:
        return outer(result.view(array.dtype) if result.dtype == np.uint16 else result)

    return HostTensor(array.view(np.uint16), "bfloat16", restore)


def _from_torch(name: str, tensor: Any) -> HostTensor:
    torch = sys.modules["torch"]
    if not tensor.is_cpu:
        raise invalid(name, f"is on {tensor.device}", f"tensors in host memory: pass {name}.cpu()")
    if tensor.requires_grad:
        raise invalid(name, "requires a gradient", f"no backward pass: pass {name}.detach()")
    if type(tensor) is not torch.Tensor:
        tensor = tensor.as_subclass(torch.Tensor)
    if tensor.dtype != torch.bfloat16:
        return _from_numpy(tensor.numpy(), torch.from_numpy)

    def restore(result: np.ndarray) -> Any:
        if result.dtype != np.uint16:
            return torch.from_numpy(result)
        return torch.from_numpy(result.view(np.int16)).view(torch.bfloat16)

    return HostTensor(tensor.view(torch.int16).numpy().view(np.uint16), "bfloat16", restore)


def _from_dlpack(name: str, tensor: Any) -> HostTensor:
    kind, _ = tensor.__dlpack_device__()
    if int(kind) not in _HOST_DEVICES:
        raise invalid(name, f"is on DLPack device type {int(kind)}", "arrays in host memory")
    try:
        array = np.from_dlpack(tensor)
    except (BufferError, RuntimeError, TypeError):  # numpy's DLPack has no bfloat16
        array = np.asarray(tensor)  # for example jax's, of ml_dtypes
    namespace = getattr(tensor, "__array_namespace__", None)
    return _from_numpy(array, namespace().asarray) if namespace else _from_numpy(array)
