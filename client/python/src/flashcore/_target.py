"""The address of a server: what connect takes. gRPC looks other text up as a name, on port 443."""

import re
import urllib.parse

from .errors import invalid

ALLOWED = "host:port, unix:/path, or local:/path of the server's --local_listen"
_MOST_PATH_BYTES = 107  # of a Unix socket
_HOST_PORT = re.compile(r"(?P<host>\[[0-9A-Fa-f:.]+(%\w+)?\]|[\w.-]+):(?P<port>\d{1,5})", re.ASCII)


def check(name: str, target: object) -> str:
    """The target that argument or variable `name` has. Raises InvalidArgument."""
    problem = _problem(target) if isinstance(target, str) else f"is a {type(target).__name__}"
    if problem:
        raise invalid(name, f"{target!r} {problem}", ALLOWED)
    return str(target)


def _problem(target: str) -> str:
    """The error in it; empty if there is none."""
    if not target:
        return "is empty"
    scheme, colon, rest = target.partition(":")
    if any(letter < " " or letter == "\x7f" for letter in target) or " " in target and scheme != "local":
        return "has a space or a control character" + (": write %20" if scheme == "unix" else "")
    if colon and scheme == "local":
        return _path_problem(rest, len(rest.encode()))
    if colon and scheme == "unix":
        uri = rest.startswith("//")  # unix:///path
        path = rest.removeprefix("//")
        return _path_problem(path, len(urllib.parse.unquote_to_bytes(path)), uri)
    if colon and scheme in ("unix-abstract", "xds"):
        return "" if rest else "has no name"
    if colon and scheme in ("ipv4", "ipv6"):
        return next(filter(None, map(_host_port_problem, rest.split(","))), "")
    if colon and scheme == "dns":
        return _host_port_problem(rest[2:].partition("/")[2] if rest.startswith("//") else rest)
    if rest.startswith("//"):
        tls = ", and tls=True" if scheme in ("https", "grpcs") else ""
        return f"has a scheme: leave {scheme}:// away{tls}"
    return _host_port_problem(target)


def _path_problem(path: str, size: int, absolute: bool = True) -> str:
    if not path or absolute and not path.startswith("/"):
        return "has no absolute path" if absolute else "has no path"
    return "" if size <= _MOST_PATH_BYTES else (
        f"has a path of {size} bytes; a Unix socket's has at most {_MOST_PATH_BYTES}")


def _host_port_problem(address: str) -> str:
    if "/" in address:
        return "has a '/'" + (f": unix:{address} or local:{address}" if address.startswith("/") else "")
    found = _HOST_PORT.fullmatch(address)
    if found:
        return "" if 1 <= int(found["port"]) <= 65535 else "has a port that is not from 1 to 65535"
    if address.count(":") > 1 and not address.startswith("["):
        return "is an IPv6 address without brackets: [::1]:7070"
    host, colon, port = address.rpartition(":")
    if not colon or address.endswith("]"):
        return f"has no port: {address}:7070" if address else "has no host and no port"
    return "has no host" if not host else "has a host or a port that is none"
