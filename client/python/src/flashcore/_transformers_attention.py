"""The attention function of flashcore.transformers."""

from typing import Any

import torch

from . import torch as _service
from ._transformers_cache import Layer, PackedLayer, Rows
from ._transformers_mask import Mask, Pattern
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
    batch, heads, rows, head_dim = query.shape
    past = layer.length if layer is not None else key.shape[2] - rows
    if attention_mask is None:  # the model asks for no mask beside is_causal
        pattern = _pattern(module, query, past, layer is not None, is_causal, sliding_window)
    else:
        pattern = _read(attention_mask, query)
    q, k, v = (x.to(dtype) for x in (query, key, value))
    options: dict[str, Any] = dict(causal=pattern.causal, window=pattern.window, softmax_scale=scaling)
    # Padded rows of causal models are not sent. Without causality, the mask may be of other rows than Q's.
    q_columns = torch.ones(batch, rows, dtype=torch.bool)
    if layer is not None:
        if not pattern.causal:
            raise invalid("cache", "with bidirectional attention", "causal models")
        if isinstance(layer, PackedLayer) and pattern.window is None and _has_window(module):
            raise invalid("cache", "with a window that the config has and the mask has not",
                          "a FlashCoreCache for this model")
        q_columns, packed = layer.attend(q, k, v, pattern.columns, options)
    else:
        k_columns, aligned = pattern.columns, pattern.causal or pattern.window
        length = k_columns.shape[1]  # K/V rows beyond it are those of a static cache, not used yet
        if not (rows if aligned else k.shape[2]) <= length <= k.shape[2]:
            raise invalid("attention_mask", f"is for {length} K/V rows", f"{k.shape[2]}, those of the call")
        q_columns = k_columns[:, -rows:] if aligned else q_columns
        asking = q_columns.any(1)
        k, v = (x[:, :, :length][asking] for x in (k, v))
        packed = _service.attend_columns(default_client(), q[asking], k, v, q_columns[asking],
                                         k_columns[asking], **options) if asking.any() else q.new_empty(0)
    output = query.new_zeros(batch, rows, heads, head_dim)
    if packed.numel() > 0:
        output[q_columns.to(output.device)] = packed.to(output)
    return output, None


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
    layers = {tensor.content.layer if isinstance(tensor, Rows) else None for tensor in (key, value)}
    if len(layers) > 1:
        raise invalid("cache", "the model takes one of K and V from it", "models that take both")
    key, value = (tensor.content.tensor if isinstance(tensor, Rows) else tensor for tensor in (key, value))
    return layers.pop(), key, value


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
    return Pattern(causal, window, torch.ones(batch, past + rows, dtype=torch.bool))


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
    if len(pattern.columns) not in (1, batch) or pattern.causal and attention_mask.shape[2] != rows:
        raise invalid("attention_mask", f"is of {attention_mask.shape[0]} sequences and "
                      f"{attention_mask.shape[2]} query rows", f"of {batch} and {rows}, those of the call")
    return Pattern(pattern.causal, pattern.window, pattern.columns.expand(batch, -1))
