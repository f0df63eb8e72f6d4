"""Tokens and TLS files, and where they may go: the rules of the C++ client, client/cpp/security.cc."""

import dataclasses
import ipaddress
import os
import re
import select
import threading
import time
from typing import Callable

from .errors import InvalidArgument, invalid

_MOST_FILE_BYTES = 1 << 20
_MOST_TOKEN_BYTES = 4096
_TOKEN = f"1 to {_MOST_TOKEN_BYTES} printable ASCII characters without spaces"
_PIPE_SECONDS = 1.0  # for a pipe's writer to begin
_PEM_LINE = re.compile(rb"^-----(BEGIN|END) (.+)-----\s*$", re.MULTILINE)
_DIGESTS = re.compile(r"[^:]*:[^:]{64}:[^:]*")  # a line of the server's --token_file

Token = str | Callable[[], str]


@dataclasses.dataclass(frozen=True)
class Tls:
    """TLS 1.2 or 1.3. The files are PEM: checked by connect, and read when the client connects."""

    ca_file: str | None = None  # that the server's certificate must be of; None: those that gRPC trusts
    cert_file: str | None = None  # of this client, with its key_file; None: none
    key_file: str | None = None  # without a password
    server_name: str | None = None  # that the server's certificate is for; None: the target's host

    def read(self) -> tuple[bytes | None, bytes | None, bytes | None]:
        """The CA's certificates, and this client's key and certificate."""
        return (_read_pem(self.ca_file, b"CERTIFICATE"), _read_pem(self.key_file, b"PRIVATE KEY"),
                _read_pem(self.cert_file, b"CERTIFICATE"))


def check_token(token: object) -> str:
    """The token, if it can be sent. Errors do not show it."""
    if not isinstance(token, str):
        raise invalid("token", f"a {type(token).__name__}", f"a str, or a function of one: {_TOKEN}")
    bad = next((i for i, character in enumerate(token) if not "!" <= character <= "~"), None)
    if bad is not None:
        raise invalid("token", f"{token[bad]!r} at index {bad}", _TOKEN)
    if not 0 < len(token) <= _MOST_TOKEN_BYTES:
        raise invalid("token", f"{len(token)} characters", _TOKEN)
    return token


class TokenFile:
    """The token in the first line of a file, read again at most once a second. While the file cannot be used,
    the token stays as it was. Thread-safe."""

    def __init__(self, path: str, now: Callable[[], float] = time.monotonic) -> None:
        self._path, self._now = path, now
        self._lock = threading.Lock()
        self._token, self._read = _read_token(path), now()

    def __call__(self) -> str:
        with self._lock:
            now = self._now()
            if now >= self._read + 1:
                self._read = now
                try:
                    self._token = _read_token(self._path)
                except InvalidArgument:
                    pass
            return self._token


def stays_on_host(target: str) -> bool:
    """Whether what is sent to the target stays on this host, whatever a name resolves to."""
    if target.startswith(("unix:", "unix-abstract:")):
        return True
    addresses = target.removeprefix("ipv4:").removeprefix("ipv6:")
    return all(_is_loopback(address.rpartition(":")[0].strip("[]")) for address in addresses.split(","))


def uses_http_proxy(target: str, tls: Tls | None, asked: bool) -> bool:
    """Whether connections may go through a proxy of the environment: only if asked for, with TLS, and not to
    an address of this host."""
    if target.startswith("dns:"):
        target = target.removeprefix("dns:").removeprefix("///")
    return asked and tls is not None and not stays_on_host(target)


def _is_loopback(host: str) -> bool:
    try:
        return host == "localhost" or ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def _read_token(path: str) -> str:
    line = _read_text(path).partition(b"\n")[0].strip().decode("latin-1")
    try:
        token = check_token(line)
    except InvalidArgument as error:
        raise InvalidArgument(f"{path}: {error.message}, in its first line") from None
    if _DIGESTS.fullmatch(token):
        raise invalid(path, "a list of digests, which the server's --token_file takes", "a token")
    return token


def _read_pem(path: str | None, what: bytes) -> bytes | None:
    """`what`: the end of the label of a block that it must have."""
    if not path:
        return None
    text = _read_text(path)
    label, found = None, False  # of the block that is not at its end
    for kind, name in _PEM_LINE.findall(text):
        if kind == b"BEGIN":
            label = name
        elif name == label:
            label, found = None, found or name.endswith(what)
    if label is not None:
        raise invalid(path, f"ends before END {label.decode('latin-1')}", "a whole file")
    if not found:
        raise invalid(path, f"no BEGIN {what.decode()}", "PEM")
    return text


def _read_text(path: str) -> bytes:
    """The text in a file of this user, which is small."""
    try:
        text = _read_bytes(path)
    except (OSError, ValueError) as error:
        raise invalid(path, f"cannot be read: {getattr(error, 'strerror', None) or error}",
                      "a file that this process may read") from None
    if len(text) > _MOST_FILE_BYTES:
        raise invalid(path, "larger than that", f"{_MOST_FILE_BYTES} bytes")
    if text.startswith(b"\xef\xbb\xbf"):
        raise invalid(path, "begins with a byte order mark", "ASCII without one")
    if b"\0" in text or text.startswith((b"\xff\xfe", b"\xfe\xff")):
        raise invalid(path, "has bytes of UTF-16, or zeros", "ASCII")
    return text


def _read_bytes(path: str) -> bytes:
    """All of a file, or more than _MOST_FILE_BYTES of it."""
    data = b""
    # A pipe without a writer is at its end.
    file = os.open(path, os.O_RDONLY | getattr(os, "O_NONBLOCK", 0))
    try:
        while len(data) <= _MOST_FILE_BYTES:
            try:
                some = os.read(file, 1 << 16)
            except BlockingIOError:
                if select.select([file], [], [], _PIPE_SECONDS)[0]:
                    continue
                raise
            if not some:
                break
            data += some
    finally:
        os.close(file)
    return data
