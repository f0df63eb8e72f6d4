"""All memory budgets under attack at once: the server takes no more than their sum."""

import contextlib
import unittest

import grpc

import harness
from harness import MIB, wait_until
from raw_http2 import ATTEND, SERVICE, SilentClient

BUDGETS = {"kv_memory_bytes": 128 * MIB, "sequence_metadata_bytes": 32 * MIB,
           "staging_memory_bytes": 64 * MIB, "transport_memory_bytes": 64 * MIB,
           "unsent_reply_bytes": 16 * MIB}
ATTACKERS = [f"127.0.0.{i}" for i in range(2, 10)]  # each is another client
DIM = 64


class BudgetsTest(unittest.TestCase):
    def silent(self, host):
        return self.stack.enter_context(SilentClient(self.server.target, host=host))

    def until_refused(self, calls):
        """How many were served."""
        count = 0
        with self.assertRaises(grpc.RpcError) as raised:
            for call in calls:
                call()
                count += 1
        self.assertEqual(raised.exception.code(), grpc.StatusCode.RESOURCE_EXHAUSTED, raised.exception)
        return count

    def fill_kv_memory(self, stub):
        sequence = harness.create(stub, num_kv_heads=8, head_dim=DIM).sequence_id
        chunk = harness.chunk(sequence, 128, 8 * DIM * 2)
        return self.until_refused(lambda: stub.LoadSequence(iter([chunk])) for _ in range(2000))

    def fill_metadata(self, stub):
        return self.until_refused(lambda: harness.create(stub, num_layers=1024, head_dim=DIM)
                                  for _ in range(100_000))

    def serves(self, channel):
        call = harness.stub(channel).Attend.future(harness.small_request(), timeout=harness.PATIENCE)
        return call.code() == grpc.StatusCode.OK

    def test_all_at_once(self):
        self.check_all_at_once(ATTACKERS[:2], divisor=16, half_messages=4)

    @harness.stress
    @unittest.skipIf(harness.SANITIZED, "it would measure the sanitizer's memory")
    def test_all_at_once_take_no_more_than_their_sum(self):
        self.check_all_at_once(ATTACKERS, measured=True)

    def check_all_at_once(self, attackers, divisor=1, half_messages=32, measured=False):
        """With budgets of 1 / divisor, but for that of the transport: when it is full, gRPC closes
        connections."""
        budgets = {name: value // divisor for name, value in BUDGETS.items()}
        budgets["transport_memory_bytes"] = BUDGETS["transport_memory_bytes"]
        flags = [f"--{name}={value}" for name, value in budgets.items()]
        with harness.Server(*flags, harness.by_address(*attackers), "--reply_timeout_s=600",
                            f"--max_message_bytes={8 * MIB // divisor}", "--client_kv_bytes=0",
                            "--staging_wait_ms=0", "--max_connection_streams=4096") as self.server, \
                contextlib.ExitStack() as self.stack:
            idle = self.server.status_bytes("VmRSS")
            stub = harness.stub(self.stack.enter_context(self.server.channel()))
            filled = {"LoadSequence": self.fill_kv_memory(stub),
                      "CreateSequence": self.fill_metadata(stub)}
            # Replies that nobody reads: large ones in staging memory, lists in the heap.
            request = harness.zeros_request(150, 150, head_dim=DIM, request_id="r").SerializeToString()
            for host in attackers:
                attends, lists = self.silent(host), self.silent(host)
                for _ in range(600):
                    attends.call(ATTEND, request)
                for _ in range(300):
                    lists.call(SERVICE + "ListSequences", b"")
            # Messages that never end.
            for host in attackers:
                for _ in range(half_messages):
                    half = self.silent(host)
                    half.send(half.open(ATTEND), bytes(60_000), missing=1)
            wait_until(lambda: self.server.metric("flashcore_rejected_requests_total") > 10, "refusals")
            self.assertGreater(min(filled.values()), 10, filled)
            if measured:
                most = self.server.status_bytes("VmHWM") - idle
                budget = sum(budgets.values())
                print(f"{self.id()}: {filled}, {most / MIB:.0f} MiB of {budget / MIB:.0f}", flush=True)
                self.assertLess(most, 1.1 * budget)
            self.stack.close()
            with self.server.channel() as channel:
                wait_until(lambda: self.serves(channel), "the server serves again")
            self.assertEqual(self.server.stop(), 0)


if __name__ == "__main__":
    harness.main()
