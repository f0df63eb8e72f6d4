"""The local socket: the C++ client, the C library, the command line and a client written from the
documentation, against a real server."""

import json
import os
import pathlib
import shutil
import signal
import subprocess
import sys
import tempfile
import unittest

import c_library
import harness
import numpy as np
from flashcore.v1 import attention_pb2 as pb
from harness import wait_until

LOCAL_CLIENT = os.environ["FLASHCORE_LOCAL_CLIENT"]
C_CLIENT = os.environ["FLASHCORE_C_CLIENT"]
RAW_CLIENT = pathlib.Path(__file__).with_name("local_raw_client.py")
GENERATED = pathlib.Path(pb.__file__).parents[2]  # the modules of the contract
OVERFLOW_UID = 65534
# In the server's own namespace its user is 0, and all others are the overflow uid.
IN_A_NAMESPACE = "exec unshare -Ur"


def local_server(*flags, **options):
    return harness.Server(*flags, local=True, **options)


def run(*command, **options):
    """The last line of its output, as JSON. Fails if the command does."""
    done = subprocess.run([str(part) for part in command], capture_output=True, text=True,
                          timeout=300, **options)
    if done.returncode != 0:
        raise AssertionError(f"{command} exited {done.returncode}:\n{done.stdout}\n{done.stderr}")
    return done.stdout.splitlines()[-1] if done.stdout else ""


def decoder(path):
    """A client that decodes until its standard input ends."""
    return subprocess.Popen([LOCAL_CLIENT, "decode", f"local:{path}"],
                            stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)


def end(client):
    """Its report."""
    output, _ = client.communicate("", timeout=120)
    report = json.loads(output.splitlines()[-1])
    if client.returncode != 0:
        raise AssertionError(report)
    return report


class LocalTest(unittest.TestCase):
    def compare(self, processes):
        with local_server() as server:
            ends = harness.run_together(
                (LOCAL_CLIENT, "compare", f"local:{server.local}", f"unix:{server.socket}",
                 harness.SEED + i) for i in range(processes))
            for done in ends:
                self.assertEqual(done.returncode, 0, done.stdout + done.stderr)
                self.assertGreater(json.loads(done.stdout.splitlines()[-1])["requests"], 10)
            wait_until(lambda: server.metric("flashcore_shared_memory_bytes") == 0,
                       "the memory of the clients is released")

    def test_same_bits_as_over_grpc(self):
        self.compare(processes=1)

    @harness.stress
    def test_same_bits_as_over_grpc_in_company(self):
        self.compare(processes=4)

    def test_eight_processes_of_four_threads(self):
        with local_server() as server:
            clients = [decoder(server.local) for _ in range(8)]
            for client in clients:
                client.stdout.readline()  # some steps were right
            for report in map(end, clients):
                self.assertGreaterEqual(report["steps"], 20)
                self.assertEqual(report["reloads"], 0)
            wait_until(lambda: server.metric("flashcore_sequences") == 0, "all are deleted")

    def test_a_server_that_is_killed_and_restarted(self):
        with tempfile.TemporaryDirectory() as folder:
            path = os.path.join(folder, "local.sock")
            with harness.Server(f"--local_listen={path}") as server:
                client = decoder(path)
                client.stdout.readline()
                server.stop(signal.SIGKILL)
            with harness.Server(f"--local_listen={path}") as server:
                try:
                    wait_until(lambda: server.metric("flashcore_sequences") == 4,
                               lambda: f"{server.metric('flashcore_sequences')} reloads")
                finally:
                    report = end(client)
            self.assertEqual(report["reloads"], 4)

    def test_a_client_that_is_killed_leaves_nothing(self):
        with local_server() as server:
            end(decoder(server.local))  # opens what the server keeps
            wait_until(lambda: server.metric("flashcore_shared_memory_bytes") == 0, "released")
            before = server.open_files()
            for _ in range(3):
                client = decoder(server.local)
                client.stdout.readline()
                self.assertGreater(server.metric("flashcore_shared_memory_bytes"), 0)
                client.kill()
                client.communicate()
                wait_until(lambda: server.metric("flashcore_shared_memory_bytes") == 0,
                           "the memory is released")
                wait_until(lambda: server.open_files() <= before, "the files are closed")
            end(decoder(server.local))

    def test_deadline_and_cancellation(self):
        with local_server(*harness.HELD) as server:
            run(LOCAL_CLIENT, "patient", f"local:{server.local}")

    def test_command_line(self):
        with local_server() as server:
            target = f"--target=local:{server.local}"
            info = json.loads(harness.cli("info", target, "--json").stdout)
            self.assertIn("devices", info)
            self.assertEqual(harness.cli("health", target).stdout, "SERVING\n")
            harness.cli("verify", target, "--cases=5", f"--seed={harness.SEED}")
            report = harness.bench(
                "--mode=decode", "--shape=1x8/2x64x64", "--transport=local", "--compare_grpc",
                f"--target=unix:{server.socket},local:{server.local}",
                enough=lambda report: report["ok"] > 0 and report["grpc"]["ok"] > 0)
            self.assertEqual((report["transport"], report["failed"]), ("local", 0))
            self.assertGreater(report["outside_kernel_to_grpc_p50_ratio"], 0)
            for flags in (["--shape=2x8x64x64"], ["--mode=decode", "--stream", "--concurrency=4",
                                                  "--shape=1x8x64x64"]):
                report = harness.bench(target, *flags)
                self.assertEqual((report["transport"], report["failed"]), ("local", 0))
                self.assertLess(report["request_bytes"], 300)  # the tensors are in shared memory
            refused = harness.cli("info", target, "--token_file=/dev/null", check=False)
            self.assertEqual(refused.returncode, 2)
            self.assertIn("user id", refused.stderr)

    def test_a_client_written_from_the_documentation(self):
        with local_server() as server:
            print(run(sys.executable, "-B", RAW_CLIENT, server.local), flush=True)


class CProgramTest(unittest.TestCase):
    def test_from_c(self):
        with local_server() as server:
            self.assertEqual(run(C_CLIENT, f"local:{server.local}"), "ok")


@harness.stress  # in the release build: the library of a sanitizer build does not load into Python
class CLibraryTest(unittest.TestCase):
    def test_from_python(self):
        rng = harness.numpy_rng()
        q, k, v = (harness.random_tensor(rng, 8, 4, 64) for _ in range(3))
        with local_server() as server, c_library.CClient(server.local) as client:
            self.assertEqual(client.identity(), f"uid:{os.getuid()}")
            region_id, memory = client.register(1 << 20)
            request = harness.request(q, k, v, "from Python", return_lse=True)
            for number, tensor in enumerate(("query", "key", "value", "output", "lse")):
                size = {"output": q.nbytes, "lse": 4 * q.shape[0] * q.shape[1]}.get(tensor)
                if size is None:
                    data = getattr(request, tensor)
                    size = len(data)
                    memory[65536 * number:65536 * number + len(data)] = data
                    request.ClearField(tensor)
                getattr(request, f"{tensor}_range").CopyFrom(
                    pb.MemoryRange(region_id=region_id, offset=65536 * number, bytes=size))
            self.assertTrue(client.submit(7, request))
            tag, response = client.wait(pb.AttendResponse)
            self.assertEqual((tag, response.request_id), (7, "from Python"))
            output, lse = harness.reference(q, k, v)
            got = np.frombuffer(memory, np.float16, q.size, 3 * 65536).reshape(q.shape)
            np.testing.assert_allclose(got, output, atol=2e-3)
            got = np.frombuffer(memory, np.float32, lse.size, 4 * 65536).reshape(lse.shape)
            np.testing.assert_allclose(got, lse, atol=1e-3)
            info = client.call("GetServerInfo", pb.GetServerInfoRequest(),
                               pb.GetServerInfoResponse)
            self.assertEqual(len(info.devices), 1)

    def test_a_full_ring_is_back_pressure_and_loses_nothing(self):
        with local_server() as server, c_library.CClient(server.local, slots=4) as client:
            region_id, _ = client.register(1 << 16)
            request = harness.small_request()
            for field in ("query", "key", "value"):
                size = len(getattr(request, field))
                request.ClearField(field)
                getattr(request, f"{field}_range").CopyFrom(
                    pb.MemoryRange(region_id=region_id, bytes=size))
            request.output_range.CopyFrom(pb.MemoryRange(
                region_id=region_id, offset=4096, bytes=request.query_range.bytes))
            answered, submitted, full = [], 0, 0
            while len(answered) < 500:
                while submitted < 500 and client.submit(submitted, request):
                    submitted += 1
                full += submitted < 500
                tag, response = client.wait(pb.AttendResponse)
                self.assertEqual(response.status.code, 0)
                answered.append(tag)
            self.assertEqual(sorted(answered), list(range(500)))
            self.assertGreater(full, 0)
            self.assertIsNone(client.wait(pb.AttendResponse, seconds=0.01))


def may_unshare():
    return subprocess.run(["unshare", "-Ur", "true"], capture_output=True).returncode == 0


@unittest.skipUnless(may_unshare(), "this user may not make user namespaces")
class UserNamespaceTest(unittest.TestCase):
    """The caller is the user of the client as the server's namespace knows it."""

    def identity(self, server, *prefix, **options):
        # Copies beside the socket: another user may not be able to read the checkout.
        folder = pathlib.Path(server.local).parent
        client = shutil.copy(RAW_CLIENT, folder)
        modules = shutil.copytree(GENERATED, folder / "generated", dirs_exist_ok=True)
        return run(*prefix, sys.executable, "-B", client, server.local,
                   env={**os.environ, "PYTHONPATH": modules}, **options).partition(": ")[0]

    def test_a_client_in_a_namespace_is_its_user_outside(self):
        with local_server() as server:
            self.assertEqual(self.identity(server, "unshare", "-Ur"), f"uid:{os.getuid()}")

    def test_two_namespaces(self):
        with harness.program(IN_A_NAMESPACE) as program, local_server(program=program) as server:
            self.assertEqual(self.identity(server, "unshare", "-Ur"), "uid:0")

    @harness.needs_root
    def test_the_overflow_user_needs_a_flag(self):
        with harness.program(IN_A_NAMESPACE) as program:
            with local_server("--unix_socket_mode=0666", program=program) as server:
                with self.assertRaisesRegex(AssertionError, str(OVERFLOW_UID)):
                    self.identity(server, user=harness.SOME_UID)
                self.assertEqual(self.identity(server), "uid:0")
            with local_server("--unix_socket_mode=0666", "--local_allow_overflow_uid",
                              program=program) as server:
                self.assertEqual(self.identity(server, user=harness.SOME_UID), f"uid:{OVERFLOW_UID}")


if __name__ == "__main__":
    harness.main()
