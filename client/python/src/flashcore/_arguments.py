"""Arguments that are no tensors. A wrong argument is an InvalidArgument, before anything is sent, that names
the argument, its value and what is allowed."""

import operator
from typing import Any, Callable, Iterable

import numpy as np

from .errors import invalid

UINT32, UINT64 = 2 ** 32 - 1, 2 ** 64 - 1  # the most of fields of the contract
_FLOAT32 = float(np.finfo(np.float32).max)
_SHOWN = 80  # characters of a value in a message


def shown(value: Any) -> str:
    """A value, for a message: one line that is not long."""
    try:
        text = " ".join(repr(value).split())
    except Exception:  # whatever its class raises
        text = f"a {type(value).__name__}"
    return text if len(text) <= _SHOWN else f"{text[:_SHOWN - 3]}..."


def integer(name: str, value: Any, least: float = 0, most: float = UINT32) -> int:
    """An int, or what Python takes for one, from `least` to `most`; True and False are none."""
    try:
        if isinstance(value, (bool, np.bool_)):
            raise TypeError
        found = operator.index(value)
        if least <= found <= most:
            return found
    except Exception:  # of a tensor, whatever its framework raises
        pass
    raise invalid(name, shown(value), f"a whole number, {least} to {most}" if most < UINT32 else
                  f"a whole number, at least {least}")


def integers(name: str, values: Any, allowed: str = "whole numbers, a list or an array [n]") -> list[int]:
    """The integers of an iterable, or of an array or tensor with one axis. Waits for a tensor of PyTorch on a
    GPU."""
    try:
        if isinstance(values, (str, bytes)):
            raise TypeError
        if getattr(values, "is_cuda", False):
            values = values.cpu()
        array = np.asarray(values if hasattr(values, "__array__") else list(values))
        if array.ndim == 1 and (array.size == 0 or array.dtype.kind in "iu"):
            return array.tolist()
    except Exception:  # of a tensor, whatever its framework raises
        pass
    raise invalid(name, shown(values), allowed)


def flag(name: str, value: Any) -> bool:
    if isinstance(value, (bool, np.bool_)) or isinstance(value, (int, np.integer)) and value in (0, 1):
        return bool(value)
    raise invalid(name, shown(value), "True, False")


def number(name: str, value: Any, allowed: str, least: float = -_FLOAT32) -> float:
    """A finite number of float32, at least `least`."""
    try:
        if isinstance(value, (bool, np.bool_, str, bytes)):
            raise TypeError
        found = float(value)
        if least <= found <= _FLOAT32:
            return found
    except Exception:  # of a tensor, whatever its framework raises
        pass
    raise invalid(name, shown(value), allowed)


def text(name: str, value: Any, allowed: str = "a str") -> str:
    if not isinstance(value, str):
        raise invalid(name, shown(value), allowed)
    try:
        value.encode()
    except UnicodeEncodeError:  # half of a surrogate pair
        raise invalid(name, shown(value), allowed) from None
    return value


def choice(name: str, value: Any, choices: Iterable[str]) -> str:
    if not isinstance(value, str) or value not in choices:
        raise invalid(name, shown(value), ", ".join(map(repr, choices)))
    return value


def optional(check: Callable[..., Any], name: str, value: Any, *options: Any) -> Any:
    """None, or what `check` returns."""
    return None if value is None else check(name, value, *options)
