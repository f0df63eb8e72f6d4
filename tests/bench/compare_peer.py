"""Section "peer" of record_server.py: flashcore-server and a Python gRPC and PyTorch server, end to end.

Its processes need what peer_server.py needs, and the Python modules of attention.proto, in
build/tests/e2e/generated or on PYTHONPATH. All servers are up at once and take turns in rounds
(cells.py); all are driven by `flashcore bench`, which checks every answer. The same random requests
are sent to each, and the answers compared.

The peer comes in two variants. `peer` is one process: at 16 clients and more Python's lock bounds it,
not the GPU. `peer_N_processes` are N of them (--peer_processes), each with a CUDA context, a port and
the sequences of its own clients; the connections are spread over all of them. It is measured where
there are at least N clients.

Cases, FP16: mission (1x8x512x64, all K/V inline), decode1 and decode64 (one step of 1 or 64
resident sequences of 4096 rows, 32 heads over 8, head_dim 128, in one request). With n clients, each
runs the case on its own sequences.
"""

import contextlib
import json
import os
import pathlib
import random
import subprocess
import sys

import cells

GENERATED = pathlib.Path(__file__).resolve().parents[2] / "build" / "tests" / "e2e" / "generated"
CONTEXT = 4096
GROWTH = 64  # rows that `flashcore bench` appends before it truncates
KV_ROW_BYTES = 2 * 8 * 128 * 2
CASES = {"mission": ["--mode=attend", "--shape=1x8x512x64"],
         "decode1": ["--mode=decode", f"--shape=1x32/8x{CONTEXT}x128"],
         "decode64": ["--mode=decode", f"--shape=64x32/8x{CONTEXT}x128"]}
SEQUENCES = {"mission": 0, "decode1": 1, "decode64": 64}  # of one client
CHECK_SECONDS = 300  # of all servers' answers
ERROR_BOUND = 2e-3  # between two answers; each may be 1e-3 from float64, with |V| <= 1


def kv_bytes(case, clients):
    return SEQUENCES[case] * clients * (CONTEXT + GROWTH) * KV_ROW_BYTES


def most_kv_bytes(args):
    """The memory of a flashcore-server for the largest cell, and some more."""
    cases = [(case, n) for case in args.cases for n in args.clients]
    fits = [kv_bytes(*cell) for cell in cases if kv_bytes(*cell) <= args.max_kv_gib * 2**30]
    return int(max(fits, default=0) * 1.1) + (1 << 30)


def start_peers(args, processes, stack):
    """Peers that share the work; they start at once."""
    script = pathlib.Path(__file__).with_name("peer_server.py")
    workers = args.peer_workers if processes == 1 else max(2, args.peer_workers // processes)
    command = [sys.executable, "-B", str(script), f"--device={args.device}", f"--workers={workers}",
               f"--backend={args.peer_backend}", f"--capacity={CONTEXT + GROWTH}"]
    peers = [cells.Server("peer", command) for _ in range(processes)]
    for peer in peers:
        stack.callback(peer.__exit__)
    return [peer.__enter__() for peer in peers]


def start_servers(args, record, stack):
    """{variant: servers}, flashcore first. A peer that does not start is a failure in the record."""
    command = cells.flashcore_command(args, kv_bytes=most_kv_bytes(args))
    servers = {"flashcore": [stack.enter_context(cells.Server("flashcore", command))]}
    for processes in dict.fromkeys((1, args.peer_processes)):
        name = "peer" if processes == 1 else f"peer_{processes}_processes"
        try:
            if processes > 0:
                servers[name] = start_peers(args, processes, stack)
        except cells.Failure as failure:
            record.fail(str(failure))
    return servers


def measure(args, record, servers, transport, case, clients):
    gib = kv_bytes(case, clients) / 2**30
    if gib > args.max_kv_gib:
        record.data["left_out"].append({"section": "peer", "case": case, "clients": clients,
                                        "why": f"{gib:.1f} GiB of K/V, over --max_kv_gib"})
        return
    variants = {}
    for name, of_name in servers.items():
        if len(of_name) <= min(clients, args.connections):
            targets = ",".join(server.targets[transport] for server in of_name)
            variants[name] = [f"--target={targets}", "--all_targets", *CASES[case]]
    record.cell(args, "peer", case, clients, variants, transport=transport, stream=False)


def check_answers(args, record, servers):
    """Adds the servers to the record: targets, version, and how far their answers are from ours. In
    a process of its own: forks of this one, where gRPC's threads would run, might crash."""
    script = pathlib.Path(__file__).with_name("check_answers.py")
    targets = {name: of_name[0].targets["tcp"] for name, of_name in servers.items()}
    done = subprocess.run(
        [sys.executable, "-B", script, f"--seed={args.seed}", *map("=".join, targets.items())],
        capture_output=True, text=True, timeout=CHECK_SECONDS)
    checked = {}
    if done.returncode == 0:
        checked = json.loads(done.stdout)
    else:
        record.fail(f"check_answers.py: {done.stderr.strip()[-1000:]}")
    for name, of_name in servers.items():
        server = {"targets": [one.targets["tcp"] for one in of_name], **checked.get(name, {})}
        record.data["servers"][name] = server
        print(f"{name}: {server}", flush=True)
        # A difference is null if it is not a number.
        if checked and not (server["largest_difference"] or 0) <= ERROR_BOUND:
            record.fail(f"answers of {name} differ by {server['largest_difference']}")
        if checked and server["largest_difference"] is None:
            record.fail(f"answers of {name} are not numbers")


def run(args, record):
    """Measures the section."""
    print(f"seed {args.seed}", flush=True)
    paths = [*([str(GENERATED)] if GENERATED.is_dir() else []), os.environ.get("PYTHONPATH", "")]
    os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, paths))
    with contextlib.ExitStack() as stack:
        servers = start_servers(args, record, stack)
        check_answers(args, record, servers)
        for transport in args.transports:
            for case in args.cases:
                for clients in args.clients:
                    measure(args, record, servers, transport, case, clients)


def add_arguments(parser):
    """The section's arguments beside cells.add_arguments."""
    comma_separated = cells.comma_separated
    parser.add_argument("--cases", type=comma_separated(str, CASES), default=list(CASES))
    parser.add_argument("--clients", type=comma_separated(int), default=[1, 16, 64])
    parser.add_argument("--transports", type=comma_separated(str, ("tcp", "unix")),
                        default=["tcp"], help="tcp,unix; default: tcp")
    parser.add_argument("--max_kv_gib", type=float, default=16,
                        help="cells with more K/V a server are left out: loading it takes long, and "
                             "all servers need several times as much of the GPU")
    parser.add_argument("--peer_workers", type=int, default=8, help="threads of all its processes")
    parser.add_argument("--peer_processes", type=int, default=8,
                        help="of the second variant of the peer; 1: none")
    parser.add_argument("--peer_backend", default="default", help="see peer_server.py")
    parser.add_argument("--seed", type=int, default=random.SystemRandom().getrandbits(32),
                        help="of the requests that all answer; default: a fresh one")
