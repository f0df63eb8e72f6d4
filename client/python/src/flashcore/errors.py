"""The errors that calls raise: one class for each cause that a caller may want to tell apart."""

import contextlib
import pickle
import re
from typing import Any, Mapping

from google.protobuf.message import DecodeError
from grpc import StatusCode

from . import _messages

Status = _messages.message("Status")
_ErrorInfo = _messages.message("ErrorInfo")
_ERROR_INFO = "type.googleapis.com/google.rpc.ErrorInfo"
_CODES = {code.value[0]: code for code in StatusCode}


class Error(Exception):
    """A call failed. `code` is a grpc.StatusCode; `message` is the server's, or says what this library
    refuses. `reason` and `metadata`: of the ErrorInfo that came with it, for programs; empty if none came."""

    code = StatusCode.UNKNOWN
    reason = ""

    def __init__(self, message: str, code: StatusCode | None = None, reason: str = "",
                 metadata: Mapping[str, str] | None = None) -> None:
        super().__init__(message)
        self.message = message
        self.code = code or self.code
        self.reason = reason or self.reason
        self.metadata: dict[str, str] = dict(metadata or {})

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
    """The named object does not exist."""

    code = StatusCode.NOT_FOUND


class SequenceLost(NotFound):
    """Sequences were deleted, have expired, were evicted, or the server restarted: create them and load their
    K/V again. See `on_lost` of flashcore.connect."""

    @property
    def lost(self) -> int:
        """How many sequences of the request are lost, at least one."""
        return int(self.metadata.get("lost", max(1, len(self.sequence_ids))))

    @property
    def sequence_ids(self) -> list[bytes]:
        """The first 128 that are lost; empty if the server does not say."""
        return [bytes.fromhex(text) for text in _split(self.metadata.get("sequence_ids"))]

    @property
    def spans(self) -> list[int]:
        """Their places among the sequences of the request; empty if the server does not say."""
        return [int(text) for text in _split(self.metadata.get("spans"))]


class FailedPrecondition(Error):
    """The state of the server, or of this client, does not allow the call."""

    code = StatusCode.FAILED_PRECONDITION


class LengthMismatch(FailedPrecondition):
    """The sequence has `actual` rows and not `expected`. Nothing changed: see Sequence.info and
    Sequence.truncate."""

    reason = "LENGTH_MISMATCH"

    @property
    def expected(self) -> int:
        return int(self.metadata["expected"])

    @property
    def actual(self) -> int:
        return int(self.metadata["actual"])


class ResourceExhausted(Error):
    """A queue, memory or a limit of this client is full, or a message is too large: wait, or ask for less."""

    code = StatusCode.RESOURCE_EXHAUSTED


class KvFull(ResourceExhausted):
    """The K/V memory of the server is full: delete or truncate sequences, or wait until others do."""


class QueueFull(ResourceExhausted):
    """The server has too much work: wait."""


class StagingFull(ResourceExhausted):
    """The server's memory for tensors in flight is full: wait, or send less at once."""


class QuotaExceeded(ResourceExhausted):
    """A limit of this client: metadata["limit"] is its name among the server's limits."""


class MessageTooLarge(ResourceExhausted):
    """The message is too large, and no waiting helps: send less at once. Sequence.load sends K/V in parts."""

    @property
    def retryable(self) -> bool:
        return False


class Unavailable(Error):
    """The server drains or cannot be reached."""

    code = StatusCode.UNAVAILABLE


class DeadlineExceeded(Error, TimeoutError):
    """The timeout passed. The rows may have been appended: call again with the same rows."""

    code = StatusCode.DEADLINE_EXCEEDED


class Cancelled(Error):
    code = StatusCode.CANCELLED


class Aborted(Error):
    """Not tried, because an earlier operation on the same sequence failed."""

    code = StatusCode.ABORTED


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


class BatchError(Error):
    """Some items of a SequenceBatch call failed; the others took effect. Its code is that of the first.

    errors: the Error of each item that failed, by its index: see Error.refused. results: [items], what the
    call would have returned for each, None where it failed. So sequences that were made are in `results`.
    Pickled, it has the repr of results that cannot leave the process, such as sequences; their ids are in it.
    """

    def __init__(self, errors: Mapping[int, Error], results: list[Any]) -> None:
        listed = "; ".join(f"{i}: {error}" for i, error in list(errors.items())[:3])
        super().__init__(f"{len(errors)} of {len(results)} items failed: {listed}"
                         f"{'; ...' if len(errors) > 3 else ''}", next(iter(errors.values())).code)
        self.errors = dict(errors)
        self.results = results

    def __reduce__(self) -> tuple[Any, ...]:
        return _rebuilt, (type(self), self.args, dict(vars(self), results=list(map(_sendable, self.results))))

    def __copy__(self) -> "BatchError":
        return _rebuilt(type(self), self.args, vars(self))

    def __deepcopy__(self, _: Any) -> "BatchError":
        return self.__copy__()  # its results are this process's, which are not copied

    @property
    def refused(self) -> bool:
        return False


def _rebuilt(kind: type[BatchError], args: tuple[Any, ...], state: dict[str, Any]) -> BatchError:
    error = kind.__new__(kind, *args)
    vars(error).update(state)
    return error


def _sendable(result: Any) -> Any:
    try:
        pickle.dumps(result)
        return result
    except Exception:  # whatever its class raises
        return repr(result)


_NOT_REACHED = re.compile("failed to connect|DNS resolution failed", re.IGNORECASE)
# For servers that send no details.
_LENGTHS = re.compile(r"expected_length: (?P<expected>\d+); the sequence has (?P<actual>\d+) rows")
# gRPC refuses messages by itself, in words of its own.
_TOO_LARGE = re.compile(r"message larger than max \((?P<needed_bytes>\d+) vs\.? (?P<limit_bytes>\d+)\)")
_REFUSED = (InvalidArgument, NotFound, FailedPrecondition, ResourceExhausted, Aborted, PermissionDenied,
            Unauthenticated, Unimplemented)
_REFUSALS = {kind.code for kind in _REFUSED}
_BY_CODE: dict[StatusCode, type[Error]] = {
    kind.code: kind for kind in (*_REFUSED, Unavailable, DeadlineExceeded, Cancelled, Internal)}
_BY_REASON: dict[str, type[Error]] = {
    "QUEUE_FULL": QueueFull, "STAGING_FULL": StagingFull, "KV_FULL": KvFull, "QUOTA_EXCEEDED": QuotaExceeded,
    "TOO_LARGE": MessageTooLarge, "SEQUENCE_LOST": SequenceLost, "LENGTH_MISMATCH": LengthMismatch}


def invalid(name: str, found: object, allowed: str) -> InvalidArgument:
    """This library's error about argument `name`, before it sends anything."""
    return InvalidArgument(f"{name}: {found}; allowed: {allowed}")


def length_mismatch(message: str, expected: int, actual: int) -> LengthMismatch:
    return LengthMismatch(message, metadata={"expected": str(expected), "actual": str(actual)})


def too_large(needed: int, limit: int) -> MessageTooLarge:
    return MessageTooLarge(
        f"the message has {needed} bytes; allowed: {limit}, the server's --max_message_bytes: send fewer "
        f"rows at once; Sequence.load sends K/V in parts", reason="TOO_LARGE",
        metadata={"needed_bytes": str(needed), "limit_bytes": str(limit)})


def no_thread(error: BaseException, why: str = "") -> ResourceExhausted:
    """For the exception of a thread that did not start; `why`: what needs it."""
    return ResourceExhausted(f"{why}cannot make a thread: {error}; the limits are pids.max of the control "
                             f"group, and ulimit -u, -s and -v")


def from_rpc(code: StatusCode, message: str | None, trailing: Any) -> Error:
    """The error for the status of an RPC; `trailing`: its metadata, pairs or None."""
    status = Status(code=code.value[0], message=message or "")
    for key, value in trailing or ():
        if key == "grpc-status-details-bin":
            with contextlib.suppress(DecodeError):
                status.details.extend(Status.FromString(value).details)
    return from_status(status)


def from_status(status: Any) -> Error:
    """The error for a Status message. On this library's calls, NOT_FOUND without a reason is about a
    sequence."""
    code, message = _CODES.get(status.code, StatusCode.UNKNOWN), status.message
    reason, metadata = "", {}
    for detail in status.details:
        if detail.type_url == _ERROR_INFO:
            info = _ErrorInfo.FromString(detail.value)
            reason, metadata = info.reason, dict(info.metadata)
    kind = _BY_REASON.get(reason, _BY_CODE.get(code, Error))
    if not reason and kind is NotFound:
        kind = SequenceLost
    if not reason and kind is FailedPrecondition and (lengths := _LENGTHS.search(message)):
        kind, metadata = LengthMismatch, lengths.groupdict()
    if not reason and kind is ResourceExhausted and (sizes := _TOO_LARGE.search(message)):
        return too_large(int(sizes["needed_bytes"]), int(sizes["limit_bytes"]))
    if kind is LengthMismatch and not {"expected", "actual"} <= metadata.keys():
        kind = FailedPrecondition
    return kind(message, code, reason, metadata)


def _split(text: str | None) -> list[str]:
    return [part for part in (text or "").split(",") if part]
