"""The attention function of flashcore.transformers."""

import functools
from typing import Any

import torch

from ._packing import Packing, attend
from ._transformers_cache import Layer, PackedLayer, Rows
from ._transformers_mask import Mask, Pattern, Window
from .client import default_client
from .errors import invalid

# Arguments that models and callers pass to attention functions beside their own and that do not change the
# result. Other arguments are refused unless they are None.
_IGNORED = {"position_ids", "cache_position", "use_cache", "return_dict", "output_hidden_states",
            "output_router_logits", "num_items_in_batch", "logits_to_keep", "token_type_ids",
            "mm_token_type_ids", "deterministic", "output_attentions"}
# Arguments that the service does not support.
_LACKED = {"softcap": "no soft-cap", "s_aux": "no attention sinks", "sinks": "no attention sinks",
           "position_bias": "no bias", "head_mask": "no mask of heads",
           "indices": "no sparse attention", "block_indices": "no sparse attention",
           "cu_seq_lens_q": "no packed rows: pass a batch with attention_mask"}

rounds_to: torch.dtype | None = None  # of register: what Q, K and V are rounded to


@torch.compiler.disable
def attention(module: torch.nn.Module, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor,
              attention_mask: torch.Tensor | None = None, scaling: float | None = None, dropout: float = 0.0,
              is_causal: bool | None = None, sliding_window: int | None = None,
              **others: Any) -> tuple[torch.Tensor, None]:
    """The attention function. query, key, value: [batch, heads, rows, head_dim]; with a FlashCoreCache, K and
    V have the step's rows. Returns [batch, rows, heads, head_dim], 0 in padded rows of causal models."""
    _check_options(dropout, others)
    layer, key, value = _cached(key, value)
    dtype = _check_tensors(query, key, value)
    if attention_mask is None:  # the model asks for no mask beside is_causal
        past = layer.length if layer is not None else key.shape[2] - query.shape[2]
        pattern = _pattern(module, query, past, layer is not None, is_causal, sliding_window)
    else:
        pattern = _read(attention_mask, query)
    if layer is None:
        return _attend_inline(pattern, query, key, value, dtype, scaling), None
    if not pattern.causal:
        raise invalid("cache", "with bidirectional attention", "causal models")
    if isinstance(layer, PackedLayer) and pattern.window is None and _has_window(module):
        raise invalid("cache", "with a window that the config has and the mask has not",
                      "a FlashCoreCache for this model")
    return layer.attend(pattern, query, key, value, dtype, scaling), None


def _attend_inline(pattern: Pattern, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, dtype: torch.dtype,
                   scaling: float | None) -> torch.Tensor:
    """Attention over K and V that go with the call."""
    length = pattern.length  # K/V rows beyond it are those of a static cache, not used yet
    least = q.shape[2] if pattern.causal or pattern.window else k.shape[2]
    if not least <= length <= k.shape[2]:
        raise invalid("attention_mask", f"is for {length} K/V rows", f"{k.shape[2]}, those of the call")
    if length < k.shape[2]:
        k, v = k[:, :, :length], v[:, :, :length]
    queries, keys = _packings(pattern, q.shape[0], q.shape[2])
    return attend(default_client(), queries, keys, q, k, v, dtype, causal=pattern.causal,
                  window=pattern.window, softmax_scale=scaling)


@functools.lru_cache(maxsize=8)
def _packings(pattern: Pattern, batch: int, rows: int) -> tuple[Packing, Packing]:
    """The packings of Q, and of K and V. Padded rows of causal models are not sent. Without causality, the
    mask may be of other rows than Q's."""
    k_columns = pattern.columns.expand(batch, -1)
    q_columns = (k_columns[:, -rows:] if pattern.causal or pattern.window else
                 torch.ones(batch, rows, dtype=torch.bool, device="cpu"))
    queries = Packing(q_columns)
    if torch.equal(q_columns, k_columns):
        return queries, queries
    return queries, Packing(k_columns & q_columns.any(1, keepdim=True))


def _check_options(dropout: float, others: dict[str, Any]) -> None:
    for name, found in others.items():
        if found is not None and name not in _IGNORED:
            raise invalid(name, "is set by this model or call",
                          f"None: the service has {_LACKED.get(name, 'no such argument')}")
    if others.get("output_attentions"):
        raise invalid("output_attentions", True, "False: the service does not return attention weights")
    if dropout:
        raise invalid("dropout", dropout, "0: call model.eval()")


def _cached(key: torch.Tensor, value: torch.Tensor) -> tuple[Layer | None, torch.Tensor, torch.Tensor]:
    """The layer of the FlashCoreCache that K and V come from, if any, and their values."""
    if isinstance(key, Rows) and isinstance(value, Rows) and key.content.layer is value.content.layer:
        return key.content.layer, key.content.tensor, value.content.tensor
    if isinstance(key, Rows) or isinstance(value, Rows):
        raise invalid("cache", "the model takes one of K and V from it", "models that take both")
    return None, key, value


def _check_tensors(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.dtype:
    """Returns the dtype to compute in."""
    if torch.is_grad_enabled() and (query.requires_grad or key.requires_grad or value.requires_grad):
        raise invalid("query", "requires a gradient",
                      "inference, under torch.no_grad(): there is no backward pass")
    if value.shape != key.shape:
        raise invalid("value", f"has shape {list(value.shape)}", f"the same as key, {list(key.shape)}")
    if query.ndim != 4 or key.ndim != 4 or query.shape[0] != key.shape[0] or query.shape[3] != key.shape[3]:
        raise invalid("query", f"has shape {list(query.shape)} where key has {list(key.shape)}",
                      "[batch, heads, rows, head_dim], with the batch and head_dim of key")
    dtype = rounds_to or query.dtype
    if dtype not in (torch.float16, torch.bfloat16):
        raise invalid("dtype", dtype, "torch.float16, torch.bfloat16: load the model with "
                      "dtype=torch.bfloat16, or register(dtype=torch.bfloat16) to round Q, K and V")
    return dtype


def _pattern(module: torch.nn.Module, query: torch.Tensor, past: int, cached: bool, is_causal: bool | None,
             sliding_window: int | None) -> Pattern:
    """That of a call without a mask."""
    batch, _, rows, _ = query.shape
    causal = getattr(module, "is_causal", None) if is_causal is None else is_causal
    if causal is None:
        raise invalid("attention_mask", f"None for a {type(module).__name__}, which does not say is_causal",
                      "a mask, or a module or call that says is_causal")
    if causal and not cached and past != 0:
        raise invalid("attention_mask", f"None for {rows} query rows and {past + rows} K/V rows",
                      "as many of both, or a mask")
    if sliding_window and not causal:
        raise invalid("attention_mask", "None with a bidirectional sliding window", "a mask")
    window = (sliding_window - 1, 0) if sliding_window else None
    return _whole_pattern(causal, window, rows, batch, past + rows)


@functools.lru_cache(maxsize=8)
def _whole_pattern(causal: bool, window: Window | None, rows: int, batch: int, length: int) -> Pattern:
    """The pattern of a batch without padding."""
    return Pattern(causal, window, rows, batch, length)


def _has_window(module: torch.nn.Module) -> bool:
    """Whether transformers' cache for this layer would drop rows beyond a window."""
    config = getattr(module, "config", None)
    kinds = getattr(config, "layer_types", None)
    return bool(getattr(config, "sliding_window", None)) and (
        kinds is None or kinds[getattr(module, "layer_idx", 0)] == "sliding_attention")


def _read(attention_mask: torch.Tensor, query: torch.Tensor) -> Pattern:
    """That of a mask which comes from the mask function."""
    if not isinstance(attention_mask, Mask):
        raise invalid("attention_mask", f"is a mask {list(attention_mask.shape)} that the model made itself",
                      "[batch, positions], which transformers' create_causal_mask and the like read")
    pattern, batch, rows = attention_mask.pattern, query.shape[0], query.shape[2]
    if pattern.batch not in (1, batch) or pattern.causal and pattern.rows != rows:
        raise invalid("attention_mask", f"is of {pattern.batch} sequences and {pattern.rows} query "
                      f"rows", f"of {batch} and {rows}, those of the call")
    return pattern
