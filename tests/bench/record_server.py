#!/usr/bin/env python3
"""Measures what the documents publish about the server, in one run, and writes one record.

    tests/bench/record_server.py --device=cuda:0 --json=OUT                 # about 7 minutes
    tests/bench/record_server.py --device=cpu --json=OUT                    # about 1 minute
    tests/bench/record_server.py --device=cpu --quick                       # a smoke test

Sections:

  peer        beside a Python gRPC and PyTorch server (compare_peer.py)
  transports  TCP and Unix socket, unary and on a stream, each beside a bare gRPC echo of the same bytes,
              in unary calls, that takes turns with it (cells.Echo); and TCP, Unix socket and local
              socket without an echo
  tuning      flags of a GPU server: --idle_spin_us, --lanes, --direct_io_bytes
  cpu         the CPU device: mission and one-row decode beside an echo, the local socket beside TCP,
              decode of 64 sequences of 512 rows with K/V resident and inline

The default is peer,transports,tuning on a GPU and cpu on the CPU device. Variants of a cell take
turns in rounds (cells.py).

The record is one JSON object:

  run         run_info.py: date, commit, cpu, gpus
  settings    the command line: rounds, duration, ...
  servers     {variant of section peer: {"targets", "version", "largest_difference" of its answers
              from flashcore's; null if one is NaN}}
  rows        one flat object for each variant of each cell
  left_out    cells that were not measured: {"section", "case", "clients", "why"}
  failures    texts; empty if all went well
  seconds     of the whole run

Keys of a row:

  section, case, clients, transport ("tcp", "unix", "local"), stream (true: AttendStream)
  variant     "flashcore", "peer", "peer_8_processes"; "tcp_unary", "unix_stream", ...; "--lanes=4"
  flag, value of section tuning: "lanes", "4"
  echo        of sections transports and cpu: true if an echo took turns
  baseline    the variant of the same cell that ratios are over
  server_version, target, mode, shape           of flashcore bench
  rounds, samples (requests of all rounds), round_seconds (the measured window of one)
  error       if the variant failed in a round; the rows of earlier rounds count

and, each with KEY_min and KEY_max over the rounds beside the median KEY:

  p50_us, p99_us, mean_us                       latency at the client
  outside_kernel_p50_us, kernel_p50_us          p50 of latency - kernel phase, and of the kernel phase
  receive_mean_us, staging_wait_mean_us, queue_mean_us, copy_in_mean_us, kernel_mean_us,
  copy_out_mean_us                              the server's phases
  requests_per_second                           ended in the window / wall time of their turns in it
  request_bytes                                 of one message
  echo_p50_us, echo_p99_us                      of the echo that took turns
  outside_kernel_over_echo                      outside_kernel_p50_us / echo_p50_us
  latency_over_echo_and_kernel                  p50_us / (echo_p50_us + kernel_p50_us)
  inline_p50_us, inline_request_bytes, inline_over_resident   the same step with all K/V inline
  p50_over_baseline, outside_kernel_p50_over_baseline, requests_per_second_over_baseline
                                                this variant / baseline, of the same round

Exit status 1 if anything failed.
"""

import argparse
import contextlib
import signal
import subprocess
import sys
import types

import cells
import compare_peer

CASES = compare_peer.CASES
MISSION = CASES["mission"]
CPU_DECODE1 = ["--mode=decode", "--shape=1x8x512x64"]
CPU_DECODE64 = ["--mode=decode", "--shape=64x8x512x64", "--compare_inline"]
SECTIONS = ("peer", "transports", "tuning", "cpu")
INLINE_SECONDS = 3  # a round with inline steps: one takes a tenth of a second

# The values of each flag, the default first, and the cells: case and clients.
TUNING = {
    "idle_spin_us": ((1000, 0), (("decode1", 1),)),
    "lanes": ((2, 1, 4), (("decode1", 1), ("decode1", 16), ("decode1", 64))),
    "direct_io_bytes": ((1 << 20, 0), (("decode1", 1), ("decode1", 16), ("decode1", 64)))}
TUNING_KV_BYTES = 3 << 30  # 64 clients x 16.25 MiB, on some variants at once


def compare_transports(args, record, server, section, case, flags, clients, transports, modes,
                       echo):
    """One cell; its variants are the transports, each unary and (`modes`) on a stream."""
    variants = {}
    for transport in transports:
        for mode in modes:
            variants[f"{transport}_{mode}"] = [
                f"--target={server.targets[transport]}", *flags,
                *(["--stream"] if mode == "stream" else [])]
    rows = record.cell(args, section, case, clients, variants, echo=echo)
    for row in rows:
        row["transport"], mode = row["variant"].split("_")
        row["stream"] = mode == "stream"
    record.write()


def run_transports(args, record):
    modes = ("unary", "stream")
    command = cells.flashcore_command(args, kv_bytes=6 << 30)
    with cells.Server("flashcore", command, local=True) as server:
        for case in args.transport_cases:
            transports = ("tcp",) if case == "decode64" else ("tcp", "unix")
            compare_transports(args, record, server, "transports", case, CASES[case], 1,
                               transports, modes, echo=True)
        for case in args.transport_cases:
            for clients in (() if case == "decode64" else args.transport_clients):
                compare_transports(args, record, server, "transports", case, CASES[case], clients,
                                   ("tcp", "unix", "local"), ("unary",), echo=False)


def run_tuning(args, record):
    for flag in args.tuning_flags:
        values, tuned = TUNING[flag]
        with contextlib.ExitStack() as stack:
            servers = {}
            for value in values:
                command = cells.flashcore_command(args, f"--{flag}={value}",
                                                  kv_bytes=TUNING_KV_BYTES)
                servers[value] = stack.enter_context(cells.Server(f"--{flag}={value}", command))
            for case, clients in tuned:
                variants = {f"--{flag}={value}": [f"--target={server.targets['tcp']}", *CASES[case]]
                            for value, server in servers.items()}
                rows = record.cell(args, "tuning", case, min(clients, args.most_clients), variants,
                                   flag=flag, transport="tcp", stream=False)
                for row in rows:
                    row["value"] = row["variant"].partition("=")[2]
    record.write()


def run_cpu(args, record):
    modes = ("unary", "stream")
    command = cells.flashcore_command(args, "--max_message_bytes=268435456",
                                      "--transport_memory_bytes=1073741824", device="cpu")
    with cells.Server("flashcore", command, local=True) as server:
        for case, flags in (("mission", MISSION), ("decode1_512", CPU_DECODE1)):
            compare_transports(args, record, server, "cpu", case, flags, 1, ("tcp", "unix"), modes,
                               echo=True)
        compare_transports(args, record, server, "cpu", "mission", MISSION, 1,
                           ("tcp", "unix", "local"), ("unary",), echo=False)
        if args.inline:
            longer = types.SimpleNamespace(**vars(args))
            longer.duration = max(args.duration, INLINE_SECONDS)
            compare_transports(longer, record, server, "cpu", "decode64_512", CPU_DECODE64, 1,
                               ("tcp",), ("unary",), echo=False)


def parse_arguments():
    parser = argparse.ArgumentParser(description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    cells.add_arguments(parser)
    parser.add_argument("--sections", type=cells.comma_separated(str, SECTIONS))
    parser.add_argument("--quick", action="store_true",
                        help="short rounds of few cells: shows that all of it works")
    parser.add_argument("--transport_cases", type=cells.comma_separated(str, CASES),
                        default=list(CASES))
    parser.add_argument("--transport_clients", type=cells.comma_separated(int), default=[1, 16],
                        help="of the cells without an echo")
    parser.add_argument("--tuning_flags", type=cells.comma_separated(str, TUNING),
                        default=list(TUNING))
    parser.add_argument("--most_clients", type=int, default=64, help="of section tuning")
    parser.add_argument("--inline", type=int, default=1, choices=(0, 1),
                        help="0: without the inline step of section cpu, which needs 300 MB")
    compare_peer.add_arguments(parser)
    args = parser.parse_args()
    if args.sections is None:
        args.sections = ["cpu"] if args.device == "cpu" else ["peer", "transports", "tuning"]
    return args


def shorten(args):
    """Sets what --quick stands for."""
    args.rounds, args.duration, args.warmup, args.most_clients, args.inline = 2, 0.15, 0, 2, 0
    args.cases, args.clients, args.peer_processes = ["mission", "decode1"], [1, 2], 2
    args.transport_cases, args.transport_clients = ["mission"], [2]
    args.tuning_flags = ["idle_spin_us"]


def main():
    args = parse_arguments()
    if args.quick:
        shorten(args)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that servers are stopped
    record = cells.Record(args)
    run = {"peer": compare_peer.run, "transports": run_transports, "tuning": run_tuning, "cpu": run_cpu}
    try:
        for section in args.sections:
            print(f"section {section}", flush=True)
            try:
                run[section](args, record)
            except (cells.Failure, OSError, subprocess.SubprocessError) as error:
                record.fail(f"{section}: {error}")
    finally:
        record.write()
    print(f"{len(record.data['rows'])} rows, {len(record.data['failures'])} failures, "
          f"{len(record.data['left_out'])} cells left out, {record.data['seconds']} s")
    return 1 if record.data["failures"] else 0


if __name__ == "__main__":
    sys.exit(main())
