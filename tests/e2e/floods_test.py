"""Floods of HTTP/2 frames that flow control does not hold back, with an honest client beside each."""

import pathlib
import select
import ssl
import subprocess
import sys
import time
import unittest

import harness
from certificates import Authority
from flooding_client import ALL_FLOODS, FLOODS, FloodingConnection, connect
from harness import MIB, wait_until
from honest_client import HonestClient

FLOOD = 'flashcore_connections_refused_total{reason="flood"}'
BANNED = 'flashcore_connections_refused_total{reason="banned"}'
STREAMS = 256  # --max_connection_streams
# A single read of the server has more of a flood than this allows within half a second, however slow it is.
FEW_STREAMS = "--max_connection_streams=16"


def assert_serves(*channels):
    for channel in channels:
        harness.stub(channel).Attend(harness.small_request(), timeout=harness.PATIENCE)


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
                        with connect(target) as connection:
                            self.flood_until_end(flood, connection)
                        wait_until(lambda: server.metric(FLOOD) == before + 1, "it counts")
                        with server.channel(other) as new:
                            assert_serves(channel, new)
            self.assertEqual(server.metric(BANNED), 0)

    def test_who_floods_a_door_is_banned_there(self):
        with harness.Server() as server, server.channel() as old:
            assert_serves(old)

            def is_banned():
                with connect(server.target) as connection:
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
                        with connect(server.target) as plain, context.wrap_socket(
                                plain, server_hostname="127.0.0.1") as connection:
                            self.flood_until_end(FLOODS[name], connection)
                        wait_until(lambda: server.metric(FLOOD) == before + 1, "it counts")

    def flood_until_end(self, flood, connection):
        """Floods, at most a million steps, until the server ends the connection."""
        try:
            flooding = FloodingConnection(flood, connection)
            connection.setblocking(False)
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

    @harness.stress
    def test_floods_do_not_hurt_a_client(self):
        cases = [(name, 1) for name in ALL_FLOODS] + [
            ("reset", 8), ("reset_stream", 8), ("unacknowledged", 8), ("continuation", 64),
            ("unknown_frames", 4), ("settings", 4), ("pings", 4)]
        for name, connections in cases:
            for unix in (False, True):
                with self.subTest(name, connections=connections, unix=unix):
                    self.check_flood(name, connections, unix)

    @harness.stress
    def test_floods_that_come_and_go_do_not_hurt_a_client(self):
        for name in ("reset", "reset_health"):
            for unix in (False, True):
                with self.subTest(name, unix=unix):
                    self.check_flood(name, 20, unix, streams=1000)

    def check_flood(self, name, connections, unix, streams=None):
        """Connections that flood, and try to do so again at once, beside a client of another identity. With
        `streams`, they are closed after so many."""
        with harness.Server("--insecure_client_names") as server:
            socket_target = f"unix:{server.socket}"
            flooded, honest_target = ((socket_target, server.target) if unix else
                                      (server.target, socket_target))
            with HonestClient(server, honest_target) as honest:
                before = server.status_bytes("VmHWM")
                script = pathlib.Path(__file__).with_name("flooding_client.py")
                subprocess.run([sys.executable, "-B", script, name, str(connections), "6", flooded, "0.1",
                                *([str(streams)] if streams else [])], check=True, timeout=120)
                grown = server.status_bytes("VmHWM") - before
                print(f"{self.id()}: {name}, {connections} connections, {'unix' if unix else 'tcp'}: "
                      f"{grown / MIB:.0f} MiB, {server.metric(FLOOD):.0f} cut off, "
                      f"{server.metric(BANNED):.0f} banned", flush=True)
                if name in FLOODS and not streams:
                    self.assertGreater(server.metric(FLOOD), 0)
                    self.assertGreater(server.metric(BANNED), 0)
                if not harness.SANITIZED:
                    self.assertLess(grown, 128 * MIB)
                honest.check(self, floor=0.25)


if __name__ == "__main__":
    harness.main()
