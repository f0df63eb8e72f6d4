"""The types of the calls that return attention, or plan it, for type checkers: they depend on return_lse and
on q.

O has the type of q. LSE is float32: for numpy a type of its own, while tensors of other frameworks have one
type for every dtype. A method gets its type from a Protocol here by `typed_as`;
tests/client/python_types_test.py compares their parameters.
"""

from __future__ import annotations

import inspect
from typing import (TYPE_CHECKING, Any, Callable, Coroutine, Iterable, Literal, Protocol, SupportsIndex,
                    TypeVar, cast, overload)

from numpy.typing import NDArray

from ._tensors import Lse, N, T, Tensor
from ._terms import Window, parameters

if TYPE_CHECKING:
    from ._batch import Layer
    from ._sequence import HasSequence

F = TypeVar("F")
L = TypeVar("L", bound=bool, covariant=True)  # of a Plan: whether its runs return LSE
# Plans whose runs return O, (O, LSE), or either.
PlanO = TypeVar("PlanO", covariant=True)
PlanLse = TypeVar("PlanLse", covariant=True)
PlanAny = TypeVar("PlanAny", covariant=True)
Offsets = Iterable[SupportsIndex] | None


def typed_as(kind: type[F]) -> Callable[[Callable[..., Any]], F]:
    """Decorates a method with the type `kind`. Its signature, for help(), has the terms that it takes before
    return_lse, in place of **terms."""
    def decorate(method: Any) -> F:
        signature = inspect.signature(method)
        own = [parameter for name, parameter in signature.parameters.items() if name != "terms"]
        if len(own) < len(signature.parameters):
            place = list(signature.parameters).index("return_lse")
            own[place:place] = parameters(method.__qualname__).values()
            method.__signature__ = signature.replace(parameters=own)
        return cast(F, method)
    return decorate


class InlineAttend(Protocol):
    """attend of Client."""

    @overload
    def __call__(self, q: T, k: Tensor, v: Tensor, *, causal: bool = False, window: Window = None,
                 softmax_scale: float | None = None, return_lse: Literal[False] = False,
                 cu_seqlens_q: Offsets = None, cu_seqlens_k: Offsets = None, layout: str = "NHD",
                 dtype: object = None, timeout: float | None = None) -> T: ...

    @overload  # type: ignore[misc]
    def __call__(self, q: NDArray[N], k: Tensor, v: Tensor, *, causal: bool = False, window: Window = None,
                 softmax_scale: float | None = None, return_lse: Literal[True], cu_seqlens_q: Offsets = None,
                 cu_seqlens_k: Offsets = None, layout: str = "NHD", dtype: object = None,
                 timeout: float | None = None) -> tuple[NDArray[N], Lse]: ...

    @overload
    def __call__(self, q: T, k: Tensor, v: Tensor, *, causal: bool = False, window: Window = None,
                 softmax_scale: float | None = None, return_lse: Literal[True], cu_seqlens_q: Offsets = None,
                 cu_seqlens_k: Offsets = None, layout: str = "NHD", dtype: object = None,
                 timeout: float | None = None) -> tuple[T, T]: ...

    @overload
    def __call__(self, q: T, k: Tensor, v: Tensor, *, causal: bool = False, window: Window = None,
                 softmax_scale: float | None = None, return_lse: bool, cu_seqlens_q: Offsets = None,
                 cu_seqlens_k: Offsets = None, layout: str = "NHD", dtype: object = None,
                 timeout: float | None = None) -> T | tuple[T, T]: ...


class AsyncInlineAttend(Protocol):
    """attend of Client, in asyncio."""

    @overload
    def __call__(self, q: T, k: Tensor, v: Tensor, *, causal: bool = False, window: Window = None,
                 softmax_scale: float | None = None, return_lse: Literal[False] = False,
                 cu_seqlens_q: Offsets = None, cu_seqlens_k: Offsets = None, layout: str = "NHD",
                 dtype: object = None, timeout: float | None = None) -> Coroutine[Any, Any, T]: ...

    @overload  # type: ignore[misc]
    def __call__(self, q: NDArray[N], k: Tensor, v: Tensor, *, causal: bool = False, window: Window = None,
                 softmax_scale: float | None = None, return_lse: Literal[True], cu_seqlens_q: Offsets = None,
                 cu_seqlens_k: Offsets = None, layout: str = "NHD", dtype: object = None,
                 timeout: float | None = None) -> Coroutine[Any, Any, tuple[NDArray[N], Lse]]: ...

    @overload
    def __call__(self, q: T, k: Tensor, v: Tensor, *, causal: bool = False, window: Window = None,
                 softmax_scale: float | None = None, return_lse: Literal[True], cu_seqlens_q: Offsets = None,
                 cu_seqlens_k: Offsets = None, layout: str = "NHD", dtype: object = None,
                 timeout: float | None = None) -> Coroutine[Any, Any, tuple[T, T]]: ...

    @overload
    def __call__(self, q: T, k: Tensor, v: Tensor, *, causal: bool = False, window: Window = None,
                 softmax_scale: float | None = None, return_lse: bool, cu_seqlens_q: Offsets = None,
                 cu_seqlens_k: Offsets = None, layout: str = "NHD", dtype: object = None,
                 timeout: float | None = None) -> Coroutine[Any, Any, T | tuple[T, T]]: ...


class BatchAttend(Protocol):
    """attend_batch of Client."""

    @overload
    def __call__(self, sequences: Iterable[HasSequence], layer: int, q: T, k: Tensor | None = None,
                 v: Tensor | None = None, *, causal: bool = False, window: Window = None,
                 softmax_scale: float | None = None, precision: str = "16bit",
                 return_lse: Literal[False] = False, cu_seqlens_q: Offsets = None,
                 cu_seqlens_k: Offsets = None, layout: str = "NHD", timeout: float | None = None) -> T: ...

    @overload  # type: ignore[misc]
    def __call__(self, sequences: Iterable[HasSequence], layer: int, q: NDArray[N], k: Tensor | None = None,
                 v: Tensor | None = None, *, causal: bool = False, window: Window = None,
                 softmax_scale: float | None = None, precision: str = "16bit", return_lse: Literal[True],
                 cu_seqlens_q: Offsets = None, cu_seqlens_k: Offsets = None, layout: str = "NHD",
                 timeout: float | None = None) -> tuple[NDArray[N], Lse]: ...

    @overload
    def __call__(self, sequences: Iterable[HasSequence], layer: int, q: T, k: Tensor | None = None,
                 v: Tensor | None = None, *, causal: bool = False, window: Window = None,
                 softmax_scale: float | None = None, precision: str = "16bit", return_lse: Literal[True],
                 cu_seqlens_q: Offsets = None, cu_seqlens_k: Offsets = None, layout: str = "NHD",
                 timeout: float | None = None) -> tuple[T, T]: ...

    @overload
    def __call__(self, sequences: Iterable[HasSequence], layer: int, q: T, k: Tensor | None = None,
                 v: Tensor | None = None, *, causal: bool = False, window: Window = None,
                 softmax_scale: float | None = None, precision: str = "16bit", return_lse: bool,
                 cu_seqlens_q: Offsets = None, cu_seqlens_k: Offsets = None, layout: str = "NHD",
                 timeout: float | None = None) -> T | tuple[T, T]: ...


class AsyncBatchAttend(Protocol):
    """attend_batch of Client, in asyncio."""

    @overload
    def __call__(self, sequences: Iterable[HasSequence], layer: int, q: T, k: Tensor | None = None,
                 v: Tensor | None = None, *, causal: bool = False, window: Window = None,
                 softmax_scale: float | None = None, precision: str = "16bit",
                 return_lse: Literal[False] = False, cu_seqlens_q: Offsets = None,
                 cu_seqlens_k: Offsets = None, layout: str = "NHD",
                 timeout: float | None = None) -> Coroutine[Any, Any, T]: ...

    @overload  # type: ignore[misc]
    def __call__(self, sequences: Iterable[HasSequence], layer: int, q: NDArray[N], k: Tensor | None = None,
                 v: Tensor | None = None, *, causal: bool = False, window: Window = None,
                 softmax_scale: float | None = None, precision: str = "16bit", return_lse: Literal[True],
                 cu_seqlens_q: Offsets = None, cu_seqlens_k: Offsets = None, layout: str = "NHD",
                 timeout: float | None = None) -> Coroutine[Any, Any, tuple[NDArray[N], Lse]]: ...

    @overload
    def __call__(self, sequences: Iterable[HasSequence], layer: int, q: T, k: Tensor | None = None,
                 v: Tensor | None = None, *, causal: bool = False, window: Window = None,
                 softmax_scale: float | None = None, precision: str = "16bit", return_lse: Literal[True],
                 cu_seqlens_q: Offsets = None, cu_seqlens_k: Offsets = None, layout: str = "NHD",
                 timeout: float | None = None) -> Coroutine[Any, Any, tuple[T, T]]: ...

    @overload
    def __call__(self, sequences: Iterable[HasSequence], layer: int, q: T, k: Tensor | None = None,
                 v: Tensor | None = None, *, causal: bool = False, window: Window = None,
                 softmax_scale: float | None = None, precision: str = "16bit", return_lse: bool,
                 cu_seqlens_q: Offsets = None, cu_seqlens_k: Offsets = None, layout: str = "NHD",
                 timeout: float | None = None) -> Coroutine[Any, Any, T | tuple[T, T]]: ...


class SequenceAttend(Protocol):
    """attend of Sequence."""

    @overload
    def __call__(self, layer: int, q: T, k: Tensor | None = None, v: Tensor | None = None, *,
                 causal: bool = False, window: Window = None, softmax_scale: float | None = None,
                 precision: str = "16bit", return_lse: Literal[False] = False, layout: str = "NHD",
                 timeout: float | None = None) -> T: ...

    @overload  # type: ignore[misc]
    def __call__(self, layer: int, q: NDArray[N], k: Tensor | None = None, v: Tensor | None = None, *,
                 causal: bool = False, window: Window = None, softmax_scale: float | None = None,
                 precision: str = "16bit", return_lse: Literal[True], layout: str = "NHD",
                 timeout: float | None = None) -> tuple[NDArray[N], Lse]: ...

    @overload
    def __call__(self, layer: int, q: T, k: Tensor | None = None, v: Tensor | None = None, *,
                 causal: bool = False, window: Window = None, softmax_scale: float | None = None,
                 precision: str = "16bit", return_lse: Literal[True], layout: str = "NHD",
                 timeout: float | None = None) -> tuple[T, T]: ...

    @overload
    def __call__(self, layer: int, q: T, k: Tensor | None = None, v: Tensor | None = None, *,
                 causal: bool = False, window: Window = None, softmax_scale: float | None = None,
                 precision: str = "16bit", return_lse: bool, layout: str = "NHD",
                 timeout: float | None = None) -> T | tuple[T, T]: ...


class AsyncSequenceAttend(Protocol):
    """attend of Sequence, in asyncio."""

    @overload
    def __call__(self, layer: int, q: T, k: Tensor | None = None, v: Tensor | None = None, *,
                 causal: bool = False, window: Window = None, softmax_scale: float | None = None,
                 precision: str = "16bit", return_lse: Literal[False] = False, layout: str = "NHD",
                 timeout: float | None = None) -> Coroutine[Any, Any, T]: ...

    @overload  # type: ignore[misc]
    def __call__(self, layer: int, q: NDArray[N], k: Tensor | None = None, v: Tensor | None = None, *,
                 causal: bool = False, window: Window = None, softmax_scale: float | None = None,
                 precision: str = "16bit", return_lse: Literal[True], layout: str = "NHD",
                 timeout: float | None = None) -> Coroutine[Any, Any, tuple[NDArray[N], Lse]]: ...

    @overload
    def __call__(self, layer: int, q: T, k: Tensor | None = None, v: Tensor | None = None, *,
                 causal: bool = False, window: Window = None, softmax_scale: float | None = None,
                 precision: str = "16bit", return_lse: Literal[True], layout: str = "NHD",
                 timeout: float | None = None) -> Coroutine[Any, Any, tuple[T, T]]: ...

    @overload
    def __call__(self, layer: int, q: T, k: Tensor | None = None, v: Tensor | None = None, *,
                 causal: bool = False, window: Window = None, softmax_scale: float | None = None,
                 precision: str = "16bit", return_lse: bool, layout: str = "NHD",
                 timeout: float | None = None) -> Coroutine[Any, Any, T | tuple[T, T]]: ...


class SequencesAttend(Protocol):
    """attend of SequenceBatch."""

    @overload
    def __call__(self, layer: int, q: T, k: Tensor | None = None, v: Tensor | None = None, *,
                 causal: bool = False, window: Window = None, softmax_scale: float | None = None,
                 precision: str = "16bit", return_lse: Literal[False] = False, cu_seqlens_q: Offsets = None,
                 cu_seqlens_k: Offsets = None, layout: str = "NHD", timeout: float | None = None) -> T: ...

    @overload  # type: ignore[misc]
    def __call__(self, layer: int, q: NDArray[N], k: Tensor | None = None, v: Tensor | None = None, *,
                 causal: bool = False, window: Window = None, softmax_scale: float | None = None,
                 precision: str = "16bit", return_lse: Literal[True], cu_seqlens_q: Offsets = None,
                 cu_seqlens_k: Offsets = None, layout: str = "NHD",
                 timeout: float | None = None) -> tuple[NDArray[N], Lse]: ...

    @overload
    def __call__(self, layer: int, q: T, k: Tensor | None = None, v: Tensor | None = None, *,
                 causal: bool = False, window: Window = None, softmax_scale: float | None = None,
                 precision: str = "16bit", return_lse: Literal[True], cu_seqlens_q: Offsets = None,
                 cu_seqlens_k: Offsets = None, layout: str = "NHD",
                 timeout: float | None = None) -> tuple[T, T]: ...

    @overload
    def __call__(self, layer: int, q: T, k: Tensor | None = None, v: Tensor | None = None, *,
                 causal: bool = False, window: Window = None, softmax_scale: float | None = None,
                 precision: str = "16bit", return_lse: bool, cu_seqlens_q: Offsets = None,
                 cu_seqlens_k: Offsets = None, layout: str = "NHD",
                 timeout: float | None = None) -> T | tuple[T, T]: ...


class AsyncSequencesAttend(Protocol):
    """attend of SequenceBatch, in asyncio."""

    @overload
    def __call__(self, layer: int, q: T, k: Tensor | None = None, v: Tensor | None = None, *,
                 causal: bool = False, window: Window = None, softmax_scale: float | None = None,
                 precision: str = "16bit", return_lse: Literal[False] = False, cu_seqlens_q: Offsets = None,
                 cu_seqlens_k: Offsets = None, layout: str = "NHD",
                 timeout: float | None = None) -> Coroutine[Any, Any, T]: ...

    @overload  # type: ignore[misc]
    def __call__(self, layer: int, q: NDArray[N], k: Tensor | None = None, v: Tensor | None = None, *,
                 causal: bool = False, window: Window = None, softmax_scale: float | None = None,
                 precision: str = "16bit", return_lse: Literal[True], cu_seqlens_q: Offsets = None,
                 cu_seqlens_k: Offsets = None, layout: str = "NHD",
                 timeout: float | None = None) -> Coroutine[Any, Any, tuple[NDArray[N], Lse]]: ...

    @overload
    def __call__(self, layer: int, q: T, k: Tensor | None = None, v: Tensor | None = None, *,
                 causal: bool = False, window: Window = None, softmax_scale: float | None = None,
                 precision: str = "16bit", return_lse: Literal[True], cu_seqlens_q: Offsets = None,
                 cu_seqlens_k: Offsets = None, layout: str = "NHD",
                 timeout: float | None = None) -> Coroutine[Any, Any, tuple[T, T]]: ...

    @overload
    def __call__(self, layer: int, q: T, k: Tensor | None = None, v: Tensor | None = None, *,
                 causal: bool = False, window: Window = None, softmax_scale: float | None = None,
                 precision: str = "16bit", return_lse: bool, cu_seqlens_q: Offsets = None,
                 cu_seqlens_k: Offsets = None, layout: str = "NHD",
                 timeout: float | None = None) -> Coroutine[Any, Any, T | tuple[T, T]]: ...


class MakesPlan(Protocol[PlanO, PlanLse, PlanAny]):
    """plan of Client."""

    @overload
    def __call__(self, sequences: Iterable[HasSequence], *, num_heads: int,
                 query_rows: int | Iterable[int] = 1, append: bool | Iterable[int] = True,
                 causal: bool = False, window: Window = None, softmax_scale: float | None = None,
                 precision: str = "16bit", return_lse: Literal[False] = False,
                 layout: str = "NHD") -> PlanO: ...

    @overload
    def __call__(self, sequences: Iterable[HasSequence], *, num_heads: int,
                 query_rows: int | Iterable[int] = 1, append: bool | Iterable[int] = True,
                 causal: bool = False, window: Window = None, softmax_scale: float | None = None,
                 precision: str = "16bit", return_lse: Literal[True], layout: str = "NHD") -> PlanLse: ...

    @overload
    def __call__(self, sequences: Iterable[HasSequence], *, num_heads: int,
                 query_rows: int | Iterable[int] = 1, append: bool | Iterable[int] = True,
                 causal: bool = False, window: Window = None, softmax_scale: float | None = None,
                 precision: str = "16bit", return_lse: bool, layout: str = "NHD") -> PlanAny: ...


class VarlenFunc(Protocol):
    """flash_attn_varlen_func."""

    @overload
    def __call__(self, q: T, k: Tensor, v: Tensor, cu_seqlens_q: Iterable[SupportsIndex],
                 cu_seqlens_k: Iterable[SupportsIndex], max_seqlen_q: int, max_seqlen_k: int,
                 dropout_p: float = 0.0, softmax_scale: float | None = None, causal: bool = False,
                 window_size: tuple[int, int] = (-1, -1), softcap: float = 0.0, alibi_slopes: None = None,
                 deterministic: bool = False, return_attn_probs: Literal[False] = False,
                 block_table: None = None) -> T: ...

    @overload  # type: ignore[misc]
    def __call__(self, q: NDArray[N], k: Tensor, v: Tensor, cu_seqlens_q: Iterable[SupportsIndex],
                 cu_seqlens_k: Iterable[SupportsIndex], max_seqlen_q: int, max_seqlen_k: int,
                 dropout_p: float = 0.0, softmax_scale: float | None = None, causal: bool = False,
                 window_size: tuple[int, int] = (-1, -1), softcap: float = 0.0, alibi_slopes: None = None,
                 deterministic: bool = False, *, return_attn_probs: Literal[True],
                 block_table: None = None) -> tuple[NDArray[N], Lse, None]: ...

    @overload
    def __call__(self, q: T, k: Tensor, v: Tensor, cu_seqlens_q: Iterable[SupportsIndex],
                 cu_seqlens_k: Iterable[SupportsIndex], max_seqlen_q: int, max_seqlen_k: int,
                 dropout_p: float = 0.0, softmax_scale: float | None = None, causal: bool = False,
                 window_size: tuple[int, int] = (-1, -1), softcap: float = 0.0, alibi_slopes: None = None,
                 deterministic: bool = False, *, return_attn_probs: Literal[True],
                 block_table: None = None) -> tuple[T, T, None]: ...

    @overload
    def __call__(self, q: T, k: Tensor, v: Tensor, cu_seqlens_q: Iterable[SupportsIndex],
                 cu_seqlens_k: Iterable[SupportsIndex], max_seqlen_q: int, max_seqlen_k: int,
                 dropout_p: float = 0.0, softmax_scale: float | None = None, causal: bool = False,
                 window_size: tuple[int, int] = (-1, -1), softcap: float = 0.0, alibi_slopes: None = None,
                 deterministic: bool = False, *, return_attn_probs: bool,
                 block_table: None = None) -> T | tuple[T, T, None]: ...


class KvcacheFunc(Protocol):
    """flash_attn_with_kvcache."""

    @overload
    def __call__(self, q: T, k_cache: Tensor | Layer, v_cache: Tensor | Layer | None, k: Tensor | None = None,
                 v: Tensor | None = None, rotary_cos: None = None, rotary_sin: None = None,
                 cache_seqlens: SupportsIndex | Offsets = None, cache_batch_idx: Offsets = None,
                 cache_leftpad: None = None, block_table: None = None, softmax_scale: float | None = None,
                 causal: bool = False, window_size: tuple[int, int] = (-1, -1), softcap: float = 0.0,
                 rotary_interleaved: bool = True, alibi_slopes: None = None, num_splits: int = 0,
                 return_softmax_lse: Literal[False] = False) -> T: ...

    @overload  # type: ignore[misc]
    def __call__(self, q: NDArray[N], k_cache: Tensor | Layer, v_cache: Tensor | Layer | None,
                 k: Tensor | None = None, v: Tensor | None = None, rotary_cos: None = None,
                 rotary_sin: None = None, cache_seqlens: SupportsIndex | Offsets = None,
                 cache_batch_idx: Offsets = None, cache_leftpad: None = None, block_table: None = None,
                 softmax_scale: float | None = None, causal: bool = False,
                 window_size: tuple[int, int] = (-1, -1), softcap: float = 0.0,
                 rotary_interleaved: bool = True, alibi_slopes: None = None, num_splits: int = 0, *,
                 return_softmax_lse: Literal[True]) -> tuple[NDArray[N], Lse]: ...

    @overload
    def __call__(self, q: T, k_cache: Tensor | Layer, v_cache: Tensor | Layer | None, k: Tensor | None = None,
                 v: Tensor | None = None, rotary_cos: None = None, rotary_sin: None = None,
                 cache_seqlens: SupportsIndex | Offsets = None, cache_batch_idx: Offsets = None,
                 cache_leftpad: None = None, block_table: None = None, softmax_scale: float | None = None,
                 causal: bool = False, window_size: tuple[int, int] = (-1, -1), softcap: float = 0.0,
                 rotary_interleaved: bool = True, alibi_slopes: None = None, num_splits: int = 0, *,
                 return_softmax_lse: Literal[True]) -> tuple[T, T]: ...

    @overload
    def __call__(self, q: T, k_cache: Tensor | Layer, v_cache: Tensor | Layer | None, k: Tensor | None = None,
                 v: Tensor | None = None, rotary_cos: None = None, rotary_sin: None = None,
                 cache_seqlens: SupportsIndex | Offsets = None, cache_batch_idx: Offsets = None,
                 cache_leftpad: None = None, block_table: None = None, softmax_scale: float | None = None,
                 causal: bool = False, window_size: tuple[int, int] = (-1, -1), softcap: float = 0.0,
                 rotary_interleaved: bool = True, alibi_slopes: None = None, num_splits: int = 0, *,
                 return_softmax_lse: bool) -> T | tuple[T, T]: ...
