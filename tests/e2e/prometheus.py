"""A real Prometheus with the shipped configuration, and load for the server that it watches."""

import contextlib
import json
import os
import pathlib
import re
import subprocess
import tempfile
import threading
import time
import urllib.error
import urllib.parse
import urllib.request

import grpc
from flashcore.v1 import attention_pb2 as pb

import harness
import monitoring


def _replace(text, old, new):
    if old not in text:
        raise AssertionError(f"{old!r} is not in the configuration")
    return text.replace(old, new)


class Prometheus:
    """Scrapes one server every second with the token of `token_file`. Use as a context manager."""

    def __init__(self, server, token_file):
        self.folder = tempfile.TemporaryDirectory()
        folder = pathlib.Path(self.folder.name)
        config = (monitoring.PROMETHEUS / "prometheus.yml").read_text()
        config = _replace(config, "scrape_interval: 15s", "scrape_interval: 1s")
        config = _replace(config, "evaluation_interval: 15s", "evaluation_interval: 1s")
        config = _replace(config, "flashcore:9464", urllib.parse.urlparse(server.metrics_url).netloc)
        config = _replace(config, "- job_name: flashcore\n", "- job_name: flashcore\n"
                          f"    authorization: {{credentials_file: {token_file}}}\n")
        (folder / "prometheus.yml").write_text(config)
        for rules in monitoring.RULE_FILES:
            (folder / rules.name).write_text(rules.read_text())
        address = f"127.0.0.1:{harness.free_port()}"
        self.url = f"http://{address}"
        self._log = open(folder / "log", "w+")
        self.process = subprocess.Popen(
            ["prometheus", f"--config.file={folder / 'prometheus.yml'}",
             f"--storage.tsdb.path={folder / 'data'}", f"--web.listen-address={address}"],
            stdout=self._log, stderr=self._log)

    def __enter__(self):
        end = time.monotonic() + harness.PATIENCE
        while time.monotonic() < end and self.process.poll() is None:
            with contextlib.suppress(urllib.error.URLError, ConnectionError):
                urllib.request.urlopen(f"{self.url}/-/ready", timeout=harness.PATIENCE).close()
                return self
            time.sleep(0.1)
        self._log.seek(0)
        raise AssertionError(f"Prometheus did not start:\n{self._log.read()}")

    def __exit__(self, *_):
        self.process.kill()
        self.process.wait()
        self._log.close()
        self.folder.cleanup()

    def get(self, path, **parameters):
        """The data of the answer. Fails with Prometheus's error message."""
        url = f"{self.url}/api/v1/{path}?{urllib.parse.urlencode(parameters, doseq=True)}"
        try:
            with urllib.request.urlopen(url, timeout=30) as response:
                return json.load(response)["data"]
        except urllib.error.HTTPError as error:
            raise AssertionError(f"{path} {parameters}: {error.read().decode()}") from error

    def query(self, promql):
        """The series of an instant query."""
        return self.get("query", query=promql)["result"]


def fill_in(promql):
    """A query as Grafana sends it: all values of every variable, and a rate interval for `Prometheus`."""
    return re.sub(r'"\$[a-z]+"', '".*"', promql).replace("$__rate_interval", "10s")


# Flags of the `flashcore bench` runs that make the load together.
LOADS = (
    ("--shape=1x8x512x64", "--concurrency=2", "--rate=40"),
    ("--shape=1x8x64x64", "--stream", "--concurrency=4", "--rate=100"),
    ("--mode=decode", "--shape=1x8x1024x64", "--sequences=16", "--concurrency=8", "--rate=100", "--pin"),
    ("--mode=prefill", "--shape=1x8x1024x64", "--concurrency=1", "--rate=5"),
)


def _fail(server, stop):
    """Makes a few failing requests a second, for several reasons, until `stop` is set."""
    with server.channel() as channel:
        stub = harness.stub(channel)
        malformed = harness.small_request()
        malformed.head_dim = 7
        lost = pb.GetSequenceRequest(sequence_id=bytes(16))
        while not stop.wait(0.5):
            for method, request, timeout in ((stub.Attend, malformed, 5),
                                             (stub.GetSequence, lost, 5),
                                             (stub.Attend, harness.small_request(), 1e-4)):
                with contextlib.suppress(grpc.RpcError):
                    method(request, timeout=timeout)


@contextlib.contextmanager
def load(server, seconds):
    """Makes requests of every kind, some with errors, for at most `seconds`."""
    stop = threading.Event()
    failing = threading.Thread(target=_fail, args=(server, stop))
    failing.start()
    benches = [subprocess.Popen([harness.CLI, "bench", f"--target={server.target}", *flags,
                                 f"--duration={seconds}s"], stdout=subprocess.DEVNULL)
               for flags in LOADS]
    try:
        yield benches
    finally:
        stop.set()
        failing.join()
        for bench in benches:
            bench.terminate()
            bench.wait()


@contextlib.contextmanager
def watched_server():
    """(server, Prometheus) with a token between them."""
    with tempfile.TemporaryDirectory() as folder:
        token_file = os.path.join(folder, "token")
        pathlib.Path(token_file).write_text("a-token\n")
        with harness.Server(f"--metrics_token_file={token_file}", "--evict=lru",
                            f"--kv_memory_bytes={256 * harness.MIB}",
                            f"--l2_budget_bytes={64 * harness.MIB}") as server, \
                Prometheus(server, token_file) as prometheus:
            yield server, prometheus
