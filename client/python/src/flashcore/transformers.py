"""Models of Hugging Face transformers whose attention, and K/V cache, is on the service.

    name = flashcore.transformers.register()
    model = AutoModelForCausalLM.from_pretrained(..., dtype=torch.bfloat16, attn_implementation=name)
    with flashcore.transformers.FlashCoreCache(model.config) as cache:
        model.generate(**inputs, cache=cache)

Written for transformers 5.24. Without a FlashCoreCache, as in encoders, K and V go with every call.
"""

import contextlib
import dataclasses
import itertools
import threading
import weakref
from typing import Any, Callable, Iterable

import torch
from transformers import AttentionInterface, AttentionMaskInterface, PreTrainedConfig
from transformers.cache_utils import Cache, CacheLayerMixin
from transformers.masking_utils import bidirectional_mask_function, causal_mask_function

from . import torch as _service
from .client import Client, Sequence, SequenceBatch, default_client, set_default_client
from .errors import BatchError, FailedPrecondition, invalid

# transformers takes every name with "flash" in it for FlashAttention.
NAME = "fc_service"

Window = tuple[int, int]  # rows before and after its own that a query row sees
_LAYER_TYPES = ("full_attention", "sliding_attention")
# Arguments of attention functions that change the result and that the service lacks.
_REFUSED = {"softcap": "no soft-cap", "s_aux": "no attention sinks", "position_bias": "no bias",
            "head_mask": "no mask of heads",
            "cu_seq_lens_q": "no packed rows: pass a batch with attention_mask"}
_dtype: torch.dtype | None = None


def register(client: Client | None = None, *, dtype: torch.dtype | None = None) -> str:
    """Makes the service an attention implementation of transformers; returns its name, NAME, for
    attn_implementation. Again: replaces client and dtype for all models.

    client: None is that of flashcore.set_default_client. dtype: what Q, K and V are
    rounded to, torch.float16 or torch.bfloat16; the result has the dtype of Q. None: models in these dtypes
    only, and InvalidArgument for others.

    A call raises InvalidArgument for what the service lacks: dropout, soft-cap, attention sinks, biases,
    output_attentions, a gradient, masks that are not causal, full or a sliding window over padding.
    """
    global _dtype
    if dtype not in (None, torch.float16, torch.bfloat16):
        raise invalid("dtype", dtype, "None, torch.float16, torch.bfloat16")
    if client is not None:
        set_default_client(client)
    _dtype = dtype
    AttentionInterface.register(NAME, _attention)
    AttentionMaskInterface.register(NAME, _mask)
    return NAME


@dataclasses.dataclass(frozen=True)
class Pattern:
    """What query rows see. The last one is aligned with the last K/V position."""

    causal: bool
    window: Window | None
    columns: torch.Tensor  # bool [batch, positions], in host memory: those that hold tokens and no padding


def _mask(batch_size: int, q_length: int, kv_length: int, q_offset: int = 0, kv_offset: int = 0,
          mask_function: Callable[..., Any] = causal_mask_function,
          attention_mask: torch.Tensor | None = None, local_size: int | None = None,
          allow_is_causal_skip: bool = True, allow_is_bidirectional_skip: bool = False, device: Any = "cpu",
          **_: Any) -> torch.Tensor:
    """The mask function: its result travels through the model to `_attention` with its Pattern."""
    plain = allow_is_causal_skip or allow_is_bidirectional_skip  # nothing was combined with the basic mask
    if mask_function is bidirectional_mask_function:
        causal, window = False, None
    elif mask_function is causal_mask_function:
        causal, window = True, None
    elif plain and local_size and _hides_like(mask_function, local_size, local_size - 1, 0):
        causal, window = True, (local_size - 1, 0)
    elif plain and local_size and _hides_like(mask_function, local_size, local_size, local_size):
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
    columns = torch.ones(batch_size, kv_length, dtype=torch.bool)
    if attention_mask is not None:
        known = attention_mask[:, kv_offset:kv_offset + kv_length].cpu().bool()
        if known.shape != columns.shape:
            raise invalid("attention_mask", f"has shape {list(attention_mask.shape)}",
                          f"[{batch_size}, {kv_offset + kv_length}]")
        columns = known
    runs = columns[:, 0] + (columns[:, 1:] & ~columns[:, :-1]).sum(1)
    if window is not None and (runs > 1).any():
        raise invalid("attention_mask", "has padding between tokens",
                      "with a sliding window, padding at the ends")
    mask = columns.to(device)
    mask.flashcore = Pattern(causal, window, columns)  # type: ignore[attr-defined]
    return mask


def _hides_like(mask_function: Callable[..., Any], size: int, left: int, right: int) -> bool:
    """Whether a row in the middle sees the window (left, right)."""
    row = torch.tensor(size + 1)
    columns = torch.arange(2 * size + 4)
    try:
        seen = mask_function(torch.tensor(0), torch.tensor(0), row, columns)
    except IndexError:  # it looks up positions of its own
        return False
    return torch.equal(seen.expand(columns.shape), (columns >= row - left) & (columns <= row + right))


class _Handover(threading.local):
    """K/V on its way from FlashCoreCache.update to the attention function, which the model calls next."""

    def __init__(self) -> None:
        self.key: torch.Tensor | None = None
        self.layer: "_Layer | None" = None

    def put(self, layer: "_Layer", key: torch.Tensor) -> None:
        if self.layer is not None:
            self.layer = self.key = None
            raise FailedPrecondition(f'cache: a model with another attention uses it; load the model with '
                                     f'attn_implementation="{NAME}"')
        self.layer, self.key = layer, key

    def take(self, key: torch.Tensor) -> "_Layer | None":
        layer, expected = self.layer, self.key
        self.layer = self.key = None
        if layer is not None and key is not expected:
            raise FailedPrecondition("cache: this model changes K and V after FlashCoreCache.update; use a "
                                     "DynamicCache")
        return layer


_handover = _Handover()


def _attention(module: torch.nn.Module, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor,
               attention_mask: torch.Tensor | None, scaling: float | None = None, dropout: float = 0.0,
               is_causal: bool | None = None, sliding_window: int | None = None,
               **kwargs: Any) -> tuple[torch.Tensor, None]:
    """The attention function. query, key, value: [batch, heads, rows, head_dim]; with a FlashCoreCache, K and
    V have the step's rows. Returns [batch, rows, heads, head_dim], 0 in padded rows of causal models."""
    layer = _handover.take(key)
    dtype = _check(query, key, value, dropout, kwargs)
    batch, heads, rows, head_dim = query.shape
    past = layer.length if layer is not None else key.shape[2] - rows
    pattern = getattr(attention_mask, "flashcore", None)
    if pattern is None and attention_mask is not None:
        raise invalid("attention_mask", f"is a mask {list(attention_mask.shape)} that the model made itself",
                      "[batch, positions], which transformers' create_causal_mask and the like read")
    if pattern is None:  # the model asks for no mask beside is_causal
        causal = getattr(module, "is_causal", True) if is_causal is None else is_causal
        if causal and layer is None and past != 0:
            raise invalid("attention_mask", f"None for {rows} query rows and {key.shape[2]} K/V rows",
                          "as many of both, or a mask")
        if sliding_window and not causal:
            raise invalid("attention_mask", "None with a bidirectional sliding window", "a mask")
        window = (sliding_window - 1, 0) if sliding_window else None
        length = past + rows if layer is not None else key.shape[2]
        pattern = Pattern(causal, window, torch.ones(batch, length, dtype=torch.bool))
    q, k, v = (x.to(dtype) for x in (query, key, value))
    options = dict(causal=pattern.causal, window=pattern.window, softmax_scale=scaling)
    # Padded rows of causal models are not sent. Without causality, the mask may be of other rows than Q's.
    q_columns = torch.ones(batch, rows, dtype=torch.bool)
    if layer is not None:
        if not pattern.causal:
            raise invalid("cache", "with bidirectional attention", "causal models")
        q_columns, packed = layer.attend(q, k, v, pattern.columns, options)
    else:
        k_columns = pattern.columns
        if pattern.causal or pattern.window:
            q_columns = k_columns[:, -rows:]
        asking = q_columns.any(1)
        k, v = (x[:, :, :k_columns.shape[1]][asking] for x in (k, v))
        packed = _service.attend_columns(default_client(), q[asking], k, v, q_columns[asking],
                                         k_columns[asking], **options) if asking.any() else q.new_empty(0)
    output = query.new_zeros(batch, rows, heads, head_dim)
    if packed.numel() > 0:
        output[q_columns.to(output.device)] = packed.to(output)
    return output, None


def _check(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, dropout: float,
           kwargs: dict[str, Any]) -> torch.dtype:
    """Refuses what the service lacks. Returns the dtype to compute in."""
    for name, why in _REFUSED.items():
        if kwargs.get(name) is not None:
            raise invalid(name, "is set by this model or call", f"None: the service has {why}")
    if kwargs.get("output_attentions"):
        raise invalid("output_attentions", True, "False: the service does not return attention weights")
    if dropout:
        raise invalid("dropout", dropout, "0: call model.eval()")
    if torch.is_grad_enabled() and (query.requires_grad or key.requires_grad or value.requires_grad):
        raise invalid("query", "requires a gradient",
                      "inference, under torch.no_grad(): there is no backward pass")
    if value.shape != key.shape:
        raise invalid("value", f"has shape {list(value.shape)}", f"the same as key, {list(key.shape)}")
    dtype = _dtype or query.dtype
    if dtype not in (torch.float16, torch.bfloat16):
        raise invalid("dtype", dtype, "torch.float16, torch.bfloat16: load the model with "
                      "dtype=torch.bfloat16, or register(dtype=torch.bfloat16) to round Q, K and V")
    return dtype


class FlashCoreCache(Cache):
    """A cache of transformers whose K/V is on the server: one sequence for each member of the batch, without
    its padding. A context manager that deletes them; so does its garbage collection, and the server after
    idle_timeout seconds without use (0: the server's limit).

    config: the model's. The sequences are created at the first step, on one device. Beams and copies
    (copy.deepcopy, fork) share memory; crop truncates. Sliding-window layers keep all rows and attend to the
    window. For one thread at a time. After a step that failed, crop(-rows of that step) or close.

    Raises InvalidArgument for layers that are not of attention or share K/V; FailedPrecondition if the model
    was loaded with another attn_implementation.
    """

    def __init__(self, config: PreTrainedConfig, client: Client | None = None, *,
                 idle_timeout: float = 0) -> None:
        text = config.get_text_config(decoder=True)
        others = set(getattr(text, "layer_types", None) or ()).difference(_LAYER_TYPES)
        if others or getattr(text, "kv_sharing_modes", None) or getattr(text, "num_kv_shared_layers", 0):
            kinds = ", ".join(sorted(others)) or "layers that share K/V"
            raise invalid("config", f"has {kinds}",
                          f"layers of {', '.join(_LAYER_TYPES)} with K/V of their own")
        self._config, self._client, self._idle_timeout = config, client, idle_timeout
        self._sequences: list[Sequence] = []  # by member of the batch
        self._columns = torch.ones(0, 0, dtype=torch.bool)  # [batch, positions]: those that are no padding
        super().__init__(layers=[_Layer(self, index) for index in range(text.num_hidden_layers)])
        weakref.finalize(self, _delete, self._sequences).atexit = False

    def __enter__(self) -> "FlashCoreCache":
        return self

    def __exit__(self, *_: Any) -> None:
        self.close()

    def __deepcopy__(self, _: Any) -> "FlashCoreCache":
        return self.fork()

    @property
    def sequences(self) -> list[Sequence]:
        """The sequence of each member of the batch; empty before the first step."""
        return list(self._sequences)

    def close(self) -> None:
        """Deletes the sequences. The cache is then empty, for any batch."""
        _delete(self._sequences)
        self._columns = torch.ones(0, 0, dtype=torch.bool)
        for layer in self.layers:
            layer.length = 0

    reset = close

    def fork(self) -> "FlashCoreCache":
        """A cache with the same content, which shares the memory on the server: a prompt is stored once."""
        copy = FlashCoreCache(self._config, self._client, idle_timeout=self._idle_timeout)
        copy._sequences += self._forks(range(len(self._sequences)))
        copy._columns = self._columns
        for mine, its in zip(self.layers, copy.layers):
            its.length = mine.length
        return copy

    def _forks(self, parents: Iterable[int]) -> list[Sequence]:
        """Forks of the sequences at these indices: all, or none."""
        parents = list(parents)
        if not parents:
            return []
        try:
            return list(SequenceBatch(self._sequences).fork(parents, idle_timeout=self._idle_timeout))
        except BatchError as error:
            _delete([made for made in error.results if made is not None])
            raise

    def crop(self, tokens_to_remove: int) -> None:
        """Drops the last -tokens_to_remove positions; 0: none."""
        length = self.get_seq_length() + tokens_to_remove
        if tokens_to_remove > 0 or length < 0:
            raise invalid("tokens_to_remove", tokens_to_remove, f"{-self.get_seq_length()} to 0")
        if tokens_to_remove == 0:
            return
        self._columns = self._columns[:, :length]
        for sequence, rows in zip(self._sequences, self._columns.sum(1).tolist()):
            if max(sequence.lengths) > rows:
                sequence.truncate(rows)
        for layer in self.layers:
            layer.length = min(layer.length, length)

    def reorder_cache(self, beam_idx: torch.Tensor) -> None:
        self.batch_select_indices(beam_idx)

    def batch_repeat_interleave(self, repeats: int) -> None:
        self.batch_select_indices(torch.arange(len(self._sequences)).repeat_interleave(repeats))

    def batch_select_indices(self, indices: torch.Tensor) -> None:
        """Makes member i of the batch what member indices[i] was."""
        if not self._sequences:
            return
        if indices.dtype == torch.bool:
            indices = indices.nonzero()[:, 0]
        chosen = indices.tolist()
        again = [index for place, index in enumerate(chosen) if index in chosen[:place]]
        forks = iter(self._forks(again))
        after = [next(forks) if index in chosen[:place] else self._sequences[index]
                 for place, index in enumerate(chosen)]
        dropped = [sequence for index, sequence in enumerate(self._sequences) if index not in chosen]
        self._sequences[:] = after
        self._columns = self._columns[chosen]
        _delete(dropped)

    def new_columns(self, columns: torch.Tensor, past: int, rows: int) -> torch.Tensor:
        """Notes the columns of the whole cache after a step. Returns those of its `rows` new positions: bool
        [batch, rows]."""
        known = self._columns[:, :past]
        if known.numel() > 0 and not torch.equal(columns[:, :past], known):
            raise invalid("attention_mask", "differs for positions that are in the cache",
                          "the mask of the steps before, and new positions")
        self._columns = columns[:, :past + rows]
        return columns[:, past:past + rows]

    def members(self, key: torch.Tensor) -> list[Sequence]:
        """The sequences, for K of [batch, kv_heads, rows, head_dim]."""
        batch, kv_heads, _, head_dim = key.shape
        client = self._client or default_client()
        device_id = ""
        while len(self._sequences) < batch and self._columns.shape[1] == key.shape[2]:
            sequence = client.create_sequence(len(self.layers), kv_heads, head_dim, dtype=key.dtype,
                                              device_id=device_id, idle_timeout=self._idle_timeout)
            self._sequences.append(sequence)
            device_id = sequence.device_id
        if len(self._sequences) != batch:
            raise invalid("cache", f"has a batch of {len(self._sequences)}", f"that of the call, {batch}")
        return self._sequences


class _Layer(CacheLayerMixin):
    """A layer of a FlashCoreCache, as transformers sees it. It has no keys and values."""

    supports_early_init = False
    is_croppable = True

    def __init__(self, cache: Any, index: int) -> None:
        self._cache = weakref.ref(cache)
        self._index = index
        self.length = 0  # positions, padding included

    @property
    def cache(self) -> Any:
        cache = self._cache()
        assert cache is not None
        return cache

    @property
    def is_initialized(self) -> bool:
        return self.length > 0

    def lazy_initialization(self, key_states: torch.Tensor, value_states: torch.Tensor) -> None:
        pass

    def update(self, key_states: torch.Tensor, value_states: torch.Tensor, *_: Any,
               **__: Any) -> tuple[torch.Tensor, torch.Tensor]:
        """Returns the new rows alone. The attention function, called next, appends them in its request."""
        lengths = {layer.length for layer in self.cache.layers[self._index:]}
        if len(lengths) > 1:
            raise FailedPrecondition("cache: a step before failed between layers; crop(-rows of that step)")
        _handover.put(self, key_states)
        return key_states, value_states

    def attend(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, columns: torch.Tensor,
               options: dict[str, Any]) -> tuple[torch.Tensor, torch.Tensor]:
        """Appends the step's rows and attends, in one request. columns: of the whole cache after the step,
        bool [batch, positions]. Returns those of the step, and their packed rows [rows, heads, head_dim]."""
        columns = self.cache.new_columns(columns, self.length, k.shape[2])
        sequences = self.cache.members(k)
        packed = q.new_empty(0)
        asking = [sequence for sequence, asks in zip(sequences, columns.any(1).tolist()) if asks]
        if asking:
            ends = _service.offsets(columns[columns.any(1)])
            client = self.cache._client or default_client()
            packed = client.attend_batch(asking, self._index, *(_service.pack(x, columns) for x in (q, k, v)),
                                         cu_seqlens_q=ends, cu_seqlens_k=ends, **options)
        self.length += k.shape[2]
        return columns, packed

    def get_seq_length(self) -> int:
        return self.length

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return self.length + query_length, 0

    def get_max_length(self) -> int:
        return -1


class PackedCache(Cache):
    """For one forward pass over rows of many sequences, of the caller: what continuous batching is made of.

        model(input_ids, position_ids=positions, cache=PackedCache(sequences, rows))

    input_ids, positions: [1, sum(rows)], without attention_mask: the new tokens of each sequence, one after
    the other, and their places in it. rows: how many each has, at least 1. The pass appends their K/V and
    attends, in one request a layer. If it fails, truncate the sequences to their lengths before it.
    The sequences have the layers, K/V heads and head_dim of the model. They stay the caller's.
    """

    def __init__(self, sequences: Iterable[Sequence], rows: Iterable[int],
                 client: Client | None = None) -> None:
        self.sequences, self.offsets = list(sequences), [0, *itertools.accumulate(rows)]
        self.client = client
        if not self.sequences:
            raise invalid("sequences", "none", "at least one")
        super().__init__(layers=[_PackedLayer(self, index) for index in range(self.sequences[0].shape[0])])


class _PackedLayer(_Layer):
    """Has no length of its own: each sequence has one."""

    def update(self, key_states: torch.Tensor, value_states: torch.Tensor, *_: Any,
               **__: Any) -> tuple[torch.Tensor, torch.Tensor]:
        _handover.put(self, key_states)
        return key_states, value_states

    def attend(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, columns: torch.Tensor,
               options: dict[str, Any]) -> tuple[torch.Tensor, torch.Tensor]:
        packed = self.cache
        client = packed.client or default_client()
        return columns, client.attend_batch(
            packed.sequences, self._index, *(_service.pack(x, columns) for x in (q, k, v)),
            cu_seqlens_q=packed.offsets, cu_seqlens_k=packed.offsets, **options).to(q.device)


def _delete(sequences: list[Sequence]) -> None:
    """Empties the list. What cannot be deleted now expires."""
    with contextlib.suppress(Exception):
        SequenceBatch(sequences).delete()
    sequences.clear()
