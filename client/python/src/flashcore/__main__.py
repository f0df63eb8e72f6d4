"""python -m flashcore: says what a server is, what is wrong, measures a call, shows the configuration."""

import argparse
import functools
import statistics
import sys
import time
from importlib import metadata
from typing import Callable

import numpy as np

import flashcore
from flashcore import _doctor
from flashcore._transport import DEFAULT_TARGET


def info(client: flashcore.Client, _: argparse.Namespace) -> None:
    reply = client.server_info()
    print(f"FlashCore {reply.version} at {client.config.target}")
    for device in reply.devices:
        print(f"device {device.id}: {device.name} ({device.arch}), {device.kv_used_bytes} of "
              f"{device.kv_memory_bytes} bytes of K/V used")
    print(f"head_dim: {', '.join(map(str, sorted(reply.limits.head_dims)))}")
    print(f"message: at most {reply.limits.max_message_bytes} bytes")


def bench(client: flashcore.Client, args: argparse.Namespace) -> None:
    heads, rows, head_dim = args.shape
    rng = np.random.default_rng(1)
    q, k, v = (rng.standard_normal((rows, heads, head_dim)).astype(np.float16) for _ in range(3))
    with client.create_sequence(1, heads, head_dim) as sequence:
        sequence.append(0, k, v)
        for name, call in (("inline", lambda: client.attend(q, k, v)),
                           ("decode", lambda: sequence.attend(0, q[:1], k[:1], v[:1]))):
            call()
            seconds = []
            for _ in range(args.iterations):
                began = time.perf_counter()
                call()
                seconds.append(time.perf_counter() - began)
            print(f"{name} {heads}x{rows}x{head_dim}: median {statistics.median(seconds) * 1e6:.0f} us, "
                  f"best {min(seconds) * 1e6:.0f} us, of {args.iterations} calls")


def show_config(client: flashcore.Client, _: argparse.Namespace) -> None:
    config = client.config
    print(f"target: {config.target}")
    print(f"tls: {config.tls or 'off'}")
    print(f"token: {'none' if config.token is None else 'set'}")
    print(f"timeout: {config.timeout:g} s")
    print(f"retry: {config.retry}")
    print(f"flashcore: {flashcore.__version__}, Python {sys.version.split()[0]}")
    for package in ("grpcio", "protobuf", "numpy"):
        print(f"{package}: {metadata.version(package)}")


def doctor(args: argparse.Namespace) -> int:
    return 0 if _doctor.report(args.target) else 1


def with_client(function: Callable[[flashcore.Client, argparse.Namespace], None],
                args: argparse.Namespace) -> int:
    try:
        retry = flashcore.Retry(attempts=4)  # somebody waits: a server that is not there is said at once
        with flashcore.connect(args.target, retry=retry) as client:
            function(client, args)
    except flashcore.Error as error:
        print(error, file=sys.stderr)
        return 1
    return 0


def shape(text: str) -> list[int]:
    numbers = [int(number) for number in text.split("x")]
    if len(numbers) != 3:
        raise ValueError
    return numbers


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m flashcore", description=__doc__)
    parser.add_argument("--target",
                        help=f"host:port, unix:/path or local:/path; default $FLASHCORE_TARGET, else "
                             f"{DEFAULT_TARGET}")
    commands = parser.add_subparsers(required=True)
    for function, words in ((info, "version, devices and limits of the server"),
                            (bench, "latency of Client.attend and of a decode step"),
                            (show_config, "what connect takes from the environment")):
        command = commands.add_parser(function.__name__.replace("_", "-"), help=words)
        command.set_defaults(run=functools.partial(with_client, function))
        if function is bench:
            command.add_argument("--shape", type=shape, default="8x512x64", help="heads x rows x head_dim")
            command.add_argument("--iterations", type=int, default=100)
    words = "whether a server answers, and what there is to reach one; exit status 1 if none does"
    commands.add_parser("doctor", help=words).set_defaults(run=doctor)
    args = parser.parse_args()
    status: int = args.run(args)
    return status


if __name__ == "__main__":
    sys.exit(main())
