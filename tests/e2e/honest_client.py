"""A client that measures its calls while others attack the server, and the judgement of what it measured."""

import datetime
import json
import math
import os
import subprocess
import sys
import threading
import time

import grpc
from flashcore.v1 import attention_pb2 as pb

import harness
from local_raw_client import COMPLETED, RawClient

QUIET = "quiet\n"
NAME = (("flashcore-client", "honest"),)


def p99(times):
    return sorted(times)[math.ceil(0.99 * len(times)) - 1]


def timed(call, count):
    """The seconds that each of `count` calls takes."""
    times = []
    for _ in range(count):
        begin = time.monotonic()
        call()
        times.append(time.monotonic() - begin)
    return times


def assert_unhurt(test, quiet, attacked, floor=0.25, what=""):
    """A p99 of at most three times the quiet one, both lists of seconds, or `floor`: other processes may
    share the cores with the test. None: any."""
    print(f"{test.id()}: {what} {len(attacked)} calls, p99 {1e3 * p99(quiet):.1f} ms, attacked "
          f"{1e3 * p99(attacked):.1f} ms, longest {1e3 * max(attacked):.0f} ms", flush=True)
    if floor is not None:
        test.assertLessEqual(p99(attacked), max(3 * p99(quiet), floor))


class HonestClient:
    """Calls the server at `target` again and again, in a process of its own, of `user` if one is given. Over
    gRPC: Attend, on one connection and on a new one each time; with --insecure_client_names it is a client of
    its own. Over local:PATH: a call and a request in a ring, on one connection, or if `renews` a call on a
    new one each time. Makes `quiet` rounds until the context begins, and at least `attacked` until `check`
    ends it."""

    def __init__(self, target, user=None, quiet=100, attacked=1, renews=False):
        self.target = target
        self._process = subprocess.Popen(
            [sys.executable, "-B", __file__, json.dumps([target, user, quiet, attacked, renews])],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)

    def __enter__(self):
        for line in self._process.stdout:
            if line == QUIET:  # it has made its quiet calls
                return self
        raise AssertionError("the honest client is not served")

    def __exit__(self, *_):
        self._process.kill()
        self._process.communicate()

    def check(self, test, floor=0.25):
        """Ends the client. It had no error, and was not hurt."""
        result = json.loads(self._process.communicate(timeout=harness.PATIENCE)[0].splitlines()[-1])
        test.assertEqual(result["errors"], [], self.target)
        test.assertTrue(result["attacked"], self.target)
        door = self.target.partition("/")[0]
        for what, times in result["attacked"].items():
            assert_unhurt(test, result["quiet"][what], times, floor, f"{door} {what}:")


class OverGrpc:
    def __init__(self, target):
        self._target, self._channel = target, harness.open_channel(target)

    def round(self):
        """The seconds of each kind of call."""
        start = time.monotonic()
        self._call(self._channel, "the kept")
        with harness.open_channel(self._target) as other:
            self._call(other, "a new")
        return {"Attend": time.monotonic() - start}

    def _call(self, channel, which):
        start = time.monotonic()
        try:
            harness.stub(channel).Attend(harness.small_request(), timeout=harness.PATIENCE, metadata=NAME)
        except grpc.RpcError as error:
            raise RuntimeError(f"{which} connection, after {time.monotonic() - start:.3f} s: "
                               f"{error.code().name}: {error.details()}") from error


class OverLocal(RawClient):
    def receive(self):
        while self.counter(COMPLETED) == self.received:
            time.sleep(2e-5)
        return super().receive()

    def get_info(self):
        self.call("GetServerInfo", pb.GetServerInfoRequest(), pb.GetServerInfoResponse)

    def round(self):
        call, = timed(self.get_info, 1)
        return {"call": call, "ring": timed(self._attend, 1)[0]}

    def _attend(self):
        self.submit(7, harness.small_request())
        status = self.receive()[1].status
        if status.code != 0:
            raise RuntimeError(str(status))


class OverNewConnections:
    def __init__(self, path):
        self._path = path

    def round(self):
        def call():
            client = OverLocal(self._path)
            client.get_info()
            client.socket.close()

        return {"new connection": timed(call, 1)[0]}


def main():
    target, user, quiet, attacked, renews = json.loads(sys.argv[1])
    if user is not None:
        os.setuid(user)
    path, errors, ended = target.removeprefix("local:"), [], threading.Event()
    client = OverGrpc(target) if path == target else (OverNewConnections if renews else OverLocal)(path)

    def rounds(is_over):
        results, count = {}, 0
        while not is_over(count) and len(errors) < 10:
            time.sleep(0.005)  # its own calls are no load
            try:
                for what, seconds in client.round().items():
                    results.setdefault(what, []).append(seconds)
            except (RuntimeError, OSError) as error:
                errors.append(f"{datetime.datetime.now():%T}: {error}")
            count += 1
        return results

    of_quiet = rounds(lambda count: count >= quiet)
    threading.Thread(target=lambda: (sys.stdin.read(), ended.set()), daemon=True).start()
    print(QUIET, end="", flush=True)
    of_attacked = rounds(lambda count: ended.is_set() and count >= attacked)
    print(json.dumps({"quiet": of_quiet, "attacked": of_attacked, "errors": errors}))


if __name__ == "__main__":
    main()
