#!/usr/bin/env python3
"""Compares flashcore-server with a Python gRPC and PyTorch server, end to end, in one run.

    PYTHONPATH=GENERATED tests/bench/compare_peer.py --device=cuda:0

GENERATED has the Python modules of attention.proto (build/tests/e2e/generated). Needs what
peer_server.py needs. One server runs after the other; both are driven by `flashcore bench`, which
checks every answer. Then the same random requests are sent to both, and the answers compared.

Cases, FP16: mission (1x8x512x64, all K/V inline), decode1 and decode64 (one step of 1 or 64
resident sequences of 4096 rows, 32 heads over 8, head_dim 128, in one request). At a concurrency of
n, n clients run the case, each with its own sequences.

`echo` is a bare echo of the same bytes by flashcore-server, measured in a run of its own that
alternates echo and request at a concurrency of 1. The phases are means, because means add up: the
phases that the server reports with its answers; `reply`, of all RPCs of the run, from /metrics, which
may end after the client has the answer; and the rest of the client's latency.

Exit status 1 if a request failed or an answer was wrong.
"""

import argparse
import contextlib
import ctypes
import json
import os
import pathlib
import signal
import subprocess
import sys
import tempfile
import time
import urllib.request

# Servers are forked while gRPC's threads run, and gRPC's fork hooks sometimes abort the process.
os.environ.setdefault("GRPC_ENABLE_FORK_SUPPORT", "0")
import grpc
import numpy as np
from flashcore.v1 import attention_pb2 as pb
from flashcore.v1 import attention_pb2_grpc

CONTEXT = 4096
GROWTH = 64  # rows that `flashcore bench` appends before it truncates
KV_ROW_BYTES = 2 * 8 * 128 * 2
CASES = {"mission": ["--mode=attend", "--shape=1x8x512x64"],
         "decode1": ["--mode=decode", f"--shape=1x32/8x{CONTEXT}x128"],
         "decode64": ["--mode=decode", f"--shape=64x32/8x{CONTEXT}x128"]}
SEQUENCES = {"mission": 0, "decode1": 1, "decode64": 64}  # of one client
REPLY_PHASES = ("receive", "queue", "copy_in", "kernel", "copy_out")
START_SECONDS = 300  # PyTorch's first import reads gigabytes
BENCH_SECONDS = 300  # of loading K/V, beside --duration
ERROR_BOUND = 2e-3  # between two answers; each may be 1e-3 from float64, with |V| <= 1
PR_SET_PDEATHSIG = 1
LIBC = ctypes.CDLL(None)


class Failure(Exception):
    """A server that did not start, or a bench with failed requests or wrong answers."""


def die_with_parent():
    LIBC.prctl(PR_SET_PDEATHSIG, signal.SIGKILL)


class Server:
    """A server process on a free port and a Unix socket; killed when the `with` block ends.

    Its JSON log has a record with the message "serving" and its addresses."""

    def __init__(self, name, command):
        self.name = name
        self._folder = tempfile.TemporaryDirectory()
        socket = f"unix:{self._folder.name}/s"
        self._log_path = pathlib.Path(self._folder.name, "log")
        with self._log_path.open("wb") as log:
            self._process = subprocess.Popen(
                [*command, "--listen=127.0.0.1:0", f"--listen={socket}"], stdout=log, stderr=log,
                preexec_fn=die_with_parent)
        self.targets = {"unix": socket}

    def __enter__(self):
        try:
            self.targets["tcp"] = self.wait_for("serving")["addresses"].split(",")[0]
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *_):
        self._process.kill()
        self._process.wait()
        self._folder.cleanup()

    def wait_for(self, message):
        """The first record of the log with this message."""
        end = time.monotonic() + START_SECONDS
        while time.monotonic() < end and self._process.poll() is None:
            for line in self._log_path.read_text().splitlines():
                with contextlib.suppress(ValueError, TypeError):
                    record = json.loads(line)
                    if record.get("msg") == message:
                        return record
            time.sleep(0.05)
        raise Failure(f"{self.name} did not start:\n{self._log_path.read_text()[-2000:]}")

    def reply_phase(self):
        """(seconds, RPCs) of flashcore-server's phase reply so far."""
        url = f"http://{self.wait_for('metrics')['address']}/metrics"
        with urllib.request.urlopen(url, timeout=10) as response:
            lines = response.read().decode().splitlines()
        series = dict(line.rsplit(" ", 1) for line in lines if not line.startswith("#"))
        name = "flashcore_request_phase_seconds"
        return tuple(float(series[f'{name}_{what}{{phase="reply"}}']) for what in ("sum", "count"))


def start_flashcore(args):
    return Server("flashcore", [args.server, f"--device={args.device}", "--enable_echo",
                                "--metrics_listen=127.0.0.1:0", "--log_format=json",
                                *args.server_flag])


def start_peer(args):
    script = pathlib.Path(__file__).with_name("peer_server.py")
    return Server("peer", [sys.executable, "-B", str(script), f"--device={args.device}",
                           f"--workers={args.peer_workers}", f"--backend={args.peer_backend}",
                           f"--capacity={CONTEXT + GROWTH}"])


def run_bench(args, target, case, concurrency, *more):
    """The JSON of `flashcore bench --json`. Raises Failure if a request failed or an answer was
    wrong."""
    connections = min(concurrency, args.connections)
    command = [args.cli, "bench", "--json", f"--target={target}", *CASES[case],
               f"--concurrency={concurrency}", f"--connections={connections}",
               f"--duration={args.duration}s", f"--warmup={args.warmup}s", *more]
    try:
        done = subprocess.run(command, capture_output=True, text=True, preexec_fn=die_with_parent,
                              timeout=BENCH_SECONDS + args.duration + args.warmup)
    except subprocess.TimeoutExpired as error:
        raise Failure(f"no end after {error.timeout:.0f} s") from error
    report = json.loads(done.stdout) if done.stdout.startswith("{") else {}
    if done.returncode != 0:
        counts = {name: report.get(name) for name in ("ok", "failed", "wrong_replies")}
        raise Failure(f"exit status {done.returncode}, {counts}: {done.stderr.strip()[-500:]}")
    return report


def kv_gib(case, concurrency):
    return SEQUENCES[case] * concurrency * (CONTEXT + GROWTH) * KV_ROW_BYTES / 2**30


def measure(args, server, transport, case, concurrency):
    """One run: {"bench": ...}, for flashcore-server also "reply_us" and at a concurrency of 1
    "echo"; or {"error": ...}, with "failed" unless it was left out."""
    gib = kv_gib(case, concurrency)
    if gib > args.max_kv_gib:
        return {"error": f"left out: {gib:.1f} GiB of K/V, over --max_kv_gib"}
    target, ours = server.targets[transport], server.name == "flashcore"
    try:
        before = server.reply_phase() if ours else None
        run = {"bench": run_bench(args, target, case, concurrency)}
        if ours:
            seconds, rpcs = (b - a for a, b in zip(before, server.reply_phase()))
            run["reply_us"] = 1e6 * seconds / rpcs
            if concurrency == 1:
                run["echo"] = run_bench(args, target, case, concurrency, "--echo")
        return run
    except Failure as failure:
        return {"error": f"FAILED: {failure}", "failed": True}


def random_elements(random, *shape):
    return random.uniform(-1, 1, shape).astype(np.float16).tobytes()


def attend(stub, random, spans, heads, kv_heads, head_dim, mask):
    """O of one request with random FP16 tensors, in float32, flat."""
    query_rows, kv_rows = (sum(getattr(span, name) for span in spans)
                           for name in ("query_rows", "kv_rows"))
    reply = stub.Attend(pb.AttendRequest(
        spans=spans, dtype=pb.DTYPE_FLOAT16, num_heads=heads, num_kv_heads=kv_heads,
        head_dim=head_dim, layout=pb.LAYOUT_NHD, mask=pb.Mask(kind=mask),
        query=random_elements(random, query_rows, heads, head_dim),
        key=random_elements(random, kv_rows, kv_heads, head_dim),
        value=random_elements(random, kv_rows, kv_heads, head_dim)))
    return np.frombuffer(reply.output, np.float16).astype(np.float32)


def load_sequence(stub, random, rows, kv_heads, head_dim):
    """The id of a new sequence of random FP16 rows."""
    created = stub.CreateSequence(pb.CreateSequenceRequest(
        num_layers=1, num_kv_heads=kv_heads, head_dim=head_dim, dtype=pb.DTYPE_FLOAT16))
    stub.LoadSequence(iter([pb.LoadSequenceRequest(
        sequence_id=created.sequence_id, expected_length=0, layout=pb.LAYOUT_NHD, rows=rows,
        key=random_elements(random, rows, kv_heads, head_dim),
        value=random_elements(random, rows, kv_heads, head_dim))]))
    return created.sequence_id


def answers(server, seed):
    """O of requests that depend only on the seed: mission, mission causal, two decode steps."""
    random = np.random.default_rng(seed)
    with grpc.insecure_channel(server.targets["tcp"]) as channel:
        stub = attention_pb2_grpc.AttentionServiceStub(channel)
        span = [pb.Span(query_rows=512, kv_rows=512)]
        outputs = [attend(stub, random, span, 8, 8, 64, mask)
                   for mask in (pb.Mask.KIND_NONE, pb.Mask.KIND_CAUSAL)]
        ids = [load_sequence(stub, random, 300, 8, 128) for _ in range(4)]
        for length in (300, 301):
            spans = [pb.Span(query_rows=1, kv_rows=1, sequence_id=i, expected_length=length)
                     for i in ids]
            outputs.append(attend(stub, random, spans, 32, 8, 128, pb.Mask.KIND_CAUSAL))
        for sequence_id in ids:
            stub.DeleteSequence(pb.DeleteSequenceRequest(sequence_id=sequence_id))
        return outputs


def describe(server):
    """The server's description of itself."""
    with grpc.insecure_channel(server.targets["tcp"]) as channel:
        info = attention_pb2_grpc.AttentionServiceStub(channel).GetServerInfo(
            pb.GetServerInfoRequest())
    return f"{info.version}, {', '.join(f'{d.id} {d.name}'.strip() for d in info.devices)}"


def drive(args, server, runs):
    """Measures every case on one server, into `runs`. Returns its description and its answers."""
    description = describe(server)
    print(f"{server.name}: {description}", flush=True)
    for transport in args.transports:
        for case in args.cases:
            for concurrency in args.concurrency:
                began = time.monotonic()
                run = measure(args, server, transport, case, concurrency)
                runs[server.name, transport, case, concurrency] = run
                print(f"  {transport} {case} x{concurrency}: {time.monotonic() - began:.1f} s "
                      f"{run.get('error', '')}", flush=True)
    return {"is": description, "outputs": answers(server, args.seed)}


def cross_check(ours, theirs):
    """The largest difference between two servers' answers; NaN if one of them has a NaN."""
    return float(np.max([np.abs(a - b).max() for a, b in zip(ours, theirs, strict=True)]))


def cell(value, width, digits=0, unit=""):
    return f"{'-' if value is None else f'{value:.{digits}f}{unit}':>{width}}"


def numbers(run):
    """(p50 us, p99 us, requests per second), each None without a result."""
    if "bench" not in run:
        return None, None, None
    latency = run["bench"]["latency_us"]
    return latency["p50"], latency["p99"], run["bench"]["requests_per_second"]


def divide(a, b):
    return a / b if a is not None and b else None


def comparison_row(transport, case, concurrency, ours, theirs):
    """One line of the table of both servers."""
    (p50, p99, rate), (their_p50, their_p99, their_rate) = numbers(ours), numbers(theirs)
    echo = over_echo = None
    if "echo" in ours:
        echo = ours["echo"]["echo_us"]["p50"]
        over_echo = ours["echo"]["latency_us"]["p50"] - echo
    return "".join([
        f"{case:9}{transport:5}{concurrency:4}", cell(p50, 11, 1), cell(p99, 11, 1),
        cell(rate, 10), cell(their_p50, 11, 1), cell(their_p99, 11, 1), cell(their_rate, 10),
        cell(divide(p50, their_p50), 8, 3), cell(divide(rate, their_rate), 8, 2),
        cell(echo, 10, 1), cell(over_echo, 10, 1)])


def phases(run):
    """{phase: mean us} of the parts of a request's time, which add up to its mean latency."""
    bench = run["bench"]
    parts = {phase: bench["server_phase_us"][phase]["mean"] for phase in REPLY_PHASES}
    parts["reply"] = run["reply_us"]
    parts["rest"] = bench["latency_us"]["mean"] - sum(parts.values())
    return parts


def print_tables(runs):
    keys = [key[1:] for key in runs if key[0] == "flashcore"]
    print(f"\n{'':18}{'flashcore':>32}{'peer':>32}{'flashcore/peer':>16}{'echo':>20}\n"
          f"{'case':9}{'over':5}{'n':>4}" + f"{'p50 us':>11}{'p99 us':>11}{'req/s':>10}" * 2 +
          f"{'p50':>8}{'req/s':>8}{'p50 us':>10}{'p50 over':>10}")
    for key in keys:
        print(comparison_row(*key, runs["flashcore", *key], runs.get(("peer", *key), {})))
    names = (*REPLY_PHASES, "reply", "rest")
    print(f"\nflashcore's mean us {''.join(f'{name:>10}' for name in names)}{'all':>10}")
    for transport, case, n in keys:
        run = runs["flashcore", transport, case, n]
        if "bench" in run:
            parts = phases(run)
            print(f"{case:9}{transport:5}{n:4}  " +
                  "".join(cell(v, 10, 1) for v in (*parts.values(), sum(parts.values()))))
    for key, run in runs.items():
        if "error" in run:
            print(f"{' '.join(map(str, key))}: {run['error']}")


def write_json(args, servers, runs, difference):
    """All of it: options, servers, every bench's own JSON."""
    names = ("server", "transport", "case", "concurrency")
    result = {"options": vars(args), "cpus": os.cpu_count(),
              "servers": {name: server["is"] for name, server in servers.items()},
              "largest_difference": difference,
              "runs": [{**dict(zip(names, key)), **run} for key, run in runs.items()]}
    pathlib.Path(args.json).write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")


def comma_separated(kind, choices=None):
    """An argparse type: a list of `kind`."""

    def parse(text):
        values = [kind(part) for part in text.split(",")]
        if choices is not None and not set(values) <= set(choices):
            raise argparse.ArgumentTypeError(f"want some of {','.join(choices)}")
        return values

    return parse


def parse_arguments():
    parser = argparse.ArgumentParser(description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--server", default="build/server/flashcore-server")
    parser.add_argument("--cli", default="build/client/cli/flashcore")
    parser.add_argument("--device", default="cuda:0", help="of both servers")
    parser.add_argument("--cases", type=comma_separated(str, CASES), default=list(CASES))
    parser.add_argument("--concurrency", type=comma_separated(int), default=[1, 16, 64])
    parser.add_argument("--transports", type=comma_separated(str, ("tcp", "unix")),
                        default=["tcp"], help="tcp,unix; default: tcp")
    parser.add_argument("--duration", type=float, default=2, help="seconds of a run")
    parser.add_argument("--warmup", type=float, default=0.5, help="seconds before that")
    parser.add_argument("--connections", type=int, default=16, help="of a run, at most")
    parser.add_argument("--max_kv_gib", type=float, default=20,
                        help="runs with more K/V are left out: loading it takes long")
    parser.add_argument("--peer_workers", type=int, default=8)
    parser.add_argument("--peer_backend", default="default", help="see peer_server.py")
    parser.add_argument("--server_flag", action="append", default=[],
                        help="another flag for flashcore-server; repeatable")
    parser.add_argument("--seed", type=int, default=time.time_ns() % 2**32,
                        help="of the requests that both answer; default: a fresh one")
    parser.add_argument("--json", help="write everything to this file")
    return parser.parse_args()


def main():
    args = parse_arguments()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that servers are stopped
    print(f"seed {args.seed}", flush=True)
    servers, runs, difference = {}, {}, float("nan")
    try:
        for start in (start_flashcore, start_peer):
            try:
                with start(args) as server:
                    servers[server.name] = drive(args, server, runs)
            except (Failure, grpc.RpcError) as error:
                print(f"FAILED: {error}", flush=True)
        if len(servers) == 2:
            difference = cross_check(*(server["outputs"] for server in servers.values()))
    finally:
        print_tables(runs)
        if args.json:
            write_json(args, servers, runs, difference)
    agree = difference <= ERROR_BOUND  # not if it is NaN
    print(f"\nlargest difference between their answers: {difference:.1e}, "
          f"{'within' if agree else 'NOT within'} {ERROR_BOUND:.0e}")
    return 0 if agree and not any(run.get("failed") for run in runs.values()) else 1


if __name__ == "__main__":
    sys.exit(main())
