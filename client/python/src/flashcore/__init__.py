"""Client of FlashCore: attention as a service.

    with flashcore.connect("127.0.0.1:7070") as client:
        o = client.attend(q, k, v, causal=True)

`flashcore.aio` has the same calls for asyncio.
"""

__version__ = "0.1.0"

from . import aio
from ._requests import merge
from ._transport import Retry, Tls
from .client import Client, Sequence, connect
from .errors import (Cancelled, DeadlineExceeded, Error, FailedPrecondition, Internal, InvalidArgument,
                     LengthMismatch, NotFound, PermissionDenied, ResourceExhausted, SequenceLost,
                     Unauthenticated, Unavailable, Unimplemented)

__all__ = [
    "Cancelled", "Client", "DeadlineExceeded", "Error", "FailedPrecondition", "Internal", "InvalidArgument",
    "LengthMismatch", "NotFound", "PermissionDenied", "ResourceExhausted", "Retry", "Sequence",
    "SequenceLost", "Tls", "Unauthenticated", "Unavailable", "Unimplemented", "aio", "connect", "merge",
]
