"""Certificates, tokens and channels of the tests of who gets in."""

import pathlib
import tempfile
import unittest

import grpc

import harness
from certificates import Authority, token_line

BY = {"alice": "alice-secret", "bob": "bob-secret"}  # tokens


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
        ca.file.read_bytes(), key, certificate), [
            ("grpc.use_local_subchannel_pool", 1), ("grpc.enable_http_proxy", 0)])


def accepts(server, ca, token):
    """Whether the server knows the token."""
    with tls_channel(server, ca) as channel:
        try:
            harness.stub(channel).GetServerInfo(harness.pb.GetServerInfoRequest(), metadata=bearer(token),
                                                timeout=harness.PATIENCE)
            return True
        except grpc.RpcError as error:
            if error.code() != grpc.StatusCode.UNAUTHENTICATED:
                raise
            return False


class CredentialsTest(unittest.TestCase):
    @classmethod
    def setUpClass(cls):
        cls.folder = pathlib.Path(cls.enterClassContext(tempfile.TemporaryDirectory()))
        cls.ca = Authority(cls.folder)
        cls.other_ca = Authority(cls.folder, "other")
        cls.pair = cls.ca.issue("server")
        cls.tokens = cls.folder / "tokens"
        cls.tokens.write_text("".join(token_line(*item) for item in BY.items()))

    def assert_code(self, code, call, *args, **kwargs):
        """The error of call(), which must have this code. Returns its message."""
        return harness.failure(code, call, *args, timeout=harness.PATIENCE, **kwargs).details()

    def assert_cli_fails(self, pattern, *args):
        self.assert_failed(pattern, harness.cli(*args, check=False))

    def assert_failed(self, pattern, done):
        self.assertEqual(done.returncode, 1, done.stderr)
        self.assertRegex(done.stderr, pattern)
