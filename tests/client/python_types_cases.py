"""Type checkers' verdicts on calls. Not run: python_types_test.py has mypy --strict read it, and pyright."""

from collections.abc import Sequence as Items
from typing import Union

import flashcore
import numpy as np
from flashcore.messages import GetServerInfoResponse, SequenceInfo
from numpy.typing import NDArray
from typing_extensions import assert_type

F16 = NDArray[np.float16]
F32 = NDArray[np.float32]


class TorchTensor:
    """A tensor of any framework but numpy: one type for all dtypes."""

    def __dlpack_device__(self) -> tuple[int, int]:
        return 1, 0


def blocking(x: F16, t: TorchTensor, lse: F32, flag: bool) -> None:
    client = flashcore.connect("127.0.0.1:7070")
    assert_type(client.attend(x, x, x, causal=True), F16)
    assert_type(client.attend(x, x, x, return_lse=True), tuple[F16, F32])
    assert_type(client.attend(t, t, t), TorchTensor)
    assert_type(client.attend(t, t, t, return_lse=True), tuple[TorchTensor, TorchTensor])
    assert_type(client.attend(x, x, x, return_lse=flag), Union[F16, tuple[F16, F16]])
    assert_type(client.server_info(), GetServerInfoResponse)
    assert_type(client.server_info().limits.head_dims, Items[int])
    assert_type(client.list_sequences(), list[SequenceInfo])

    sequence = client.create_sequence(num_layers=2, num_kv_heads=8, head_dim=64)
    assert_type(sequence, flashcore.Sequence)
    assert_type(sequence.append(0, x, x), int)
    assert_type(sequence.attend(0, x, x, x), F16)
    assert_type(sequence.attend(0, t, return_lse=True), tuple[TorchTensor, TorchTensor])
    assert_type(sequence.fork(), flashcore.Sequence)
    assert_type(sequence.info(), SequenceInfo)
    assert_type(client.attend_batch([sequence], 0, x, return_lse=True), tuple[F16, F32])

    batch = client.create_sequences(2, 2, num_kv_heads=8, head_dim=64)
    assert_type(batch[0], flashcore.Sequence)
    assert_type(batch[:1], flashcore.SequenceBatch)
    assert_type([one for one in batch], list[flashcore.Sequence])
    assert_type(batch.attend(0, x, x, x), F16)
    assert_type(batch.info(), list[SequenceInfo])

    assert_type(client.plan(batch, num_heads=8).run(0, x, x, x), F16)
    assert_type(client.plan(batch, num_heads=8, return_lse=True).run(0, x, x, x), tuple[F16, F32])
    assert_type(client.plan([sequence], num_heads=8, return_lse=True).run(0, t),
                tuple[TorchTensor, TorchTensor])
    assert_type(client.plan(batch, num_heads=8, return_lse=flag).run(0, x), Union[F16, tuple[F16, F16]])
    assert_type(flashcore.merge(x, lse, x, lse), tuple[F16, F32])
    assert_type(flashcore.merge(t, t, t, t), tuple[TorchTensor, TorchTensor])

    assert_type(flashcore.flash_attn_varlen_func(x, x, x, [0, 1], [0, 1], 1, 1), F16)
    assert_type(flashcore.flash_attn_varlen_func(x, x, x, [0, 1], [0, 1], 1, 1, return_attn_probs=True),
                tuple[F16, F32, None])
    assert_type(flashcore.flash_attn_with_kvcache(x, batch.layer(0), None), F16)
    assert_type(flashcore.flash_attn_with_kvcache(t, batch.layer(0), None, return_softmax_lse=True),
                tuple[TorchTensor, TorchTensor])


async def asynchronous(x: F16, t: TorchTensor) -> None:
    client = flashcore.aio.connect("127.0.0.1:7070")
    assert_type(await client.attend(x, x, x), F16)
    assert_type(await client.attend(x, x, x, return_lse=True), tuple[F16, F32])
    assert_type(await client.server_info(), GetServerInfoResponse)
    batch = await client.create_sequences(2, 2, num_kv_heads=8, head_dim=64)
    assert_type(batch[0], flashcore.aio.Sequence)
    assert_type(batch[:1], flashcore.aio.SequenceBatch)
    assert_type(await batch.attend(0, t, return_lse=True), tuple[TorchTensor, TorchTensor])
    assert_type(await batch[0].attend(0, x), F16)
    assert_type(await batch[0].info(), SequenceInfo)
    assert_type(await client.attend_batch(batch, 0, x), F16)
    assert_type(await client.plan(batch, num_heads=8).run(0, x, x, x), F16)
    assert_type(await client.plan(batch, num_heads=8, return_lse=True).run(0, x), tuple[F16, F32])


def wrong(client: flashcore.Client, batch: flashcore.SequenceBatch, x: F16) -> None:
    """A checker that did not refuse one of these would report its comment."""
    client.attend([1.0], x, x)  # type: ignore[call-overload]
    client.attend(x, x, x, casual=True)  # type: ignore[call-overload]
    client.plan(batch)  # type: ignore[call-overload]
    client.plan(batch, num_heads="8")  # type: ignore[call-overload]
    client.plan(batch, num_heads=8).run(0)  # type: ignore[call-overload]
    client.server_info().versoin  # type: ignore[attr-defined]
    batch["0"]  # type: ignore[call-overload]
