"""What calls raise: one class for each status code that a caller may want to tell apart."""

import re
from grpc import StatusCode


class Error(Exception):
    """A call failed. `code` is a grpc.StatusCode; `message` is the server's, or says what this library
    refuses."""

    code = StatusCode.UNKNOWN

    def __init__(self, message: str, code: StatusCode | None = None) -> None:
        super().__init__(message)
        self.message = message
        if code is not None:
            self.code = code

    def __str__(self) -> str:
        return f"{self.code.name}: {self.message}"

    @property
    def retryable(self) -> bool:
        """Whether the same call may succeed later. That it is safe to repeat is another matter."""
        return self.code in (StatusCode.UNAVAILABLE, StatusCode.RESOURCE_EXHAUSTED)

    @property
    def refused(self) -> bool:
        """Whether the call had no effect for certain. Otherwise it may have taken effect."""
        return self.code in _REFUSALS or self.never_sent

    @property
    def never_sent(self) -> bool:
        """Whether no server was reached."""
        return self.code is StatusCode.UNAVAILABLE and _NOT_REACHED.search(self.message) is not None


class InvalidArgument(Error, ValueError):
    """An argument does not fit: the message has its name, its value and what is allowed."""

    code = StatusCode.INVALID_ARGUMENT


class NotFound(Error):
    """What the call names does not exist."""

    code = StatusCode.NOT_FOUND


class SequenceLost(NotFound):
    """The sequence was deleted, has expired, was evicted, or the server restarted: create it and load its K/V
    again."""


class FailedPrecondition(Error):
    """The state of the server, or of this client, does not allow the call."""

    code = StatusCode.FAILED_PRECONDITION


class LengthMismatch(FailedPrecondition):
    """The sequence has `actual` rows and not `expected`. Nothing changed: see Sequence.info and
    Sequence.truncate."""

    def __init__(self, message: str) -> None:
        super().__init__(message)
        self.expected, self.actual = map(int, _LENGTHS.search(message).groups())  # type: ignore[union-attr]


class ResourceExhausted(Error):
    """A queue, memory or a limit of this client is full, or a message is too large: wait, or ask for less."""

    code = StatusCode.RESOURCE_EXHAUSTED


class Unavailable(Error):
    """The server drains or cannot be reached."""

    code = StatusCode.UNAVAILABLE


class DeadlineExceeded(Error, TimeoutError):
    """The timeout passed. What was to be appended may have been appended: call again with the same rows."""

    code = StatusCode.DEADLINE_EXCEEDED


class Cancelled(Error):
    code = StatusCode.CANCELLED


class PermissionDenied(Error):
    """A change of a sequence that is only shared for reading: fork it. Or a group without this client."""

    code = StatusCode.PERMISSION_DENIED


class Unauthenticated(Error):
    """The server asks for a token or a certificate, and no valid one came."""

    code = StatusCode.UNAUTHENTICATED


class Unimplemented(Error, NotImplementedError):
    """This server or this library lacks what was asked."""

    code = StatusCode.UNIMPLEMENTED


class Internal(Error):
    """The device failed, or a reply does not fit its request."""

    code = StatusCode.INTERNAL


_NOT_REACHED = re.compile("failed to connect|DNS resolution failed", re.IGNORECASE)
_LENGTHS = re.compile(r"expected_length: (\d+); the sequence has (\d+) rows")
_REFUSED = (InvalidArgument, SequenceLost, FailedPrecondition, ResourceExhausted, PermissionDenied,
            Unauthenticated, Unimplemented)
_REFUSALS = {kind.code for kind in _REFUSED}
_BY_CODE = {kind.code: kind for kind in
            (*_REFUSED, Unavailable, DeadlineExceeded, Cancelled, Internal)}


def invalid(name: str, found: object, allowed: str) -> InvalidArgument:
    """What this library says about argument `name` before it sends anything."""
    return InvalidArgument(f"{name}: {found}; allowed: {allowed}")


def from_status(code: StatusCode, message: str) -> Error:
    """The error for the status of an RPC. Of what this library calls, NOT_FOUND is about a sequence."""
    kind: type[Error] = _BY_CODE.get(code, Error)
    if kind is FailedPrecondition and _LENGTHS.search(message):
        kind = LengthMismatch
    return Error(message, code) if kind is Error else kind(message)
