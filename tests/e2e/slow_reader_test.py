"""Clients that do not read, or send half messages: what they take is bounded, ends in time, and hurts nobody
else. tests/transport/local/client_faults_test.cc has those of the local socket."""

import collections
import contextlib
import unittest

import grpc
from flashcore.v1 import attention_pb2 as pb

import harness
from attackers import HALF, connect_local
from harness import MIB, HeldStaging, another_user, refused, wait_until, window_request
from honest_client import assert_unhurt, timed
from local_raw_client import HELLO, RawClient, frame
from raw_http2 import ATTEND, SERVICE, SilentClient

ATTACKER = "127.0.0.2"
BY_ADDRESS = harness.by_address(ATTACKER)  # it is another client than the one on the Unix socket
ATTACKERS = [f"127.0.0.{number}" for number in range(2, 6)]
USED = 'flashcore_staging_bytes{state="used"}'
INFLIGHT = "flashcore_inflight_requests"
WAITING = "flashcore_staging_waiting_requests"
UNREAD = 'flashcore_rejected_requests_total{reason="UNREAD"}'


def handled(method, code):
    return f'grpc_server_handled_total{{grpc_code="{code}",grpc_method="{method}"}}'


HELLO_FRAME = frame(1, hello=HELLO)
BANNED = refused("banned", "local_")
SMALL_SHARE = ("--max_message_bytes=1048576", "--transport_memory_bytes=2097152")
LIST_ALL = pb.ListSequencesRequest(page_size=1000).SerializeToString()

# Memory for some 400 replies of window_request(); a client may hold a quarter of it.
SMALL_STAGING = (f"--staging_memory_bytes={8 * MIB}", f"--max_message_bytes={MIB // 4}",
                 "--staging_wait_ms=0")
UNSENT = f"--unsent_reply_bytes={256 * MIB}"  # room for all replies to unread_socket


class Honest:
    """A client on the Unix socket that measures its calls."""

    def __init__(self, server):
        self.channel = server.channel(f"unix:{server.socket}")
        self.stub = harness.stub(self.channel)
        self.request = pb.AttendRequest.FromString(window_request())

    def times(self, calls=100):
        """Seconds of each call. Fails if one does."""
        return timed(lambda: self.stub.Attend(self.request, timeout=harness.PATIENCE), calls)


class SlowReaderTest(unittest.TestCase):
    def silent_clients(self, stack, server, clients, calls):
        """Attends, whose replies are never read, of one client on several connections."""
        made = [stack.enter_context(SilentClient(server.target, host=ATTACKER))
                for _ in range(clients)]
        return [(client, [client.call(ATTEND, window_request())
                          for _ in range(calls)]) for client in made]

    def test_unread_replies_of_one_client_do_not_take_the_memory_of_others(self):
        self.check_unread_replies(clients=2)

    @harness.stress
    def test_unread_replies_of_one_client_do_not_delay_others(self):
        self.check_unread_replies(clients=10, measured=True)

    def check_unread_replies(self, clients, measured=False):
        with harness.Server(BY_ADDRESS, *SMALL_STAGING) as server, contextlib.ExitStack() as stack:
            honest = Honest(server)
            quiet = honest.times()
            self.silent_clients(stack, server, clients, calls=90)
            refused = handled("Attend", "ResourceExhausted")
            wait_until(lambda: server.metric(refused) > 0, "the attacker reaches its share")
            attacked = honest.times()
            if measured:
                assert_unhurt(self, quiet, attacked)
            wait_until(lambda: server.metric(USED) <= 2 * MIB, "the attacker has its share only")
            with server.channel() as channel:  # from 127.0.0.1
                harness.stub(channel).Attend(honest.request, timeout=harness.PATIENCE)

    def test_unread_replies_of_four_clients_make_room_for_a_fifth(self):
        self.check_full_memory(calls=20)

    @harness.stress
    def test_unread_replies_of_four_clients_do_not_delay_a_fifth(self):
        self.check_full_memory(calls=500, measured=True)

    def check_full_memory(self, calls, measured=False):
        """Nobody has more than its share, all that time would free comes much later, and the attackers
        have more requests, which wait."""
        share = 9 * MIB // 4  # of four, more than all
        with harness.Server(harness.by_address(*ATTACKERS), *SMALL_STAGING, "--reply_timeout_s=3600",
                            "--staging_wait_ms=3600000", f"--client_staging_bytes={share}") as server, \
                contextlib.ExitStack() as stack:
            honest = Honest(server)
            quiet = honest.times()
            attackers = [stack.enter_context(SilentClient(server.target, host=host))
                         for host in ATTACKERS]
            before = server.metric(harness.COMPUTED)
            # At the same pace: who has a request's bytes more in replies would have to give them back.
            step = (HeldStaging.REQUEST - 1) // HeldStaging.REPLY
            for sent in range(step, 141, step):
                for client in attackers:
                    for _ in range(step):
                        client.call(ATTEND, window_request())
                wait_until(lambda: server.metric(harness.COMPUTED) - before + server.metric(WAITING) ==
                           sent * len(attackers), "all requests are computed or wait")
            self.assertGreater(server.metric(WAITING), 0)
            self.assertGreater(server.metric(USED), 8 * MIB - HeldStaging.REQUEST)
            self.assertEqual(server.metric(UNREAD), 0)
            attacked = honest.times(calls)
            if measured:
                assert_unhurt(self, quiet, attacked)
            cut_off = server.metric(UNREAD)
            print(f"{self.id()}: {calls} calls, {cut_off:.0f} replies cut off", flush=True)
            self.assertGreater(cut_off, 0)
            # For each call of 84 KiB, replies of 20.
            self.assertLessEqual(cut_off, 5 * calls)

    def test_the_refusal_names_the_limit(self):
        with harness.Server(*SMALL_STAGING, f"--client_staging_bytes={MIB // 2}",
                            "--reply_timeout_s=600") as server, \
                contextlib.ExitStack() as stack, server.channel() as channel:
            stub = harness.stub(channel)
            limits = stub.GetServerInfo(pb.GetServerInfoRequest()).limits
            self.assertEqual((limits.client_staging_bytes, limits.reply_timeout_seconds),
                             (MIB // 2, 600))
            call = []

            def refused():
                stack.enter_context(SilentClient(server.target)).call(ATTEND, window_request())
                call[:] = [stub.Attend.future(pb.AttendRequest.FromString(window_request()))]
                return call[0].code() != grpc.StatusCode.OK

            wait_until(refused, "the share is used up")
            self.assertEqual(call[0].code(), grpc.StatusCode.RESOURCE_EXHAUSTED)
            self.assertIn(f"of the {MIB // 2} of --client_staging_bytes", call[0].details())

    def test_a_reply_that_is_not_read_in_time_ends_its_call(self):
        canceled = handled("Attend", "Canceled")
        with harness.Server("--reply_timeout_s=0.1") as server, contextlib.ExitStack() as stack:
            (client, calls), = self.silent_clients(stack, server, clients=1, calls=20)
            wait_until(lambda: server.metric(UNREAD) == 20, "the calls are cut off")
            wait_until(lambda: server.metric(USED) == 0, "the memory is released")
            wait_until(lambda: server.metric(INFLIGHT) == 0, "the calls have ended")
            wait_until(lambda: server.metric(canceled) == 20, "they count as cancelled")
            client.wait_for_end(calls)

    def test_a_stream_that_is_not_read_in_time_ends(self):
        small = harness.small_request("r").SerializeToString()
        with harness.Server(BY_ADDRESS, "--reply_timeout_s=0.1") as server, \
                SilentClient(server.target, host=ATTACKER) as client:
            stream = client.open(SERVICE + "AttendStream")
            for _ in range(10):
                client.send(stream, small)
            wait_until(lambda: server.metric(handled("AttendStream", "Canceled")) == 1,
                       "the stream is cut off")
            wait_until(lambda: server.metric(UNREAD) >= 1, "its replies are lost")
            wait_until(lambda: server.metric(USED) == 0, "the memory is released")
            wait_until(lambda: server.metric(INFLIGHT) == 0, "its requests have ended")
            client.wait_for_end([stream])

    def test_lists_that_nobody_reads_are_refused(self):
        """Beyond a quarter of --unsent_reply_bytes."""
        with harness.Server(BY_ADDRESS, f"--unsent_reply_bytes={4 * MIB}") as server, \
                contextlib.ExitStack() as stack:
            honest = Honest(server)
            self.create(stack, server, 100)
            client = stack.enter_context(SilentClient(server.target, host=ATTACKER))
            refused = handled("ListSequences", "ResourceExhausted")

            for _ in range(100):
                client.call(SERVICE + "ListSequences", LIST_ALL)
            wait_until(lambda: server.metric(refused) + server.metric(INFLIGHT) == 100,
                       "all calls are refused or computed")
            self.assertGreater(server.metric(refused), 0)
            honest.times()
            honest.stub.ListSequences(pb.ListSequencesRequest(), timeout=harness.PATIENCE)

    @harness.stress
    @unittest.skipIf(harness.SANITIZED, "it would measure the sanitizer's memory")
    def test_lists_that_nobody_reads_are_bounded(self):
        calls = 1000
        with harness.Server(BY_ADDRESS) as server, contextlib.ExitStack() as stack:
            honest = Honest(server)
            for _ in range(300):  # of the address that lists
                honest.stub.Attend(honest.request)
            quiet = honest.times()
            self.create(stack, server, 200)
            before = server.status_bytes("VmRSS")
            for _ in range(10):
                client = stack.enter_context(SilentClient(server.target, host=ATTACKER))
                for _ in range(calls // 10):
                    client.call(SERVICE + "ListSequences", LIST_ALL)
            wait_until(lambda: server.metric(handled("ListSequences", "ResourceExhausted")) +
                       server.metric(INFLIGHT) >= calls, "all calls are refused or computed")
            grown = server.status_bytes("VmRSS") - before
            print(f"{calls} unread lists: {grown / MIB:.1f} MiB more resident", flush=True)
            self.assertLess(grown, 1.1 * 64 * MIB)  # --unsent_reply_bytes
            assert_unhurt(self, quiet, honest.times())

    def create(self, stack, server, sequences):
        """Sequences of the attacker, with long records in a list."""
        creator = stack.enter_context(SilentClient(server.target, 65535, ATTACKER))
        create = harness.create_request(num_layers=512, head_dim=64).SerializeToString()
        creator.wait_for_end([creator.call(SERVICE + "CreateSequence", create)
                              for _ in range(sequences)])

    def test_a_reset_stream_is_not_counted_ok(self):
        with harness.Server() as server, SilentClient(server.target, window=1 << 20) as client:
            stream = client.open(SERVICE + "AttendStream")
            client.send(stream, window_request())
            wait_until(lambda: server.metric(
                'flashcore_request_duration_seconds_count{rpc="AttendStream"}') == 1, "an answer")
            client.reset(stream)
            wait_until(lambda: server.metric(handled("AttendStream", "Canceled")) == 1,
                       "the stream has ended")
            self.assertEqual(server.metric(handled("AttendStream", "OK")), 0)

    def test_a_connection_that_takes_no_bytes_is_ended_with_its_calls(self):
        """gRPC does not end a call that is cut off while it waits for the socket."""
        with self.unread_socket("--reply_timeout_s=0.5") as (server, _):
            wait_until(lambda: server.metric(UNREAD) > 0, "a call that was cut off has ended")
            wait_until(lambda: server.metric(INFLIGHT) == 0, "all have")

    def test_a_connection_that_takes_no_bytes_does_not_hold_the_end(self):
        with self.unread_socket("--drain_timeout_s=1") as (server, calls):
            wait_until(lambda: 0 < server.metric(INFLIGHT) ==
                       calls - server.metric(handled("ListSequences", "OK")), "unread answers")
            self.assertEqual(server.stop(), 0)

    @contextlib.contextmanager
    def unread_socket(self, flag):
        """A server and the number of its calls by a client whose windows are open, but that does not read
        its socket: their replies take 8 MB, twice what the socket's buffers take."""
        calls = 250
        with harness.Server(BY_ADDRESS, UNSENT, flag) as server, contextlib.ExitStack() as stack:
            self.create(stack, server, 70)
            client = stack.enter_context(SilentClient(server.target, window=(1 << 31) - 1, host=ATTACKER))
            client.grant(0, 1 << 30)
            for _ in range(calls):
                client.call(SERVICE + "ListSequences", LIST_ALL)
            yield server, calls


def connect(server, data):
    """A connection that has sent some of `data`, and reads nothing."""
    connection = connect_local(server.local)
    connection.setblocking(False)
    with contextlib.suppress(BlockingIOError):
        connection.send(data)
    return connection


class HalfFramesTest(unittest.TestCase):
    @harness.needs_root
    def test_a_user_whose_half_frames_were_cut_off_is_read_later(self):
        with harness.open_server(*SMALL_SHARE) as server:
            with contextlib.ExitStack() as stack:
                def flood():
                    stack.enter_context(connect(server, HELLO_FRAME + HALF))
                    return server.metric(BANNED) >= 1

                with another_user():
                    wait_until(flood, "a connection is banned")
            with another_user():
                waiting = connect(server, HELLO_FRAME)
            RawClient(server.local).socket.close()  # accepted behind all of the above, which now are counted
            banned = server.metric(BANNED)
            RawClient(server.local).socket.close()
            self.assertEqual(server.metric(BANNED), banned)
            waiting.settimeout(harness.PATIENCE)
            self.assertNotEqual(waiting.recv(1), b"")  # the ban is over
            waiting.close()

    @harness.stress
    def test_connections_that_make_room_leave_nothing(self):
        """The oldest of a user end while their frames wait for a turn."""
        with harness.open_server() as server, contextlib.ExitStack() as stack:
            opened = collections.deque(connect(server, HELLO_FRAME) for _ in range(500))
            stack.callback(lambda: [connection.close() for connection in opened])
            before = server.status_bytes("VmHWM")
            for _ in range(100_000):
                opened.append(connect(server, HELLO_FRAME))
                opened.popleft().close()
            grown = server.status_bytes("VmHWM") - before
            print(f"connections that make room: {grown / MIB:.0f} MiB more", flush=True)
            if not harness.SANITIZED:
                self.assertLess(grown, 16 * MIB)


if __name__ == "__main__":
    harness.main()
