"""The credentials of the Python client: which tokens and files it refuses; that nothing reaches a proxy."""

import asyncio
import concurrent.futures
import math
import os
import pathlib
import socket
import tempfile
import threading
import unittest
from unittest import mock

import flashcore
import grpc
from flashcore import _credentials, _messages, aio
from flashcore._credentials import TokenFile, stays_on_host, uses_http_proxy

CERTIFICATE = b"-----BEGIN CERTIFICATE-----\nAAAA\n-----END CERTIFICATE-----\n"
KEY = b"-----BEGIN EC PRIVATE KEY-----\nAAAA\n-----END EC PRIVATE KEY-----\n"
# Contents that no credential file may have, and the message for each.
UNUSABLE = dict(
    missing=(None, "No such file"), folder=("folder", "Is a directory"),
    empty=(b"", ""), blank=(b" \n", ""), comment=(b"# nothing\n", ""),
    bom=(b"\xef\xbb\xbf" + CERTIFICATE + KEY, "byte order mark"),
    utf16=("secret\n".encode("utf-16"), "UTF-16"),
    utf16_without_bom=("secret\n".encode("utf-16-le"), "UTF-16"),
    large=(b"x" * (1 << 20) + b"\n" + CERTIFICATE + KEY, "larger than"))


class Folder(unittest.TestCase):
    def setUp(self):
        self.folder = tempfile.TemporaryDirectory()
        self.addCleanup(self.folder.cleanup)

    def write(self, content, name="file"):
        path = pathlib.Path(self.folder.name, name)
        path.write_bytes(content)
        return str(path)

    def unusable(self):
        """(name, path, what is said of it) of each."""
        for name, (content, words) in UNUSABLE.items():
            if content == "folder":
                yield name, self.folder.name, words
            elif content is None:
                yield name, os.path.join(self.folder.name, "none"), words
            else:
                yield name, self.write(content, name), words


class TokenTest(Folder):
    def connect(self, path):
        with mock.patch.dict(os.environ, FLASHCORE_CLIENT_TOKEN_FILE=path):
            return flashcore.connect("127.0.0.1:1")

    def test_refuses_files_by_name(self):
        files = [*self.unusable(), ("spaces", self.write(b"two words\n", "spaces"), "' ' at index 3"),
                 ("control", self.write(b"a\x01b", "control"), r"'\\x01' at index 1"),
                 ("latin", self.write(b"caf\xe9", "latin"), "at index 3"),
                 ("long", self.write(b"x" * 4097, "long"), "4097 characters"),
                 ("digests", self.write(b"alice:" + b"0" * 64 + b":\n", "digests"), "list of digests")]
        for name, path, words in files:
            with self.subTest(name), self.assertRaisesRegex(flashcore.InvalidArgument, f"{path}: .*{words}"):
                self.connect(path)

    def test_the_first_line_is_the_token(self):
        for content in (b"secret\nsecond line\n", b" secret \r\n", b"secret"):
            metadata = self.connect(self.write(content)).config.metadata(on_sequence=False)
            self.assertEqual(metadata, [("authorization", "Bearer secret")])

    def test_a_file_that_is_rewritten_keeps_the_last_token(self):
        seconds = 0.0
        path = self.write(b"first\n")
        token = TokenFile(path, lambda: seconds)
        self.write(b"second\n")
        seconds = 0.999
        self.assertEqual(token(), "first")
        seconds = 1.0
        self.assertEqual(token(), "second")
        for content in (b"", b"\n", b"bad token\n", "secret".encode("utf-16"), b"x" * 5000):
            self.write(content)
            seconds += 1
            self.assertEqual(token(), "second", content[:20])
        os.remove(path)
        seconds += 1
        self.assertEqual(token(), "second")
        self.write(b"third\n")
        seconds += 1
        self.assertEqual(token(), "third")

    def test_refuses_tokens_before_a_call(self):
        for token, words in (("secret\n", r"'\\n' at index 6"), ("a\x00b", "index 1"), ("caf\xe9", "index 3"),
                             ("", "0 characters"), ("x" * 4097, "4097 characters"), (b"secret", "a bytes")):
            for given in (token, lambda: token):
                with self.subTest(words), self.assertRaisesRegex(
                        flashcore.InvalidArgument, f"^INVALID_ARGUMENT: token: .*{words}.*allowed") as caught:
                    flashcore.connect("127.0.0.1:1", token=given, timeout=1).server_info()
                self.assertNotIn("secret", str(caught.exception))


class TlsFilesTest(Folder):
    def test_refuses_files_by_name(self):
        cut = self.write(CERTIFICATE[:-5] + b"\n" + KEY[:-20], "cut")
        others = dict(ca_file=self.write(KEY, "key"), cert_file=self.write(KEY, "key"),
                      key_file=self.write(CERTIFICATE, "certificate"))
        for field, other in others.items():
            good = dict(cert_file=self.write(CERTIFICATE, "good"), key_file=self.write(KEY, "good_key"))
            for name, path, words in (*self.unusable(), ("other", other, "no BEGIN"),
                                      ("cut", cut, "ends before END")):
                tls = flashcore.Tls(**{**good, field: path})
                for connect in (flashcore.connect, aio.connect):
                    with self.subTest(f"{field} {name}"), \
                            self.assertRaisesRegex(flashcore.InvalidArgument, f"{path}: .*{words}"):
                        connect("attention.example:7070", tls=tls)

    def test_takes_bundles_with_comments(self):
        path = self.write("# Autoridad de Certificaci\u00f3n\r\n".encode() + 2 * CERTIFICATE)
        self.assertEqual(flashcore.Tls(ca_file=path).read(), (pathlib.Path(path).read_bytes(), None, None))

    def test_unix_sockets_take_no_tls(self):
        self.assertIsNone(flashcore.connect("unix:/tmp/none", tls=flashcore.Tls("/none")).config.tls)


class ProxyTest(unittest.TestCase):
    """A proxy that every variable names, beside a server."""

    def setUp(self):
        self.proxy = socket.create_server(("127.0.0.1", 0))
        self.addCleanup(self.proxy.close)
        url = f"http://127.0.0.1:{self.proxy.getsockname()[1]}"
        names = ("http_proxy", "https_proxy", "grpc_proxy", "HTTP_PROXY", "HTTPS_PROXY")
        variables = dict.fromkeys(names, url)
        variables.update(GRPC_ADDRESS_HTTP_PROXY=url.removeprefix("http://"), no_proxy="", no_grpc_proxy="",
                         GRPC_ADDRESS_HTTP_PROXY_ENABLED_ADDRESSES="0.0.0.0/0,::/0")
        patch = mock.patch.dict(os.environ, variables)
        patch.start()
        self.addCleanup(patch.stop)

    def serve(self, *addresses):
        """The ports of a server that answers GetServerInfo; 0: of a Unix socket."""
        reply = _messages.METHODS["GetServerInfo"][1](version="fake").SerializeToString()
        handler = grpc.unary_unary_rpc_method_handler(lambda request, context: reply)
        server = grpc.server(concurrent.futures.ThreadPoolExecutor(1))
        server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(
            _messages.SERVICE, {"GetServerInfo": handler}),))
        ports = [server.add_insecure_port(address) for address in addresses]
        server.start()
        self.addCleanup(lambda: server.stop(None).wait())
        return ports

    def assert_nobody_came(self):
        self.proxy.setblocking(False)
        with self.assertRaises(BlockingIOError):
            self.proxy.accept()

    def targets(self, folder):
        port, _ = self.serve("127.0.0.1:0", f"unix:{folder}/socket")
        # 0.0.0.0 is not loopback: a plaintext address like that of any other host.
        return [(f"127.0.0.1:{port}", "secret"), (f"localhost:{port}", None), (f"0.0.0.0:{port}", None),
                (f"unix:{folder}/socket", "secret")]

    def test_plaintext_takes_no_proxy(self):
        with tempfile.TemporaryDirectory() as folder:
            for target, token in self.targets(folder):
                with self.subTest(target), flashcore.connect(target, token=token, timeout=10) as client:
                    self.assertEqual(client.server_info().version, "fake")
                self.assert_nobody_came()

    def test_plaintext_takes_no_proxy_in_asyncio(self):
        async def info(target, token):
            async with aio.connect(target, token=token, timeout=10) as client:
                return await client.server_info()

        with tempfile.TemporaryDirectory() as folder:
            for target, token in self.targets(folder):
                with self.subTest(target):
                    self.assertEqual(asyncio.run(info(target, token)).version, "fake")
                self.assert_nobody_came()

    def test_timeouts_of_any_size_mean_what_they_say(self):
        async def info(target, timeout):
            async with aio.connect(target) as client:
                return await client.server_info(timeout=timeout)

        target = f"127.0.0.1:{self.serve('127.0.0.1:0')[0]}"
        for huge in (9e9, threading.TIMEOUT_MAX, 1e300, 10**400, math.inf, 364 * 86400):
            with self.subTest(huge), flashcore.connect(target, timeout=huge) as client:
                self.assertEqual(client.server_info().version, "fake")
                self.assertEqual(asyncio.run(info(target, huge)).version, "fake")
                with self.assertRaises(flashcore.DeadlineExceeded):
                    client.server_info(timeout=0)

    def test_tls_takes_it_only_if_asked(self):
        target = f"0.0.0.0:{self.serve('127.0.0.1:0')[0]}"  # without TLS: no call succeeds
        os.environ.pop("GRPC_ADDRESS_HTTP_PROXY_ENABLED_ADDRESSES")
        options = dict(tls=True, token="secret", timeout=10, retry=flashcore.Retry(attempts=1))

        def call(asked):
            with flashcore.connect(target, http_proxy=asked, **options) as client:
                with self.assertRaises(flashcore.Unavailable):
                    client.server_info()

        def refuse():
            came, _ = self.proxy.accept()
            with came:
                return came.recv(4096)

        call(False)
        self.assert_nobody_came()
        self.proxy.settimeout(30)  # ends a hang
        with concurrent.futures.ThreadPoolExecutor() as executor:
            request = executor.submit(refuse)
            call(True)
            self.assertTrue(request.result().startswith(f"CONNECT {target} ".encode()), request.result())
            self.assertNotIn(b"secret", request.result())

    def test_what_may_take_it(self):
        tls = flashcore.Tls()
        for target in ("attention.example:7070", "10.0.0.1:1", "dns:///attention.example:1",
                       "ipv4:10.0.0.1:1"):
            self.assertTrue(uses_http_proxy(target, tls, True), target)
            self.assertFalse(uses_http_proxy(target, tls, False), target)
            with self.assertRaisesRegex(flashcore.InvalidArgument, f"http_proxy: .*{target}.*TLS"):
                flashcore.connect(target, http_proxy=True)
        for target in ("127.0.0.1:1", "[::1]:1", "localhost:1", "unix:/a", "unix-abstract:a",
                       "ipv4:127.0.0.1:1", "ipv4:127.0.0.1:1,127.0.0.2:1", "dns:///localhost:1",
                       "dns:127.0.0.1:1"):
            self.assertFalse(uses_http_proxy(target, tls, True), target)
        self.assertFalse(flashcore.connect("127.0.0.1:1", http_proxy=True).config.http_proxy)
        with self.assertRaisesRegex(flashcore.InvalidArgument, "http_proxy: 'http://proxy:3128'.*True"):
            flashcore.connect(tls=True, http_proxy="http://proxy:3128")

    def test_what_stays_on_the_host(self):
        for target in ("unix:/a", "127.1.2.3:1", "localhost:1", "[::1]:1", "ipv4:127.0.0.1:1,127.0.0.2:1"):
            self.assertTrue(stays_on_host(target), target)
        for target in ("10.0.0.1:1", "localhost.example:1", "unixbox:1", "[::2]:1", "0.0.0.0:1",
                       "ipv4:127.0.0.1:1,10.0.0.1:1", "dns:///localhost:1", ""):
            self.assertFalse(stays_on_host(target), target)


class PipeTest(unittest.TestCase):
    def test_is_read_as_far_as_it_is_written(self):
        with tempfile.TemporaryDirectory() as folder:
            path = os.path.join(folder, "pipe")
            os.mkfifo(path)
            self.assertEqual(_credentials._read_bytes(path), b"")  # no writer: not held up
            end = os.open(path, os.O_RDWR)
            os.write(end, b"secret\n")
            reader = os.open(path, os.O_RDONLY | os.O_NONBLOCK)
            self.addCleanup(os.close, reader)
            os.close(end)
            self.assertEqual(_credentials._read_bytes(path), b"secret\n")


if __name__ == "__main__":
    unittest.main()
