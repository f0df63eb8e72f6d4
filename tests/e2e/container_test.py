"""A server with default budgets in a small container, under load: it refuses by name what finds no room, and
is not ended by the system. FLASHCORE_SOAK_SECONDS says how long the load lasts."""

import concurrent.futures
import contextlib
import os
import random
import time
import unittest

import grpc
from flashcore.v1 import attention_pb2 as pb

import container
import harness
from harness import MIB

SECONDS = float(os.environ.get("FLASHCORE_SOAK_SECONDS", "60"))
HEADS, DIM = 8, 64
ROW_BYTES = HEADS * DIM * 2  # of K, or of V
# Where messages take all that they may, gRPC cancels calls, and closes connections (GOAWAY).
REFUSALS = (grpc.StatusCode.RESOURCE_EXHAUSTED, grpc.StatusCode.DEADLINE_EXCEEDED,
            grpc.StatusCode.CANCELLED, grpc.StatusCode.UNAVAILABLE)


def is_kv_full(error):
    return "KV_FULL" in str(error.trailing_metadata())


class Load:
    """The clients' calls until `end`: each method in threads of its own."""

    def __init__(self, server, end):
        self.server, self.end = server, end
        self.kv_full = self.served = self.refused = 0
        self.errors = []
        with server.channel() as channel:
            self.message = harness.stub(channel).GetServerInfo(
                pb.GetServerInfoRequest()).limits.max_message_bytes

    def run(self):
        with self.server.channel() as channel:  # all of the K/V memory first, at once
            self._try(self.fill_kv, channel, random.Random(harness.SEED))
        # Together they want more of each budget than there is.
        work = [self.fill_kv] * 2 + [self.attend_inline] * 4 + [self.send_too_much]
        with concurrent.futures.ThreadPoolExecutor(len(work)) as pool:
            list(pool.map(self._repeat, work, range(len(work))))

    def _repeat(self, work, number):
        chance = random.Random(harness.SEED + number)
        with self.server.channel() as channel:
            while time.monotonic() < self.end and not self.errors and self.is_alive():
                self._try(work, channel, chance)

    def _try(self, work, channel, chance):
        try:
            work(harness.stub(channel), channel, chance)
            self.served += 1
        except grpc.RpcError as error:
            self.kv_full += is_kv_full(error)
            self.refused += 1
            if error.code() not in REFUSALS:
                self.errors.append(error)

    def is_alive(self):
        return self.server.process.poll() is None

    def fill_kv(self, stub, _, chance):
        """Loads one sequence after the other until no more fit, and attends to them."""
        sequences = []
        try:
            while time.monotonic() < self.end and self.is_alive():
                try:
                    self.load(stub, sequences)
                    stub.Attend(self.query(chance.choice(sequences)), timeout=30)
                except grpc.RpcError as error:
                    if is_kv_full(error) or error.code() not in REFUSALS:
                        raise
        finally:
            for sequence in sequences:
                self.delete(stub, sequence)

    @staticmethod
    def load(stub, sequences):
        rows = 2 * MIB // ROW_BYTES
        sequences.append(harness.create(stub, num_kv_heads=HEADS, head_dim=DIM).sequence_id)
        stub.LoadSequence(iter([harness.chunk(sequences[-1], rows, ROW_BYTES)]))

    def delete(self, stub, sequence):
        """Again and again: a call that gRPC cuts off for want of memory may have been done or not."""
        while self.is_alive():
            try:
                stub.DeleteSequence(pb.DeleteSequenceRequest(sequence_id=sequence))
                break
            except grpc.RpcError as error:
                if error.code() == grpc.StatusCode.NOT_FOUND:
                    break
                if error.code() not in REFUSALS:
                    raise

    @staticmethod
    def query(sequence):
        return harness.zeros_request(4, 0, HEADS, DIM, sequence=sequence)

    def attend_inline(self, stub, _, chance):
        """Requests of any size: many query rows have results as large, many K/V rows none."""
        rows = chance.randrange(1, int(0.9 * self.message) // (3 * ROW_BYTES))
        kv_rows = chance.choice((1, rows // 16 + 1))
        stub.Attend(harness.zeros_request(rows, kv_rows, HEADS, DIM), timeout=30)

    def send_too_much(self, _, channel, chance):
        """Messages that are refused once the server has received them, or as much as it may."""
        channel.unary_unary("/flashcore.v1.AttentionService/Attend")(
            bytes(self.message + chance.randrange(self.message)), timeout=30)


@harness.stress
@unittest.skipIf(harness.SANITIZED, "it would measure the sanitizer's memory")
class ContainerTest(unittest.TestCase):
    def test_512_mib_40_pids_and_half_a_cpu(self):
        self.check_load(SECONDS, memory=512 * MIB, pids=40, cpus=0.5)

    def test_1_gib(self):
        self.check_load(SECONDS / 4, memory=1024 * MIB)

    def test_what_the_server_takes_is_the_containers(self):
        with self.server(memory=512 * MIB, cpus=0.5) as (_, server):
            memory = server.wait_for_record("memory")
            self.assertEqual((memory["of"], memory["bytes"], memory["cores"]), ("container", 512 * MIB, 1))
            self.assertGreaterEqual(memory["kv_memory_bytes"], 256 * MIB)
            self.assertLessEqual(memory["budgets_bytes"], 512 * MIB)
        with self.server("--kv_memory_bytes=1GiB", memory=512 * MIB) as (_, server):
            warning = server.wait_for_record("a budget is more than the memory there is")
            self.assertEqual((warning["flag"], warning["value"]), ("kv_memory_bytes", 1024 * MIB))

    @contextlib.contextmanager
    def server(self, *flags, **limits):
        if why := container.why_none(**limits):
            self.skipTest(f"no control group can be made: {why}")
        with container.Container(**limits) as box, \
                harness.Server("--client_kv_bytes=0", *flags, program=box.program) as server:
            yield box, server

    def check_load(self, seconds, **limits):
        with self.server(**limits) as (box, server):
            load = Load(server, time.monotonic() + seconds)
            load.run()
            self.assertIsNone(server.process.poll(), "the server was ended")
            print(f"{limits}: at most {box.peak_bytes() / MIB:.0f} MiB, {load.served} served, "
                  f"{load.refused} refused, {load.kv_full} of them KV_FULL")
            self.assertEqual(load.errors, [])
            self.assertGreater(load.kv_full, 0)
            self.assertGreater(load.served, 0)
            with server.channel() as channel:
                harness.stub(channel).Attend(harness.small_request(), timeout=harness.PATIENCE)
            self.assertEqual(server.stop(), 0)


if __name__ == "__main__":
    harness.main()
