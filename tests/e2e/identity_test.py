"""Bearer tokens and identities: who gets in, and as whom."""

import contextlib
import json
import os
import pathlib
import re
import subprocess
import threading

import grpc
from flashcore.v1 import attention_pb2 as pb

import harness
from certificates import token_line
from credentials import BY, CredentialsTest, bearer, tls_channel, tls_flags
from harness import wait_until

Code = grpc.StatusCode
REFLECTION, OLD_REFLECTION = (f"/grpc.reflection.{package}.ServerReflection/ServerReflectionInfo"
                              for package in ("v1", "v1alpha"))


def create(stub, metadata=()):
    return harness.create(stub, metadata).sequence_id


class TokenTest(CredentialsTest):
    def test_every_rpc_but_health_needs_a_token(self):
        service = pb.DESCRIPTOR.services_by_name["AttentionService"]
        methods = [f"/{service.full_name}/{method.name}" for method in service.methods]
        methods += [REFLECTION, OLD_REFLECTION]
        no_token = 'flashcore_unauthenticated_total{reason="no_token"}'
        bad_token = 'flashcore_unauthenticated_total{reason="bad_token"}'
        with harness.Server("--enable_reflection", f"--token_file={self.tokens}") as server:
            for target in (server.target, f"unix:{server.socket}"):
                with server.channel(target) as channel:
                    counted = server.metric(no_token) + server.metric(bad_token)
                    for method in methods:
                        for metadata in ((), bearer("wrong"), (("authorization", "alice-secret"),)):
                            # As a stream, which can call methods of every kind.
                            call = channel.stream_stream(method)
                            self.assert_code(Code.UNAUTHENTICATED,
                                             lambda timeout: list(call(iter([b""]), timeout=timeout,
                                                                       metadata=metadata)))
                    wait_until(lambda: server.metric(no_token) + server.metric(bad_token) ==
                               counted + 3 * len(methods), "all are counted")
                    self.assertEqual(next(harness.watch_health(channel)), "SERVING")
                    harness.stub(channel).GetServerInfo(pb.GetServerInfoRequest(),
                                                        metadata=bearer(BY["alice"]))
                    services = channel.stream_stream(REFLECTION)(
                        iter([b"\x3a\x00"]), metadata=bearer(BY["alice"]))  # list_services: ""
                    # A service that comes new must be called above.
                    called = {method.split("/")[1].encode() for method in methods}
                    self.assertEqual(set(re.findall(rb"[a-z][a-z0-9.]+\.[A-Z]\w+", next(services))),
                                     called | {b"grpc.health.v1.Health"})
            self.assertEqual(server.probe("/readyz"), 200)
            refused = server.wait_for_record("caller refused")
            self.assertRegex(refused["peer"], r"ipv4:127\.0\.0\.1:\d+")
            self.assertEqual(server.stop(), 0)
            refused = [r for r in server.records() if r["msg"] == "caller refused"]
            self.assertNotIn("wrong", json.dumps(refused))
            self.assertNotIn("alice-secret", server.log_path.read_text())

    def test_revoking_a_token_ends_its_streams(self):
        tokens = self.folder / "revoked"
        tokens.write_text(self.tokens.read_text())
        with harness.Server(f"--token_file={tokens}") as server, \
                server.channel(f"unix:{server.socket}") as channel:
            release = threading.Event()
            self.addCleanup(release.set)

            def messages(first):
                yield first
                release.wait()

            def open_streams(name):
                stub, metadata = harness.stub(channel), bearer(BY[name])
                sequence = create(stub, metadata)
                chunk = harness.chunk(sequence, 1)
                attend = stub.AttendStream(messages(harness.small_request("1")), metadata=metadata)
                next(attend)
                load = stub.LoadSequence.future(messages(chunk), metadata=metadata)
                wait_until(lambda: list(stub.GetSequence(pb.GetSequenceRequest(
                    sequence_id=sequence), metadata=metadata).sequence.layer_lengths) == [1],
                    "the chunk is appended")
                return {"attend": attend, "load": load}

            alices, bobs = open_streams("alice"), open_streams("bob")
            tokens.write_text(token_line("bob", BY["bob"]))
            for name, stream in alices.items():
                wait_until(stream.done, f"the end of {name}")
                self.assertEqual(stream.code(), Code.UNAUTHENTICATED, name)
                self.assertIn("revoked", stream.details())
            for name, stream in bobs.items():
                self.assertFalse(stream.done(), name)
            counted = 'flashcore_unauthenticated_total{reason="revoked"}'
            wait_until(lambda: server.metric(counted) == len(alices), "all are counted")
            self.assert_code(Code.UNAUTHENTICATED, harness.stub(channel).GetServerInfo,
                             pb.GetServerInfoRequest(), metadata=bearer(BY["alice"]))
            release.set()
            self.assertEqual(bobs["load"].result(timeout=harness.PATIENCE).sequence.layer_lengths, [1])

    def test_the_command_line_sends_a_token_and_keeps_it_on_the_host(self):
        token_file = self.folder / "alice"
        token_file.write_text(BY["alice"] + "\n")
        token = f"--token_file={token_file}"
        with harness.Server(f"--token_file={self.tokens}") as server:
            target = f"--target={server.target}"
            harness.cli("info", target, token)
            harness.cli("verify", f"--target=unix:{server.socket}", token, "--cases=3",
                        f"--seed={harness.SEED}")
            self.assert_cli_fails("UNAUTHENTICATED.*no bearer token", "info", target)
            env = {**os.environ, "FLASHCORE_CLIENT_TOKEN_FILE": str(token_file)}
            subprocess.run([harness.CLI, "info", target], env=env, check=True, capture_output=True)
            harness.cli("health", target)
        for args, error in (
                (("--target=10.0.0.1:7070", token), "in clear text"),
                (("--target=localhost.example:7070", token), "in clear text"),
                (("--target=unix.example:7070", token), "in clear text"),
                ((f"--token_file={self.tokens}",), "list of digests"),
                ((f"--token_file={self.folder}/none",), "none: cannot be read"),
                ((f"--tls_ca_file={self.folder}/none",), "none: cannot be read")):
            done = harness.cli("info", *args, check=False)
            self.assertEqual(done.returncode, 2, done.stderr)
            self.assertIn(error, done.stderr)

    def test_the_documented_commands_make_a_token(self):
        readme = (pathlib.Path(__file__).parents[2] / "client" / "README.md").read_text()
        commands = re.search(r"```sh\n(head -c [^`]*)```", readme).group(1)
        with harness.in_temporary_folder() as folder:
            subprocess.run(["sh", "-euc", commands], cwd=folder, check=True)
            with harness.Server(f"--token_file={folder / 'tokens'}") as server:
                harness.cli("info", f"--target={server.target}", f"--token_file={folder / 'alice.token'}")


class IdentityTest(CredentialsTest):
    """A caller is seen by what it lists: its own sequences."""

    def assert_same(self, same, first, second):
        """first and second: (stub, metadata). Whether they are one identity."""
        (stub, metadata), (other, other_metadata) = first, second
        mine = create(stub, metadata)
        listed = other.ListSequences(pb.ListSequencesRequest(page_size=1000),
                                     metadata=other_metadata)
        self.assertEqual(mine in {info.sequence_id for info in listed.sequences}, same)

    def test_the_same_name_from_two_sources_is_two_identities(self):
        alice = self.ca.issue("alice", san=None)
        dns = self.ca.issue("x", san="DNS:alice")
        uri = self.ca.issue("alice", san="URI:spiffe://example/alice,DNS:alice")
        also_uri = self.ca.issue("bob", san="URI:spiffe://example/alice")
        with harness.Server(*tls_flags(self.pair, self.ca), f"--token_file={self.tokens}",
                            "--insecure_client_names") as server, contextlib.ExitStack() as stack:
            def stub(pair):
                return harness.stub(stack.enter_context(tls_channel(server, self.ca, pair)))

            by_cn, by_dns, by_uri = (stub(pair) for pair in (alice, dns, uri))
            by_token = bearer(BY["alice"])
            self.assert_same(True, (by_cn, ()), (stub(alice), ()))
            self.assert_same(True, (by_cn, ()), (by_dns, ()))  # one CA gives both
            self.assert_same(True, (by_uri, ()), (stub(also_uri), ()))
            self.assert_same(False, (by_cn, ()), (by_uri, ()))
            self.assert_same(False, (by_cn, ()), (by_cn, by_token))
            self.assert_same(True, (by_dns, by_token), (by_cn, by_token))
            self.assert_same(False, (by_cn, by_token), (by_cn, bearer(BY["bob"])))
            # Names that callers give themselves do not count beside a certificate.
            self.assert_same(True, (by_cn, ()), (by_cn, (("flashcore-client", "x"),)))
            self.assert_code(Code.UNAUTHENTICATED, by_cn.GetServerInfo, pb.GetServerInfoRequest(),
                             metadata=bearer("wrong"))

    def test_client_names_count_only_with_the_flag(self):
        def named(name):
            return (("flashcore-client", name),)

        for flags, counts in (((), False), (("--insecure_client_names",), True)):
            with harness.Server(*flags) as server, server.channel() as channel:
                stub = harness.stub(channel)
                self.assert_same(not counts, (stub, named("a")), (stub, named("b")))
                self.assert_same(not counts, (stub, named("a")), (stub, ()))
                self.assert_same(True, (stub, named("a")), (stub, named("a")))
                if counts:
                    self.assert_code(Code.INVALID_ARGUMENT, stub.CreateSequence, harness.create_request(),
                                     metadata=named("x" * 65))

    def test_only_a_trusted_proxy_calls_for_others(self):
        def forwarded(header):
            return (("x-forwarded-client-cert", header),)

        proxy, client = self.ca.issue("envoy", san="DNS:envoy"), self.ca.issue("c", san="URI:spiffe://c")
        with harness.Server(*tls_flags(self.pair, self.ca),
                            "--trusted_proxies=cert:envoy,cert:edge") as server, \
                tls_channel(server, self.ca, proxy) as through, \
                tls_channel(server, self.ca, client) as direct:
            through, direct = harness.stub(through), harness.stub(direct)
            c = forwarded('By=spiffe://envoy;Hash=ab;Subject="CN=c,O=x";URI=spiffe://c;DNS=d')
            self.assert_same(True, (through, c), (direct, ()))
            self.assert_same(False, (through, c), (through, ()))
            self.assert_same(False, (through, c), (through, forwarded("URI=spiffe://b")))
            # The last element is what the proxy saw; those before are what its caller claims.
            self.assert_same(True, (direct, ()),
                             (through, forwarded("URI=spiffe://admin,URI=spiffe://c")))
            self.assert_same(True, (direct, ()),
                             (through, forwarded("URI=spiffe://admin") + c))
            # Unless that is a trusted proxy too.
            self.assert_same(True, (direct, ()), (through, forwarded("URI=spiffe://c,DNS=edge")))
            # From anybody else the header is ignored, whatever it has.
            for header in ("URI=spiffe://b", "garbage"):
                self.assert_same(True, (direct, ()), (direct, forwarded(header)))
            for header in ("garbage", "Hash=ab", "URI=" + "a" * 600, "URI=a;URI=\"b"):
                self.assert_code(Code.UNAUTHENTICATED, through.GetServerInfo,
                                 pb.GetServerInfoRequest(), metadata=forwarded(header))
            counted = 'flashcore_unauthenticated_total{reason="bad_forwarded_cert"}'
            wait_until(lambda: server.metric(counted) == 4, "all are counted")

    def test_a_proxy_may_be_trusted_by_its_address(self):
        header = (("x-forwarded-client-cert", "URI=spiffe://c"),)
        hosts = {"127.0.0.1": "127.0.0.1:0", "unix": None}
        if harness.has_ipv6():
            hosts["[::1]"] = "[::1]:0"
        for host, listen in hosts.items():
            flags = [f"--listen={listen}"] if listen else []
            with harness.Server(f"--trusted_proxies=host:{host}", *flags) as server:
                for address in server.addresses:
                    with server.channel(address) as channel:
                        stub = harness.stub(channel)
                        trusted = address.startswith(host)
                        with self.subTest(host, address=address):
                            self.assert_same(not trusted, (stub, header), (stub, ()))


if __name__ == "__main__":
    harness.main()
