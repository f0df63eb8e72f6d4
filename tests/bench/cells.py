"""Servers, and variants of a measurement that take turns: what the records of tests/bench are made of.

A cell is one case measured on several variants: servers, transports or flags. Each variant is a
process `flashcore bench --rounds_from_stdin`, which loads its K/V once. In a round every variant is
measured once, and every other round goes backwards, so that a drift of the machine hits all alike.

A row is flat: one variant of one cell. It has the median of the rounds of each quantity and, with _min and
_max, their spread. See record_server.py for the keys.
"""

import argparse
import contextlib
import ctypes
import json
import os
import pathlib
import selectors
import signal
import statistics
import subprocess
import sys
import tempfile
import time

sys.path.append(str(pathlib.Path(__file__).resolve().parent / "kernels"))
import record_file  # noqa: E402
import run_info  # noqa: E402

START_SECONDS = 300  # PyTorch's first import reads gigabytes
SETUP_SECONDS = 300  # of loading K/V
ATTEMPTS = 10  # at a round with a request of each kind
ROUND_SECONDS = 120  # of one round, beside --duration and --warmup
PHASES = ("receive", "staging_wait", "queue", "copy_in", "kernel", "copy_out")
PR_SET_PDEATHSIG = 1
LIBC = ctypes.CDLL(None)


class Failure(Exception):
    """A server that did not start, or a bench with failed requests or wrong answers."""


def die_with_parent():
    LIBC.prctl(PR_SET_PDEATHSIG, signal.SIGKILL)


class Server:
    """A server process on a free port and a Unix socket, flashcore's also (`local`) on a local
    socket; killed when the `with` block ends.

    Its JSON log has a record with the message "serving" and its addresses."""

    def __init__(self, name, command, local=False):
        self.name = name
        self._folder = tempfile.TemporaryDirectory()
        self.targets = {"unix": f"unix:{self._folder.name}/s"}
        flags = ["--listen=127.0.0.1:0", f"--listen={self.targets['unix']}"]
        if local:
            self.targets["local"] = f"local:{self._folder.name}/l"
            flags.append(f"--local_listen={self._folder.name}/l")
        self._log_path = pathlib.Path(self._folder.name, "log")
        with self._log_path.open("wb") as log:
            self._process = subprocess.Popen(
                [*command, *flags], stdout=log, stderr=log, stdin=subprocess.DEVNULL,
                preexec_fn=die_with_parent)

    def __enter__(self):
        try:
            self.targets["tcp"] = self._wait_for("serving")["addresses"].split(",")[0]
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *_):
        self._process.kill()
        self._process.wait()
        self._folder.cleanup()

    def _wait_for(self, message):
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


def flashcore_command(args, *flags, device=None, kv_bytes=2 << 30):
    """The command of a flashcore-server. On a GPU its K/V is bounded: other servers need memory."""
    return [args.server, f"--device={device or args.device}", f"--kv_memory_bytes={kv_bytes}",
            "--client_kv_bytes=0", "--metrics_listen=127.0.0.1:0", "--log_format=json",
            *args.server_flag, *flags]


class Bench:
    """A `flashcore bench` that measures a round whenever it is told to. A context manager."""

    def __init__(self, command):
        self._errors = tempfile.TemporaryFile()
        self._process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE,
                                         stderr=self._errors, preexec_fn=die_with_parent)
        self._selector = selectors.DefaultSelector()
        self._selector.register(self._process.stdout, selectors.EVENT_READ)
        self._read = b""

    def __enter__(self):
        return self

    def __exit__(self, *_):
        """Lets it delete its sequences."""
        with contextlib.suppress(OSError):
            self._process.stdin.close()
        try:
            self._process.wait(60)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._process.stdout.close()
        self._selector.close()
        self._errors.close()

    def wait_until_ready(self):
        self._line(SETUP_SECONDS)

    def round(self):
        """The report of one more round. Raises Failure if a request failed or an answer was wrong. A
        round that was too short for one request of each kind is repeated a few times."""
        for _ in range(ATTEMPTS):
            report = self._answer("")
            counts = {name: report[name] for name in ("ok", "failed", "wrong_replies")}
            if counts["failed"] or counts["wrong_replies"]:
                break
            inline = report.get("inline", {}).get("ok", 1)
            if counts["ok"] and inline:
                return report
        raise Failure(f"{counts}: {self._error_text()}")

    def _answer(self, text):
        """Its next line of output, after this line of input."""
        with contextlib.suppress(OSError):  # if it has ended, so has its output
            self._process.stdin.write(f"{text}\n".encode())
            self._process.stdin.flush()
        return self._line(ROUND_SECONDS)

    def _line(self, seconds):
        """The next line of its output, parsed."""
        end = time.monotonic() + seconds
        while b"\n" not in self._read:
            left = end - time.monotonic()
            if left <= 0 or not self._selector.select(left):
                self._process.kill()
                raise Failure(f"no output within {seconds} s")
            got = os.read(self._process.stdout.fileno(), 1 << 16)
            if not got:
                raise Failure(f"exit status {self._process.wait()}: {self._error_text()}")
            self._read += got
        line, _, self._read = self._read.partition(b"\n")
        return json.loads(line)

    def _error_text(self):
        self._errors.seek(0)
        return self._errors.read().decode(errors="replace").strip()[-500:]


class Echo(Bench):
    """A bare gRPC echo in a process of its own: `flashcore-grpc-api-bench --echo`."""

    def latency(self, report):
        """{"p50", "p99"} of unary echoes, one at a time, in microseconds: of as many bytes, over the same
        transport and for as long as the requests of a report of `flashcore bench`."""
        return self._answer(f"{report['transport']} {round(report['request_bytes'])} "
                            f"{round(report['response_bytes'])} {report['duration_seconds']}")


def bench_command(args, flags, clients):
    return [args.cli, "bench", "--json", "--rounds_from_stdin", *flags,
            f"--concurrency={clients}", f"--connections={min(clients, args.connections)}",
            f"--duration={args.duration}s", f"--warmup={args.warmup}s"]


def run_rounds(commands, rounds, echo=None):
    """{name: (reports, error)} of {name: command}. A variant that fails is left out from then on;
    `error` says why, else it is empty. `echo`: a flashcore-grpc-api-bench, whose echo takes turns with
    each variant; the reports have its latency as "echo_us"."""
    reports = {name: [] for name in commands}
    errors = dict.fromkeys(commands, "")
    with contextlib.ExitStack() as stack:
        benches = {}
        for name, command in commands.items():
            benches[name] = stack.enter_context(Bench(command))
        if echo:
            echo = stack.enter_context(Echo([echo, "--echo"]))
            echo.wait_until_ready()
        for name, bench in benches.items():
            with noted(errors, name):
                bench.wait_until_ready()
        for number in range(rounds):
            for name in list(benches)[::-1 if number % 2 else 1]:
                if not errors[name]:
                    with noted(errors, name):
                        report = benches[name].round()
                        if echo:
                            report["echo_us"] = echo.latency(report)
                        reports[name].append(report)
    return {name: (reports[name], errors[name]) for name in commands}


@contextlib.contextmanager
def noted(errors, name):
    try:
        yield
    except Failure as failure:
        errors[name] = str(failure)


def quantities(report):
    """A row's numbers from one report of `flashcore bench`, flat, with units in the keys."""
    out = {"p50_us": report["latency_us"]["p50"], "p99_us": report["latency_us"]["p99"],
           "mean_us": report["latency_us"]["mean"],
           "outside_kernel_p50_us": report["outside_kernel_us"]["p50"],
           "kernel_p50_us": report["server_phase_us"]["kernel"]["p50"],
           "requests_per_second": report["requests_per_second"],
           "request_bytes": report["request_bytes"]}
    for phase in PHASES:
        out[f"{phase}_mean_us"] = report["server_phase_us"][phase]["mean"]
    if "echo_us" in report:
        out["echo_p50_us"] = report["echo_us"]["p50"]
        out["echo_p99_us"] = report["echo_us"]["p99"]
        out["outside_kernel_over_echo"] = out["outside_kernel_p50_us"] / out["echo_p50_us"]
        out["latency_over_echo_and_kernel"] = (
            out["p50_us"] / (out["echo_p50_us"] + out["kernel_p50_us"]))
    if "inline" in report:
        out["inline_p50_us"] = report["inline"]["latency_us"]["p50"]
        out["inline_request_bytes"] = report["inline"]["request_bytes"]
        out["inline_over_resident"] = report["inline_to_decode_p50_ratio"]
    return out


def spread(key, values):
    """The median of rounds, and their least and greatest."""
    return {key: statistics.median(values), f"{key}_min": min(values), f"{key}_max": max(values)}


COMPARED = ("p50_us", "outside_kernel_p50_us", "requests_per_second")


def make_rows(where, results, baseline):
    """The rows of one cell, one for each variant of run_rounds' results. `where` is in all of them.
    Ratios to the variant `baseline` are of the same round."""
    base = [quantities(report) for report in results[baseline][0]]
    rows = []
    for name, (reports, error) in results.items():
        row = {**where, "variant": name, "baseline": baseline, "rounds": len(reports)}
        if error:
            row["error"] = error
        of_rounds = [quantities(report) for report in reports]
        if reports:
            row |= {"server_version": reports[-1]["server"], "target": reports[-1]["target"],
                    "shape": reports[-1]["shape"], "mode": reports[-1]["mode"],
                    "samples": sum(report["ok"] for report in reports),
                    "round_seconds": reports[-1]["window_seconds"]}
        for key in of_rounds[0] if of_rounds else ():
            row |= spread(key, [values[key] for values in of_rounds])
        pairs = list(zip(of_rounds, base))
        for key in COMPARED:
            ratios = [a[key] / b[key] for a, b in pairs if b[key]]
            if ratios and name != baseline:
                row |= spread(f"{key.removesuffix('_us')}_over_baseline", ratios)
        rows.append(row)
    return rows


def format_row(row):
    """One line for people."""
    text = " ".join(f"{row[key]!s:>9}" for key in ("case", "clients") if key in row)
    text = f"{text}  {row['variant']:28}"
    if "p50_us" in row:
        text += f"{row['p50_us']:10.1f} us ({row['p50_us_min']:.1f}..{row['p50_us_max']:.1f})"
        text += f"  p99 {row['p99_us']:.1f}  {row['requests_per_second']:.0f} req/s"
    for key in ("p50_over_baseline", "requests_per_second_over_baseline",
                "outside_kernel_over_echo", "latency_over_echo_and_kernel",
                "inline_over_resident"):
        if key in row:
            text += f"\n{'':12}{key} {row[key]:.3f} ({row[key + '_min']:.3f}..{row[key + '_max']:.3f})"
    return text + (f"  FAILED: {row['error']}" if "error" in row else "")


class Record:
    """The cells measured so far, written to the file after each cell: a run that is cut short keeps them."""

    def __init__(self, args):
        self._path = args.json
        self._end = time.monotonic() + args.budget_seconds
        self._began = time.monotonic()
        self.data = {"run": run_info.run_info(), "settings": vars(args).copy(), "servers": {},
                     "rows": [], "left_out": [], "failures": []}

    def cell(self, args, section, case, clients, variants, baseline=None, **where):
        """Measures and adds one cell. `variants`: flags of `flashcore bench` by name. With echo=True in
        `where`, an echo takes turns with each."""
        where = {"section": section, "case": case, "clients": clients, **where}
        if time.monotonic() > self._end:
            print(f"left out, out of time: {where}", flush=True)
            self.data["left_out"].append({**where, "why": "out of time"})
            return []
        commands = {name: bench_command(args, flags, clients) for name, flags in variants.items()}
        results = run_rounds(commands, args.rounds, args.echo if where.get("echo") else None)
        rows = make_rows(where, results, baseline or next(iter(variants)))
        for row in rows:
            print(format_row(row), flush=True)
            if "error" in row:
                self.fail(f"{section} {case} x{clients} {row['variant']}: {row['error']}")
        self.data["rows"] += rows
        self.write()
        return rows

    def fail(self, what):
        print(f"FAILED: {what}", flush=True)
        self.data["failures"].append(what)

    def write(self):
        self.data["seconds"] = round(time.monotonic() - self._began, 1)
        if self._path:
            record_file.write(self._path, self.data)


def comma_separated(kind, choices=None):
    """An argparse type: a list of `kind`."""

    def parse(text):
        values = [kind(part) for part in text.split(",")]
        if choices is not None and not set(values) <= set(choices):
            raise argparse.ArgumentTypeError(f"want some of {','.join(choices)}")
        return values

    return parse


def add_arguments(parser):
    """The arguments of every record."""
    parser.add_argument("--server", default="build/server/flashcore-server")
    parser.add_argument("--cli", default="build/client/cli/flashcore")
    parser.add_argument("--echo", default="build/tests/bench/flashcore-grpc-api-bench")
    parser.add_argument("--device", default="cuda:0", help="of all servers")
    parser.add_argument("--rounds", type=int, default=3, help="of each cell")
    parser.add_argument("--duration", type=float, default=1, help="seconds of a round")
    parser.add_argument("--warmup", type=float, default=0.2, help="seconds before that")
    parser.add_argument("--connections", type=int, default=16, help="of a variant, at most")
    parser.add_argument("--server_flag", action="append", default=[],
                        help="another flag for every flashcore-server; repeatable")
    parser.add_argument("--budget_seconds", type=float, default=float("inf"),
                        help="after that, no further cell is started")
    parser.add_argument("--json", help="write the record to this file")
