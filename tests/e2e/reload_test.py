"""New certificates and tokens while the server runs: what they change, and what they break."""

import concurrent.futures
import itertools
import json
import signal
import ssl
import subprocess
import tempfile
import threading
import time

import grpc
from flashcore.v1 import attention_pb2 as pb

import credentials
import harness
from certificates import DAY, SwappedFolder, token_line
from credentials import CredentialsTest, bearer, client_flags, tls_channel
from harness import wait_until

Code = grpc.StatusCode


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
        pem = ssl.get_server_certificate(("127.0.0.1", server.port))
        return subprocess.run(["openssl", "x509", "-noout", "-serial"], input=pem, text=True,
                              capture_output=True, check=True).stdout

    def test_a_rotation_fails_no_connection(self):
        folder = self.mounted(self.ca)
        with harness.Server(*self.flags(folder)) as server, \
                concurrent.futures.ThreadPoolExecutor() as pool:
            stop, served = threading.Event(), itertools.count()

            def connect_and_call():
                while not stop.is_set():
                    self.assertTrue(self.accepts(server, "alice-0"))
                    next(served)

            load = pool.submit(connect_and_call)
            try:
                before = self.serial(server)
                both = token_line("alice", "alice-0") + token_line("alice", "alice-1")
                folder.write(**self.contents(self.ca, both))
                wait_until(lambda: self.serial(server) != before, "the new certificate")
                wait_until(lambda: self.accepts(server, "alice-1"), "the new token")
            finally:
                stop.set()
            load.result()
            self.assertGreater(next(served), 0)
            for credential in ("tls", "tokens"):
                self.assertEqual(self.failures(server, credential), 0)

    @harness.stress
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
                self.assertEqual(self.failures(server, credential), 0)

    @staticmethod
    def failures(server, credential):
        return server.metric(
            f'flashcore_credential_reload_failures_total{{credential="{credential}"}}')

    def accepts(self, server, token):
        return credentials.accepts(server, self.ca, token)

    def bad_tls_files(self, good):
        return ({"key": self.pair[1].read_bytes()}, {"key": b""},
                {"cert": good["cert"][:len(good["cert"]) // 2]})

    def test_bad_new_files_change_nothing(self):
        folder = self.mounted(self.ca)
        with harness.Server(*self.flags(folder)) as server:
            serial = self.serial(server)
            begin = time.time()  # gate: bounds of a date
            good = self.contents(self.ca, token_line("alice", "alice-0"))
            folder.write(**{**good, **self.bad_tls_files(good)[0], "tokens": b""})
            for credential in ("tls", "tokens"):
                wait_until(lambda: self.failures(server, credential) > 0, "the bad files are seen")
            self.assertTrue(self.accepts(server, "alice-0"))
            self.assertEqual(self.serial(server), serial)
            wait_until(lambda: any("tokens: it is empty" in record.get("error", "")
                                   for record in server.records()
                                   if "cannot be used" in record["msg"]), "a warning")
            folder.write(**good)
            # Files that are rewritten in place count too.
            (folder / "tokens").write_text(token_line("alice", "alice-1"))
            wait_until(lambda: self.serial(server) != serial, "the new certificate")
            wait_until(lambda: self.accepts(server, "alice-1"), "the new token")
            self.assertFalse(self.accepts(server, "alice-0"))
            expiry = "flashcore_tls_certificate_expiry_timestamp_seconds"
            wait_until(lambda: int(begin) <= server.metric(expiry) - DAY.total_seconds()
                       <= time.time(), lambda: f"{server.metric(expiry)}")  # gate: bounds of a date

    def test_sighup_reads_them_and_ends_nothing(self):
        folder = self.mounted(self.ca)
        with harness.Server(*self.flags(folder)) as server:
            serial = self.serial(server)
            with tls_channel(server, self.ca) as channel:
                stub, info = harness.stub(channel), pb.GetServerInfoRequest()
                stub.GetServerInfo(info, metadata=bearer("alice-0"))
                both = token_line("alice", "alice-0") + token_line("alice", "alice-1")
                folder.write(**self.contents(self.ca, both))
                server.process.send_signal(signal.SIGHUP)
                server.wait_for_record("SIGHUP: reading the credential files")
                wait_until(lambda: self.accepts(server, "alice-1"), "the new token")
                wait_until(lambda: self.serial(server) != serial, "the new certificate")
                stub.GetServerInfo(info, metadata=bearer("alice-0"))
            self.assertEqual(server.stop(), 0)

    @harness.stress  # the server reads them once a second
    def test_no_bad_certificate_and_key_change_anything(self):
        folder = self.mounted(self.ca)
        good = self.contents(self.ca, token_line("alice", "alice-0"))
        with harness.Server(*self.flags(folder)) as server:
            serial = self.serial(server)
            for bad in self.bad_tls_files(good):
                before = self.failures(server, "tls")
                folder.write(**{**good, **bad})
                wait_until(lambda: self.failures(server, "tls") > before, "the bad files are seen")
                self.assertTrue(self.accepts(server, "alice-0"))
                self.assertEqual(self.serial(server), serial)

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


if __name__ == "__main__":
    harness.main()
