"""Caches of flashcore.transformers: the K/V of a generation, on the server."""

import contextlib
import weakref
from typing import Any, Hashable, Iterable, Literal, NamedTuple

import torch
from transformers import PreTrainedConfig
from transformers.cache_utils import Cache, CacheLayerMixin, get_layer_types_and_kwargs

from . import _transformers_models as _models
from ._device_step import DeviceStep, step_on_gpu
from ._packing import Packer, Packing, whole
from ._transformers_mask import RESET, Opaque, Pattern, Window, no_padding
from ._transformers_unread import Unread
from .client import Client, Plan, Sequence, SequenceBatch, default_client
from .errors import BatchError, FailedPrecondition, invalid

_LAYER_TYPES = ("full_attention", "sliding_attention")


class Rows(Opaque):
    """The K or V of a step on its way from the cache to the attention function. content: a HandedOver."""

    WHY = ("cache", "the model computes with K and V of its cache itself",
           f"models that give them to transformers' attention interface; load the model with "
           f'attn_implementation="{_models.NAME}", or use a DynamicCache')


class HandedOver(NamedTuple):
    layer: "Layer"
    tensor: torch.Tensor


class Step:
    """A step of the layers that have one mask, scale, and shape of Q and of K: what is the same for all. Its
    tensors go through host memory."""

    def __init__(self, packing: Packing, plan: Plan[Literal[False]] | None, dtype: torch.dtype,
                 q: torch.Tensor, k: torch.Tensor) -> None:
        self._packing, self._plan = packing, plan  # None: all rows are padding
        self._packer = Packer(packing, dtype, q, k, k)

    def attend(self, layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        """Appends K and V and attends, in one request. Returns [batch, rows, heads, head_dim] like q."""
        if self._plan is None:
            return q.new_zeros(q.shape[0], q.shape[2], q.shape[1], q.shape[3])
        query, key, value = self._packer.pack(q, k, v)
        output = self._plan.run(layer, query.array, key.array, value.array)
        return self._packing.unpack(output, query, q)


class FlashCoreCache(Cache):
    """A cache of transformers whose K/V is on the server: one sequence for each member of the batch, without
    its padding. A context manager that deletes them; so does its garbage collection, and the server after
    idle_timeout seconds without use (0: the server's limit).

    config: the model's. client: None is that of flashcore.set_default_client, now; the cache stays with it.
    The sequences are created at the first step, on one device. Beams and copies (copy.deepcopy, fork) share
    memory; crop truncates. Sliding-window layers keep all rows and attend to the window. For one thread at a
    time. After a step that failed, whichever layer failed, crop(-rows of that step) or close.

    Raises InvalidArgument for models that do not ask transformers' attention interface, for layers that are
    not of attention or share K/V, and in the first step of a model with another attn_implementation.
    """

    layers: list["Layer"]  # type: ignore[assignment]

    def __init__(self, config: PreTrainedConfig, client: Client | None = None, *,
                 idle_timeout: float = 0) -> None:
        _models.check_config(config)
        text = config.get_text_config(decoder=True)
        kinds, options = get_layer_types_and_kwargs(text)
        others = set(kinds).difference(_LAYER_TYPES)
        if others or getattr(text, "num_kv_shared_layers", None):
            raise invalid("config", f"has {', '.join(sorted(others)) or 'layers that share K/V'}",
                          f"layers of {', '.join(_LAYER_TYPES)} with K/V of their own")
        self.client = client or default_client()
        self._config, self._idle_timeout = config, idle_timeout
        self._sequences: list[Sequence] = []  # by member of the batch
        self._columns = no_padding(0, 0)  # bool [batch, positions]: those that are no padding
        self._padded = False  # some are
        self._noted = False  # _columns has those of the step that has begun, with its mask
        self._unread = Unread()
        self._begun: tuple[int, int] | None = None  # positions before a step that has not ended, and its rows
        self.steps: dict[Hashable, Step | DeviceStep] = {}  # of this step, by what they are made of
        super().__init__(layers=[Layer(self, index, option.get("sliding_window"))
                                 for index, option in enumerate(options)])
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
        self._columns, self._padded, self._begun = no_padding(0, 0), False, None
        self._unread = Unread()
        for layer in self.layers:
            layer.length = 0

    reset = close

    def fork(self) -> "FlashCoreCache":
        """A cache with the same content, which shares the memory on the server: a prompt is stored once."""
        self._unread.check(wait=True)
        copy = FlashCoreCache(self._config, self.client, idle_timeout=self._idle_timeout)
        copy._sequences += self._forks(range(len(self._sequences)))
        copy._columns, copy._padded, copy._begun = self._columns, self._padded, self._begun
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
        """Drops the last -tokens_to_remove positions; 0: none. After a step that failed, its rows count,
        whatever it appended of them."""
        before, rows = self._begun or (self.get_seq_length(), 0)
        length = before + rows + tokens_to_remove
        if tokens_to_remove == 0:
            return
        if not 0 <= length <= before or tokens_to_remove > 0:
            raise invalid("tokens_to_remove", tokens_to_remove,
                          f"{-before - rows} to {-rows}, 0" + (", after a step that failed" if rows else ""))
        self._unread.check(wait=True)
        self._unread = Unread()
        self._columns = self._columns[:, :length]
        for sequence, kept in zip(self._sequences, self._columns.sum(1).tolist()):
            if self._begun or max(sequence.lengths) > kept:
                sequence.truncate(kept)
        for layer in self.layers:
            layer.length = min(layer.length, length)
        self._begun = None

    def reorder_cache(self, beam_idx: torch.Tensor) -> None:
        self.batch_select_indices(beam_idx)

    def batch_repeat_interleave(self, repeats: int) -> None:
        self.batch_select_indices(torch.arange(len(self._sequences)).repeat_interleave(repeats))

    def batch_select_indices(self, indices: Any) -> None:
        """Makes member i of the batch what member indices[i] was. indices: what torch takes for one axis: a
        tensor or list of integers, negative ones from the end, or of bools, or a slice."""
        members = torch.arange(len(self._sequences))
        if not self._sequences:
            return
        try:
            if not isinstance(indices, slice):
                indices = torch.as_tensor(indices, device="cpu")
                indices = indices if indices.numel() else indices.long()  # torch makes float32 of []
            chosen = members[indices].tolist()
        except (IndexError, TypeError, ValueError, RuntimeError) as error:
            raise invalid("indices", f"{indices} ({error})",
                          f"of {len(members)} members of the batch") from None
        if not isinstance(chosen, list) or not all(isinstance(index, int) for index in chosen):
            raise invalid("indices", indices, f"of one axis, of {len(members)} members of the batch")
        self._unread.check(wait=True)
        self._unread = Unread()
        again = [index for place, index in enumerate(chosen) if index in chosen[:place]]
        forks = iter(self._forks(again))
        after = [next(forks) if index in chosen[:place] else self._sequences[index]
                 for place, index in enumerate(chosen)]
        dropped = [sequence for index, sequence in enumerate(self._sequences) if index not in chosen]
        self._sequences[:] = after
        self._columns = self._columns[chosen]
        _delete(dropped)

    def begin(self, layer: int, rows: int) -> None:
        """Notes that a step of `rows` rows has come to a layer."""
        step = self.layers[layer].length, rows
        if layer == 0 or step != self._begun:
            if len({other.length for other in self.layers[layer:]}) > 1:
                raise FailedPrecondition("cache: a step before failed between layers; crop(-rows of that "
                                         "step)")
            self._begun, self._noted = step, False
            self.steps.clear()

    def end(self, layer: int, rows: int) -> None:
        """Notes that a layer has done a step."""
        self.layers[layer].length += rows
        if layer + 1 == len(self.layers):
            self._begun = None
            self.steps.clear()

    def new_rows(self, pattern: Pattern, batch: int, past: int, rows: int) -> Packing:
        """Notes the columns of the whole cache after a step. Returns the packing of its `rows` new
        positions."""
        if pattern.length != past + rows:
            raise invalid("attention_mask", f"is for {pattern.length} positions",
                          f"for {past + rows}: {past} that are in the cache, and the step's")
        if pattern.mask is None and (past == 0 or not self._padded and len(self._columns) == batch):
            self._columns, self._padded = no_padding(batch, past + rows), False
            return whole(batch, rows)
        if self._noted and pattern.mask is not None and self._unread.again(pattern.mask):
            pattern.check(self._columns)
            return Packing(self._columns[:, past:])
        known = self._columns[:, :past]
        if past and rows == 1 and self._unread.take(pattern.mask):
            columns = torch.cat([known, no_padding(batch, 1)], 1)
        else:
            columns = pattern.columns.expand(batch, -1)
            if known.numel() > 0 and not torch.equal(columns[:, :past], known):
                raise invalid("attention_mask", "differs for positions that are in the cache",
                              "the mask of the steps before, and new positions" + RESET)
            self._padded = not bool(columns.all())
            self._unread.known(pattern.mask)
        pattern.check(columns)
        self._columns, self._noted = columns, True
        return Packing(columns[:, past:])

    @property
    def columns(self) -> torch.Tensor:
        """bool [batch, positions]: those that are no padding, also of the step that has begun."""
        return self._columns

    def members(self, key: torch.Tensor, dtype: torch.dtype) -> list[Sequence]:
        """The sequences, for K of [batch, kv_heads, rows, head_dim]. New ones have this dtype."""
        batch, kv_heads, _, head_dim = key.shape
        device_id = self._sequences[0].device_id if self._sequences else ""
        while len(self._sequences) < batch and self._columns.shape[1] == key.shape[2]:
            sequence = self.client.create_sequence(len(self.layers), kv_heads, head_dim, dtype=dtype,
                                                   device_id=device_id, idle_timeout=self._idle_timeout)
            self._sequences.append(sequence)
            device_id = sequence.device_id
        if len(self._sequences) != batch:
            raise invalid("cache", f"has a batch of {len(self._sequences)}",
                          f"that of the call, {batch}{RESET}")
        return self._sequences


class Layer(CacheLayerMixin):
    """A layer of a FlashCoreCache, as transformers sees it. It has no keys and values."""

    supports_early_init = False
    is_croppable = True

    def __init__(self, cache: Any, index: int, window: int | None = None) -> None:
        self._cache = weakref.ref(cache)
        self._index = index
        self._window = window  # of the config
        self.length = 0  # positions, padding included

    def __deepcopy__(self, _: Any) -> "Layer":
        raise invalid("cache", "the model adds layers of its own to it", "a DynamicCache for this model")

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

    @torch.compiler.disable
    def update(self, key_states: torch.Tensor, value_states: torch.Tensor, *_: Any,
               **__: Any) -> tuple[torch.Tensor, torch.Tensor]:
        """Returns the new rows alone. The attention function, called next, appends them in its request."""
        self.cache.begin(self._index, key_states.shape[2])
        return self.hand_over(key_states), self.hand_over(value_states)

    def hand_over(self, rows: torch.Tensor) -> Rows:
        return Rows(rows.shape, rows.dtype, rows.device, HandedOver(self, rows))

    def attend(self, pattern: Pattern, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, dtype: torch.dtype,
               scale: float | None) -> torch.Tensor:
        """Appends the step's rows, rounded to `dtype`, and attends, in one request. pattern: causal, of the
        whole cache after the step. Returns [batch, rows, heads, head_dim] like q, 0 in padded rows."""
        cache = self.cache
        key = pattern, q.shape, k.shape, q.device, dtype, scale, self._window
        step = cache.steps.get(key)
        if step is None:
            step = cache.steps[key] = self._step(pattern, q, k, dtype, scale)
        output = step.attend(self._index, q, k, v)
        cache.end(self._index, k.shape[2])
        return output

    def _step(self, pattern: Pattern, q: torch.Tensor, k: torch.Tensor, dtype: torch.dtype,
              scale: float | None) -> Step | DeviceStep:
        packing, plan = self._plan(pattern, q, k, dtype, scale)
        found = None if plan is None else step_on_gpu(self.cache.client, plan, packing, dtype, q, k)
        return found or Step(packing, plan, dtype, q, k)

    def _plan(self, pattern: Pattern, q: torch.Tensor, k: torch.Tensor, dtype: torch.dtype,
              scale: float | None) -> tuple[Packing, Plan[Literal[False]] | None]:
        """None: all rows are padding."""
        cache, rows = self.cache, k.shape[2]
        packing = cache.new_rows(pattern, len(q), self.length, rows)
        window = pattern.window or self._hidden_window(cache.columns, rows)
        asking = [(sequence, count)
                  for sequence, count in zip(cache.members(k, dtype), packing.counts) if count]
        if not asking:
            return packing, None
        sequences, counts = zip(*asking)
        return packing, cache.client.plan(sequences, num_heads=q.shape[1], query_rows=counts, causal=True,
                                          window=window, softmax_scale=scale)

    def _hidden_window(self, columns: torch.Tensor, rows: int) -> Window | None:
        """For a model like Moshi, whose masks have no window: transformers' cache for its config would drop
        the rows before it, after each step."""
        size = self._window
        if size is None or self.length == 0 or self.length + rows <= size:
            return None
        if rows > 1 or (columns[:, :-size].any(1) & ~columns[:, -size:].all(1)).any():
            raise invalid("cache", f"a step of {rows} rows, or padding between tokens, beyond the window of "
                          f"{size} that the config has and the mask has not",
                          "one row at a time; a DynamicCache")
        return size - 1, 0

    def get_seq_length(self) -> int:
        return self.length

    @property  # type: ignore
    def keys(self) -> Any:  # type: ignore
        raise Rows.refuse("keys of a layer")

    @property  # type: ignore
    def values(self) -> Any:  # type: ignore
        raise Rows.refuse("values of a layer")

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
    The sequences have the layers, K/V heads and head_dim of the model. They stay the caller's. client: None
    is that of flashcore.set_default_client, now.
    """

    def __init__(self, sequences: Iterable[Sequence], rows: Iterable[int],
                 client: Client | None = None) -> None:
        self.sequences, self.rows = list(sequences), list(rows)
        if not self.sequences:
            raise invalid("sequences", "none", "at least one")
        self.client = client or default_client()
        self.steps: dict[Hashable, Step | DeviceStep] = {}
        super().__init__(layers=[PackedLayer(self, index) for index in range(self.sequences[0].shape[0])])

    def begin(self, layer: int, rows: int) -> None:
        if layer == 0:
            self.steps.clear()

    def end(self, layer: int, rows: int) -> None:
        if layer + 1 == len(self.layers):
            self.steps.clear()


class PackedLayer(Layer):
    """Has no length of its own: each sequence has one."""

    def _plan(self, pattern: Pattern, q: torch.Tensor, k: torch.Tensor, dtype: torch.dtype,
              scale: float | None) -> tuple[Packing, Plan[Literal[False]] | None]:
        cache, packing = self.cache, Packing(pattern.columns)
        rows, asked = sum(cache.rows), sum(packing.counts)
        plan = cache.client.plan(cache.sequences, num_heads=q.shape[1], query_rows=cache.rows, causal=True,
                                 window=pattern.window, softmax_scale=scale)
        if rows != asked:
            raise invalid("rows", f"are {rows} together", f"the {asked} rows of the call")
        return packing, plan


def _delete(sequences: list[Sequence]) -> None:
    """Empties the list. A sequence that cannot be deleted now expires."""
    with contextlib.suppress(Exception):
        SequenceBatch(sequences).delete()
    sequences.clear()
