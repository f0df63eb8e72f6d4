"""The threads of a server: all are made at the start. In the release build: sanitizers have threads, and a
pthread_create, of their own."""

import os
import pathlib
import re
import ssl
import tempfile
import unittest

import certificates
import harness
import raw_http2
from harness import wait_until
from limited import USER, LimitedServer, refusal

NEEDED = re.compile(r"the server needs (\d+) threads")


def hello():
    """The first bytes of a TLS client."""
    sent = ssl.MemoryBIO()
    with_tls = ssl.create_default_context().wrap_bio(ssl.MemoryBIO(), sent, server_hostname="localhost")
    try:
        with_tls.do_handshake()
    except ssl.SSLWantReadError:
        return sent.read()
    raise AssertionError("a handshake without a server")


@harness.needs_root
class ThreadsTest(unittest.TestCase):
    def needed(self, *flags):
        status, said = refusal({"RLIMIT_NPROC": 5}, *flags, user=USER)
        self.assertEqual(status, 2, said)
        self.assertIn("there is room for 5: RLIMIT_NPROC", said)
        return int(NEEDED.search(said).group(1))

    def connect(self, server, first_bytes):
        self.enterContext(raw_http2.connect(server.target)).sendall(first_bytes)

    def assert_refuses_one_fewer(self, needed, *flags):
        status, said = refusal({"RLIMIT_NPROC": needed - 1}, *flags, user=USER)
        self.assertEqual(status, 2, said)
        self.assertIn(f"the server needs {needed} threads, and there is room for {needed - 1}", said)
        self.assertIn(f"RLIMIT_NPROC (ulimit -u, all threads of the user) is {needed - 1}", said)

    def test_no_thread_is_made_after_the_start(self):
        folder = self.enterContext(tempfile.TemporaryDirectory())
        os.chmod(folder, 0o777)
        flags = ("--probe_listen=127.0.0.1:0", "--max_connections_per_host=1000",
                 f"--local_listen={folder}/local")
        needed = self.needed(*flags)
        self.assert_refuses_one_fewer(needed, *flags)
        with LimitedServer({"RLIMIT_NPROC": needed}, *flags, user=USER) as server, \
                server.channel() as channel:
            self.assertEqual(server.threads(), needed)
            self.assertEqual(server.wait_for_record("serving")["threads"], needed)
            for _ in range(200):
                self.connect(server, raw_http2.HANDSHAKE)
            calls = [harness.stub(channel).Attend.future(harness.small_request()) for _ in range(200)]
            for call in calls:
                call.result(timeout=harness.PATIENCE)
            wait_until(lambda: server.metric("flashcore_connections") >= 201, "all are connected")
            self.assertEqual(server.threads(), needed)
            self.assertEqual(server.stop(), 0)

    def test_tls_connections_take_no_threads(self):
        with tempfile.TemporaryDirectory() as folder:
            os.chmod(folder, 0o755)
            authority = certificates.Authority(folder)
            certificate, key = authority.issue("server")
            for path in pathlib.Path(folder).rglob("*"):
                path.chmod(0o755)
            flags = (f"--tls_cert_file={certificate}", f"--tls_key_file={key}",
                     "--max_connections_per_host=1000")
            needed = self.needed(*flags)
            self.assert_refuses_one_fewer(needed, *flags)
            with LimitedServer({"RLIMIT_NPROC": needed}, *flags, user=USER) as server:
                first_bytes = hello()
                for _ in range(250):
                    self.connect(server, first_bytes)
                wait_until(lambda: server.metric("flashcore_connections") >= 250, "all are connected")
                self.assertEqual(server.threads(), needed)
                self.assertEqual(server.stop(), 0)


if __name__ == "__main__":
    harness.main()
