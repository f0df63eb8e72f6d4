"""Many sequences of one shape, in asyncio: see flashcore.aio."""

import contextlib
from typing import Any, Callable, Iterable, Iterator, SupportsIndex, overload

from . import _messages
from ._arguments import UINT64, integer, integers, shown
from ._requests import Attention
from ._sequence import HasSequence, Sequence, common_shape, cores_of, fork_options, rows_text
from ._signatures import AsyncSequencesAttend, typed_as
from ._tensors import Tensor
from ._terms import terms_of
from .errors import Aborted, BatchError, Error, LengthMismatch, NotFound, SequenceLost, from_status, invalid
from .messages import SequenceInfo

_Operation = _messages.message("SequenceOperation")
_MOST_SEQUENCES = 1 << 20  # that one call makes: more is a mistake, which would take memory here
_MOST_RESULT_BYTES = 256 << 10  # of one reply to ManageSequences


class SequenceBatch:
    """Sequences of one shape, dtype, kv_dtype and device, such as the beams of a search. A context manager
    that deletes them. batch[i] is a Sequence, batch[i:j] a SequenceBatch of the same Sequences.

    Its calls on all sequences are one RPC, or several beyond limits.max_sequence_operations. Each sequence
    succeeds or fails by itself: BatchError says which failed and has the results of the others. Another Error
    means that no result is known. Forks are repeated only if no server was reached.
    """

    def __init__(self, sequences: Iterable[HasSequence]) -> None:
        self.cores = list(cores_of(sequences))
        if self.cores:
            common_shape(self.cores, 0)

    @property
    def core(self) -> "SequenceBatch":
        return self

    @property
    def client(self) -> Any:
        if not self.cores:
            raise invalid("sequences", "none", "at least one")
        return self.cores[0].client

    @property
    def lengths(self) -> list[list[int]]:
        """Rows of each layer of each sequence, as far as these objects know."""
        return [core.lengths for core in self.cores]

    def __repr__(self) -> str:
        if not self.cores:
            return "<flashcore batch of no sequences>"
        return (f"<flashcore batch of {len(self.cores)} sequences: {rows_text(self.cores)}, "
                f"{self.cores[0].shape_text()}>")

    def __len__(self) -> int:
        return len(self.cores)

    def __iter__(self) -> Iterator[Sequence]:
        return iter([core.outer for core in self.cores])

    @overload
    def __getitem__(self, index: SupportsIndex) -> Sequence: ...

    @overload
    def __getitem__(self, index: slice) -> "SequenceBatch": ...

    def __getitem__(self, index: Any) -> Any:
        if isinstance(index, slice):
            return type(self)(self.cores[index])
        return self.cores[index].outer

    async def __aenter__(self) -> "SequenceBatch":
        return self

    async def __aexit__(self, *_: Any) -> None:
        await self.delete()

    def layer(self, layer: int) -> "Layer":
        """One layer of the sequences, for flashcore.flash_attn_with_kvcache."""
        return Layer(self, layer)

    @typed_as(AsyncSequencesAttend)
    async def attend(self, layer: int, q: Tensor, k: Tensor | None = None, v: Tensor | None = None, *,
                     return_lse: bool = False, cu_seqlens_q: Any = None, cu_seqlens_k: Any = None,
                     layout: str = "NHD", timeout: float | None = None, **terms: Any) -> Attention:
        """Client.attend_batch of these sequences."""
        asked = terms_of("SequenceBatch.attend", return_lse, terms)
        return await self.client.step(self.cores, layer, q, k, v, cu_seqlens_q, cu_seqlens_k, asked, layout,
                                      timeout)

    async def fork(self, parents: Iterable[int] | None = None, *, counts: Iterable[int] | None = None,
                   length: int | None = None, pin: bool = False, shared: bool = False, group: str = "",
                   idle_timeout: float = 0, timeout: float | None = None) -> "SequenceBatch":
        """A new batch of forks: of the sequences at the indices `parents`, in this order; or as many of each
        sequence as `counts` says; or one of each. Options are those of Sequence.fork."""
        if counts is not None:
            if parents is not None:
                raise invalid("counts", "given with parents", "one of the two")
            numbers = integers("counts", counts)
            if (len(numbers) != len(self.cores) or min(numbers, default=0) < 0
                    or sum(numbers) > _MOST_SEQUENCES):
                raise invalid("counts", shown(numbers), f"{len(self.cores)} numbers, each at least 0, "
                              f"together at most {_MOST_SEQUENCES}")
            parents = [i for i, count in enumerate(numbers) for _ in range(count)]
        chosen = range(len(self.cores)) if parents is None else self._indices(parents)
        options = fork_options(length, pin, shared, group, idle_timeout)
        deadline = self.client.deadline(timeout)
        options["lease_id"] = await self.client.lease_id(deadline)
        cores = [self.cores[i] for i in chosen]
        results = await self._manage(
            cores, lambda: [dict(fork=dict(options, sequence_id=core.id)) for core in cores], False, deadline)
        return _made(self.client, results)

    async def reorder(self, parents: Iterable[int], *, timeout: float | None = None) -> None:
        """A step of beam search: sequence i of this batch becomes what sequence parents[i] was. Sequences
        that are chosen several times are forked, with their options; those that are not chosen are deleted,
        and others just move: one RPC, or none. parents may have more or fewer items than the batch.

        After a BatchError the batch has the sequences that are there, in their new order without those that
        failed. `errors` and `results` go by `parents`; sequences that could not be deleted follow.
        """
        chosen = self._indices(parents)
        places: dict[int, int] = {}  # parent -> where its own object goes: its own place, if it can
        for place, parent in enumerate(chosen):
            if parent not in places or place == parent:
                places[parent] = place
        deadline = self.client.deadline(timeout)
        forks = [place for place, parent in enumerate(chosen) if places[parent] != place]
        dropped = [core for i, core in enumerate(self.cores) if i not in places]
        order: list[Any] = [self.cores[parent] if places[parent] == place else None
                            for place, parent in enumerate(chosen)]
        lease = await self.client.lease_id(deadline) if forks else b""
        operations = [dict(fork=dict(self.cores[chosen[place]].options(), lease_id=lease)) for place in forks]
        operations += [dict(delete=dict(sequence_id=core.id)) for core in dropped]
        errors: dict[int, Error] = {}
        if operations:
            results = await manage(self.client, operations, self.cores[0].num_layers, deadline,
                                   repeatable=not forks)
            for place, result in zip(forks, results):
                if isinstance(result, Error):
                    errors[place] = result
                else:
                    order[place] = Sequence(self.client, result)
            failed = [(core, result) for core, result in zip(dropped, results[len(forks):])
                      if isinstance(result, Error) and not isinstance(result, NotFound)]
        else:
            failed = []
        self.cores[:] = [core for core in order if core is not None]  # in place: plans see it
        if errors or failed:
            errors.update({len(chosen) + i: error for i, (_, error) in enumerate(failed)})
            order += [core for core, _ in failed]
            raise BatchError(errors, [core and core.outer for core in order])

    async def truncate(self, lengths: int | Iterable[int], *, timeout: float | None = None) -> None:
        """Sequence.truncate of each: to one length, or to a length for each."""
        each = (integers("lengths", lengths) if isinstance(lengths, Iterable) else
                [integer("lengths", lengths, 0, UINT64)] * len(self.cores))
        if len(each) != len(self.cores) or min(each, default=0) < 0:
            raise invalid("lengths", each, f"{len(self.cores)} lengths, each at least 0")
        deadline = self.client.deadline(timeout)

        def operations() -> list[dict]:
            return [dict(truncate=dict(sequence_id=core.id, length=length,
                                       expected_length=core.certain_length()))
                    for core, length in zip(self.cores, each)]

        safe = all(core.certain_length() is not None for core in self.cores)
        results = await self._manage(self.cores, operations, safe, deadline)
        for i, (core, length) in enumerate(zip(self.cores, each)):
            if isinstance(results[i], LengthMismatch):  # an attempt whose reply was lost may have done it
                with contextlib.suppress(Error):
                    info = await self.client.sequence_info(core.id, deadline)
                    if set(info.layer_lengths) == {length}:
                        results[i] = info
        self._adopt(results)

    async def delete(self, *, timeout: float | None = None) -> None:
        """Deletes the sequences. That one is gone already is no error."""
        operations = [dict(delete=dict(sequence_id=core.id)) for core in self.cores]
        if operations:
            deadline = self.client.deadline(timeout)
            results = await manage(self.client, operations, self.cores[0].num_layers, deadline,
                                   repeatable=True)
            _raise_failed([None if isinstance(result, NotFound) else result for result in results])

    async def info(self, *, timeout: float | None = None) -> list[SequenceInfo]:
        """The SequenceInfo message of each. `lengths` are then those of the server."""
        results = await self._manage(
            self.cores, lambda: [dict(get=dict(sequence_id=core.id)) for core in self.cores], True,
            self.client.deadline(timeout))
        self._adopt(results)
        return results

    async def _manage(self, cores: list[Sequence], operations: Callable[[], list[dict]], repeatable: bool,
                      deadline: float) -> list[Any]:
        """The results of one operation on each of `cores`. Those that are lost are restored as on_lost
        says."""
        if not cores:
            return []
        ids = [core.id for core in cores]
        results = await manage(self.client, operations(), cores[0].num_layers, deadline, repeatable)
        for i, (core, result) in enumerate(zip(cores, results)):
            restored = isinstance(result, SequenceLost) and await self.client.reload([core], [ids[i]], result)
            # Operations after a failure on the same sequence were not tried.
            if restored or isinstance(result, Aborted) and core.id != ids[i]:
                again = await manage(self.client, [operations()[i]], core.num_layers, deadline, repeatable)
                results[i] = again[0]
        return results

    def _adopt(self, results: list[Any]) -> None:
        for core, result in zip(self.cores, results):
            if not isinstance(result, Error):
                core.adopt(result)
        _raise_failed(results)

    def _indices(self, parents: Iterable[int]) -> list[int]:
        chosen = integers("parents", parents)
        if not chosen or not all(0 <= parent < len(self.cores) for parent in chosen):
            raise invalid("parents", chosen, f"at least one index, each from 0 to {len(self.cores) - 1}")
        return chosen


class Layer:
    """A layer of a SequenceBatch."""

    def __init__(self, batch: Any, layer: int) -> None:
        common_shape(batch.core.cores, layer)
        self.batch, self.index = batch, int(layer)

    def __repr__(self) -> str:
        return f"<layer {self.index} of {self.batch}>"


async def create_batch(client: Any, n: int, num_layers: int, fields: dict, deadline: float) -> SequenceBatch:
    """n sequences on one device."""
    n, num_layers = integer("n", n, 1, _MOST_SEQUENCES), integer("num_layers", num_layers, 1)
    fields = dict(fields, num_layers=num_layers, lease_id=await client.lease_id(deadline))
    made: list[Any] = []
    if not fields["device_id"] and n > 1 and len((await client.known_info(deadline)).devices) > 1:
        # Each server chooses a device for each sequence: the first one decides.
        made = [await client.make("CreateSequence", fields, deadline)]
        fields["device_id"] = made[0].device_id
    try:
        made += await manage(client, [dict(create=fields)] * (n - len(made)), num_layers, deadline)
    except Error as error:
        if not made:
            raise
        made += [error] * (n - len(made))
    return _made(client, made)


async def manage(client: Any, operations: list[dict], num_layers: int, deadline: float,
                 repeatable: bool = False) -> list[Any]:
    """For each operation a SequenceInfo (after delete an empty one), or the Error. Raises an Error if the
    first RPC as a whole fails; of a later one, it is the result of all its operations."""
    limits = (await client.known_info(deadline)).limits
    # The reply has at most 256 KiB of SequenceInfo: 192 bytes and 8 bytes a layer.
    at_once = max(1, min(limits.max_sequence_operations or 1, _MOST_RESULT_BYTES // (192 + 8 * num_layers)))
    results: list[Any] = []
    while len(results) < len(operations):
        some = operations[len(results):len(results) + at_once]
        try:
            reply = await client.call("ManageSequences", dict(operations=[_Operation(**one) for one in some]),
                                      deadline, repeatable=repeatable, on_sequence=True)
        except Error as error:
            if not results:
                raise
            results.extend([error] * (len(operations) - len(results)))
            break
        results.extend(from_status(result.status) if result.status.code else result.sequence
                       for result in reply.results)
    return results


def _made(client: Any, results: list[Any]) -> SequenceBatch:
    """The batch of new sequences, from their SequenceInfo or Error."""
    made: list[Any] = [result if isinstance(result, Error) else Sequence(client, result)
                       for result in results]
    _raise_failed(made)
    return SequenceBatch(made)


def _raise_failed(results: list[Any]) -> None:
    errors = {i: result for i, result in enumerate(results) if isinstance(result, Error)}
    if errors:
        raise BatchError(errors, [None if i in errors else getattr(result, "outer", result)
                                  for i, result in enumerate(results)])
