"""FlashCore for PyTorch: scaled_dot_product_attention on the service, also as the operator flashcore::sdpa.

    o = flashcore.torch.scaled_dot_product_attention(q, k, v, is_causal=True)

Inference only: there is no backward pass. Tensors on a GPU that the server shares stay there; those on others
are copied to host memory, and the result back.
"""

from typing import Any

import torch

from ._arguments import flag, number, optional
from ._packing import Packing, attend, whole
from ._terms import SCALES
from .client import default_client
from .errors import invalid


def scaled_dot_product_attention(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor,
                                 attn_mask: torch.Tensor | None = None, dropout_p: float = 0.0,
                                 is_causal: bool = False, scale: float | None = None,
                                 enable_gqa: bool = False) -> torch.Tensor:
    """torch.nn.functional.scaled_dot_product_attention, computed by the service.

    query: [..., heads, L, head_dim]; key, value: [..., heads, S, head_dim], or with enable_gqa a number of
    heads that divides that of query; without the axis of heads: [batch, L, head_dim]. All float16 or all
    bfloat16; sums are float32.
    attn_mask: None, or a boolean mask that hides whole keys, such as padding: broadcastable to
    [..., heads, L, S], the same for every head and query row; True is visible.
    is_causal: query row i sees keys up to i, as PyTorch has it, also where L and S differ.
    scale: None is 1/sqrt(head_dim). dropout_p: 0.

    Returns [..., heads, L, head_dim] on query's device, contiguous. A query row that sees no key gets 0.
    Raises InvalidArgument, and the errors of Client.attend. Its client is that of
    flashcore.set_default_client.
    """
    if not torch.compiler.is_compiling():  # which checks types itself
        _check_types(query, key, value, attn_mask)
        dropout_p, scale = number("dropout_p", dropout_p, "0"), optional(number, "scale", scale, SCALES)
        is_causal, enable_gqa = flag("is_causal", is_causal), flag("enable_gqa", enable_gqa)
    return torch.ops.flashcore.sdpa(query, key, value, attn_mask, dropout_p, is_causal, scale, enable_gqa)


@torch.library.custom_op("flashcore::sdpa", mutates_args=())
def _sdpa(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, attn_mask: torch.Tensor | None,
          dropout_p: float, is_causal: bool, scale: float | None, enable_gqa: bool) -> torch.Tensor:
    _check(query, key, value, attn_mask, dropout_p, is_causal, enable_gqa)
    result = torch.empty_like(query, memory_format=torch.contiguous_format)
    if query.numel() == 0 or key.shape[-2] == 0:
        return result.zero_()
    rows, keys = query.shape[-2], key.shape[-2]
    q, k, v = (_batched(tensor) for tensor in (query, key, value))
    if is_causal and keys > rows:
        k, v, keys = k[:, :, :rows], v[:, :, :rows], rows
    visible = None if attn_mask is None else _visible_keys(attn_mask, query, keys)
    # Query rows beyond the last key see every key. The service aligns the last rows, PyTorch the first.
    parts = [(q[:, :, :keys], True), (q[:, :, keys:], False)] if is_causal else [(q, False)]
    to, done = _batched(result), 0  # a view; copy_ is nothing that autocast changes
    for part, causal in parts:
        if part.shape[2] > 0:
            to[:, :, done:done + part.shape[2]].copy_(_attend(part, k, v, visible, causal, scale))
            done += part.shape[2]
    return result


@_sdpa.register_fake
def _(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, attn_mask: torch.Tensor | None,
      dropout_p: float, is_causal: bool, scale: float | None, enable_gqa: bool) -> torch.Tensor:
    _check(query, key, value, attn_mask, dropout_p, is_causal, enable_gqa)
    return torch.empty_like(query, memory_format=torch.contiguous_format)


def _no_gradient(_: Any, gradient: torch.Tensor) -> Any:
    raise invalid("query, key, value", "a gradient is asked for", "inference: there is no backward pass; "
                  "torch.no_grad()")


_sdpa.register_autograd(_no_gradient)


def _check_types(query: Any, key: Any, value: Any, attn_mask: Any) -> None:
    for name, tensor in (("query", query), ("key", key), ("value", value), ("attn_mask", attn_mask)):
        if not isinstance(tensor, torch.Tensor) and (name != "attn_mask" or tensor is not None):
            raise invalid(name, f"is a {type(tensor).__name__}", "a torch.Tensor")
        if tensor is not None and tensor.layout is not torch.strided:
            raise invalid(name, f"has layout {tensor.layout}", "dense tensors, torch.strided")


def _check(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, attn_mask: torch.Tensor | None,
           dropout_p: float, is_causal: bool, enable_gqa: bool) -> None:
    """Shapes and dtypes; not the values of attn_mask."""
    if query.dtype not in (torch.float16, torch.bfloat16):
        raise invalid("query", f"has dtype {query.dtype}",
                      "torch.float16, torch.bfloat16; for others pass query.half()")
    if query.ndim < 3:
        raise invalid("query", f"has shape {list(query.shape)}",
                      "[..., heads, L, head_dim], [batch, L, head_dim]")
    for name, tensor in (("key", key), ("value", value)):
        if tensor.dtype != query.dtype or tensor.device != query.device:
            raise invalid(name, f"is of {tensor.dtype} on {tensor.device}",
                          f"the same as query, {query.dtype} on {query.device}")
        batch = -3 if enable_gqa else -2
        fits = (tensor.ndim == query.ndim and tensor.shape[:batch] == query.shape[:batch]
                and tensor.shape[-1] == query.shape[-1] and tensor.shape == key.shape)
        if not fits or enable_gqa and (query.ndim < 4 or tensor.shape[-3] == 0
                                       or query.shape[-3] % tensor.shape[-3]):
            heads = "heads that divide those of query" if enable_gqa else "heads of query, or enable_gqa"
            raise invalid(name, f"has shape {list(tensor.shape)} where query has {list(query.shape)}",
                          f"the same batch and head_dim, {heads}, and one shape for key and value")
    if dropout_p != 0:
        raise invalid("dropout_p", dropout_p, "0")
    if attn_mask is not None:
        if is_causal:
            raise invalid("attn_mask", "is set with is_causal", "one of the two")
        if attn_mask.dtype != torch.bool:
            raise invalid("attn_mask", f"has dtype {attn_mask.dtype}", "torch.bool: biases are not supported")


def _batched(tensor: torch.Tensor) -> torch.Tensor:
    """As [batch, heads, rows, head_dim]. A tensor of three axes is a batch with one head."""
    if tensor.ndim == 3:
        tensor = tensor.unsqueeze(1)
    return tensor.detach().reshape(-1, *tensor.shape[-3:])


def _visible_keys(attn_mask: torch.Tensor, query: torch.Tensor, keys: int) -> torch.Tensor:
    """bool [batch, keys]"""
    mask = attn_mask
    wanted = (*query.shape[:-1], keys)
    try:
        if torch.broadcast_shapes(mask.shape, wanted) != torch.Size(wanted):
            raise RuntimeError
    except RuntimeError:
        raise invalid("attn_mask", f"has shape {list(mask.shape)}",
                      f"what can be broadcast to {list(wanted)}") from None
    mask = mask.reshape(*([1] * (query.ndim - mask.ndim)), *mask.shape)
    if query.ndim == 3:
        mask = mask.unsqueeze(1)
    whole = mask[..., :1, :1, :]
    if not torch.equal(mask, whole.expand(mask.shape)):
        raise invalid("attn_mask", "differs between heads or query rows", "masks of whole keys, such as "
                      "[batch, 1, 1, S] for padding; is_causal")
    batch = query.shape[:-3] if query.ndim > 3 else query.shape[:1]
    return whole[..., 0, 0, :].expand(*batch, keys).reshape(-1, keys)


def _attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, visible: torch.Tensor | None, causal: bool,
            scale: float | None) -> torch.Tensor:
    """q: [batch, heads, L, head_dim]; k, v: [batch, kv_heads, S, head_dim]; visible: bool [batch, S]."""
    queries = whole(q.shape[0], q.shape[2])
    keys = whole(k.shape[0], k.shape[2]) if visible is None else Packing(visible.cpu())
    return attend(default_client(), queries, keys, q, k, v, q.dtype, causal=causal,
                  softmax_scale=scale).transpose(1, 2)
