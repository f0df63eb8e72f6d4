"""The mask function of flashcore.transformers, and tensors that only this package can read."""

import functools
from typing import Any, Callable

import torch
from transformers.masking_utils import bidirectional_mask_function, causal_mask_function

from .errors import InvalidArgument, invalid

RESET = "; for another prompt, reset() the cache first"
Window = tuple[int, int]  # rows before and after its own that a query row sees
# Arguments that transformers passes to a mask function beside those of `_pattern`. It changes no mask.
_IGNORED = {"dtype", "config", "use_vmap"}
# Functions that leave the values of a tensor alone, and those that may bring it elsewhere.
_METADATA = {"size", "dim", "ndimension", "numel", "nelement", "element_size", "stride", "is_contiguous",
             "is_floating_point", "is_complex", "get_device", "__len__", "__hash__", "__repr__", "__format__"}
_MOVES = {"to", "cpu", "cuda", "bool", "contiguous", "detach"}


class Opaque(torch.Tensor):
    """A tensor on its way through a model to the attention function: it has a shape, dtype and device, and no
    values. A model that computes with it does part of the attention itself: that is refused by name."""

    WHY = ("", "", "")  # the argument to blame, what the model does, what is allowed

    @staticmethod
    def __new__(cls, shape: Any, dtype: torch.dtype, device: Any, _: Any) -> "Opaque":
        return torch.Tensor._make_wrapper_subclass(cls, shape, dtype=dtype, device=device)  # type: ignore

    def __init__(self, shape: Any, dtype: torch.dtype, device: Any, content: Any) -> None:
        self.content = content

    def __repr__(self, **_: Any) -> str:  # type: ignore
        return f"{type(self).__name__}({list(self.shape)})"

    @classmethod
    def refuse(cls, operation: object) -> InvalidArgument:
        name, what, allowed = cls.WHY
        return invalid(name, f"{what}, by {operation}", allowed)

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func.__name__
        if name in _MOVES and isinstance(args[0], Opaque):
            return args[0]._moved(func, *args[1:], **(kwargs or {}))
        if name == "__get__" or name in _METADATA:  # __get__: shape, dtype, device and the like
            return super().__torch_function__(func, types, args, kwargs or {})
        raise cls.refuse(name)

    @classmethod  # type: ignore
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        raise cls.refuse(func)  # below the functions of Python

    def _moved(self, func: Any, *args: Any, **options: Any) -> "Opaque":
        like = func(torch.empty(0, dtype=self.dtype, device=self.device), *args, **options)
        if like.dtype != self.dtype:
            raise self.refuse(func.__name__)
        same = like.device == self.device
        return self if same else type(self)(self.shape, self.dtype, like.device, self.content)


class Mask(Opaque):
    """The result of the mask function: [batch, 1, query rows, K/V rows], like the mask of SDPA. content: its
    Pattern, or why the service has none: models make masks that no layer uses."""

    WHY = ("attention_mask", "the model computes with its mask itself",
           "models that give it to transformers' attention interface as it is; load this one with "
           'attn_implementation="eager"')

    @property
    def pattern(self) -> "Pattern":
        if isinstance(self.content, InvalidArgument):
            raise InvalidArgument(self.content.message)
        return self.content


class Pattern:
    """The rows that query rows see. The last one is aligned with the last K/V position. The layers of a step
    share it: what is made of it is kept by its identity.

    rows: of the query. batch: of the mask, at least 1. length: of the K/V. mask: bool [batch, length], False
    where there is padding; None: there is none.
    """

    def __init__(self, causal: bool, window: Window | None, rows: int, batch: int, length: int,
                 mask: torch.Tensor | None = None) -> None:
        self.causal, self.window, self.rows = causal, window, rows
        self.batch, self.length, self.mask = batch, length, mask

    @functools.cached_property
    def columns(self) -> torch.Tensor:
        """bool [batch, length], in host memory: those with tokens and no padding. Waits for a mask on a
        GPU."""
        if self.mask is None:
            return no_padding(self.batch, self.length)
        columns = self.mask.cpu()
        self.check(columns)
        return columns

    def check(self, columns: torch.Tensor) -> None:
        """Refuses columns, in host memory, that the window does not go with."""
        if self.window is None:
            return
        runs = columns[:, 0] + (columns[:, 1:] & ~columns[:, :-1]).sum(1)
        if (runs > 1).any():
            raise invalid("attention_mask", "has padding between tokens",
                          "with a sliding window, padding at the ends")


def no_padding(batch: int, length: int) -> torch.Tensor:
    """Columns without padding. They take no memory."""
    return torch.ones(1, 1, dtype=torch.bool, device="cpu").expand(batch, length)


@torch.compiler.disable
def mask(batch_size: int, q_length: int, kv_length: int, device: Any = "cpu", **options: Any) -> Mask:
    """The mask function: its result travels through the model to the attention function."""
    content: Pattern | InvalidArgument
    try:
        content = _pattern(batch_size, q_length, kv_length, **options)
    except InvalidArgument as refusal:
        content = refusal
    return Mask((batch_size, 1, q_length, kv_length), torch.bool, device, content)


def _pattern(batch_size: int, q_length: int, kv_length: int, q_offset: Any = 0, kv_offset: int = 0,
             mask_function: Callable[..., Any] = causal_mask_function,
             attention_mask: torch.Tensor | None = None, local_size: int | None = None,
             allow_is_causal_skip: bool = True, allow_is_bidirectional_skip: bool = False,
             **others: Any) -> Pattern:
    for name in set(others) - _IGNORED:
        raise invalid(name, "transformers passes it to mask functions", "what transformers 5.24 passes")
    plain = allow_is_causal_skip or allow_is_bidirectional_skip  # nothing was combined with the basic mask
    # A mask of one row, as in a step with a static cache, is checked as a whole.
    row = None if plain or q_length != 1 else (batch_size, int(q_offset), kv_offset)
    window: Window | None
    if mask_function is bidirectional_mask_function:
        causal, window = False, None
    elif mask_function is causal_mask_function:
        causal, window = True, None
    elif (plain or row) and local_size and _hides_like(mask_function, local_size - 1, 0, row):
        causal, window = True, (local_size - 1, 0)
    elif plain and local_size and _hides_like(mask_function, local_size, local_size):
        causal, window = False, (local_size, local_size)
    else:
        raise invalid("attention_mask", "the model combines masks, or attends in chunks or packed sequences",
                      "causal, bidirectional and sliding-window attention over padding")
    if causal or window:  # K/V positions after the last query row are those of a static cache, not used yet
        length = int(q_offset) + q_length - kv_offset
        if not 0 < length <= kv_length:
            raise invalid("cache", f"has positions {kv_offset} to {kv_offset + kv_length} for query rows up "
                          f"to {int(q_offset) + q_length}", "FlashCoreCache, DynamicCache, no cache")
        kv_length = length
    seen = attention_mask
    if attention_mask is not None:
        shape = attention_mask.shape
        if len(shape) != 2 or shape[0] != batch_size or shape[1] < kv_offset + kv_length:
            raise invalid("attention_mask", f"has shape {list(shape)}",
                          f"[{batch_size}, {kv_offset + kv_length}]" + RESET * (kv_length > q_length))
        seen = attention_mask.narrow(1, kv_offset, kv_length).bool()
    return Pattern(causal, window, q_length, batch_size, kv_length, seen)


def _hides_like(mask_function: Callable[..., Any], left: int, right: int,
                exact: tuple[int, int, int] | None = None) -> bool:
    """Whether a row in the middle sees the window (left, right): looks at both ends of it, and inside.
    exact: the batch size, a row and its first column. Then all columns of this row are checked instead."""
    if exact is None:
        batch, row = 1, torch.tensor(left + 2)
        columns = row + torch.tensor([-left - 1, -left, -left // 2, -1, 0, 1, right // 2, right, right + 1])
    else:
        batch, row = exact[0], torch.tensor(exact[1])
        columns = torch.arange(exact[2], exact[1] + 1)
    try:
        seen = mask_function(torch.arange(batch)[:, None], torch.tensor(0), row, columns)
    except IndexError:  # it looks up positions of its own
        return False
    wanted = (columns >= row - left) & (columns <= row + right)
    return torch.equal(seen.cpu().expand(batch, -1), wanted.expand(batch, -1))
