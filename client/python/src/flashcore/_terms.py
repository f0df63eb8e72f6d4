"""The terms of a call: what it asks of attention beside its tensors.

A new one is a field of Terms, its check, its field of AttendRequest, and a parameter in _signatures.py.
"""

import dataclasses
import functools
import inspect
import math
from typing import Any, Callable

from . import _messages
from ._arguments import choice, flag, integer, number, optional, shown
from .errors import invalid

Mask = _messages.message("Mask")
_PRECISIONS = _messages.enum("Precision")
SCALES = "a finite float32; None for 1/sqrt(head_dim)"
Window = tuple[int | None, int | None] | None


@dataclasses.dataclass(frozen=True)
class Terms:
    """Made by terms_of, which checks them. Client.attend says what they mean, attend_batch for precision."""

    causal: bool = False
    window: Window = None  # None in it is no bound
    softmax_scale: float | None = None
    precision: str = "16bit"
    return_lse: bool = False

    def fields(self) -> dict[str, Any]:
        """Their fields of AttendRequest."""
        fields = dict(mask=self._mask(), precision=_PRECISIONS[f"PRECISION_{self.precision.upper()}"],
                      return_lse=self.return_lse)
        if self.softmax_scale is not None:
            fields["softmax_scale"] = self.softmax_scale
        return fields

    def _mask(self) -> Any:
        if self.window is None:
            return Mask(kind=Mask.KIND_CAUSAL if self.causal else Mask.KIND_NONE)
        left, right = self.window
        return Mask(kind=Mask.KIND_SLIDING_WINDOW, window_left=left, window_right=0 if self.causal else right)


def _window(name: str, window: Any) -> Window:
    """With None for no bound. One of 2^31 rows bounds no K/V that a message or a server can hold."""
    if window is None:
        return None
    try:
        left, right = (optional(integer, name, rows, -1, math.inf) for rows in window)
    except Exception:  # of what is no pair, whatever its class raises
        raise invalid(name, shown(window), "(left, right), the rows before and after the query row's "
                      "own, each at least 0; None, -1, or 2^31 and more for no bound") from None
    left, right = (None if rows is None or rows == -1 or rows >= 2 ** 31 else rows for rows in (left, right))
    return left, right


# By term, the function of its name and the caller's value that returns the value of Terms.
_CHECKS: dict[str, Callable[[str, Any], Any]] = dict(
    causal=flag, window=_window, return_lse=flag,
    softmax_scale=lambda name, value: optional(number, name, value, SCALES),
    precision=lambda name, value: choice(name, value, ("16bit", "int8_qk", "int8_qk_pv")))
# By method, the terms that it does not take: K/V that is sent along has one precision.
_LACKED = {"Client.attend": ("precision",)}


@functools.lru_cache
def parameters(method: str) -> dict[str, inspect.Parameter]:
    """The terms that a method such as "Client.attend" takes as keywords `**terms`, beside return_lse."""
    lacked = ("return_lse", *_LACKED.get(method, ()))
    return {term.name: inspect.Parameter(term.name, inspect.Parameter.KEYWORD_ONLY, default=term.default,
                                         annotation=term.type)
            for term in dataclasses.fields(Terms) if term.name not in lacked}


_made = functools.lru_cache(Terms)  # takes a fifth of the time of Terms


def terms_of(method: str, return_lse: Any, others: dict[str, Any]) -> Terms:
    """The arguments of a call of `method`, checked. Raises InvalidArgument; TypeError for a keyword that the
    method lacks."""
    taken = parameters(method)
    checked = {"return_lse": flag("return_lse", return_lse)}
    for name, value in others.items():
        if name not in taken:
            raise TypeError(f"{method}() got an unexpected keyword argument {name!r}")
        checked[name] = _CHECKS[name](name, value)
    return _made(**checked)
