"""Models of Hugging Face transformers whose attention, and K/V cache, is on the service.

    name = flashcore.transformers.register()
    model = AutoModelForCausalLM.from_pretrained(..., dtype=torch.bfloat16, attn_implementation=name)
    with flashcore.transformers.FlashCoreCache(model.config) as cache:
        model.generate(**inputs, cache=cache)

Written for transformers 5.24. Without a FlashCoreCache, as in encoders, K and V go with every call.
"""

import torch

from . import _doctor
from . import _transformers_models as _models
from . import _transformers_attention as _attention
from ._transformers_cache import FlashCoreCache, PackedCache
from ._transformers_mask import mask as _mask
from .client import Client, default_client, set_default_client
from .errors import invalid

from transformers import AttentionInterface, AttentionMaskInterface

NAME = _models.NAME
__all__ = ["NAME", "FlashCoreCache", "PackedCache", "register"]


def register(client: Client | None = None, *, dtype: torch.dtype | None = None) -> str:
    """Makes the service an attention implementation of transformers; returns its name, NAME, for
    attn_implementation. Again: replaces client and dtype for all models. A FlashCoreCache stays with the
    client that it was made with.

    Asks the server once whether it is there: Unavailable says how to start one, and nothing is registered.
    client: None is that of flashcore.set_default_client. dtype: what Q, K and V are
    rounded to, torch.float16 or torch.bfloat16; the result has the dtype of Q. None: models in these dtypes
    only, and InvalidArgument for others.

    From then on, loading a model with this name, or setting it, raises InvalidArgument if the model does not
    ask transformers' attention interface, such as BLOOM. A call raises InvalidArgument for what the service
    lacks: dropout, soft-cap, attention sinks, biases, sparse attention, output_attentions, a gradient,
    arguments that it does not know, masks that are not causal, full or a sliding window over padding.
    """
    if dtype not in (None, torch.float16, torch.bfloat16):
        raise invalid("dtype", dtype, "None, torch.float16, torch.bfloat16")
    _doctor.ping(default_client() if client is None else client)
    if client is not None:
        set_default_client(client)
    _attention.rounds_to = dtype
    AttentionInterface.register(NAME, _attention.attention)
    AttentionMaskInterface.register(NAME, _mask)
    _models.check_at_load()
    return NAME
