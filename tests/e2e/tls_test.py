"""TLS, client certificates and bearer tokens: who gets in, as whom, and what a replacement breaks."""

import concurrent.futures
import contextlib
import itertools
import json
import os
import pathlib
import re
import socket
import subprocess
import tempfile
import threading
import time
import unittest

import grpc
from flashcore.v1 import attention_pb2 as pb

import harness
from certificates import DAY, Authority, SwappedFolder, token_line
from harness import wait_until

Code = grpc.StatusCode
SOON = 20  # seconds within which an error must come, on a busy machine
BY = {"alice": "alice-secret", "bob": "bob-secret"}  # tokens
REFLECTION = "/grpc.reflection.v1alpha.ServerReflection/ServerReflectionInfo"


def bearer(token):
    return (("authorization", f"Bearer {token}"),)


def tls_flags(pair, client_ca=None):
    return [f"--tls_cert_file={pair[0]}", f"--tls_key_file={pair[1]}",
            *([f"--tls_client_ca_file={client_ca.file}"] if client_ca else [])]


def client_flags(ca, pair=None):
    return [f"--tls_ca_file={ca.file}",
            *([f"--tls_cert_file={pair[0]}", f"--tls_key_file={pair[1]}"] if pair else [])]


def tls_channel(server, ca, pair=None):
    """A connection of its own."""
    certificate, key = (path.read_bytes() for path in pair) if pair else (None, None)
    return grpc.secure_channel(server.target, grpc.ssl_channel_credentials(
        ca.file.read_bytes(), key, certificate), [("grpc.use_local_subchannel_pool", 1)])


def has_ipv6():
    try:
        with socket.create_server(("::1", 0), family=socket.AF_INET6):
            return True
    except OSError:
        return False


def create(stub, metadata=(), timeout=harness.PATIENCE):
    return stub.CreateSequence(pb.CreateSequenceRequest(
        num_layers=1, num_kv_heads=1, head_dim=32, dtype=pb.DTYPE_FLOAT16), metadata=metadata,
        timeout=timeout).sequence_id


class CredentialsTest(unittest.TestCase):
    @classmethod
    def setUpClass(cls):
        cls.folder = pathlib.Path(cls.enterClassContext(tempfile.TemporaryDirectory()))
        cls.ca = Authority(cls.folder)
        cls.other_ca = Authority(cls.folder, "other")
        cls.pair = cls.ca.issue("server")
        cls.tokens = cls.folder / "tokens"
        cls.tokens.write_text("".join(token_line(*item) for item in BY.items()))

    @classmethod
    def enterClassContext(cls, context):  # unittest has it since Python 3.11
        value = context.__enter__()
        cls.addClassCleanup(context.__exit__, None, None, None)
        return value

    def assert_code(self, code, call, *args, **kwargs):
        """The error of call(), which must have this code. Returns its message."""
        begin = time.monotonic()
        with self.assertRaises(grpc.RpcError) as caught:
            call(*args, timeout=harness.PATIENCE, **kwargs)
        self.assertEqual(caught.exception.code(), code, caught.exception.details())
        self.assertLess(time.monotonic() - begin, SOON)
        return caught.exception.details()

    def assert_cli_fails(self, pattern, *args):
        begin = time.monotonic()
        done = harness.cli(*args, check=False)
        self.assertEqual(done.returncode, 1, done.stderr)
        self.assertRegex(done.stderr, pattern)
        self.assertLess(time.monotonic() - begin, SOON)


class TlsTest(CredentialsTest):
    def test_the_client_checks_the_servers_certificate(self):
        cases = {
            "good": (self.pair, None),
            "expired": (self.ca.issue("server", begin=-2 * DAY, end=-DAY),
                        "(?i)certificate.*(expired|verify failed)"),
            "not yet valid": (self.ca.issue("server", begin=DAY, end=2 * DAY),
                              "(?i)certificate.*(not yet valid|verify failed)"),
            "wrong CA": (self.other_ca.issue("server"), "(?i)certificate.*verify failed"),
            "wrong host": (self.ca.issue("server", san="DNS:elsewhere.example"),
                           "(?i)hostname verification"),
        }
        for name, (pair, error) in cases.items():
            with self.subTest(name), harness.Server(*tls_flags(pair)) as server:
                command = ("info", f"--target={server.target}", *client_flags(self.ca))
                with tls_channel(server, self.ca) as channel:
                    info = harness.stub(channel).GetServerInfo
                    if error is None:
                        harness.cli(*command)
                        info(pb.GetServerInfoRequest())
                    else:
                        self.assert_cli_fails(error, *command)
                        self.assert_code(Code.UNAVAILABLE, info, pb.GetServerInfoRequest())
                if name == "wrong host":
                    harness.cli(*command, "--tls_server_name=elsewhere.example")

    def test_the_server_checks_the_clients_certificate(self):
        bad = {
            "none": None,
            "expired": self.ca.issue("client", begin=-2 * DAY, end=-DAY),
            "not yet valid": self.ca.issue("client", begin=DAY, end=2 * DAY),
            "wrong CA": self.other_ca.issue("client"),
        }
        good = self.ca.issue("client", san=None)
        with harness.Server(*tls_flags(self.pair, self.ca)) as server:
            target = f"--target={server.target}"
            for name, pair in bad.items():
                with self.subTest(name):
                    self.assert_cli_fails("UNAVAILABLE", "info", target,
                                          *client_flags(self.ca, pair))
                    with tls_channel(server, self.ca, pair) as channel:
                        self.assert_code(Code.UNAVAILABLE, harness.stub(channel).GetServerInfo,
                                         pb.GetServerInfoRequest())
            harness.cli("info", target, *client_flags(self.ca, good))
            with tls_channel(server, self.ca, good) as channel:
                harness.stub(channel).GetServerInfo(pb.GetServerInfoRequest())
            harness.cli("info", f"--target=unix:{server.socket}", *client_flags(self.ca))

    def test_plaintext_and_tls_do_not_mix(self):
        with harness.Server(*tls_flags(self.pair)) as server:
            self.assert_cli_fails("UNAVAILABLE.*(?s:.)*TLS", "info", f"--target={server.target}")
            with server.channel() as channel:
                self.assert_code(Code.UNAVAILABLE, harness.stub(channel).GetServerInfo,
                                 pb.GetServerInfoRequest())
            harness.cli("info", f"--target={server.target}", *client_flags(self.ca))
        with harness.Server() as server:
            self.assert_cli_fails("UNAVAILABLE.*(?s:.)*TLS", "info", f"--target={server.target}",
                                  *client_flags(self.ca))
            harness.cli("info", f"--target={server.target}")

    def test_only_tls_from_1_2_on(self):
        with harness.Server(*tls_flags(self.pair)) as server:
            for version, works in (("-tls1_1", False), ("-tls1_2", True), ("-tls1_3", True)):
                done = subprocess.run(
                    ["openssl", "s_client", "-connect", server.target, version, "-alpn", "h2",
                     "-CAfile", self.ca.file, "-cipher", "ALL:@SECLEVEL=0"],
                    input=b"", capture_output=True, timeout=harness.PATIENCE)
                got = b"ALPN protocol: h2" in done.stdout and b"Verification: OK" in done.stdout
                self.assertEqual(got, works, (version, done.stdout[-1000:], done.stderr[-1000:]))

    def test_start_needs_files_that_fit(self):
        certificate, key = self.pair
        other_key = self.ca.issue("other")[1]
        missing, garbage = self.folder / "missing", self.folder / "garbage"
        garbage.write_text("-----BEGIN CERTIFICATE-----\nAAAA\n-----END CERTIFICATE-----\n")
        ok = tls_flags(self.pair)
        cases = [
            (1, f"{missing}: No such file", tls_flags((missing, key))),
            (1, f"{missing}: No such file", tls_flags((certificate, missing))),
            (1, f"{garbage}: no certificate in PEM", tls_flags((garbage, key))),
            (1, f"{certificate}: no private key", tls_flags((certificate, certificate))),
            (1, f"{other_key}: not the key of the first certificate in {certificate}",
             tls_flags((certificate, other_key))),
            (1, f"{key}: no certificate in PEM", [*ok, f"--tls_client_ca_file={key}"]),
            (1, f"{self.folder}: ", [f"--token_file={self.folder}"]),
            (1, f"{certificate}: line 1: want NAME:SHA256:GROUPS", [f"--token_file={certificate}"]),
            (2, "--insecure_listen", ["--listen=0.0.0.0:0"]),
            (2, "--insecure_listen", ["--listen=unix:/tmp/x,[::]:0"]),
            (2, "--insecure_listen", ["--listen=example.com:0"]),
            (2, "--tls_key_file", [f"--tls_cert_file={certificate}"]),
            (2, "--tls_client_ca_file", [f"--tls_client_ca_file={certificate}"]),
            (2, "--trusted_proxies: 'envoy'", ["--trusted_proxies=envoy"]),
        ]
        for status, error, flags in cases:
            done = subprocess.run(
                [harness.SERVER, "--device=cpu", "--metrics_listen=",
                 *([] if flags[0].startswith("--listen") else ["--listen=127.0.0.1:0"]), *flags],
                capture_output=True, text=True, timeout=harness.PATIENCE)
            self.assertEqual(done.returncode, status, (flags, done.stderr))
            self.assertIn(error, done.stderr)

    def test_every_address_may_be_served_with_tls_or_when_told_so(self):
        for flags in (tls_flags(self.pair), ["--insecure_listen"]):
            with harness.Server("--listen=0.0.0.0:0", *flags) as server:
                self.assertEqual(server.stop(), 0)


class ReloadTest(CredentialsTest):
    def mounted(self, ca, token="alice-0"):
        """The server's files, as in a Kubernetes Secret."""
        contents = self.contents(ca, token_line("alice", token))
        return SwappedFolder(tempfile.mkdtemp(dir=self.folder) + "/mount", **contents)

    def contents(self, ca, tokens):
        certificate, key = ca.issue("server")
        return {"cert": certificate.read_bytes(), "key": key.read_bytes(),
                "ca": ca.file.read_bytes(), "tokens": tokens.encode()}

    @staticmethod
    def flags(folder):
        return [f"--tls_cert_file={folder / 'cert'}", f"--tls_key_file={folder / 'key'}",
                f"--token_file={folder / 'tokens'}"]

    def serial(self, server):
        """The serial number of the certificate that the server shows now."""
        import ssl
        pem = ssl.get_server_certificate(("127.0.0.1", server.port))
        return subprocess.run(["openssl", "x509", "-noout", "-serial"], input=pem, text=True,
                              capture_output=True, check=True).stdout

    def test_rotation_under_load_fails_no_request(self):
        folder = self.mounted(self.ca)
        token_file = self.folder / "token"
        token_file.write_text("alice-0\n")
        with harness.Server(*self.flags(folder)) as server:
            stop, served = threading.Event(), itertools.count()

            def connect_and_call():
                """A new connection for each call."""
                while not stop.is_set():
                    with tls_channel(server, self.ca) as channel:
                        harness.stub(channel).Attend(
                            harness.small_request(), timeout=harness.PATIENCE,
                            metadata=bearer(token_file.read_text().strip()))
                    next(served)

            bench = subprocess.Popen(
                [harness.CLI, "bench", f"--target={server.target}", *client_flags(self.ca),
                 f"--token_file={token_file}", "--shape=1x1x16x32", "--concurrency=2",
                 "--duration=8s", "--warmup=0s", "--json"], stdout=subprocess.PIPE, text=True)
            with concurrent.futures.ThreadPoolExecutor() as pool:
                load = pool.submit(connect_and_call)
                for i in range(1, 4):
                    before = self.serial(server)
                    # A token is valid until the next but one comes, while clients change theirs.
                    both = token_line("alice", f"alice-{i - 1}") + token_line("alice", f"alice-{i}")
                    folder.write(**self.contents(self.ca, both))
                    wait_until(lambda: self.serial(server) != before, "the new certificate")
                    wait_until(lambda: self.accepts(server, f"alice-{i}"), "the new token")
                    following = token_file.with_suffix(".next")
                    following.write_text(f"alice-{i}\n")
                    following.rename(token_file)
                    if i > 1:
                        self.assertFalse(self.accepts(server, f"alice-{i - 2}"))
                    time.sleep(1.5)  # clients look at the file once a second
                output = json.loads(bench.communicate(timeout=harness.PATIENCE)[0])
                stop.set()
                load.result()
            self.assertEqual(bench.returncode, 0)
            self.assertEqual((output["failed"], output["wrong_replies"]), (0, 0))
            self.assertGreater(output["ok"], 0)
            self.assertGreater(next(served), 3)
            for credential in ("tls", "tokens"):
                self.assertEqual(server.metric(
                    f'flashcore_credential_reload_failures_total{{credential="{credential}"}}'), 0)

    def accepts(self, server, token):
        with tls_channel(server, self.ca) as channel:
            try:
                harness.stub(channel).GetServerInfo(
                    pb.GetServerInfoRequest(), metadata=bearer(token), timeout=harness.PATIENCE)
                return True
            except grpc.RpcError as error:
                self.assertEqual(error.code(), Code.UNAUTHENTICATED)
                return False

    def test_bad_new_files_change_nothing(self):
        folder = self.mounted(self.ca)
        with harness.Server(*self.flags(folder)) as server:
            serial = self.serial(server)

            def failures(credential):
                return server.metric(
                    f'flashcore_credential_reload_failures_total{{credential="{credential}"}}')

            good = self.contents(self.ca, token_line("alice", "alice-0"))
            half = good["cert"][:len(good["cert"]) // 2]
            for i, bad in enumerate(({"cert": half}, {"key": b""},
                                     {"key": self.pair[1].read_bytes()})):
                folder.write(**{**good, **bad})
                wait_until(lambda: failures("tls") == i + 1, "the bad files are seen")
                self.assertTrue(self.accepts(server, "alice-0"))
                self.assertEqual(self.serial(server), serial)
            folder.write(**{**good, "tokens": b"alice:not-a-digest:\n"})
            wait_until(lambda: failures("tokens") == 1, "the bad tokens are seen")
            self.assertTrue(self.accepts(server, "alice-0"))
            self.assertNotEqual(self.serial(server), serial)  # the certificates were good
            warnings = [r for r in server.records() if "cannot be used" in r["msg"]]
            self.assertIn("line 1: SHA256", warnings[-1]["error"])
            # Files that are rewritten in place count too.
            (folder / "tokens").write_text(token_line("alice", "alice-1"))
            wait_until(lambda: self.accepts(server, "alice-1"), "the new token")
            self.assertFalse(self.accepts(server, "alice-0"))
            expiry = server.metric("flashcore_tls_certificate_expiry_timestamp_seconds")
            self.assertAlmostEqual(expiry, time.time() + DAY.total_seconds(), delta=600)

    def test_a_new_client_ca_counts_for_new_connections(self):
        folder = self.mounted(self.ca)
        mine, theirs = self.ca.issue("client"), self.other_ca.issue("client")
        with harness.Server(*self.flags(folder)[:2],
                            f"--tls_client_ca_file={folder / 'ca'}") as server:
            def enters(pair):
                with tls_channel(server, self.ca, pair) as channel:
                    try:
                        harness.stub(channel).GetServerInfo(pb.GetServerInfoRequest(),
                                                            timeout=harness.PATIENCE)
                        return True
                    except grpc.RpcError:
                        return False
            self.assertTrue(enters(mine))
            self.assertFalse(enters(theirs))
            contents = self.contents(self.ca, "")
            folder.write(**{**contents, "ca": self.other_ca.file.read_bytes()})
            wait_until(lambda: enters(theirs), "the new CA")
            self.assertFalse(enters(mine))


class TokenTest(CredentialsTest):
    def test_every_rpc_but_health_needs_a_token(self):
        service = pb.DESCRIPTOR.services_by_name["AttentionService"]
        methods = [f"/{service.full_name}/{method.name}" for method in service.methods]
        methods += ["/flashcore.v1.DebugService/Echo", "/flashcore.v1.DebugService/EchoStream",
                    REFLECTION]
        no_token = 'flashcore_unauthenticated_total{reason="no_token"}'
        bad_token = 'flashcore_unauthenticated_total{reason="bad_token"}'
        with harness.Server("--enable_echo", "--enable_reflection",
                            f"--token_file={self.tokens}") as server:
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
                    self.assertEqual(server.metric(no_token) + server.metric(bad_token),
                                     counted + 3 * len(methods))
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
            refused = [r for r in server.records() if r["msg"] == "caller refused"]
            self.assertRegex(refused[0]["peer"], r"ipv4:127\.0\.0\.1:\d+")
            self.assertNotIn("wrong", json.dumps(refused))
            self.assertNotIn("alice-secret", server.log_path.read_text())

    def test_revoking_a_token_ends_its_streams(self):
        tokens = self.folder / "revoked"
        tokens.write_text(self.tokens.read_text())
        with harness.Server(f"--token_file={tokens}", "--enable_echo",
                            "--allow_shared_memory") as server, \
                server.channel(f"unix:{server.socket}") as channel, \
                tempfile.NamedTemporaryFile(dir="/dev/shm") as memory:
            memory.truncate(4096)
            release = threading.Event()
            self.addCleanup(release.set)

            def messages(first):
                yield first
                release.wait()

            def open_streams(name):
                stub, metadata = harness.stub(channel), bearer(BY[name])
                sequence = create(stub, metadata)
                chunk = pb.LoadSequenceRequest(sequence_id=sequence, rows=1, key=bytes(64),
                                               value=bytes(64), layout=pb.LAYOUT_NHD)
                attend = stub.AttendStream(messages(harness.small_request("1")), metadata=metadata)
                next(attend)
                load = stub.LoadSequence.future(messages(chunk), metadata=metadata)
                wait_until(lambda: list(stub.GetSequence(pb.GetSequenceRequest(
                    sequence_id=sequence), metadata=metadata).sequence.layer_lengths) == [1],
                    "the chunk is appended")
                region = pb.RegisterMemoryRequest(name=f"/{pathlib.Path(memory.name).name}", bytes=4096)
                register = stub.RegisterMemory(messages(region), metadata=metadata)
                next(register)
                echo = channel.stream_stream("/flashcore.v1.DebugService/EchoStream")(
                    messages(b""), metadata=metadata)
                next(echo)
                return {"attend": attend, "load": load, "register": register, "echo": echo}

            alices, bobs = open_streams("alice"), open_streams("bob")
            tokens.write_text(token_line("bob", BY["bob"]))
            for name, stream in alices.items():
                wait_until(stream.done, f"the end of {name}")
                self.assertEqual(stream.code(), Code.UNAUTHENTICATED, name)
                self.assertIn("revoked", stream.details())
            for name, stream in bobs.items():
                self.assertFalse(stream.done(), name)
            self.assertEqual(
                server.metric('flashcore_unauthenticated_total{reason="revoked"}'), len(alices))
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
            harness.cli("verify", f"--target=unix:{server.socket}", token, "--cases=3")
            self.assert_cli_fails("UNAUTHENTICATED.*no bearer token", "info", target)
            env = {**os.environ, "FLASHCORE_CLIENT_TOKEN_FILE": str(token_file)}
            subprocess.run([harness.CLI, "info", target], env=env, check=True, capture_output=True)
            harness.cli("health", target)
        for args, error in (
                (("--target=10.0.0.1:7070", token), "in clear text"),
                (("--target=localhost.example:7070", token), "in clear text"),
                (("--target=unix.example:7070", token), "in clear text"),
                ((f"--token_file={self.tokens}",), "list of digests"),
                ((f"--token_file={self.folder}/none",), "none: has no token"),
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
                    self.assert_code(Code.INVALID_ARGUMENT, create, stub, named("x" * 65))

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
            self.assertEqual(server.metric(
                'flashcore_unauthenticated_total{reason="bad_forwarded_cert"}'), 4)

    def test_a_proxy_may_be_trusted_by_its_address(self):
        header = (("x-forwarded-client-cert", "URI=spiffe://c"),)
        hosts = {"127.0.0.1": "127.0.0.1:0", "unix": None}
        if has_ipv6():
            hosts["[::1]"] = "[::1]:0"
        for host, listen in hosts.items():
            flags = [f"--listen={listen}"] if listen else []
            with harness.Server(f"--trusted_proxies=host:{host}", *flags) as server:
                addresses = server.wait_for_record("serving")["addresses"].split(",")
                for address in addresses:
                    with server.channel(address) as channel:
                        stub = harness.stub(channel)
                        trusted = address.startswith(host)
                        with self.subTest(host, address=address):
                            self.assert_same(not trusted, (stub, header), (stub, ()))


if __name__ == "__main__":
    harness.main()
