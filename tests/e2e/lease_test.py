"""Leases: what a client leaves behind when it ends or is killed."""

import contextlib
import os
import subprocess
import time
import unittest

import grpc
from flashcore.v1 import attention_pb2 as pb

import harness
from harness import wait_until

LOCAL_CLIENT = os.environ["FLASHCORE_LOCAL_CLIENT"]
DELETED = 'flashcore_sequences_evicted_total{reason="lease"}'


class LeaseTest(unittest.TestCase):
    @contextlib.contextmanager
    def client(self, target):
        """A process with three sequences under a lease, which waits for the end of its input."""
        with subprocess.Popen([LOCAL_CLIENT, "lease", target], stdin=subprocess.PIPE,
                              stdout=subprocess.PIPE, text=True) as process:
            try:
                self.assertEqual(process.stdout.readline(), "ready\n")
                yield process
            finally:
                process.kill()

    def assert_left_nothing(self, server, count):
        wait_until(lambda: server.metric(DELETED) == count, "its sequences are deleted")
        with server.channel() as channel:
            info = harness.stub(channel).GetServerInfo(pb.GetServerInfoRequest())
        self.assertEqual(info.devices[0].kv_used_bytes, 0)

    def test_a_killed_client_leaves_nothing(self):
        with harness.Server(local=True) as server:
            for number, target in enumerate(server.addresses):
                with self.subTest(target), self.client(target) as client:
                    self.assertEqual(server.metric("flashcore_sequences"), 3)
                    self.assertEqual(server.metric(DELETED), 3 * number)
                    client.kill()
                    client.wait()
                    self.assert_left_nothing(server, 3 * (number + 1))

    def test_a_client_that_ends_leaves_nothing(self):
        with harness.Server(local=True) as server:
            for number, target in enumerate(server.addresses):
                with self.subTest(target), self.client(target) as client:
                    client.communicate("", timeout=harness.PATIENCE)
                    self.assertEqual(client.returncode, 0)
                    self.assert_left_nothing(server, 3 * (number + 1))

    def test_an_open_lease_does_not_hold_a_drain(self):
        with harness.Server(local=True) as server, contextlib.ExitStack() as clients:
            for target in server.addresses:
                clients.enter_context(self.client(target))
            channel = clients.enter_context(server.channel())
            lease = harness.stub(channel).HoldLease(pb.HoldLeaseRequest())
            next(lease)
            self.assertEqual(server.stop(), 0)
            with self.assertRaises(grpc.RpcError) as caught:
                next(lease)
            self.assertEqual(caught.exception.code(), grpc.StatusCode.UNAVAILABLE)

    @harness.stress
    def test_an_idle_client_keeps_its_lease(self):
        """Over the server's pings, which it must answer, although no thread of it waits in gRPC."""
        with harness.Server(local=True) as server, contextlib.ExitStack() as clients:
            processes = [clients.enter_context(self.client(target)) for target in server.addresses]
            time.sleep(100)  # more than the server's 60 s to a ping and 20 s to its answer
            self.assertEqual(server.metric("flashcore_sequences"), 9)
            for process in processes:
                process.communicate("", timeout=harness.PATIENCE)
                self.assertEqual(process.returncode, 0)


if __name__ == "__main__":
    harness.main()
