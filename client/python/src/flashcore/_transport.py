"""The connection to a server: its configuration, the rule for retries, and gRPC, blocking or in asyncio."""

import asyncio
import ctypes
import dataclasses
import functools
import math
import numbers
import os
import random
import secrets
import threading
import time
import warnings
import weakref
from typing import Any, Mapping

import grpc
import grpc.aio

from . import _messages
from ._credentials import Tls, Token, TokenFile, check_token, stays_on_host, uses_http_proxy
from ._requests import Request
from ._target import check as check_target
from .errors import (DeadlineExceeded, Error, FailedPrecondition, Internal, ResourceExhausted, from_rpc,
                     invalid, no_thread, too_large)

DEFAULT_TARGET = "127.0.0.1:7070"
_RECONNECT_MS = 500  # at most, between two attempts of gRPC to connect
_NOT_RESOLVED = "DNS resolution failed"  # words of gRPC
_CONNECTION_WAIT = 0.7  # seconds: longer than that with gRPC's jitter, 1.2 times
LOCAL = "local:"
_YEAR = 365 * 24 * 3600


_CLIENT = "FLASHCORE_CLIENT_"
# Variables of this prefix: the clients', and of the server's flags --client_kv_bytes and so on.
_KNOWN = {*(f"TLS_{field.name.upper()}" for field in dataclasses.fields(Tls)), "TOKEN_FILE",
          "KV_BYTES", "SEQUENCES", "STAGING_BYTES"}


@functools.lru_cache(maxsize=None)
def _warn_once(variable: str) -> None:
    """Warns of a misspelt one, which would leave a client without a token or TLS."""
    warnings.warn(f"flashcore: unknown environment variable {variable}; known: TLS_CA_FILE, TLS_CERT_FILE, "
                  f"TLS_KEY_FILE, TLS_SERVER_NAME and TOKEN_FILE after {_CLIENT}", stacklevel=4)


def seconds_of(timeout: Any, allowed: str, at_least_zero: bool = False) -> float:
    """Checks an argument `timeout`. Infinity: no limit, which more than a year is, too."""
    if not isinstance(timeout, numbers.Real) or isinstance(timeout, bool):
        raise invalid("timeout", repr(timeout), allowed)
    number: Any = timeout
    try:
        seconds = float(number)
    except OverflowError:
        seconds = math.inf if number > 0 else -math.inf
    if not seconds > 0 and not (at_least_zero and seconds == 0):
        raise invalid("timeout", repr(timeout), allowed)
    return math.inf if seconds > _YEAR else seconds


@dataclasses.dataclass(frozen=True)
class Retry:
    """Repeats calls that end with UNAVAILABLE and are safe to repeat, and those that reached no server, until
    the timeout. Before attempt n + 1 it waits min(initial * 2^(n-1), longest) seconds, times a random number
    in [1/2, 1]; never past the timeout, and less where a connection comes first."""

    attempts: int | None = None  # 1: no repetition; None: as many as the timeout allows
    initial: float = 0.05
    longest: float = 0.5

    def __post_init__(self) -> None:
        attempts = self.attempts
        if attempts is not None and not (isinstance(attempts, numbers.Integral) and attempts >= 1):
            raise invalid("attempts", repr(attempts), "a number, at least 1; None for as many as fit")
        for name, value in (("initial", self.initial), ("longest", self.longest)):
            if not isinstance(value, numbers.Real) or not value > 0:
                raise invalid(name, repr(value), "seconds, more than 0")

    def wait(self, error: Error, attempt: int, repeatable: bool, left: float, uniform: float) -> float | None:
        """Seconds to wait before the attempt after `attempt`, which ended with `error`; None: it was the
        last. `left`: seconds of the timeout. `uniform`: a random number in [0, 1]."""
        may_repeat = error.code is grpc.StatusCode.UNAVAILABLE and (repeatable or error.never_sent)
        may_repeat &= self.attempts is None or attempt < self.attempts
        seconds = min(self.initial * 2.0 ** min(attempt - 1, 64), self.longest) * (1 + uniform) / 2
        return seconds if may_repeat and seconds < left else None


@dataclasses.dataclass(frozen=True)
class Config:
    """The arguments of flashcore.connect, completed from the environment."""

    target: str
    tls: Tls | None
    token: Token | None = dataclasses.field(repr=False)
    timeout: float  # seconds; infinity: none
    client_name: str | None
    retry: Retry
    affinity: str  # of all sequences of the client, for a proxy in front of several servers
    http_proxy: bool = False  # connections go through the proxy of the environment

    @classmethod
    def read(cls, target: str | None, tls: Tls | bool | None, token: Token | None, timeout: float | None,
             client_name: str | None, retry: Retry | None,
             environment: Mapping[str, str] = os.environ, http_proxy: bool = False) -> "Config":
        name = "target" if target is not None else "FLASHCORE_TARGET"
        given = environment.get("FLASHCORE_TARGET") or DEFAULT_TARGET if target is None else target
        target = check_target(name, given)
        for variable in sorted(environment):
            if variable.startswith(_CLIENT) and variable.removeprefix(_CLIENT) not in _KNOWN:
                _warn_once(variable)
        local = target.startswith(LOCAL)
        for name, value in (("tls", tls), ("token", token)):
            if local and value is not None and value is not False:  # do not show a token
                raise invalid(name, f"given for {target}", "neither: who calls is the user of this process")
        if local:
            environment = {}  # what it has is for other targets
        if tls is None or tls is True:
            files = Tls(**{field.name: environment.get(f"{_CLIENT}TLS_{field.name.upper()}") or None
                           for field in dataclasses.fields(Tls)})
            tls = files if tls or files != Tls() else None
        if target.startswith(("unix:", "unix-abstract:")):
            tls = None  # servers take none there
        if tls and bool(tls.cert_file) != bool(tls.key_file):
            raise invalid("tls", tls, "both of cert_file and key_file, or neither")
        token_file = environment.get(f"{_CLIENT}TOKEN_FILE")
        if token is None and token_file:
            token = TokenFile(token_file)
        if token is not None and not callable(token):
            check_token(token)
        if not isinstance(http_proxy, bool):
            raise invalid("http_proxy", repr(http_proxy), "True, for the proxy of the environment, or False")
        if http_proxy and not tls and not local and not stays_on_host(target):
            raise invalid("http_proxy", f"True for {target} in plaintext", "with TLS")
        if token is not None and not tls and not stays_on_host(target):
            raise invalid("token", f"would go to {target} in plaintext",
                          "with TLS, to a loopback address, or over a Unix socket")
        seconds = math.inf if timeout is None else seconds_of(
            timeout, "seconds, more than 0; None or infinity for no limit")
        return cls(target, tls or None, token, seconds, client_name,
                   retry or Retry(), secrets.token_hex(8), uses_http_proxy(target, tls or None, http_proxy))

    def metadata(self, on_sequence: bool) -> list[tuple[str, str]]:
        """Metadata of one call. The token is read anew for each."""
        pairs = []
        if self.token is not None:
            token = self.token() if callable(self.token) else self.token
            pairs.append(("authorization", f"Bearer {check_token(token)}"))
        if self.client_name:
            pairs.append(("flashcore-client", self.client_name))
        if on_sequence:
            pairs.append(("x-flashcore-sequence", self.affinity))
        return pairs


class _Transport:
    """A channel that opens with the first call, in the process that makes it. Thread-safe."""

    _open_ones: "weakref.WeakSet[_Transport]" = weakref.WeakSet()  # of this process
    _grpc_process = 0  # the one that has used gRPC; 0: none

    def __init__(self, config: Config, module: Any) -> None:
        if config.tls:
            config.tls.read()
        self._config = config
        self._module = module  # grpc or grpc.aio
        self._lock = threading.Lock()
        self._channel: Any = None
        self._calls: dict[str, Any] = {}
        self._process = 0
        self._closed = False
        self.max_message_bytes = math.inf  # of a request; set by the client once it knows the server's
        self._lease: Any = None  # the call that holds it
        self._unreached = False  # the last call found no connection

    now = staticmethod(time.monotonic)
    uniform = staticmethod(random.random)

    def check_here(self) -> None:
        """Raises FailedPrecondition where this cannot be used. Before any lock is taken: in a child that was
        forked, locks may be those of the parent's threads. A connection's threads do not survive a fork."""
        if self._process not in (0, os.getpid()):
            raise FailedPrecondition(f"this client belongs to process {self._process}, from which process "
                                     f"{os.getpid()} was forked: connect after the fork, or start processes "
                                     f"with multiprocessing's 'spawn'")

    def _opens(self) -> None:
        """This process has a connection from now on."""
        self._process = os.getpid()
        self._open_ones.add(self)

    @classmethod
    def keep_the_parents(cls) -> None:
        """In a child: nothing here may close what is the parent's, not even the interpreter when it ends."""
        for transport in list(cls._open_ones):
            ctypes.pythonapi.Py_IncRef(ctypes.py_object(transport))
        cls._open_ones.clear()

    def streams(self, deadline: float) -> Any:
        """The requests on CUDA streams, of which none has failed. Only of local: targets."""
        raise invalid("target", self._config.target, "with tensors on a GPU 'local:/path', of a server with "
                      "--local_device_tensors on this host; else pass tensors in host memory, q.cpu()")

    def synchronize(self, deadline: float) -> None:
        """Waits until all requests on CUDA streams are answered. Raises the errors of earlier ones."""

    def _call(self, method: str) -> Any:
        """The multicallable of a method."""
        self.check_here()
        with self._lock:
            if self._closed:
                raise closed()
            if self._channel is None:
                _check_grpc()
                self._channel = self._open()
                self._opens()
            if method not in self._calls:
                kind = dict(LoadSequence="stream_unary", HoldLease="unary_stream").get(method, "unary_unary")
                make = getattr(self._channel, kind)
                self._calls[method] = make(f"/{_messages.SERVICE}/{method}",
                                           response_deserializer=_messages.METHODS[method][1].FromString)
            return self._calls[method]

    def _open(self) -> Any:
        from . import __version__
        tls = self._config.tls
        options = [
            # gRPC would refuse replies over 4 MiB; the server's limit is the one that holds.
            ("grpc.max_receive_message_length", -1), ("grpc.max_send_message_length", -1),
            # A server that is back is found within half a second, also under a new address of its name; gRPC
            # would wait for up to two minutes.
            ("grpc.initial_reconnect_backoff_ms", 100), ("grpc.max_reconnect_backoff_ms", _RECONNECT_MS),
            ("grpc.dns_min_time_between_resolutions_ms", _RECONNECT_MS),
            ("grpc.primary_user_agent", f"flashcore-python/{__version__}"),
        ]
        if not self._config.http_proxy:
            # By itself gRPC calls loopback and plaintext addresses through the proxy of $http_proxy, too.
            options += [("grpc.enable_http_proxy", 0), ("grpc.address_http_proxy_enabled_addresses", "")]
        if tls is None:
            return self._module.insecure_channel(self._config.target, options=options)
        if tls.server_name:
            options.append(("grpc.ssl_target_name_override", tls.server_name))
        credentials = grpc.ssl_channel_credentials(*tls.read())
        return self._module.secure_channel(self._config.target, credentials, options=options)

    def _prepare(self, method: str, request: Any, left: float, on_sequence: bool) -> tuple[Any, tuple, dict]:
        if left <= 0:
            raise DeadlineExceeded(f"{method}: the timeout passed before it was sent")
        if isinstance(request, Request):
            request = request.inline()
        data = request.SerializeToString()
        if len(data) > self.max_message_bytes:
            raise too_large(len(data), int(self.max_message_bytes))
        endless = left == math.inf or method == "HoldLease"
        return self._call(method), (iter([data]) if method == "LoadSequence" else data,), dict(
            timeout=None if endless else left, metadata=self._config.metadata(on_sequence))

    def _failed(self, error: Error) -> Any:
        """Notes how a call failed. Returns the channel to close, or None: gRPC looks up a name
        that did not resolve again after up to two minutes, a new channel at once."""
        self._unreached = error.never_sent
        if not error.never_sent or _NOT_RESOLVED not in error.message:
            return None
        with self._lock:
            channel, self._channel, self._calls = self._channel, None, {}
            return channel

    def _forget(self) -> Any:
        """Ends calls. Returns the channel to close; None if there is none, or if it is another process's."""
        if self._process not in (0, os.getpid()):
            return None
        with self._lock:
            self._closed = True
            return self._channel


def _check_grpc() -> None:
    """gRPC has no threads in a child, and waits there on descriptors that are the parent's: a call hangs, and
    takes events from calls of the parent."""
    if _Transport._grpc_process not in (0, os.getpid()):
        raise FailedPrecondition(f"process {os.getpid()} was forked from process {_Transport._grpc_process}, "
                                 f"which has used gRPC, and gRPC does not survive a fork: make the first "
                                 f"call after the fork, use 'local:/path', or start processes with "
                                 f"multiprocessing's 'spawn'")
    if _Transport._grpc_process == 0:
        _check_room()
    _Transport._grpc_process = os.getpid()


def _check_room() -> None:
    """gRPC opens files and makes threads with its first channel. Where it can open none, it ends the
    program; where it can make no thread, calls wait past their deadlines. So this takes as many and gives
    them back."""
    _check_files(8)  # 4 as it starts, those of a connection, and one to spare
    cores = os.cpu_count() or 1
    # Its event engine and pollers; two executors and two timers; and grpcio's own, of the channel.
    _check_threads(min(max(cores, 2), 32) + min(max(cores // 2, 2), 16) + 5)


def _check_files(wanted: int) -> None:
    files: list[int] = []
    try:
        for _ in range(wanted):
            files.append(os.open(os.devnull, os.O_RDONLY))
    except OSError as error:
        raise ResourceExhausted(f"gRPC needs {wanted} open files: {error.strerror}; the limit is "
                                f"ulimit -n") from None
    finally:
        for file in files:
            os.close(file)


def _check_threads(wanted: int) -> None:
    end = threading.Event()
    threads: list[threading.Thread] = []
    try:
        for _ in range(wanted):
            thread = threading.Thread(target=end.wait, name="flashcore-check", daemon=True)
            thread.start()
            threads.append(thread)
    except (RuntimeError, MemoryError) as error:
        raise no_thread(error, f"gRPC needs {wanted} threads: ") from None
    finally:
        end.set()
        for thread in threads:
            thread.join()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_Transport.keep_the_parents)


class _BlockingLock:
    """threading.Lock with the interface of asyncio.Lock."""

    def __init__(self) -> None:
        self._lock = threading.Lock()

    async def __aenter__(self) -> None:
        self._lock.acquire()

    async def __aexit__(self, *_: Any) -> None:
        self._lock.release()


class BlockingTransport(_Transport):
    """Its coroutines never suspend: they block."""

    def __init__(self, config: Config) -> None:
        super().__init__(config, grpc)

    async def call(self, method: str, request: Any, left: float, on_sequence: bool) -> Any:
        deadline = self.now() + left
        call, args, options = self._prepare(method, request, left, on_sequence)
        if self._unreached:
            self._await_connection(min(_CONNECTION_WAIT, left / 2))
            left = deadline - self.now()
            options["timeout"] = options["timeout"] and max(left, 0)
        try:
            reply = call(*args, **options)
            reply = self._hold(reply, left) if method == "HoldLease" else reply
        except grpc.RpcError as rpc_error:
            error = from_rpc(rpc_error.code(), rpc_error.details(), rpc_error.trailing_metadata())
            channel = self._failed(error)
            if channel is not None:
                channel.close()
            raise error from None
        self._unreached = False
        return reply

    def _await_connection(self, seconds: float) -> None:
        """Waits, or less if a connection comes. Calls poll the sockets only while they block, so not if they
        fail at once: to get a connection, wait in gRPC."""
        with self._lock:
            channel = self._channel
        if channel is None:
            return time.sleep(seconds)
        # Not grpc.channel_ready_future: its thread writes a traceback where the channel is closed meanwhile.
        try:
            channel.unary_unary("/grpc.health.v1.Health/Check")(b"", timeout=seconds, wait_for_ready=True)
        except (grpc.RpcError, ValueError):  # there is no connection, or no health check, or it was closed
            pass

    def _hold(self, stream: Any, left: float) -> Any:
        """The first reply; the stream stays open."""
        late = threading.Event()

        def give_up() -> None:
            late.set()
            stream.cancel()

        timer = threading.Timer(min(left, threading.TIMEOUT_MAX), give_up)
        timer.daemon = True
        timer.start()
        try:
            reply = next(stream)
        except StopIteration:
            raise Internal("HoldLease: the server ended it without a lease") from None
        except grpc.RpcError:
            if late.is_set():
                raise DeadlineExceeded("HoldLease: no answer within the timeout") from None
            raise
        finally:
            timer.cancel()
        self._lease = stream
        return reply

    def holds_lease(self) -> bool:
        return self._lease is not None and self._lease.is_active()

    def lock(self) -> Any:
        return _BlockingLock()

    async def sleep(self, seconds: float) -> None:
        if self._unreached:
            self._await_connection(seconds)
            self._unreached = False  # the next attempt does not wait again
        else:
            time.sleep(seconds)

    async def close(self) -> None:
        channel = self._forget()
        if channel is not None:
            channel.close()


class AsyncTransport(_Transport):
    """For the event loop of the first call."""

    def __init__(self, config: Config) -> None:
        super().__init__(config, grpc.aio)
        self._loop: asyncio.AbstractEventLoop | None = None

    def check_here(self) -> None:
        super().check_here()
        try:
            loop = asyncio.get_running_loop()
        except RuntimeError:
            raise FailedPrecondition("flashcore.aio: no asyncio event loop runs in this thread") from None
        with self._lock:
            self._loop = self._loop or loop
        if self._loop is not loop:
            state = "is closed" if self._loop.is_closed() else "is another one"
            raise FailedPrecondition(f"this client belongs to the event loop of its first call, which "
                                     f"{state}: make a client in each event loop")

    async def call(self, method: str, request: Any, left: float, on_sequence: bool) -> Any:
        call, args, options = self._prepare(method, request, left, on_sequence)
        try:
            reply = call(*args, **options)
            return await (self._hold(reply, left) if method == "HoldLease" else reply)
        except grpc.aio.AioRpcError as rpc_error:
            error = from_rpc(rpc_error.code(), rpc_error.details(), rpc_error.trailing_metadata())
            channel = self._failed(error)
            if channel is not None:
                await channel.close()
            raise error from None

    async def _hold(self, stream: Any, left: float) -> Any:
        """The first reply; the stream stays open."""
        try:
            reply = await asyncio.wait_for(stream.read(), None if left == math.inf else left)
        except asyncio.TimeoutError:
            raise DeadlineExceeded("HoldLease: no answer within the timeout") from None
        if reply is grpc.aio.EOF:
            raise Internal("HoldLease: the server ended it without a lease")
        self._lease = stream
        return reply

    def holds_lease(self) -> bool:
        return self._lease is not None and not self._lease.done()

    def lock(self) -> Any:
        return asyncio.Lock()

    async def sleep(self, seconds: float) -> None:
        await asyncio.sleep(seconds)

    async def close(self) -> None:
        if self._loop is not None and not self._loop.is_closed():
            self.check_here()
        channel = self._forget()
        if channel is not None:
            if self._lease is not None:  # grpc.aio ends only calls that a task waits for
                self._lease.cancel()
            await channel.close()


def closed() -> FailedPrecondition:
    return FailedPrecondition("this client is closed")
