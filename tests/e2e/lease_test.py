"""Leases: what a client leaves behind when it ends or is killed."""

import contextlib
import os
import subprocess
import tempfile
import time
import unittest

import grpc
from flashcore.v1 import attention_pb2 as pb

import harness
from harness import wait_until

LOCAL_CLIENT = os.environ["FLASHCORE_LOCAL_CLIENT"]
DELETED = 'flashcore_sequences_evicted_total{reason="lease"}'


@contextlib.contextmanager
def leasing_server():
    """A server and its three addresses. It deletes idle sequences after an hour only."""
    with tempfile.TemporaryDirectory() as folder:
        path = os.path.join(folder, "local.sock")
        with harness.Server(f"--local_listen={path}") as server:
            yield server, (server.target, f"unix:{server.socket}", f"local:{path}")


def create(stub, **fields):
    return stub.CreateSequence(pb.CreateSequenceRequest(
        num_layers=1, num_kv_heads=1, head_dim=32, dtype=pb.DTYPE_FLOAT16, **fields)).sequence


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
        with leasing_server() as (server, targets):
            for number, target in enumerate(targets):
                with self.subTest(target), self.client(target) as client:
                    self.assertEqual(server.metric("flashcore_sequences"), 3)
                    self.assertEqual(server.metric(DELETED), 3 * number)
                    client.kill()
                    client.wait()
                    self.assert_left_nothing(server, 3 * (number + 1))

    def test_a_client_that_ends_leaves_nothing(self):
        with leasing_server() as (server, targets):
            for number, target in enumerate(targets):
                with self.subTest(target), self.client(target) as client:
                    client.communicate("", timeout=harness.PATIENCE)
                    self.assertEqual(client.returncode, 0)
                    self.assert_left_nothing(server, 3 * (number + 1))

    def test_an_open_lease_does_not_hold_a_drain(self):
        with leasing_server() as (server, targets), contextlib.ExitStack() as clients:
            for target in targets:
                clients.enter_context(self.client(target))
            channel = clients.enter_context(server.channel())
            lease = harness.stub(channel).HoldLease(pb.HoldLeaseRequest())
            next(lease)
            self.assertEqual(server.stop(), 0)
            with self.assertRaises(grpc.RpcError) as caught:
                next(lease)
            self.assertEqual(caught.exception.code(), grpc.StatusCode.UNAVAILABLE)

    def test_a_lease_of_a_raw_client(self):
        with leasing_server() as (server, _), server.channel() as channel:
            stub = harness.stub(channel)
            lease = stub.HoldLease(pb.HoldLeaseRequest())
            lease_id = next(lease).lease_id
            self.assertEqual(len(lease_id), 16)
            leased, kept = create(stub, lease_id=lease_id), create(stub)
            self.assertEqual((leased.leased, kept.leased), (True, False))
            lease.cancel()
            wait_until(lambda: server.metric(DELETED) == 1, "the leased one is deleted")
            listed = stub.ListSequences(pb.ListSequencesRequest()).sequences
            self.assertEqual([info.sequence_id for info in listed], [kept.sequence_id])

    @harness.stress
    def test_an_idle_client_keeps_its_lease(self):
        """Over the server's pings, which it must answer, although no thread of it waits in gRPC."""
        with leasing_server() as (server, targets), contextlib.ExitStack() as clients:
            processes = [clients.enter_context(self.client(target)) for target in targets]
            time.sleep(100)  # more than the server's 60 s to a ping and 20 s to its answer
            self.assertEqual(server.metric("flashcore_sequences"), 9)
            for process in processes:
                process.communicate("", timeout=harness.PATIENCE)
                self.assertEqual(process.returncode, 0)


if __name__ == "__main__":
    harness.main()
