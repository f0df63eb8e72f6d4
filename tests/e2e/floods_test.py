"""Floods of HTTP/2 frames that flow control does not hold back. attackers_test measures that they hurt
nobody."""

import select
import ssl
import time
import unittest

import harness
from attackers import FLOODS, FloodingConnection
from certificates import Authority
from harness import assert_serves, refused, wait_until
from raw_http2 import connect

FLOOD, BANNED = refused("flood"), refused("banned")
STREAMS = 256  # --max_connection_streams
# A single read of the server has more of a flood than this allows within half a second, however slow it is.
FEW_STREAMS = "--max_connection_streams=16"


class FloodsTest(unittest.TestCase):
    def test_floods_are_cut_off(self):
        # As proxies, the addresses may flood again at once.
        with harness.Server(harness.by_address("127.0.0.1", "unix"), FEW_STREAMS) as server, \
                server.channel() as tcp, server.channel(f"unix:{server.socket}") as unix:
            assert_serves(tcp, unix)
            tcp_target, unix_target = server.target, f"unix:{server.socket}"
            for name, flood in FLOODS.items():
                # The channel is that of another client: what was reset stays its client's for a moment.
                for target, channel, other in ((tcp_target, unix, unix_target),
                                               (unix_target, tcp, tcp_target)):
                    with self.subTest(name, target=target):
                        before = server.metric(FLOOD)
                        with connect(target, resets=True) as connection:
                            self.flood_until_end(flood, connection)
                        wait_until(lambda: server.metric(FLOOD) == before + 1, "it counts")
                        with server.channel(other) as new:
                            assert_serves(channel, new)
            self.assertEqual(server.metric(BANNED), 0)

    def test_who_floods_a_door_is_banned_there(self):
        with harness.Server() as server, server.channel() as old:
            assert_serves(old)

            def is_banned():
                with connect(server.target, resets=True) as connection:
                    self.flood_until_end(FLOODS["continuation"], connection)
                return server.metric(BANNED) > 0

            wait_until(is_banned, "a ban is longer than the time between two floods")
            with server.channel(f"unix:{server.socket}") as new:
                assert_serves(old, new)

    def test_floods_over_tls_are_cut_off(self):
        with harness.in_temporary_folder() as folder:
            authority = Authority(folder)
            certificate, key = authority.issue("server")
            context = ssl.create_default_context(cafile=authority.file)
            context.set_alpn_protocols(["h2"])
            with harness.Server(f"--tls_cert_file={certificate}", f"--tls_key_file={key}",
                                harness.by_address("127.0.0.1"), FEW_STREAMS) as server:
                for name in ("reset", "reset_stream", "unacknowledged", "continuation"):
                    with self.subTest(name):
                        before = server.metric(FLOOD)
                        with connect(server.target, resets=True) as plain, context.wrap_socket(
                                plain, server_hostname="127.0.0.1") as connection:
                            self.flood_until_end(FLOODS[name], connection)
                        wait_until(lambda: server.metric(FLOOD) == before + 1, "it counts")

    def flood_until_end(self, flood, connection):
        """Floods, at most a million steps, until the server ends the connection."""
        try:
            flooding = FloodingConnection(flood, connection)
            for _ in range(1_000_000):
                readable, writable, _ = select.select([connection], [connection], [], harness.PATIENCE)
                self.assertTrue(readable or writable, "the flood is neither read nor ended")
                if not flooding.step(bool(readable)):
                    return
        except (ConnectionError, ssl.SSLError):
            return
        self.fail("the flood is not ended")

    def test_a_client_that_cancels_all_its_calls_stays(self):
        with harness.Server() as server, server.channel() as channel:
            self.cancel_all_calls(channel, 3)
            self.assertEqual(server.metric(FLOOD), 0)

    @harness.stress
    def test_a_client_that_cancels_all_its_calls_again_and_again_stays(self):
        with harness.Server() as server, server.channel() as channel:
            for _ in range(40):
                start = time.monotonic()
                self.cancel_all_calls(channel, 1)
                time.sleep(max(0, start + 0.2 - time.monotonic()))
            self.assertEqual(server.metric(FLOOD), 0)

    def cancel_all_calls(self, channel, times):
        """On one connection, which serves all the time."""
        for _ in range(times):
            calls = [harness.stub(channel).HoldLease(harness.pb.HoldLeaseRequest())
                     for _ in range(STREAMS)]
            for call in calls:
                next(call)  # it has begun
            for call in calls:
                call.cancel()
            assert_serves(channel)


if __name__ == "__main__":
    harness.main()
