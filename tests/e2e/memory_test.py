"""Memory of the server: idle, with many connections, and under hostile requests, which it refuses."""

import time
import unittest

import grpc
import numpy as np
from flashcore.v1 import attention_pb2 as pb

import harness
from harness import MIB

MESSAGE_LIMIT = 64 * MIB    # --max_message_bytes

# The figures that server/README.md publishes, and how much more memory these tests allow.
MARGIN = 1.25  # of an idle server: threads and heap differ between machines
IDLE, CONNECTED = harness.published(
    r"\*\*Idle server\.\*\* (\d+) MiB of its own; (\d+) MiB with 1,000 idle connections")
MESSAGE_MARGIN = 1.1  # of messages: the first large one also warms up threads and heap
# Memory per byte of a message: gRPC's slices have headers and unused ends.
OVERHEAD = harness.published(r"\(measured: 1\.00 to ([\d.]+) times\)")[0] * MESSAGE_MARGIN
OVER_THE_LIMIT, = harness.published(r"\(measured: ([\d.]+) MiB for a message of 768 MiB\)")


def hostile_messages(limit):
    """Requests that are refused, by name; most have nearly `limit` bytes."""
    q = np.zeros((1, 1, 32), np.float16)
    full = limit - 4096
    return {
        "a query of the whole limit, of the wrong size":
            harness.request(q, q, q).SerializeToString() + harness.bytes_field(13, bytes(full)),
        "a field that is not known":
            harness.request(q, q, q).SerializeToString() + harness.bytes_field(900, bytes(full)),
        "millions of empty spans": harness.bytes_field(2, b"") * (full // 2),
        "a request id of the whole limit": harness.bytes_field(1, b"x" * full),
        "claims of 2^32 - 1 rows, heads and dims": pb.AttendRequest(
            spans=[pb.Span(query_rows=2**32 - 1, kv_rows=2**32 - 1)] * 4000,
            dtype=pb.DTYPE_FLOAT16, num_heads=2**32 - 1, num_kv_heads=2**32 - 1,
            head_dim=2**32 - 1, layout=pb.LAYOUT_NHD).SerializeToString(),
        "a length of 2 GiB": b"\x6a\xff\xff\xff\xff\x07" + bytes(full),
    }


def send_refused(test, channel, message):
    with test.assertRaises(grpc.RpcError) as caught:
        channel.unary_unary("/flashcore.v1.AttentionService/Attend")(message,
                                                                     timeout=harness.PATIENCE)
    test.assertIn(caught.exception.code(), (
        grpc.StatusCode.INVALID_ARGUMENT, grpc.StatusCode.RESOURCE_EXHAUSTED))


class HostileMessagesTest(unittest.TestCase):
    def test_they_are_refused_and_the_next_request_is_served(self):
        limit = MIB
        with harness.Server(f"--max_message_bytes={limit}") as server, server.channel() as channel:
            for name, message in {**hostile_messages(limit), "over the limit": bytes(limit + 1),
                                  "far over the limit": bytes(12 * limit)}.items():
                with self.subTest(name):
                    send_refused(self, channel, message)
                    harness.stub(channel).Attend(harness.small_request(), timeout=harness.PATIENCE)


@harness.stress
@unittest.skipIf(harness.SANITIZED, "it would measure the sanitizer's memory")
class MemoryTest(unittest.TestCase):
    def test_idle(self):
        with harness.Server() as server:
            self.assert_own_memory(server, "idle server", IDLE)

    def test_a_thousand_idle_connections(self):
        with harness.Server("--max_connections=2048", "--max_connections_per_host=1000",
                            "--max_connections_per_client=1000") as server:
            channels = [server.channel() for _ in range(1000)]
            # Each connection makes one RPC first, and is idle then.
            calls = [harness.stub(c).GetServerInfo.future(pb.GetServerInfoRequest())
                     for c in channels]
            self.assertTrue(all(call.code() == grpc.StatusCode.OK for call in calls))
            self.assert_own_memory(server, "with 1,000 idle connections", CONNECTED)
            for channel in channels:
                channel.close()

    def test_hostile_requests_grow_it_by_no_more_than_the_message(self):
        """No allocation grows with a claimed size or the number of fields."""
        for name, message in hostile_messages(MESSAGE_LIMIT).items():
            with self.subTest(name):
                self.send_and_measure(name, message, max(len(message), 4 * MIB) * OVERHEAD)

    def test_messages_over_the_limit_grow_it_by_no_more_than_the_transport_memory(self):
        """gRPC receives a message before it checks its size; the quota bounds that."""
        for size in (MESSAGE_LIMIT + 1, 12 * MESSAGE_LIMIT):
            with self.subTest(size=size):
                self.send_and_measure(f"{size // MIB} MiB, over the limit of 64", bytes(size),
                                      OVER_THE_LIMIT * MESSAGE_MARGIN * MIB, repeats=1)

    def test_the_memory_of_large_messages_is_given_back(self):
        with harness.Server() as server, server.channel() as channel:
            harness.stub(channel).Attend(harness.small_request())
            before = server.status_bytes("VmRSS")
            for _ in range(3):
                with self.assertRaises(grpc.RpcError):
                    channel.unary_unary("/flashcore.v1.AttentionService/Attend")(
                        bytes(2 * MESSAGE_LIMIT))
            harness.wait_until(lambda: server.status_bytes("VmRSS") - before <= 32 * MIB,
                               "the memory is given back")

    def test_a_context_of_one_gib_loads_through_bounded_memory(self):
        chunk, rows = 16 * MIB, 4096  # per message: K and V of 8 heads of 128
        chunks = 1024 * MIB // chunk

        def messages(sequence):
            for i in range(chunks):
                yield harness.chunk(sequence if i == 0 else b"", rows, chunk // 2 // rows,
                                    expected_length=i * rows)

        with harness.Server("--kv_memory_bytes=1140850688", "--client_kv_bytes=0") as server, \
                server.channel() as channel:
            stub = harness.stub(channel)
            sequence = harness.create(stub, num_kv_heads=8, head_dim=128).sequence_id
            before = server.status_bytes("VmRSS")
            began = time.monotonic()
            info = stub.LoadSequence(messages(sequence)).sequence
            seconds = time.monotonic() - began
            self.assertEqual((list(info.layer_lengths), info.kv_bytes),
                             ([chunks * rows], 1024 * MIB))
            grown = server.status_bytes("VmHWM") - before - info.kv_bytes
            print(f"1 GiB of K/V in chunks of 16 MiB: grown by {grown / MIB:.1f} MiB beyond the K/V, "
                  f"{1 / seconds:.2f} GiB/s")
            # Two chunks in staging memory, and two being received.
            self.assertLessEqual(grown, 4 * chunk * OVERHEAD)

    def test_the_memory_of_deleted_kv_is_given_back(self):
        with harness.Server("--kv_memory_bytes=256MiB", "--client_kv_bytes=0") as server, \
                server.channel() as channel:
            stub = harness.stub(channel)
            before = server.status_bytes("VmRSS")
            sequence = harness.create(stub, num_kv_heads=8, head_dim=128).sequence_id
            stub.LoadSequence(harness.chunk(sequence if i == 0 else b"", 4096, 2048) for i in range(15))
            self.assertGreater(server.status_bytes("VmRSS") - before, 15 * 16 * MIB)
            stub.DeleteSequence(pb.DeleteSequenceRequest(sequence_id=sequence))
            # Staging memory and messages of chunks are kept for the next ones.
            harness.wait_until(lambda: server.status_bytes("VmRSS") - before <= 4 * 16 * MIB,
                               "the memory is given back")

    def assert_own_memory(self, server, what, published):
        """Without the pages of files, program and libraries: the system decides how many are resident."""
        own = server.status_bytes("RssAnon")
        print(f"{what}: {own / MIB:.1f} MiB of its own")
        self.assertLessEqual(own, published * MARGIN * MIB)

    def send_and_measure(self, name, message, limit, repeats=3):
        with harness.Server() as server, server.channel() as channel:
            harness.stub(channel).Attend(harness.small_request())
            before = server.status_bytes("VmRSS")
            for _ in range(repeats):
                send_refused(self, channel, message)
            grown = server.status_bytes("VmHWM") - before
            print(f"{name}: grown by {grown / MIB:.1f} MiB at most, "
                  f"{grown / len(message):.2f} times its size")
            self.assertLessEqual(grown, limit)
            harness.stub(channel).Attend(harness.small_request())


if __name__ == "__main__":
    harness.main()
