"""Client of FlashCore: attention as a service.

    with flashcore.connect("127.0.0.1:7070") as client:
        o = client.attend(q, k, v, causal=True)

`flashcore.aio` has the same calls for asyncio.
"""

__version__ = "0.1.0"

from . import aio, messages
from ._flash_attn import flash_attn_varlen_func, flash_attn_with_kvcache
from ._requests import merge
from ._transport import Retry, Tls
from .client import Client, Plan, Sequence, SequenceBatch, connect, set_default_client
from .errors import (Aborted, BatchError, Cancelled, DeadlineExceeded, Error, FailedPrecondition, Internal,
                     InvalidArgument, KvFull, LengthMismatch, MessageTooLarge, NotFound, PermissionDenied,
                     QueueFull, QuotaExceeded, ResourceExhausted, SequenceLost, StagingFull, Unauthenticated,
                     Unavailable, Unimplemented)

__all__ = [
    "Aborted", "BatchError", "Cancelled", "Client", "DeadlineExceeded", "Error", "FailedPrecondition",
    "Internal", "InvalidArgument", "KvFull", "LengthMismatch", "MessageTooLarge", "NotFound",
    "PermissionDenied", "Plan", "QueueFull", "QuotaExceeded", "ResourceExhausted", "Retry", "Sequence",
    "SequenceBatch", "SequenceLost", "StagingFull", "Tls", "Unauthenticated", "Unavailable", "Unimplemented",
    "aio", "connect", "flash_attn_varlen_func", "flash_attn_with_kvcache", "merge", "messages",
    "set_default_client",
]
