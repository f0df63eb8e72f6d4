"""Clients that do not trust each other: what one can see of another's sequences, and take from it."""

import time
import unittest

import grpc
from flashcore.v1 import attention_pb2 as pb

import harness
from harness import MIB, chunk, create, wait_until
from honest_client import assert_unhurt, timed
from raw_http2 import SERVICE, SilentClient

Code = grpc.StatusCode
UNKNOWN = bytes(16)  # device 0, and no sequence
PAGE_BYTES = 256 << 10  # of ListSequences


def attend_request(sequence, rows):
    """One query row; `rows` rows are appended."""
    return harness.zeros_request(1, rows, sequence=sequence, request_id="r")


def status_of(message):
    """Code and message of a Status message."""
    return next(code for code in Code if code.value[0] == message.code), message.message


def stream_status(stub, request):
    """The status of one request of an AttendStream."""
    reply, = stub.AttendStream(iter([request]))
    return status_of(reply.status)


def manage_status(stub, **operation):
    """The status of one operation of ManageSequences."""
    request = pb.ManageSequencesRequest(operations=[pb.SequenceOperation(**operation)])
    return status_of(stub.ManageSequences(request).results[0].status)


def status(call):
    try:
        result = call()
    except grpc.RpcError as error:
        return error.code(), error.details()
    return result if isinstance(result, tuple) else (Code.OK, "")


# Every RPC that names a sequence: whether it changes it, and the call.
RPCS = {
    "Attend": (False, lambda stub, s: stub.Attend(attend_request(s, 0))),
    "Attend that appends": (True, lambda stub, s: stub.Attend(attend_request(s, 1))),
    "AttendStream": (False, lambda stub, s: stream_status(stub, attend_request(s, 0))),
    "AttendStream that appends": (True, lambda stub, s: stream_status(stub, attend_request(s, 1))),
    "LoadSequence": (True, lambda stub, s: stub.LoadSequence(iter([chunk(s, 2)]))),
    "ForkSequence": (False, lambda stub, s: stub.ForkSequence(pb.ForkSequenceRequest(sequence_id=s))),
    "TruncateSequence": (True, lambda stub, s: stub.TruncateSequence(
        pb.TruncateSequenceRequest(sequence_id=s, length=0))),
    "DeleteSequence": (True, lambda stub, s: stub.DeleteSequence(
        pb.DeleteSequenceRequest(sequence_id=s))),
    "GetSequence": (False, lambda stub, s: stub.GetSequence(pb.GetSequenceRequest(sequence_id=s))),
    "ManageSequences fork": (False, lambda stub, s: manage_status(
        stub, fork=pb.ForkSequenceRequest(sequence_id=s))),
    "ManageSequences truncate": (True, lambda stub, s: manage_status(
        stub, truncate=pb.TruncateSequenceRequest(sequence_id=s, length=0))),
    "ManageSequences delete": (True, lambda stub, s: manage_status(
        stub, delete=pb.DeleteSequenceRequest(sequence_id=s))),
    "ManageSequences get": (False, lambda stub, s: manage_status(
        stub, get=pb.GetSequenceRequest(sequence_id=s))),
}


def list_all(stub, **fields):
    """The pages of ListSequences."""
    pages, token = [], ""
    while True:
        pages.append(stub.ListSequences(pb.ListSequencesRequest(page_token=token, **fields)))
        token = pages[-1].next_page_token
        if not token:
            return pages


class Tenants:
    """A server with two clients: one over TCP, one over the Unix socket."""

    def __init__(self, *flags):
        self.server = harness.Server(harness.by_address("unix"), *flags)
        self.channels = [self.server.channel(),
                         self.server.channel(f"unix:{self.server.socket}")]
        self.first, self.second = (harness.stub(channel) for channel in self.channels)

    def __enter__(self):
        return self

    def __exit__(self, *_):
        for channel in self.channels:
            channel.close()
        self.server.__exit__()


class OwnershipTest(unittest.TestCase):
    @classmethod
    def setUpClass(cls):
        cls.tenants = Tenants()
        cls.addClassCleanup(cls.tenants.__exit__)
        cls.owner, cls.stranger = cls.tenants.first, cls.tenants.second

    def make(self, **fields):
        sequence = create(self.owner, **fields).sequence_id
        self.owner.LoadSequence(iter([chunk(sequence, 3)]))
        return sequence

    def state(self, sequence):
        info = self.owner.GetSequence(pb.GetSequenceRequest(sequence_id=sequence)).sequence
        info.idle_seconds = 0
        return info

    def test_every_rpc_with_the_sequence_of_another(self):
        covered = {method.name for method in pb.DESCRIPTOR.services_by_name["AttentionService"].methods}
        self.assertEqual(covered - {name.split()[0] for name in RPCS},
                         {"GetServerInfo", "CreateSequence", "ListSequences", "HoldLease"})
        private, shared = self.make(), self.make(shared=True)
        before = self.state(private), self.state(shared)
        for name, (changes, call) in RPCS.items():
            with self.subTest(name):
                unknown = status(lambda: call(self.stranger, UNKNOWN))
                self.assertEqual(unknown[0], Code.NOT_FOUND, unknown)
                self.assertEqual(status(lambda: call(self.stranger, private)), unknown)
                got = status(lambda: call(self.stranger, shared))
                self.assertEqual(got[0], Code.PERMISSION_DENIED if changes else Code.OK, got)
        self.assertEqual((self.state(private), self.state(shared)), before)
        for name, (_, call) in RPCS.items():
            if name not in ("DeleteSequence", "ManageSequences delete"):
                with self.subTest(f"{name}, by the owner"):
                    self.assertEqual(status(lambda: call(self.owner, private))[0], Code.OK)

    def test_every_operation_with_the_lease_of_another(self):
        sequence = self.make()
        calls = {
            "CreateSequence": lambda lease: create(self.owner, lease_id=lease),
            "ForkSequence": lambda lease: self.owner.ForkSequence(
                pb.ForkSequenceRequest(sequence_id=sequence, lease_id=lease)),
            "ManageSequences create": lambda lease: manage_status(
                self.owner, create=harness.create_request(lease_id=lease)),
            "ManageSequences fork": lambda lease: manage_status(
                self.owner, fork=pb.ForkSequenceRequest(sequence_id=sequence, lease_id=lease)),
        }
        messages = {message.name for message in pb.DESCRIPTOR.message_types_by_name.values()
                    if message.name.endswith("Request") and "lease_id" in message.fields_by_name}
        self.assertEqual(messages, {name + "Request" for name in calls if " " not in name})
        foreign, own = (stub.HoldLease(pb.HoldLeaseRequest()) for stub in (self.stranger, self.owner))
        self.addCleanup(foreign.cancel)
        self.addCleanup(own.cancel)
        foreign_id, own_id = next(foreign).lease_id, next(own).lease_id
        for name, call in calls.items():
            with self.subTest(name):
                unknown = status(lambda: call(UNKNOWN))
                self.assertEqual(unknown[0], Code.NOT_FOUND, unknown)
                self.assertEqual(unknown[1][:9], "lease_id:")
                self.assertEqual(status(lambda: call(foreign_id)), unknown)
                self.assertEqual(status(lambda: call(own_id))[0], Code.OK)
                self.assertEqual(status(lambda: call(b"1"))[0], Code.INVALID_ARGUMENT)

    def test_a_fork_of_a_shared_sequence_belongs_to_the_forker(self):
        shared = self.make(shared=True)
        fork = self.stranger.ForkSequence(pb.ForkSequenceRequest(sequence_id=shared))
        self.assertFalse(fork.sequence.shared)
        self.assertEqual(status(lambda: RPCS["GetSequence"][1](self.owner, fork.sequence_id))[0],
                         Code.NOT_FOUND)
        self.owner.DeleteSequence(pb.DeleteSequenceRequest(sequence_id=shared))
        reply = self.stranger.Attend(attend_request(fork.sequence_id, 1))
        self.assertEqual(list(reply.sequence_lengths), [4])

    def test_a_group_needs_a_member(self):
        code, message = status(lambda: create(self.owner, group="staff"))
        self.assertEqual(code, Code.PERMISSION_DENIED)
        self.assertIn("does not belong to 'staff'", message)
        code, _ = status(lambda: create(self.owner, group="staff", shared=True))
        self.assertEqual(code, Code.INVALID_ARGUMENT)

    def test_lists_and_tokens_are_of_one_client(self):
        mine = {self.make() for _ in range(5)}
        for _ in range(3):
            create(self.stranger)
        token = self.owner.ListSequences(pb.ListSequencesRequest(page_size=2)).next_page_token
        self.assertNotIn(token, "0123456789")
        code, message = status(
            lambda: self.stranger.ListSequences(pb.ListSequencesRequest(page_token=token)))
        self.assertEqual((code, message[:11]), (Code.INVALID_ARGUMENT, "page_token:"))
        listed = {info.sequence_id for page in list_all(self.owner, page_size=2)
                  for info in page.sequences}
        self.assertLessEqual(mine, listed)
        self.assertFalse({info.sequence_id for page in list_all(self.stranger)
                          for info in page.sequences} & listed)

    def test_the_limits_of_a_client_are_set_and_reported(self):
        info = self.owner.GetServerInfo(pb.GetServerInfoRequest())
        limits = info.limits
        kv_bytes = min(device.kv_memory_bytes for device in info.devices)
        self.assertAlmostEqual(limits.client_kv_bytes / kv_bytes, 0.5, delta=0.01)
        self.assertEqual(limits.client_sequences, 16384)
        self.assertEqual(limits.client_metadata_bytes, 64 * MIB)
        self.assertEqual(limits.client_shared_memory_bytes, 512 * MIB)

    def test_idle_timeouts(self):
        limit = self.owner.GetServerInfo(
            pb.GetServerInfoRequest()).limits.sequence_idle_timeout_seconds
        self.assertEqual(create(self.owner).sequence.idle_timeout_seconds, limit)
        for seconds in (limit + 1, 0.5, -1, 2e8, 1e300, float("nan"), float("inf")):
            code, message = status(lambda s=seconds: create(self.owner, idle_timeout_seconds=s))
            self.assertEqual(code, Code.INVALID_ARGUMENT)
            self.assertIn("idle_timeout_seconds: ", message)


class OrphansTest(unittest.TestCase):
    def test_idle_sequences_go_and_give_back_their_memory(self):
        """Sequences of a client that is gone expire; not after the hour of the server's default."""
        with harness.Server() as server, server.channel() as channel:
            stub = harness.stub(channel)
            with server.channel() as gone:
                loaded = [self.load_sequence(harness.stub(gone)) for _ in range(4)]
            self.assertGreater(min(info.kv_bytes for info in loaded), 0)
            kept = create(stub).sequence_id
            wait_until(lambda: server.metric("flashcore_sequences") == 1, "they expire")
            expired = 'flashcore_sequences_evicted_total{reason="idle"}'
            wait_until(lambda: server.metric(expired) >= len(loaded), "they are counted")
            for info in loaded:
                call = stub.GetSequence.future(pb.GetSequenceRequest(sequence_id=info.sequence_id))
                self.assertEqual(call.code(), Code.NOT_FOUND)
            stub.GetSequence(pb.GetSequenceRequest(sequence_id=kept))
            wait_until(lambda: stub.GetServerInfo(
                pb.GetServerInfoRequest()).devices[0].kv_used_bytes == 0, "the memory is free")

    def load_sequence(self, stub):
        """A sequence that expires after a second. One that does so before it has K/V does not count."""
        while True:
            sequence = create(stub, idle_timeout_seconds=1).sequence_id
            call = stub.LoadSequence.future(iter([chunk(sequence, 3)]))
            if call.code() != Code.NOT_FOUND:
                return call.result().sequence

    @harness.stress
    def test_the_sequences_of_a_killed_client_go_within_the_time_it_asked_for(self):
        with harness.Server() as server:
            with server.load("--mode=decode", "--shape=4x8x512x64", "--idle_timeout=2s",
                             "--fork_from_prefix=128"):
                wait_until(lambda: server.metric(harness.COMPUTED) > 20, "it decodes")
                self.assertEqual(server.metric("flashcore_sequences"), 5)
            killed = time.monotonic()
            wait_until(lambda: not server.metric("flashcore_sequences"), "they expire")
            self.assertLess(time.monotonic() - killed, 30)  # not the hour of the server's default
            with server.channel() as channel:
                info = harness.stub(channel).GetServerInfo(pb.GetServerInfoRequest())
                self.assertEqual(info.devices[0].kv_used_bytes, 0)


class HonestClient:
    """Decodes on a sequence of its own, and measures."""

    def __init__(self, test, stub):
        self.test, self.stub = test, stub
        self.sequence = create(stub).sequence_id
        self.length = 0
        self.quiet = self.steps()

    def steps(self, count=200):
        return timed(self.step, count)

    def step(self):
        reply = self.stub.Attend(attend_request(self.sequence, 1), timeout=harness.PATIENCE)
        self.length += 1
        self.test.assertEqual(list(reply.sequence_lengths), [self.length])

    def assert_served(self, latencies):
        if self.test.measured:
            assert_unhurt(self.test, self.quiet, latencies)


class ExhaustionTest(unittest.TestCase):
    measured = False  # times and memory
    lists = 60  # that nobody reads

    def test_metadata_of_one_client(self):
        with Tenants("--sequence_metadata_bytes=33554432") as tenants:
            honest = HonestClient(self, tenants.second)
            created, code, latencies = 0, Code.OK, []
            while code == Code.OK and created < 3000:
                code, message = status(lambda: create(tenants.first, num_layers=1024))
                created += code == Code.OK
                latencies += honest.steps(1)
                create(tenants.second)
            self.assertEqual(code, Code.RESOURCE_EXHAUSTED)
            self.assertIn(f"of {8 * MIB}", message)
            print(f"created {created} sequences of 1024 layers, then: {message}")
            for _ in range(100):
                create(tenants.second, num_layers=16)
            honest.assert_served(latencies + honest.steps())

    def test_metadata_with_eviction(self):
        with Tenants("--sequence_metadata_bytes=8388608", "--evict=lru",
                     "--client_kv_bytes=0") as tenants:
            honest = HonestClient(self, tenants.second)
            latencies = []
            for _ in range(300):  # three times what there is room for
                create(tenants.first, num_layers=1024)
                latencies += honest.steps(1)
            evicted = 'flashcore_sequences_evicted_total{reason="lru"}'
            wait_until(lambda: tenants.server.metric(evicted) > 100, "others are evicted")
            honest.assert_served(latencies)

    def test_lists_that_nobody_reads(self):
        lists, connections = self.lists, 6
        with Tenants("--client_kv_bytes=0") as tenants:
            honest = HonestClient(self, tenants.second)
            for _ in range(400):
                create(tenants.first, num_layers=1024)
            pages = list_all(tenants.first, page_size=1000)
            self.assertEqual(sum(len(page.sequences) for page in pages), 400)
            self.assertLessEqual(max(page.ByteSize() for page in pages), PAGE_BYTES)
            before = tenants.server.status_bytes("VmRSS")  # gate: compared if measured
            for _ in range(connections):
                flood = self.enterContext(SilentClient(tenants.server.target))
                for _ in range(lists // connections):
                    flood.call(SERVICE + "ListSequences",
                               pb.ListSequencesRequest(page_size=1000).SerializeToString())
            started = 'grpc_server_started_total{grpc_method="ListSequences"}'
            wait_until(lambda: tenants.server.metric(started) >= lists + len(pages), "the lists have begun")
            latencies = honest.steps()
            if self.measured and not harness.SANITIZED:
                grown = tenants.server.status_bytes("VmRSS") - before  # gate: compared if measured
                print(f"{lists} lists: {grown / MIB:.1f} MiB resident")
                self.assertLess(grown, lists * 2 * PAGE_BYTES)  # a message and its encoding
            honest.assert_served(latencies)


@harness.stress
class MeasuredExhaustionTest(ExhaustionTest):
    """The same; the honest client is not hurt."""

    measured, lists = True, 300


if __name__ == "__main__":
    harness.main()
