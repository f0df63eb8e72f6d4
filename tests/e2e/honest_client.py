"""A client that measures its calls while others attack the server."""

import datetime
import json
import math
import subprocess
import sys
import threading
import time

import grpc

import harness


QUIET = "quiet\n"
NAME = (("flashcore-client", "honest"),)


def p99(times):
    return sorted(times)[math.ceil(0.99 * len(times)) - 1]


def assert_unhurt(test, quiet, attacked, floor=0.25):
    """A p99 of at most three times the quiet one, both lists of seconds, or `floor`: other processes may
    share the cores with the test."""
    print(f"{test.id()}: p99 {1e3 * p99(quiet):.1f} ms, attacked {1e3 * p99(attacked):.1f} ms",
          flush=True)
    test.assertLessEqual(p99(attacked), max(3 * p99(quiet), floor))


class HonestClient:
    """Calls Attend again and again, on one connection and on a new one each time, in a process of its
    own. Quiet until the context begins. With --insecure_client_names it is a client of its own."""

    def __init__(self, server, target=None):
        self._process = subprocess.Popen(
            [sys.executable, "-B", __file__, target or server.target], stdin=subprocess.PIPE,
            stdout=subprocess.PIPE, text=True)

    def __enter__(self):
        for line in self._process.stdout:
            if line == QUIET:  # it has made its quiet calls
                return self
        raise AssertionError("the honest client is not served")

    def __exit__(self, *_):
        self._process.kill()
        self._process.communicate()

    def end(self):
        """Ends the client. Returns what it printed."""
        return self._process.communicate()[0]

    def check(self, test, floor=1):
        """Ends the client. It had no error, and was not hurt."""
        result = json.loads(self.end().splitlines()[-1])
        test.assertEqual(result["errors"], [])
        test.assertGreater(len(result["attacked"]), 0)
        assert_unhurt(test, result["quiet"], result["attacked"], floor)


def main():
    target, times, errors = sys.argv[1], [], []
    ended = threading.Event()

    def call(channel, which):
        start = time.monotonic()
        try:
            harness.stub(channel).Attend(harness.small_request(), timeout=harness.PATIENCE, metadata=NAME)
        except grpc.RpcError as error:
            errors.append(f"{datetime.datetime.now():%T}, {which} connection, after "
                          f"{time.monotonic() - start:.3f} s: {error.code().name}: {error.details()}")

    def call_until(condition):
        while not condition():
            time.sleep(0.005)  # its own calls are no load
            start = time.monotonic()
            call(channel, "the kept")
            with harness.open_channel(target) as other:
                call(other, "a new")
            times.append(time.monotonic() - start)

    with harness.open_channel(target) as channel:
        call_until(lambda: len(times) >= 100)
        quiet = list(times)
        times.clear()
        threading.Thread(target=lambda: (sys.stdin.read(), ended.set())).start()
        print(QUIET, end="", flush=True)
        call_until(ended.is_set)
    print(json.dumps({"quiet": quiet, "attacked": times, "errors": errors}))


if __name__ == "__main__":
    main()
