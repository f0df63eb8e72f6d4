"""Mixed load at the queue limit from clients that are killed at random, over TLS and with tokens.

The server's certificate and the clients' token are replaced again and again meanwhile. No crash, no leak,
no refusal because of a replacement, every request ends with a status. FLASHCORE_SOAK_SECONDS sets the
duration; use 600 for a real soak. FLASHCORE_TEST_SEED repeats the clients' choices, not their timing.
"""

import os
import pathlib
import random
import re
import subprocess
import sys
import tempfile
import time
import unittest

import grpc
import numpy as np
from flashcore.v1 import attention_pb2 as pb

import harness
from certificates import Authority, SwappedFolder, token_line
from credentials import accepts, bearer, tls_channel

SECONDS = float(os.environ.get("FLASHCORE_SOAK_SECONDS", "20"))
WORKERS = 6
HEADS, KV_HEADS, DIM, LAYERS = 8, 2, 64, 2
EXPECTED = {grpc.StatusCode.RESOURCE_EXHAUSTED, grpc.StatusCode.NOT_FOUND,
            grpc.StatusCode.FAILED_PRECONDITION, grpc.StatusCode.INVALID_ARGUMENT,
            grpc.StatusCode.DEADLINE_EXCEEDED, grpc.StatusCode.CANCELLED}

# Between two replacements of the certificate and the token.
ROTATE_SECONDS = min(60, SECONDS / 4)

# Time-outs of sequences. A bench ends if one of its own expires while it is starved.
IDLE_SECONDS = 3 if SECONDS < 300 else 20
KV_BYTES = 128 * harness.MIB
# How much the largest memory of the second half may exceed that of the first half, in bytes. All K/V
# memory has been used before the first half, so what grows is heap: in 20 s by up to 12 MiB without a leak.
# A leak of 8 KiB for each request shows in 20 s.
GROWTH = 32 * harness.MIB


class Worker:
    """A client that makes all kinds of calls in random order until it is killed."""

    def __init__(self, target, seed, ca_file, token_file):
        self.random = random.Random(seed)
        self.token_file = pathlib.Path(token_file)
        credentials = grpc.composite_channel_credentials(
            grpc.ssl_channel_credentials(pathlib.Path(ca_file).read_bytes()),
            grpc.metadata_call_credentials(self.send_token))
        self.stub = harness.stub(grpc.secure_channel(target, credentials, [
            ("grpc.max_receive_message_length", -1), ("grpc.use_local_subchannel_pool", 1),
            ("grpc.enable_http_proxy", 0)]))
        self.sequences = []
        self.noise = np.random.default_rng(seed).standard_normal(1 << 20).astype(np.float16)

    def send_token(self, _, callback):
        """Sends with each call the token that is in the file now."""
        callback((("authorization", f"Bearer {self.token_file.read_text().strip()}"),), None)

    def bytes(self, rows, heads):
        return self.noise[:rows * heads * DIM].tobytes()

    def create(self):
        reply = self.stub.CreateSequence(pb.CreateSequenceRequest(
            num_layers=LAYERS, num_kv_heads=KV_HEADS, head_dim=DIM, dtype=pb.DTYPE_FLOAT16,
            pin=self.random.random() < 0.2))
        self.sequences.append(reply.sequence_id)

    def pick(self):
        return self.random.choice(self.sequences) if self.sequences else os.urandom(16)

    def load(self):
        rows = self.random.randint(1, 700)
        chunks = self.random.randint(1, 4)

        def messages():
            sequence = self.pick()
            for i in range(chunks):
                yield pb.LoadSequenceRequest(
                    sequence_id=sequence if i == 0 else b"", layer=self.random.randrange(LAYERS),
                    layout=pb.LAYOUT_HND, rows=rows, key=self.bytes(rows, KV_HEADS),
                    value=self.bytes(rows, KV_HEADS))
        call = self.stub.LoadSequence.future(messages(), timeout=self.timeout())
        if self.random.random() < 0.1:
            time.sleep(self.random.random() * 0.01)
            call.cancel()
        call.result()

    def request(self, request_id=""):
        sequences = set(self.pick() for _ in range(self.random.randint(1, 8)))
        rows = self.random.choice((0, 1, 1, 1, 5, 200))
        queries = max(1, rows)
        spans = []
        for sequence in sequences:
            spans.append(pb.Span(query_rows=queries, kv_rows=rows, sequence_id=sequence))
            if self.random.random() < 0.1:
                spans[-1].expected_length = self.random.randint(0, 100)
        return pb.AttendRequest(
            request_id=request_id, spans=spans, dtype=pb.DTYPE_FLOAT16, num_heads=HEADS,
            num_kv_heads=KV_HEADS, head_dim=DIM, layout=pb.LAYOUT_NHD,
            layer=self.random.randrange(LAYERS), mask=pb.Mask(kind=pb.Mask.KIND_CAUSAL),
            query=self.bytes(queries * len(spans), HEADS),
            key=self.bytes(rows * len(spans), KV_HEADS),
            value=self.bytes(rows * len(spans), KV_HEADS))

    def timeout(self):
        return self.random.choice((0.002, 0.05, 5, 5, 5, 5))

    def attend(self):
        self.stub.Attend(self.request(), timeout=self.timeout())

    def cancel(self):
        call = self.stub.Attend.future(self.request())
        time.sleep(self.random.random() * 0.01)
        call.cancel()

    def stream(self):
        requests = [self.request(str(i)) for i in range(20)]
        answers = sum(1 for _ in self.stub.AttendStream(iter(requests), timeout=5))
        assert answers == len(requests), answers

    def fork(self):
        reply = self.stub.ForkSequence(pb.ForkSequenceRequest(sequence_id=self.pick()))
        self.sequences.append(reply.sequence_id)

    def truncate(self):
        self.stub.TruncateSequence(pb.TruncateSequenceRequest(
            sequence_id=self.pick(), length=self.random.randint(0, 300)))

    def delete(self):
        if len(self.sequences) > 2:
            sequence = self.sequences.pop(self.random.randrange(len(self.sequences)))
            self.stub.DeleteSequence(pb.DeleteSequenceRequest(sequence_id=sequence))

    def run(self):
        actions = ([self.create, self.fork, self.truncate, self.load, self.cancel, self.stream] +
                   [self.delete] * 3 + [self.attend] * 12)
        while True:
            try:
                self.random.choice(actions)()
            except grpc.FutureCancelledError:
                pass
            except grpc.RpcError as error:
                if error.code() not in EXPECTED:
                    print(error.code(), error.details(), flush=True)
                    sys.exit(7)


class Credentials:
    """The certificate and the tokens of a server, and what its clients need. All are files in `folder`,
    replaced as Kubernetes replaces the files of a Secret."""

    def __init__(self, folder):
        self.authority = Authority(folder)
        self.rotations = 0
        self.tokens = [self.new_token()]
        self.server = SwappedFolder(pathlib.Path(folder, "server"), **self.server_files())
        self.client = SwappedFolder(pathlib.Path(folder, "client"), token=self.tokens[-1].encode())
        self.token_file = self.client / "token"

    @staticmethod
    def new_token():
        return os.urandom(16).hex()

    def server_files(self):
        certificate, key = self.authority.issue("server")
        return {"cert.pem": certificate.read_bytes(), "key.pem": key.read_bytes(),
                "tokens": "".join(token_line("soak", token) for token in self.tokens).encode()}

    def server_flags(self):
        return [f"--tls_cert_file={self.server / 'cert.pem'}", f"--tls_key_file={self.server / 'key.pem'}",
                f"--token_file={self.server / 'tokens'}"]

    def rotate(self, server):
        """A new certificate and a new token, known to the server before any client sends it. The token
        before the last one ends."""
        self.rotations += 1
        self.tokens = [self.tokens[-1], self.new_token()]
        self.server.write(**self.server_files())
        harness.wait_until(lambda: accepts(server, self.authority, self.tokens[-1]),
                           "the server knows the token")
        self.client.write(token=self.tokens[-1].encode())


@harness.stress
class SoakTest(unittest.TestCase):
    def start_worker(self):
        self.started += 1
        return subprocess.Popen([sys.executable, "-B", __file__, "worker", self.server.target,
                                 str(harness.SEED + self.started), self.credentials.authority.file,
                                 self.credentials.token_file], stdout=subprocess.PIPE, text=True)

    def start_bench(self, *flags):
        return subprocess.Popen(
            [harness.CLI, "bench", f"--target={self.server.target}", "--connections=4",
             f"--tls_ca_file={self.credentials.authority.file}",
             f"--token_file={self.credentials.token_file}", "--duration=10h", "--allow_errors", *flags],
            stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)

    def start_inline_bench(self):
        return self.start_bench("--shape=1x8x64x64", "--concurrency=64")

    def start_sequence_bench(self):
        return self.start_bench("--mode=mixed", "--shape=1x8/2x256x64", "--concurrency=32",
                                "--query_rows=64", "--fork_from_prefix=128", "--client_name=bench")

    @staticmethod
    def end(process):
        process.kill()
        process.wait()
        process.stdout.close()

    def gave_up(self, process):
        """Clients run until they are killed. Only a bench may give up, because the queue is full."""
        if process.poll() is None:
            return False
        output = process.stdout.read()
        if "RESOURCE_EXHAUSTED" not in output or process.args[0] != harness.CLI:
            self.fail(f"{process.args} ended by itself with {process.returncode}: {output}")
        return True

    def test_soak(self):
        self.started = 0
        self.random = random.Random(harness.SEED)
        folder = tempfile.TemporaryDirectory()
        self.addCleanup(folder.cleanup)
        self.credentials = Credentials(folder.name)
        # The delay fills the queue even on a device that is faster than its clients.
        with harness.Server("--max_queue_requests=32", "--max_queue_delay_us=2000",
                            f"--kv_memory_bytes={KV_BYTES}",
                            "--l2_budget_bytes=8388608", f"--sequence_idle_timeout_s={IDLE_SECONDS}",
                            "--client_sequences=400", "--client_kv_bytes=0",
                            *self.credentials.server_flags()) as self.server:
            self.use_all_kv_memory()
            self.idle = self.open_files_and_threads()
            starts = [self.start_worker] * WORKERS + [self.start_inline_bench,
                                                      self.start_sequence_bench]
            processes = []
            self.addCleanup(lambda: [self.end(process) for process in processes])
            processes += [start() for start in starts]
            begin, rss, kills = time.monotonic(), [], 0
            while time.monotonic() < begin + SECONDS:
                time.sleep(0.4)
                if time.monotonic() > begin + (self.credentials.rotations + 1) * ROTATE_SECONDS:
                    self.credentials.rotate(self.server)
                self.assertIsNone(self.server.process.poll(), "the server died")
                rss.append(self.resident_bytes())
                victim = self.random.randrange(len(processes))
                kills += 1
                for i, process in enumerate(processes):
                    if i == victim or self.gave_up(process):
                        self.end(process)
                        processes[i] = starts[i]()
            for process in processes:
                self.end(process)
            self.check_all_is_given_back(begin, rss, kills)
            self.assertEqual(self.server.stop(), 0)

    def use_all_kv_memory(self):
        """Touches every page, so that memory that grows later is not K/V."""
        metadata = bearer(self.credentials.tokens[-1])
        with tls_channel(self.server, self.credentials.authority) as channel:
            stub = harness.stub(channel)
            sequence = harness.create(stub, metadata, num_kv_heads=KV_HEADS, head_dim=DIM).sequence_id
            message = harness.chunk(sequence, 4096, KV_HEADS * DIM * 2)
            for _ in range(KV_BYTES // (2 * len(message.key))):
                stub.LoadSequence(iter([message]), metadata=metadata)
            stub.DeleteSequence(pb.DeleteSequenceRequest(sequence_id=sequence), metadata=metadata)

    def resident_bytes(self):
        """Without K/V memory, which comes and goes with the sequences."""
        mappings = (self.server.proc / "smaps").read_text()
        found = re.findall(r"^Size: +(\d+) kB\n(?:\w+: .*\n)*?Rss: +(\d+) kB$", mappings, re.MULTILINE)
        return 1024 * sum(int(rss) for size, rss in found if 1024 * int(size) != KV_BYTES)

    def open_files_and_threads(self):
        return self.server.open_files(), self.server.threads()

    def check_all_is_given_back(self, begin, rss, kills):
        harness.wait_until(lambda: self.server.metric("flashcore_sequences") == 0,
                           "the sequences expire")
        for gauge in ("flashcore_sequences", "flashcore_queue_depth", "flashcore_inflight_requests",
                      'flashcore_kv_bytes{segment="hot",state="used"}',
                      'flashcore_kv_bytes{segment="cold",state="used"}',
                      'flashcore_staging_bytes{state="used"}'):
            self.assertEqual(self.server.metric(gauge), 0, gauge)
        harness.wait_until(lambda: all(now <= before + 4 for now, before in
                                       zip(self.open_files_and_threads(), self.idle)),
                           lambda: f"files and threads: {self.idle} before, "
                                   f"{self.open_files_and_threads()} after")
        started = self.server.metric("grpc_server_started_total")
        self.assertEqual(started, self.server.metric("grpc_server_handled_total"))
        refused = self.server.metric('flashcore_rejected_requests_total{reason="QUEUE_FULL"}')
        self.assertGreater(refused, 0, "the load never reached the queue limit")
        # The first quarter warms up the heap, for each thread and size of message.
        measured = rss[len(rss) // 4:]
        first, second = max(measured[:len(measured) // 2]), max(measured[len(measured) // 2:])
        print(f"{time.monotonic() - begin:.0f} s, {kills} clients killed, "
              f"{self.credentials.rotations} replacements, {started:.0f} RPCs, "
              f"{refused:.0f} refused, RSS at most {first / harness.MIB:.0f} MiB in the first half, "
              f"{second / harness.MIB:.0f} MiB in the second, "
              f"{self.server.status_bytes('VmRSS') / harness.MIB:.0f} MiB at the end")
        self.assertLess(second - first, GROWTH)
        if SECONDS >= 300:
            self.assertLess(second, first * 1.05)


if __name__ == "__main__":
    if len(sys.argv) == 6 and sys.argv[1] == "worker":
        Worker(sys.argv[2], int(sys.argv[3]), *sys.argv[4:]).run()
    harness.main()
