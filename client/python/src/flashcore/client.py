"""The blocking client. It is the code of flashcore.aio, whose coroutines never suspend over a blocking
transport."""

import functools
import threading
from typing import (Any, Callable, Concatenate, Coroutine, Generic, Iterable, Iterator, Literal, ParamSpec,
                    SupportsIndex, TypeVar, overload)

from numpy.typing import NDArray

from . import aio
from ._arguments import shown
from ._batch import Layer
from ._local import LocalTransport
from ._sequence import HasSequence
from ._streams import empty
from ._signatures import BatchAttend, InlineAttend, L, MakesPlan, SequenceAttend, SequencesAttend, typed_as
from ._tensors import Lse, N, T, Tensor
from ._transport import LOCAL, BlockingTransport, Config, Retry, Tls, Token
from .errors import invalid

OnLost = Callable[["Sequence"], object]
P = ParamSpec("P")
R = TypeVar("R")


def connect(target: str | None = None, *, tls: Tls | bool | None = None, token: Token | None = None,
            timeout: float | None = 30.0, client_name: str | None = None, retry: Retry | None = None,
            on_lost: OnLost | None = None, lease: bool = False, http_proxy: bool = False) -> "Client":
    """A client of the server at `target`: "host:port", "unix:/path", or "local:/path", the local socket of a
    server on this host, where tensors go through shared memory; None: $FLASHCORE_TARGET, else
    127.0.0.1:7070. There is no default port, and no scheme such as https://: see tls.

    tls: a Tls, or True for $FLASHCORE_CLIENT_TLS_CA_FILE, _CERT_FILE, _KEY_FILE and _SERVER_NAME; None
    takes TLS if one of them is set, False never. token: the bearer token, or a function that returns it
    for each call; None: the first line of $FLASHCORE_CLIENT_TOKEN_FILE. A token leaves this host only over
    TLS. timeout: seconds that a call may take, its repetitions included, unless it says otherwise; None
    or more than a year: no limit. client_name: for servers that believe names.

    on_lost: called with a Sequence when a call on it finds that it is lost. It may restore it, with
    Sequence.recreate and Sequence.append, and return True: then the call runs once more, within its timeout.
    Runs on the thread of the call, one at a time. Sequences lost inside of it are not restored, nor those
    that delete and SequenceBatch.reorder find lost.
    lease: sequences that this client makes are deleted when its process ends or its connection breaks. Later
    ones are made under a new lease.
    http_proxy: connects through the proxy of $grpc_proxy, $https_proxy or $http_proxy, except to what
    $no_proxy names. Needs TLS; Unix sockets and loopback addresses never take a proxy. False: no proxy,
    whatever the environment says.
    "local:/path" takes no tls and no token, nor from the environment: who calls is the user of this process.

    Connects with the first call, and again by itself. Raises InvalidArgument, and Unimplemented for
    "local:/path" if this package was built without the C library.
    """
    config = Config.read(target, tls, token, timeout, client_name, retry, http_proxy=http_proxy)
    transport = (LocalTransport if config.target.startswith(LOCAL) else BlockingTransport)(config)
    return Client(aio.Client(config, transport, on_lost, lease))


_default_lock = threading.Lock()
_default: "Client | None" = None


def set_default_client(client: "Client | None") -> None:
    """The client of the flash_attn functions, flashcore.torch and flashcore.transformers from now on, in all
    threads; the caller closes it. None: one that connect() makes at the next call."""
    if client is not None and not isinstance(client, Client):
        raise invalid("client", shown(client), "a Client of flashcore.connect; None")
    global _default
    with _default_lock:
        _default = client


def default_client() -> "Client":
    """That of set_default_client, or one of connect()."""
    global _default
    with _default_lock:
        if _default is None:
            _default = connect()
        return _default


def run(coroutine: Coroutine[Any, Any, R]) -> R:
    try:
        coroutine.send(None)
    except StopIteration as end:
        return end.value
    raise AssertionError("a coroutine of the blocking client has suspended")


def _blocking(method: Callable[Concatenate[Any, P], Coroutine[Any, Any, R]]
              ) -> Callable[Concatenate[Any, P], R]:
    @functools.wraps(method)
    def call(self: Any, *args: P.args, **kwargs: P.kwargs) -> R:
        return run(method(self.core, *args, **kwargs))
    return call


def _makes_sequence(method: Callable[Concatenate[Any, P], Coroutine[Any, Any, aio.Sequence]]
                    ) -> Callable[Concatenate[Any, P], "Sequence"]:
    @functools.wraps(method)
    def call(self: Any, *args: P.args, **kwargs: P.kwargs) -> "Sequence":
        return run(method(self.core, *args, **kwargs)).outer
    return call


def _makes_batch(method: Callable[Concatenate[Any, P], Coroutine[Any, Any, aio.SequenceBatch]]
                 ) -> Callable[Concatenate[Any, P], "SequenceBatch"]:
    @functools.wraps(method)
    def call(self: Any, *args: P.args, **kwargs: P.kwargs) -> "SequenceBatch":
        return SequenceBatch(run(method(self.core, *args, **kwargs)))
    return call


class Client:
    __doc__ = f"{aio.Client.__doc__} Thread-safe. After its first call, it is refused in a forked child."

    def __init__(self, core: aio.Client) -> None:
        self.core = core
        core.outer = Sequence

    def __repr__(self) -> str:
        return repr(self.core)

    def __enter__(self) -> "Client":
        return self

    def __exit__(self, *_: Any) -> None:
        self.close()

    @property
    def config(self) -> Config:
        return self.core.config

    close = _blocking(aio.Client.close)
    attend = typed_as(InlineAttend)(_blocking(aio.Client.attend))
    attend_batch = typed_as(BatchAttend)(_blocking(aio.Client.attend_batch))
    create_sequence = _makes_sequence(aio.Client.create_sequence)
    create_sequences = _makes_batch(aio.Client.create_sequences)
    open_sequence = _makes_sequence(aio.Client.open_sequence)
    list_sequences = _blocking(aio.Client.list_sequences)
    server_info = _blocking(aio.Client.server_info)

    def synchronize(self, *, timeout: float | None = None) -> None:
        """Waits until every request with tensors on a GPU is answered: its results are then written, whatever
        the stream does. Raises the error of one that failed, as the next call with such tensors would.
        DeadlineExceeded after the timeout."""
        self.core.synchronize(self.core.deadline(timeout))

    def device_empty(self, shape: Iterable[SupportsIndex], dtype: Any = "float16", *, stream: int = 0,
                     device_id: str = "", timeout: float | None = None) -> Any:
        """A tensor of undefined content in memory of the server's GPU, which requests use in place. Over
        "local:/path", of a server with --local_device_tensors.

        dtype: float16, bfloat16 or float32. One of PyTorch, such as torch.float16, makes a torch.Tensor for
        PyTorch's current stream; a name or a dtype of numpy makes a DeviceTensor for `stream`, a CUstream
        as an int, 0 the legacy default stream. device_id: Sequence.device_id of sequences on another GPU
        than the server's first.

        When nobody has the tensor any more, its memory is used again in the order of that stream: before, let
        the stream wait for work on the tensor in other streams. Raises an error of an earlier request, too;
        ResourceExhausted at --device_tensor_bytes, Unimplemented if the server shares no GPU.
        """
        deadline = self.core.deadline(timeout)
        return empty(run(self.core.streams(deadline)), shape, dtype, stream, device_id, deadline)

    @typed_as(MakesPlan["Plan[Literal[False]]", "Plan[Literal[True]]", "Plan[bool]"])
    @functools.wraps(aio.Client.plan)
    def plan(self, sequences: Iterable[HasSequence], **options: Any) -> Any:
        return Plan(self.core.plan(sequences, **options))


class Sequence:
    __doc__ = aio.Sequence.__doc__

    def __init__(self, core: aio.Sequence) -> None:
        self.core = core
        core.outer = self

    def __repr__(self) -> str:
        return repr(self.core)

    def __enter__(self) -> "Sequence":
        return self

    def __exit__(self, *_: Any) -> None:
        self.delete()

    @property
    def id(self) -> bytes:
        """16 bytes, for Client.open_sequence."""
        return self.core.id

    @property
    def shape(self) -> tuple[int, int, int]:
        """(num_layers, num_kv_heads, head_dim)"""
        return self.core.shape

    @property
    def dtype(self) -> str:
        return self.core.dtype

    @property
    def kv_dtype(self) -> str:
        """How the server stores K/V: same_as_query, int8 or float8_e4m3."""
        return self.core.kv_dtype

    @property
    def device_id(self) -> str:
        return self.core.device_id

    @property
    def lengths(self) -> list[int]:
        """Rows of each layer, as far as this object knows."""
        return self.core.lengths

    append = _blocking(aio.Sequence.append)
    load = _blocking(aio.Sequence.load)
    attend = typed_as(SequenceAttend)(_blocking(aio.Sequence.attend))
    fork = _makes_sequence(aio.Sequence.fork)
    recreate = _blocking(aio.Sequence.recreate)
    truncate = _blocking(aio.Sequence.truncate)
    delete = _blocking(aio.Sequence.delete)
    info = _blocking(aio.Sequence.info)


class SequenceBatch:
    __doc__ = aio.SequenceBatch.__doc__

    def __init__(self, sequences: Iterable[HasSequence]) -> None:
        self.core = aio.SequenceBatch(sequences)

    def __repr__(self) -> str:
        return repr(self.core)

    def __enter__(self) -> "SequenceBatch":
        return self

    def __exit__(self, *_: Any) -> None:
        self.delete()

    def __len__(self) -> int:
        return len(self.core)

    def __iter__(self) -> Iterator[Sequence]:
        return iter([core.outer for core in self.core.cores])

    @overload
    def __getitem__(self, index: SupportsIndex) -> Sequence: ...

    @overload
    def __getitem__(self, index: slice) -> "SequenceBatch": ...

    def __getitem__(self, index: Any) -> Any:
        found = self.core[index]
        return SequenceBatch(found) if isinstance(index, slice) else found

    @property
    def lengths(self) -> list[list[int]]:
        """Rows of each layer of each sequence, as far as these objects know."""
        return self.core.lengths

    def layer(self, layer: int) -> Layer:
        """One layer of the sequences, for flashcore.flash_attn_with_kvcache."""
        return Layer(self, layer)

    attend = typed_as(SequencesAttend)(_blocking(aio.SequenceBatch.attend))
    fork = _makes_batch(aio.SequenceBatch.fork)
    reorder = _blocking(aio.SequenceBatch.reorder)
    truncate = _blocking(aio.SequenceBatch.truncate)
    delete = _blocking(aio.SequenceBatch.delete)
    info = _blocking(aio.SequenceBatch.info)


class Plan(Generic[L]):
    __doc__ = aio.Plan.__doc__

    def __init__(self, core: aio.Plan[Any]) -> None:
        self.core = core

    def __repr__(self) -> str:
        return repr(self.core)

    @overload
    def run(self: "Plan[Literal[False]]", layer: int, q: T, k: Tensor | None = None, v: Tensor | None = None,
            *, timeout: float | None = None) -> T: ...

    @overload  # type: ignore[misc]
    def run(self: "Plan[Literal[True]]", layer: int, q: NDArray[N], k: Tensor | None = None,
            v: Tensor | None = None, *, timeout: float | None = None) -> tuple[NDArray[N], Lse]: ...

    @overload
    def run(self: "Plan[Literal[True]]", layer: int, q: T, k: Tensor | None = None, v: Tensor | None = None,
            *, timeout: float | None = None) -> tuple[T, T]: ...

    @overload
    def run(self: "Plan[bool]", layer: int, q: T, k: Tensor | None = None, v: Tensor | None = None,
            *, timeout: float | None = None) -> T | tuple[T, T]: ...

    @functools.wraps(aio.Plan.run)
    def run(self, *args: Any, **kwargs: Any) -> Any:
        return run(self.core.run(*args, **kwargs))
