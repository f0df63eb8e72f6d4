"""Without tokens and certificates, a client is a user of this host, whatever transport it comes by."""

import os
import subprocess
import sys
import unittest

import grpc
import numpy as np
from flashcore.v1 import attention_pb2 as pb

import harness
from credentials import CredentialsTest, tls_channel, tls_flags
from harness import SOME_UID, chunk, create_request, kernel_tells_of_tcp, needs_root, open_server
from local_raw_client import RawClient

Code = grpc.StatusCode


def create(stub):
    return harness.create(stub).sequence_id


def create_locally(client):
    return client.call("CreateSequence", create_request(), pb.CreateSequenceResponse).sequence_id


def extend(stub, sequence):
    """The sequence's length after one row more."""
    return list(stub.LoadSequence(iter([chunk(sequence, 1)])).sequence.layer_lengths)


def owns(stub, sequence):
    return sequence in {info.sequence_id for info in stub.ListSequences(
        pb.ListSequencesRequest(page_size=1000)).sequences}


class OneOwnerTest(CredentialsTest):
    @unittest.skipUnless(kernel_tells_of_tcp(), "the kernel does not tell whose a TCP connection is")
    def test_a_sequence_made_over_tcp_is_extended_over_every_transport(self):
        with open_server() as server:
            with server.channel() as channel:
                sequence = create(harness.stub(channel))
            self.assertGreaterEqual(len(server.over_grpc), 2)
            for length, address in enumerate(server.over_grpc, 1):
                with self.subTest(address), server.channel(address) as channel:
                    stub = harness.stub(channel)
                    self.assertEqual(extend(stub, sequence), [length])
                    self.assertTrue(owns(stub, sequence))
            client = RawClient(server.local)
            self.assertEqual(client.identity, f"uid:{os.getuid()}")
            tensor = client.put(0, np.zeros((1, 1, 32), np.float16))
            reply = client.call("LoadSequence", pb.LoadSequenceRequest(
                sequence_id=sequence, layout=pb.LAYOUT_NHD, rows=1, key_range=tensor,
                value_range=tensor), pb.LoadSequenceResponse)
            self.assertEqual(list(reply.sequence.layer_lengths), [len(server.over_grpc) + 1])

    def test_a_sequence_made_over_the_local_socket_is_extended_over_a_unix_socket(self):
        with open_server() as server, server.channel(f"unix:{server.socket}") as channel:
            sequence = create_locally(RawClient(server.local))
            self.assertEqual(extend(harness.stub(channel), sequence), [1])

    def test_the_quota_of_a_user_is_over_all_transports(self):
        with open_server("--client_sequences=2") as server, \
                server.channel(f"unix:{server.socket}") as channel:
            client, stub = RawClient(server.local), harness.stub(channel)
            create(stub)
            create_locally(client)
            self.assertIn("client quota", self.assert_code(
                Code.RESOURCE_EXHAUSTED, stub.CreateSequence, create_request()))

    def as_stranger(self, sequence, targets):
        """The error that another user gets who deletes the sequence, at each of the targets."""
        done = subprocess.run([sys.executable, "-B", __file__, "stranger", sequence.hex(), *targets],
                              capture_output=True, text=True, timeout=2 * harness.PATIENCE)
        self.assertEqual(done.returncode, 0, done.stderr)
        return done.stdout.split()[1:]  # behind the seed

    @needs_root
    def test_another_user_is_another_owner(self):
        with open_server() as server:
            targets = server.addresses
            if not kernel_tells_of_tcp():
                targets = [a for a in targets if a.startswith(("unix:", "local:"))]
            with server.channel(f"unix:{server.socket}") as channel:
                stub = harness.stub(channel)
                sequence = create(stub)
                self.assertEqual(self.as_stranger(sequence, targets), ["NOT_FOUND"] * len(targets))
                self.assertEqual(extend(stub, sequence), [1])

    def test_a_trusted_proxy_may_be_a_user(self):
        header = (("x-forwarded-client-cert", "URI=spiffe://c"),)
        for user, trusted in ((os.getuid(), True), (SOME_UID, False)):
            with harness.Server(f"--trusted_proxies=uid:{user}") as server, \
                    server.channel(f"unix:{server.socket}") as channel:
                stub = harness.stub(channel)
                sequence = create(stub)
                listed = stub.ListSequences(pb.ListSequencesRequest(), metadata=header).sequences
                self.assertEqual([info.sequence_id for info in listed], [] if trusted else [sequence])

    def test_over_tls_without_certificates_a_client_is_its_address(self):
        with harness.Server(*tls_flags(self.pair)) as server, \
                tls_channel(server, self.ca) as first, tls_channel(server, self.ca) as second, \
                server.channel(f"unix:{server.socket}") as unix:
            sequence = create(harness.stub(first))
            self.assertTrue(owns(harness.stub(second), sequence))
            self.assertFalse(owns(harness.stub(unix), sequence))

    @unittest.skipUnless(os.getuid() == 0 and subprocess.run(
        ["unshare", "-Ur", "true"], capture_output=True).returncode == 0,
        "only root can be another user, and needs a user namespace")
    def test_a_user_of_another_namespace_is_its_address(self):
        """The server's namespace does not number it."""
        with harness.program("exec unshare -Ur") as program, open_server(program=program) as server, \
                server.channel() as channel:
            sequence = create(harness.stub(channel))
            self.assertEqual(self.as_stranger(sequence, server.over_grpc),
                             ["NOT_FOUND"] * len(server.over_grpc))


def be_stranger(sequence, targets):
    """Becomes SOME_UID, and prints what becomes of the sequence at the targets."""
    os.setuid(SOME_UID)
    request = pb.DeleteSequenceRequest(sequence_id=sequence)
    for target in targets:
        try:
            if target.startswith("local:"):
                RawClient(target.removeprefix("local:")).call("DeleteSequence", request,
                                                              pb.DeleteSequenceResponse)
            else:
                with harness.open_channel(target) as channel:
                    harness.stub(channel).DeleteSequence(request, timeout=harness.PATIENCE)
            print("OK")
        except RuntimeError as error:
            print("NOT_FOUND" if "code: 5" in str(error) else error)
        except grpc.RpcError as error:
            print(error.code().name)


if __name__ == "__main__":
    if sys.argv[1:2] == ["stranger"]:
        be_stranger(bytes.fromhex(sys.argv[2]), sys.argv[3:])
    else:
        harness.main()
