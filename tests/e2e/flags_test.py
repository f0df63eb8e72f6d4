"""Flags: what they take, where from, and what a server says of those that it cannot take."""

import contextlib
import ctypes
import grp
import json
import os
import stat
import subprocess
import unittest

import harness

MIB = harness.MIB
# Without the flags that the environment of this test may set.
ENVIRONMENT = {**{name: value for name, value in os.environ.items() if not name.startswith("FLASHCORE_")},
               "FLASHCORE_LISTEN": "127.0.0.1:0", "FLASHCORE_METRICS_LISTEN": ""}


def limits(server):
    from flashcore.v1 import attention_pb2 as pb
    with server.channel() as channel:
        return harness.stub(channel).GetServerInfo(pb.GetServerInfoRequest()).limits


class FlagTest(unittest.TestCase):
    def assert_refused(self, cases):
        """Each (flags, variables, message): a start with them ends with 2 and says the message."""
        commands = [(flags, {**ENVIRONMENT, **variables}) for flags, variables, _ in cases]
        for (flags, variables, message), done in zip(cases, map(self.start, commands)):
            self.assertEqual(done.returncode, 2, (flags, variables, done.stderr))
            self.assertIn(message, done.stderr)
            self.assertEqual(done.stderr.count("\n"), 1, done.stderr)

    @staticmethod
    def start(command):
        flags, environment = command
        return subprocess.run([harness.SERVER, *flags], capture_output=True, text=True, env=environment,
                              timeout=harness.PATIENCE)

    def test_the_environment_sets_flags_and_the_command_line_wins(self):
        env = {"FLASHCORE_MAX_QUEUE_REQUESTS": "17", "FLASHCORE_MAX_MESSAGE_BYTES": "2000000"}
        with harness.Server("--max_message_bytes=3000000", env=env) as server:
            found = limits(server)
            self.assertEqual((found.max_queue_requests, found.max_message_bytes), (17, 3000000))

    def test_bytes_and_times_take_units(self):
        flags = ("--max_message_bytes=1.5MiB", "--client_staging_bytes", "2MB", "--reply_timeout_s=1500ms",
                 "--staging_wait_ms=2s", "-max_queue_delay_us=0.5ms")
        env = {"FLASHCORE_STAGING_MEMORY_BYTES": "1GiB", "FLASHCORE_KV_MEMORY_BYTES": "64MiB"}
        with harness.Server(*flags, env=env) as server:
            found = limits(server)
            self.assertEqual((found.max_message_bytes, found.client_staging_bytes, found.staging_memory_bytes,
                              found.reply_timeout_seconds), (3 * MIB // 2, 2_000_000, 1 << 30, 1.5))

    def test_what_is_taken_of_the_memory_is_in_the_log(self):
        with harness.Server("--kv_memory_bytes=8MiB", "--unsent_reply_bytes=2MiB") as server:
            memory = server.wait_for_record("memory")
        self.assertIn(memory["of"], ("machine", "container"))
        self.assertLessEqual(memory["budgets_bytes"], memory["bytes"])
        self.assertEqual((memory["kv_memory_bytes"], memory["unsent_reply_bytes"]),
                         (0 if harness.ON_GPU else 8 * MIB, 2 * MIB))
        self.assertGreaterEqual(memory["cores"], 1)

    def test_more_than_there_is_is_warned_about(self):
        with harness.Server("--unsent_reply_bytes=32TiB") as server:
            server.wait_for_record("serving")
            warned = [record for record in server.records() if record["level"] == "warning"]
        self.assertIn(("a budget is more than the memory there is", "unsent_reply_bytes", 32 << 40),
                      [(record["msg"], record.get("flag"), record.get("value")) for record in warned])
        self.assertIn("the budgets together are more than the memory there is",
                      [record["msg"] for record in warned])

    def test_a_single_client_gets_all_memory(self):
        with harness.Server("--client_kv_bytes=0") as server:
            found = limits(server)
            self.assertEqual((found.client_kv_bytes, found.client_metadata_bytes,
                              found.client_shared_memory_bytes), (0, 0, 0))

    def test_a_value_that_is_not_allowed_exits_with_2_and_says_what_is(self):
        self.assert_refused([([flag], {}, message) for flag, message in {
            "--listen=nonsense": "--listen: 'nonsense' is not host:port or unix:path",
            "--max_queue_requests=0": "--max_queue_requests: '0' is not in 1..",
            "--reply_timeout_s=0": "--reply_timeout_s: '0' is not in 0.01..",
            "--unsent_reply_bytes=1": "--unsent_reply_bytes: '1' is not in 1048576..",
            "--device=cuda:0,cpu": "--device: 'cuda:0,cpu' is not auto, cpu or cuda:N[,cuda:M...]",
            "--device=cuda:0,cuda:0": "cuda:N[,cuda:M...], each GPU once",
            "--l2_window=yes": "--l2_window: 'yes' is not auto, on or off",
            "--client_kv_bytes=-2": "--client_kv_bytes: '-2' is not in -1..",
            "--drain_timeout_s=nan": "--drain_timeout_s: 'nan' is not in",
            "--lanes=two": "--lanes: 'two' is not a whole number",
            "--lanes=99999999999": "--lanes: '99999999999' is not a whole number",
            "--max_request_gflop=1e": "--max_request_gflop: '1e' is not a number",
            "--enable_reflection=maybe": "--enable_reflection: 'maybe' is not true or false",
            "--unix_socket_mode=0668": "--unix_socket_mode: '0668' is not an octal mode up to 0777 that",
            "--unix_socket_mode=1660": "--unix_socket_mode: '1660' is not an octal mode",
            "--unix_socket_mode=0460": "that lets the owner read and write, such as 0660",
            "--unix_socket_group=no group": "--unix_socket_group: 'no group' is not a group of this system",
            "--kv_memory_bytes=1Gib": "'1Gib' is not a number of bytes, such as 1073741824, 512MiB or 1GiB",
            "--kv_memory_bytes=0.3B": "'0.3B' is not a number of bytes",
            "--kv_memory_bytes=1e30GiB": "'1e30GiB' is not a number of bytes",
            "--staging_wait_ms=1us": "'1us' is not a number of milliseconds, such as 500 or 2s",
            "--drain_timeout_s=2 weeks": "'2 weeks' is not a number of seconds, such as 2.5, 500ms or 5m",
        }.items()])

    def test_arguments_that_are_no_flags_exit_with_2(self):
        self.assert_refused([
            (["stray"], {}, "unexpected argument 'stray'"),
            (["--"], {}, "unexpected argument '--'"),
            (["--bogus=1"], {}, "unknown flag --bogus"),
            (["-bogus"], {}, "unknown flag -bogus"),
            (["--nolanes"], {}, "unknown flag --nolanes"),
            (["--keepalive_s=60"], {}, "unknown flag --keepalive_s"),  # removed
            (["--enable_echo"], {}, "unknown flag --enable_echo"),  # removed
            (["--listen"], {}, "--listen: no value"),
            (["--enable_reflection", "--lanes"], {}, "--lanes: no value")])

    def test_a_value_of_the_environment_is_named_by_its_variable(self):
        self.assert_refused([
            ([], {"FLASHCORE_LANES": "two"}, "variable FLASHCORE_LANES: 'two' is not a whole number"),
            ([], {"FLASHCORE_LANES": "0"}, "environment variable FLASHCORE_LANES: '0' is not in 1..64"),
            ([], {"FLASHCORE_EVICT": "all"}, "variable FLASHCORE_EVICT: 'all' is not none or lru"),
            (["--lanes=0"], {"FLASHCORE_LANES": "2"}, "--lanes: '0' is not in 1..64")])

    def test_flags_that_contradict_each_other_are_refused(self):
        self.assert_refused([
            (["--client_staging_bytes=1", "--max_message_bytes=2MiB", "--staging_memory_bytes=4MiB"], {},
             "--client_staging_bytes: '1' is not 0, or from "
             "--max_message_bytes, 2097152, to --staging_memory_bytes, 4194304"),
            (["--client_staging_bytes=1025MiB", "--staging_memory_bytes=1GiB"], {},
             "--client_staging_bytes: '1074790400' is not 0, or"),
            (["--staging_memory_bytes=2MiB", "--max_message_bytes=4MiB"], {},
             "--staging_memory_bytes: '2097152' is not at least --max_message_bytes, 4194304"),
            (["--transport_memory_bytes=4MiB", "--max_message_bytes=4MiB"], {},
             "--transport_memory_bytes: '4194304' is not in 8388608.."),
            (["--device=cuda:0,cuda:1", "--staging_memory_bytes=1TiB"], {},
             "--staging_memory_bytes: '1099511627776' is not at most "),
            (["--tls_cert_file=a.pem"], {}, "--tls_key_file: '' is not set together with --tls_cert_file"),
            (["--metrics_listen=", "--metrics_token_file=t"], {},
             "--metrics_token_file: 't' is not usable without --metrics_listen"),
            (["--local_allow_overflow_uid"], {},
             "--local_allow_overflow_uid: 'true' is not usable without --local_listen")])

    def test_unix_sockets_have_their_mode_and_group_whatever_the_umask_is(self):
        own = os.getgid()
        other = 12345 if os.getuid() == 0 else own
        cases = [(0, (), 0o660, own),
                 (0o077, ("--unix_socket_mode=606", f"--unix_socket_group={other}"), 0o606, other)]
        with contextlib.suppress(KeyError):
            cases.append((0o077, (f"--unix_socket_group={grp.getgrgid(own).gr_name}",), 0o660, own))
        for umask, flags, mode, group in cases:
            with self.subTest(umask=umask, flags=flags), harness.in_temporary_folder() as folder:
                before = os.umask(umask)
                try:
                    server = harness.Server(f"--local_listen={folder / 'local'}", *flags)
                finally:
                    os.umask(before)
                with server:
                    for path in (server.socket, folder / "local"):
                        file = os.stat(path)
                        self.assertEqual((file.st_mode, file.st_gid), (stat.S_IFSOCK | mode, group), path)

    def test_a_group_that_the_server_may_not_give_ends_the_start(self):
        def lose_cap_chown():
            ctypes.CDLL(None).prctl(24, 0, 0, 0, 0)  # PR_CAPBSET_DROP, CAP_CHOWN

        with harness.in_temporary_folder() as folder:
            for flag in (f"--listen=unix:{folder / 'grpc'}", f"--local_listen={folder / 'local'}"):
                done = subprocess.run(
                    [harness.SERVER, "--device=cpu", "--log_format=json", flag, "--unix_socket_group=54321"],
                    capture_output=True, text=True, env=ENVIRONMENT, timeout=harness.PATIENCE,
                    preexec_fn=lose_cap_chown)
                self.assertEqual(done.returncode, 1, done.stderr)
                record = json.loads(done.stderr.splitlines()[-1])
                self.assertEqual(record["msg"], "cannot serve")
                self.assertIn("cannot have the group 54321 (--unix_socket_group)", record["error"])
            self.assertEqual(list(folder.iterdir()), [])

    def test_variables_that_are_of_no_flag_are_warned_about(self):
        env = {"FLASHCORE_LANE": "2", "FLASHCORE_TARGET": "127.0.0.1:1", "FLASHCORE_CLIENT_TOKEN_FILE": "t"}
        with harness.Server(env=env) as server:
            server.wait_for_record("serving")
            warned = {record["variable"] for record in server.records()
                      if record["msg"] == "an environment variable is not of a flag: it has no effect"}
            self.assertIn("FLASHCORE_LANE", warned)
            self.assertFalse(warned & {"FLASHCORE_TARGET", "FLASHCORE_CLIENT_TOKEN_FILE", "FLASHCORE_LISTEN"})

    def test_help_and_version_exit_with_0(self):
        for flag, text in (("--help", "--kv_memory_bytes=0"), ("--version", "flashcore-server ")):
            done = self.start(([flag], ENVIRONMENT))
            self.assertEqual((done.returncode, done.stderr), (0, ""))
            self.assertIn(text, done.stdout)

    def test_a_gpu_that_is_not_there_stops_the_start_and_is_named(self):
        done = self.start((["--device=cuda:1000", "--log_format=json"], ENVIRONMENT))
        self.assertEqual(done.returncode, 1)
        record = json.loads(done.stderr.splitlines()[-1])
        self.assertEqual(record["msg"], "cannot use the device")
        self.assertTrue(record["error"].startswith("cuda:1000: "), record["error"])


if __name__ == "__main__":
    harness.main()
