"""What a server does at the limits of its process: threads, open files, stack, CPU time.

RLIMIT_NPROC counts the threads of a user, so each server here is one of its own. That takes root.
"""

import json
import os
import pathlib
import re
import signal
import socket
import ssl
import subprocess
import sys
import tempfile
import unittest

import certificates
import harness
import raw_http2
from harness import wait_until

NEEDED = re.compile(r"the server needs (\d+) threads")
USER = 2_000_000_000 + os.getpid()  # nobody else's

# Runs argv[3:] as user argv[1] with the limits of argv[2]. It opens the program before it gives up the right
# to look into its folder.
LAUNCHER = """
import json, os, resource, sys
program = os.open(sys.argv[3], os.O_RDONLY)
for name, value in json.loads(sys.argv[2]).items():
    resource.setrlimit(getattr(resource, name), (value, value))
if int(sys.argv[1]):
    for argument in sys.argv:
        if argument.startswith("--listen=unix:"):
            os.chmod(os.path.dirname(argument.removeprefix("--listen=unix:")), 0o777)
    os.setgroups([])
    os.setresgid(*3 * [int(sys.argv[1])])
    os.setresuid(*3 * [int(sys.argv[1])])
os.execve(program, sys.argv[3:], os.environ)
"""


class LimitedServer(harness.Server):
    """Of a user of its own if `user`; `limits`: of resource.setrlimit, by name."""

    def __init__(self, limits, *flags, user=0):
        with tempfile.NamedTemporaryFile("w", prefix="limited-", delete=False) as script:
            arguments = json.dumps([sys.executable, "-c", LAUNCHER, str(user), json.dumps(limits),
                                    harness.SERVER])
            script.write(f"#!{sys.executable}\nimport os, sys\n"
                         f"argv = {arguments} + sys.argv[1:]\nos.execv(argv[0], argv)\n")
        os.chmod(script.name, 0o755)
        try:
            super().__init__(*flags, program=script.name)
        finally:
            os.unlink(script.name)


def refusal(limits, *flags, user=0):
    """What a server says that does not start."""
    done = subprocess.run([sys.executable, "-c", LAUNCHER, str(user), json.dumps(limits), harness.SERVER,
                           "--listen=127.0.0.1:0", "--metrics_listen=127.0.0.1:0", *harness.device_flags(),
                           *flags], capture_output=True, text=True, timeout=harness.PATIENCE, check=False)
    return done.returncode, done.stderr


def hello():
    """What a TLS client sends first."""
    sent = ssl.MemoryBIO()
    with_tls = ssl.create_default_context().wrap_bio(ssl.MemoryBIO(), sent, server_hostname="localhost")
    try:
        with_tls.do_handshake()
    except ssl.SSLWantReadError:
        return sent.read()
    raise AssertionError("a handshake without a server")


@unittest.skipIf(harness.SANITIZED, "sanitizers have threads, and a pthread_create, of their own")
@unittest.skipIf(os.getuid() != 0, "only root can be another user")
class ThreadsTest(unittest.TestCase):
    def needed(self, *flags):
        status, said = refusal({"RLIMIT_NPROC": 5}, *flags, user=USER)
        self.assertEqual(status, 2, said)
        self.assertIn("there is room for 5: RLIMIT_NPROC", said)
        return int(NEEDED.search(said).group(1))

    def threads(self, server):
        return len(list(pathlib.Path(f"/proc/{server.process.pid}/task").iterdir()))

    def connect(self, server, first_bytes):
        connection = socket.create_connection(("127.0.0.1", server.port), timeout=harness.PATIENCE)
        self.addCleanup(connection.close)
        connection.sendall(first_bytes)

    def assert_refuses_one_fewer(self, needed, *flags):
        status, said = refusal({"RLIMIT_NPROC": needed - 1}, *flags, user=USER)
        self.assertEqual(status, 2, said)
        self.assertIn(f"the server needs {needed} threads, and there is room for {needed - 1}", said)
        self.assertIn(f"RLIMIT_NPROC (ulimit -u, all threads of the user) is {needed - 1}", said)

    def test_no_thread_is_made_after_the_start(self):
        flags = ("--probe_listen=127.0.0.1:0", "--max_connections_per_host=1000")
        needed = self.needed(*flags)
        self.assert_refuses_one_fewer(needed, *flags)
        with LimitedServer({"RLIMIT_NPROC": needed}, *flags, user=USER) as server, \
                server.channel() as channel:
            self.assertEqual(self.threads(server), needed)
            self.assertEqual(server.wait_for_record("serving")["threads"], needed)
            for _ in range(200):
                self.connect(server, raw_http2.PREFACE + raw_http2.frame(raw_http2.SETTINGS, 0, 0, b""))
            calls = [harness.stub(channel).Attend.future(harness.small_request()) for _ in range(200)]
            for call in calls:
                call.result(timeout=harness.PATIENCE)
            wait_until(lambda: server.metric("flashcore_connections") >= 201, "all are connected")
            self.assertEqual(self.threads(server), needed)
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
                self.assertEqual(self.threads(server), needed)
                self.assertEqual(server.stop(), 0)


PYTHON_CLIENTS = (
    "import flashcore, sys; flashcore.connect(sys.argv[1]).server_info()",
    """import asyncio, flashcore.aio, sys
async def main():
    async with flashcore.aio.connect(sys.argv[1]) as client:
        await client.server_info()
asyncio.run(main())""")


class ClientsTest(unittest.TestCase):
    """Clients that cannot make a thread, because its stack does not fit into the address space."""

    def assert_says_so(self, text, *command):
        done = subprocess.run([sys.executable, "-c", LAUNCHER, "0", json.dumps({"RLIMIT_STACK": 1 << 47}),
                               *command],
                              capture_output=True, text=True, timeout=harness.PATIENCE, check=False)
        self.assertNotIn(done.returncode, (0, -signal.SIGABRT, -signal.SIGSEGV), done)
        self.assertIn(text, done.stderr)
        self.assertIn("cannot make a thread: ", done.stderr)
        self.assertIn("pids.max of the control group, and ulimit -u", done.stderr)

    def test_a_client_without_threads_says_so(self):
        with tempfile.TemporaryDirectory() as folder, \
                harness.Server(f"--local_listen={folder}/local") as server:
            for address in server.wait_for_record("serving")["addresses"].split(","):
                text = "" if address.startswith("local:") else "gRPC needs "
                with self.subTest(address):
                    self.assert_says_so(text, harness.CLI, "info", f"--target={address}")
                for program in PYTHON_CLIENTS:
                    with self.subTest(address, program=program):
                        self.assert_says_so(text, sys.executable, "-c", program, address)
            self.assertEqual(server.stop(), 0)

    def test_a_client_without_files_says_so(self):
        with harness.Server() as server:
            for program in ((harness.CLI, "info", f"--target={server.target}"),
                            *((sys.executable, "-c", text, server.target) for text in PYTHON_CLIENTS)):
                with self.subTest(program=program):
                    said = ""
                    # From the fewest with which the program itself starts, to those that suffice.
                    for files in range(6, 40):
                        done = subprocess.run([sys.executable, "-c", LAUNCHER, "0",
                                               json.dumps({"RLIMIT_NOFILE": files}), *program],
                                              capture_output=True, text=True, timeout=harness.PATIENCE,
                                              check=False)
                        if done.returncode == 0:
                            break
                        self.assertGreater(done.returncode, 0, done.stderr)
                        said += done.stderr
                    self.assertEqual(done.returncode, 0, done.stderr)
                    self.assertIn("open files: Too many open files; the limit is ulimit -n", said)


class LimitsTest(unittest.TestCase):
    def test_too_few_open_files_are_refused_by_name(self):
        for files in (20, 257):
            status, said = refusal({"RLIMIT_NOFILE": files})
            self.assertEqual((status, said), (
                2, f"flashcore-server: RLIMIT_NOFILE (ulimit -Hn) is {files}; the server needs at least 258 "
                "open files\n"))

    def test_the_fewest_open_files_serve_one_connection(self):
        with LimitedServer({"RLIMIT_NOFILE": 258}) as server, server.channel() as channel:
            harness.stub(channel).Attend(harness.small_request(), timeout=harness.PATIENCE)
            self.assertEqual(server.stop(), 0)

    def test_a_small_stack_is_refused_by_name(self):
        status, said = refusal({"RLIMIT_STACK": 256 << 10})
        self.assertEqual((status, said), (
            2, "flashcore-server: RLIMIT_STACK (ulimit -Hs) is 262144 bytes; the server needs at least "
            "1048576\n"))

    def test_a_log_file_beyond_its_size_does_not_end_the_server(self):
        with LimitedServer({"RLIMIT_FSIZE": 8192}) as server, server.channel() as channel:
            for _ in range(100):  # each is logged
                server.process.send_signal(signal.SIGHUP)
                harness.stub(channel).Attend(harness.small_request(), timeout=harness.PATIENCE)
            self.assertEqual(server.stop(), 0)

    def test_the_end_of_the_cpu_time_drains(self):
        with harness.Server() as server:
            self.assertEqual(server.stop(signal.SIGXCPU), 0)
            self.assertEqual(server.wait_for_record("draining")["signal"], "CPU time limit exceeded")


if __name__ == "__main__":
    harness.main()
