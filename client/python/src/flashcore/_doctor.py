"""Whether a server can be reached, and what to do if not."""

import os
import sys
import time
from importlib import metadata

from . import _c_library
from ._transport import DEFAULT_TARGET, LOCAL
from .client import Client, connect, run
from .errors import DeadlineExceeded, Error, Unavailable
from .messages import GetServerInfoResponse

_SECONDS = 5.0  # that the server has to answer
_START = ("start a server on this host with `flashcore serve` (pip install ./deploy/wheel) or "
          "build/server/flashcore-server, or name another in FLASHCORE_TARGET")


def ping(client: Client) -> GetServerInfoResponse:
    """The server's answer about itself, asked once. Unavailable and DeadlineExceeded say what to do."""
    try:
        return run(client.core.ping(_SECONDS))
    except (Unavailable, DeadlineExceeded) as error:
        message = f"no server answers at {client.config.target}: {error.message}; {_START}"
        raise type(error)(message, error.code, error.reason, error.metadata) from None


def report(target: str | None) -> bool:
    """Prints what there is, in at most ten lines. Returns whether a server answers."""
    from . import __version__
    print(f"flashcore: {__version__} in {os.path.dirname(__file__)}, Python {sys.version.split()[0]}, "
          f"{', '.join(map(_version, ('grpcio', 'protobuf', 'numpy')))}")
    named = os.environ.get("FLASHCORE_TARGET")
    source = "--target" if target is not None else "FLASHCORE_TARGET" if named else "the default"
    print(f"target: {(named or DEFAULT_TARGET) if target is None else target}, {source}")
    answers = _report_server(target)
    print(f"transports: host:port and unix:/path; {_local()}")
    print(f"extras: {', '.join(map(_version, ('torch', 'transformers', 'ml_dtypes')))}; "
          f"flashcore.transformers needs transformers 5.24: pip install './client/python[transformers]'")
    return answers


def _report_server(target: str | None) -> bool:
    try:
        with connect(target) as client:
            config = client.config
            token = "none" if config.token is None else "set"
            print(f"credentials: TLS {config.tls or 'off'}, token {token}")
            began = time.perf_counter()
            info = ping(client)
            milliseconds = 1e3 * (time.perf_counter() - began)
    except Error as error:
        print(f"server: {_line(error)}")
        return False
    print(f"server: FlashCore {info.version} answered in {milliseconds:.1f} ms, connecting included")
    print("devices: " + "; ".join(
        f"{device.id}, {device.name} ({device.arch}), {device.kv_used_bytes >> 20} of "
        f"{device.kv_memory_bytes >> 20} MiB of K/V used" for device in info.devices))
    return True


def _line(error: Error) -> str:
    return " ".join(str(error).split())


def _version(package: str) -> str:
    try:
        return f"{package} {metadata.version(package)}"
    except metadata.PackageNotFoundError:
        return f"{package} not installed"


def _local() -> str:
    try:
        _c_library.load()
    except Error as error:
        return f"not {LOCAL}/path: {_line(error)}"
    return f"{LOCAL}/path"
