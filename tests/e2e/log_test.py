"""Nobody reads the log, or its pipe is closed: the server answers and ends as ever."""

import contextlib
import fcntl
import json
import os
import pathlib
import subprocess
import tempfile
import threading
import unittest

import grpc
import harness

INVALID = grpc.StatusCode.INVALID_ARGUMENT
# gRPC traces each frame: some hundred records for each request.
FLOOD = {"GRPC_VERBOSITY": "DEBUG", "GRPC_TRACE": "http"}
TCP_LISTEN = "0A"  # in /proc/net/tcp
DROPPED = "flashcore_log_records_dropped_total"


class PipedServer(harness.Server):
    """A server whose standard error is a pipe: full, so that the server blocks if it waits for it, or
    without a reader. Its addresses are not read from the log."""

    def __init__(self, full, env=None):
        self.folder = tempfile.TemporaryDirectory()
        self.socket = os.path.join(self.folder.name, "s")
        read_end, write_end = os.pipe()
        self._log = os.fdopen(read_end, "rb")
        if full:
            self.filled = fill(write_end)
        else:
            self._log.close()
        self.process = subprocess.Popen(
            [harness.SERVER, f"--listen=unix:{self.socket}", "--metrics_listen=127.0.0.1:0",
             "--log_format=json", "--log_level=debug", *harness.device_flags()],
            stderr=write_end, env={**os.environ, **(env or {})})
        os.close(write_end)
        self.target = f"unix:{self.socket}"
        port = harness.wait_until(self.metrics_port, "the server listens")
        self.metrics_url = f"http://127.0.0.1:{port}/metrics"

    def metrics_port(self):
        """The only TCP port on which the server listens; None as long as there is none."""
        mine = set()
        for file in (self.proc / "fd").iterdir():
            with contextlib.suppress(FileNotFoundError):  # it is closed by now
                mine.add(os.readlink(file))
        for line in pathlib.Path("/proc/net/tcp").read_text().splitlines()[1:]:
            _, local, _, state, *_, inode = line.split()[:10]
            if state == TCP_LISTEN and f"socket:[{inode}]" in mine:
                return int(local.split(":")[1], 16)
        return None

    def attend(self, times):
        with self.channel() as channel:
            for _ in range(times):
                harness.stub(channel).Attend(harness.small_request(), timeout=60,
                                             wait_for_ready=True)

    def flood(self):
        """Sends requests until records are dropped."""
        self.attend(1)
        harness.wait_until(lambda: self.attend(10) or self.metric(DROPPED) > 0,
                           "a record is dropped")

    def read_records(self):
        """Each record from now on."""
        self._log.read(self.filled)
        for line in self._log:
            yield json.loads(line)


def fill(pipe):
    """Writes until the pipe takes no more; returns the number of bytes."""
    flags = fcntl.fcntl(pipe, fcntl.F_GETFL)
    fcntl.fcntl(pipe, fcntl.F_SETFL, flags | os.O_NONBLOCK)
    filled = 0
    try:
        while True:
            filled += os.write(pipe, b"x")
    except BlockingIOError:
        fcntl.fcntl(pipe, fcntl.F_SETFL, flags)
        return filled


class LogTest(unittest.TestCase):
    def test_a_stalled_reader_stops_neither_requests_nor_the_end(self):
        with PipedServer(full=True, env=FLOOD) as server:
            server.flood()
            self.assertEqual(server.stop(), 0)

    def test_a_reader_that_goes_on_learns_what_it_missed(self):
        with PipedServer(full=True, env=FLOOD) as server:
            server.flood()
            dropped = server.metric(DROPPED)
            records = server.read_records()
            report = next(record for record in records if record["msg"] == "log records dropped")
            self.assertGreaterEqual(report["dropped"], dropped)
            self.assertEqual(report["level"], "warning")
            rest = threading.Thread(target=lambda: list(records))
            rest.start()
            self.assertEqual(server.stop(), 0)
            rest.join()

    def test_requests_do_not_wait_for_a_stalled_reader(self):
        with PipedServer(full=True, env=FLOOD) as server, self.load(server) as load:
            self.wait_for_load(server, requests=100, dropped=0)
            load.kill()  # a drain waits for clients to be silent
            self.assertEqual(server.stop(), 0)

    @harness.stress
    def test_under_load_nothing_waits_for_the_log(self):
        for full in (True, False):
            with self.subTest(full=full), PipedServer(full) as server, self.load(server):
                self.wait_for_load(server, requests=5000, dropped=1000)
                self.assertEqual(server.stop(), 0)

    def load(self, server):
        """Many clients, with a record for each request."""
        server.attend(1)
        return server.load("--concurrency=8", "--shape=1x1x16x32", "--allow_errors")

    def wait_for_load(self, server, requests, dropped):
        """Sends bad requests, with a warning for each, until that much is done."""
        bad = harness.small_request()
        bad.head_dim = 0
        answered = 'flashcore_request_duration_seconds_count{rpc="Attend"}'
        with server.channel() as channel:
            stub = harness.stub(channel)
            harness.wait_until(
                lambda: stub.Attend.future(bad, timeout=60).code() == INVALID and
                server.metric(DROPPED) > dropped and server.metric(answered) > requests,
                lambda: f"{server.metric(answered)} requests answered")

    def test_a_closed_pipe_ends_nothing(self):
        with PipedServer(full=False) as server:
            server.attend(3)
            harness.wait_until(lambda: server.metric(DROPPED) > 0, "a record is dropped")
            self.assertEqual(server.stop(), 0)


if __name__ == "__main__":
    harness.main()
