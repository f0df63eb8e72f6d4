"""Attackers beside honest clients: each kind alone, and all at once. FLASHCORE_SOAK_SECONDS says how long all
attack; 3600 is a real soak. tests/transport/local/turns_test.cc tests what takes turns, and how."""

import contextlib
import os
import resource
import threading
import typing
import unittest

import harness
from attackers import ALL_FLOODS, FLOODS, Attacker
from harness import MIB, needs_root, refused, wait_until
from honest_client import HonestClient

SECONDS = int(os.environ.get("FLASHCORE_SOAK_SECONDS", 60))
HONEST, FIRST_ATTACKER = 20001, 20010  # users, nobody's
needs_tcp_users = unittest.skipUnless(harness.kernel_tells_of_tcp(),
                                      "the kernel does not tell whose a TCP connection is")
# The memory that the flags let clients take, all together: messages over gRPC, half frames, unanswered calls,
# replies.
BUDGETS = (3 * 256 + 64) * MIB


class Attack(typing.NamedTuple):
    """An attack, and how the honest clients fare beside it."""
    name: str
    options: dict
    floor: float = 0.05  # of honest_client.assert_unhurt: the attackers take the cores, too
    grows: float = None  # MiB that the server may take besides; None: not judged
    seconds: float = 5


def grown(server, before):
    return (server.status_bytes("VmHWM") - before) / MIB


# By another user, over the local socket. Memory: --unsent_reply_bytes, and a share of half frames.
OF_A_USER = (
    Attack("list_sequences", {"count": 8}),
    Attack("fork_sequences", {"count": 32}),
    Attack("manage_sequences", {"count": 16}),
    Attack("quick_calls", {"count": 200}),
    Attack("cancels", {"count": 200}),
    Attack("bad_rings", {"cancels_a_second": 150}),
    Attack("bad_rings", {"cancels_a_second": 5000}),
    Attack("idle_rings", {"count": 200}),
    Attack("unread_replies", {"count": 250}, 0.25, 1.1 * 64, 8),
    Attack("unread_replies", {"count": 110, "sip": 8192}, 0.25, 1.1 * 64, 8),
    Attack("half_frames", {"count": 250}, 0.25, 1.1 * 64, 8))
# Over gRPC.
OF_HTTP2 = (
    *(Attack("flood_http2", {"flood": name, "count": 1}, 0.25, 128, 6) for name in ALL_FLOODS),
    *(Attack("flood_http2", {"flood": name, "count": count}, 0.25, 128, 6) for name, count in (
        ("reset", 8), ("reset_stream", 8), ("unacknowledged", 8), ("continuation", 64),
        ("unknown_frames", 4), ("settings", 4), ("pings", 4))),
    *(Attack("come_and_go", {"flood": name, "count": 20, "streams": 1000}, 0.25, 128, 6)
      for name in ("reset", "reset_health")))


@harness.stress
class OneAttackerTest(unittest.TestCase):
    def check(self, server, row, target, honest, **options):
        """Attacks the target for a while, and judges the server's memory and the honest clients."""
        with contextlib.ExitStack() as stack:
            for client in honest:
                stack.enter_context(client)
            before = server.status_bytes("VmRSS")
            attacker = stack.enter_context(Attacker(row.name, target, **row.options, **options))
            threading.Event().wait(row.seconds)
            self.assertIsNone(attacker.process.poll(), "the attack lasts")
            more = grown(server, before)
            cut_off = {reason: count for door in ("", "local_") for reason in (
                "flood", "banned", "unread", "memory") if (count := self.count(server, reason, door))}
            print(f"{self.id()}: {row.name}, {row.options} {options}, {target}: {more:.0f} MiB more, "
                  f"cut off: {cut_off}", flush=True)
            for client in honest:
                client.check(self, row.floor)
            if row.grows and not harness.SANITIZED:
                self.assertLess(more, row.grows)
            return cut_off

    @staticmethod
    def count(server, reason, door):
        with contextlib.suppress(KeyError):  # not every door has every reason
            return server.metric(refused(reason, door))
        return 0

    @needs_root
    def test_a_user_does_not_hurt_others(self):
        for row in OF_A_USER:
            with self.subTest(row.name, **row.options), harness.open_server() as server:
                target = f"local:{server.local}"
                honest = [HonestClient(target, HONEST, quiet=500, attacked=500)]
                if row.grows:
                    honest.append(HonestClient(server.target))
                self.check(server, row, target, honest, user=FIRST_ATTACKER)

    def test_floods_do_not_hurt_a_client(self):
        for row in OF_HTTP2:
            for at_unix in (False, True):
                with self.subTest(row.name, **row.options, at_unix=at_unix), \
                        harness.Server("--insecure_client_names") as server:
                    targets = (server.target, f"unix:{server.socket}")
                    flooded, other = targets[::-1] if at_unix else targets
                    cut_off = self.check(server, row, flooded, [HonestClient(other)])
                    if row.name == "flood_http2" and row.options["flood"] in FLOODS:
                        self.assertLessEqual({"flood", "banned"}, set(cut_off))


@harness.stress
@needs_root
@needs_tcp_users
class AttackersTest(unittest.TestCase):
    @classmethod
    def setUpClass(cls):
        limits = resource.getrlimit(resource.RLIMIT_NOFILE)
        cls.addClassCleanup(resource.setrlimit, resource.RLIMIT_NOFILE, limits)
        resource.setrlimit(resource.RLIMIT_NOFILE, (min(limits[1], 8192), limits[1]))

    def test_idle_connections_do_not_hurt_a_client(self):
        with harness.open_server() as server, contextlib.ExitStack() as stack:
            tcp, unix, local = targets = self.doors(server)
            honest = [HonestClient(tcp), HonestClient(unix),
                      HonestClient(local, quiet=1000, attacked=1000, renews=True)]
            for client in honest:
                stack.enter_context(client)
            attackers = [stack.push(Attacker("idle", *targets, user=FIRST_ATTACKER + i, count=256,
                                             host=f"127.0.0.{i + 3}", refill=True)) for i in range(5)]
            held = [attacker.begun() for attacker in attackers]
            print(f"{self.id()}: attackers hold {held}")
            for client in honest:
                client.check(self, floor=0.05)

    def doors(self, server):
        return server.target, f"unix:{server.socket}", f"local:{server.local}"

    def test_nobody_is_hurt_by_all_of_them(self):
        with harness.open_server() as server, contextlib.ExitStack() as stack:
            tcp, unix, local = self.doors(server)
            honest = [stack.enter_context(HonestClient(tcp)), stack.enter_context(HonestClient(unix)),
                      stack.enter_context(HonestClient(local, HONEST, quiet=500))]
            before = server.status_bytes("VmRSS")
            attackers = self.attack_at(stack, tcp, unix, local)
            memory = []
            for tenth in range(1, 11):
                threading.Event().wait(SECONDS / 10)
                memory.append(server.status_bytes("RssAnon"))
                print(f"{self.id()}: {memory[-1] / MIB:.0f} MiB after {tenth}/10", flush=True)

            ended = [one.process.args[4:] for one in attackers if one.process.poll() is not None]
            print(f"{self.id()}: {SECONDS} s, ended before: {ended}", flush=True)
            for client in honest:
                with self.subTest(client.target):
                    client.check(self, floor=None)
            more = grown(server, before)
            print(f"{self.id()}: {more:.0f} MiB more", flush=True)
            if not harness.SANITIZED:
                self.assertLess(more * MIB, 1.1 * BUDGETS)
                self.assertLess(max(memory[5:]), 1.25 * max(memory[:5]) + 16 * MIB, "it grows and grows")
            stack.close()
            wait_until(lambda: server.metric("flashcore_connections") <= 3, "connections are closed")
            wait_until(lambda: server.metric("flashcore_local_connections") == 0, "local ones, too")
            self.assertEqual(server.stop(), 0)

    def attack_at(self, stack, tcp, unix, local):
        rows = [("list_sequences", local, {"count": 8}), ("fork_sequences", local, {"count": 8}),
                ("manage_sequences", local, {"count": 8}), ("quick_calls", local, {"count": 40}),
                ("cancels", local, {"count": 20}), ("bad_rings", local, {"cancels_a_second": 150}),
                ("idle_rings", local, {"count": 20}), ("unread_replies", local, {"count": 80}),
                ("half_frames", local, {"count": 80}),
                *(("flood_http2", (tcp, unix)[number % 2], {"flood": name, "count": 2, "pause": 1})
                  for number, name in enumerate(ALL_FLOODS)),
                *(("idle", ",".join((tcp, unix, local)),
                   {"count": 100, "host": f"127.0.0.{number}", "refill": True}) for number in (3, 4))]
        return [stack.enter_context(Attacker(name, target, user=FIRST_ATTACKER + number, **options))
                for number, (name, target, options) in enumerate(rows)]


if __name__ == "__main__":
    harness.main()
