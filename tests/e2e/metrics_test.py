"""/metrics has the right values in the format of Prometheus."""

import json
import os
import shutil
import subprocess
import unittest

import grpc

import harness
from harness import wait_until


class MetricsTest(unittest.TestCase):
    def test_every_series_is_there_at_zero(self):
        with harness.Server() as server:
            for series in (
                    'flashcore_request_duration_seconds_count{rpc="Attend",transport="grpc"}',
                    'flashcore_request_phase_seconds_count{phase="kernel"}',
                    'flashcore_batch_requests_count', 'flashcore_queue_depth',
                    'flashcore_rejected_requests_total{reason="deadline_exceeded"}',
                    'grpc_server_handled_total{grpc_type="bidi_stream",'
                    'grpc_service="flashcore.v1.AttentionService",grpc_method="AttendStream",'
                    'grpc_code="Unavailable"}'):
                self.assertEqual(server.metric(series), 0, series)

    def test_counts_what_happened(self):
        with harness.Server() as server, server.channel() as channel:
            stub = harness.stub(channel)
            for _ in range(5):
                stub.Attend(harness.small_request())
            for _ in range(2):
                with self.assertRaises(grpc.RpcError):
                    bad = harness.small_request()
                    bad.num_heads = 0
                    stub.Attend(bad)
            list(stub.AttendStream(harness.small_request(str(i)) for i in range(3)))
            service = 'grpc_service="flashcore.v1.AttentionService"'
            unary = f'grpc_type="unary",{service},grpc_method="Attend"'
            stream = f'grpc_type="bidi_stream",{service},grpc_method="AttendStream"'
            want = {
                'flashcore_request_duration_seconds_count{rpc="Attend",transport="grpc"}': 7,
                'flashcore_request_duration_seconds_count{rpc="AttendStream",transport="grpc"}': 3,
                'flashcore_request_phase_seconds_count{phase="receive"}': 10,
                'flashcore_request_phase_seconds_count{phase="queue"}': 8,
                'flashcore_request_phase_seconds_count{phase="kernel"}': 8,
                'flashcore_request_phase_seconds_count{phase="reply"}': 10,
                'flashcore_rejected_requests_total{reason="invalid_argument"}': 2,
                f'grpc_server_started_total{{{unary}}}': 7,
                f'grpc_server_handled_total{{{unary},grpc_code="OK"}}': 5,
                f'grpc_server_handled_total{{{unary},grpc_code="InvalidArgument"}}': 2,
                f'grpc_server_handled_total{{{stream},grpc_code="OK"}}': 1,
                'flashcore_inflight_requests': 0,
                'flashcore_queue_depth': 0,
                'flashcore_queue_capacity': 1024,
                'flashcore_serving': 1,
            }
            got = {}

            def as_wanted():
                got.update((series, server.metric(series)) for series in want)
                return got == want

            wait_until(as_wanted, lambda: f"{got}, want {want}")
            self.assertEqual(server.metric("flashcore_batch_requests_sum"), 8)
            self.assertEqual(server.metric("flashcore_batch_query_rows_sum"), 8)
            device = [line for line in server.metrics_text().splitlines()
                      if line.startswith("flashcore_device_info{")
                      and f'device="{harness.DEVICE}"' in line]
            self.assertEqual(len(device), 1)

    def test_promtool_accepts_it(self):
        promtool = shutil.which("promtool")
        if promtool is None:
            self.skipTest("promtool is not installed")
        with harness.Server() as server, server.channel() as channel:
            harness.stub(channel).Attend(harness.small_request())
            checked = subprocess.run([promtool, "check", "metrics"], capture_output=True,
                                     text=True, input=server.metrics_text())
            self.assertEqual((checked.returncode, checked.stdout + checked.stderr), (0, ""))


class LogTest(unittest.TestCase):
    def test_a_failed_request_is_logged_with_its_id(self):
        with harness.Server() as server, server.channel() as channel:
            bad = harness.small_request("my request")
            bad.head_dim = 7
            with self.assertRaises(grpc.RpcError):
                harness.stub(channel).Attend(bad)
            record = server.wait_for_record("request failed")
            self.assertEqual((record["request_id"], record["code"], record["method"]),
                             ("my request", "INVALID_ARGUMENT", "Attend"))
            self.assertIn(record["client"], (f"uid:{os.getuid()}", "host:127.0.0.1"))
            self.assertIn("head_dim: 7", record["error"])

    def test_flags_come_from_the_environment_too_and_the_command_line_wins(self):
        env = {"FLASHCORE_MAX_QUEUE_REQUESTS": "17", "FLASHCORE_MAX_MESSAGE_BYTES": "2000000"}
        with harness.Server("--max_message_bytes=3000000", env=env) as server, server.channel() as channel:
            from flashcore.v1 import attention_pb2 as pb
            limits = harness.stub(channel).GetServerInfo(pb.GetServerInfoRequest()).limits
            self.assertEqual((limits.max_queue_requests, limits.max_message_bytes), (17, 3000000))


class FlagTest(unittest.TestCase):
    def test_a_single_client_gets_all_memory(self):
        with harness.Server("--client_kv_bytes=0") as server, server.channel() as channel:
            from flashcore.v1 import attention_pb2 as pb
            limits = harness.stub(channel).GetServerInfo(pb.GetServerInfoRequest()).limits
            self.assertEqual((limits.client_kv_bytes, limits.client_metadata_bytes,
                              limits.client_shared_memory_bytes), (0, 0, 0))

    ENVIRONMENT = {**os.environ, "FLASHCORE_LISTEN": "127.0.0.1:0"}

    def test_bad_flags_exit_2_and_name_the_value(self):
        messages = {
            "--listen=nonsense": "'nonsense' is not host:port or unix:path",
            "--max_queue_requests=0": "--max_queue_requests: 0 is not in 1..",
            "--reply_timeout_s=0": "--reply_timeout_s: 0 is not in 0.01..",
            "--unsent_reply_bytes=1": "--unsent_reply_bytes: 1 is not in 1048576..",
            "--client_staging_bytes=1073741825": "1073741825 is not in 0..1073741824",
            "--device=tpu": "'tpu' is not auto, cpu or cuda:N",
            "--device=cuda:": "'cuda:' is not auto, cpu or cuda:N",
            "--device=cuda:-1": "'cuda:-1' is not auto, cpu or cuda:N",
            "--device=cuda:0,cpu": "'cuda:0,cpu' is not auto, cpu or cuda:N[,cuda:M...]",
            "--device=cuda:0,cuda:0": "cuda:N[,cuda:M...], each GPU once",
            "--lanes=0": "--lanes: 0 is not in 1..",
            "--l2_window=yes": "--l2_window: 'yes' is not auto, on or off",
            "--l2_budget_bytes=-1": "--l2_budget_bytes: -1 is not in 0..",
            "--kv_memory_bytes=1": "--kv_memory_bytes: 1 is not in",
            "--client_kv_bytes=-2": "--client_kv_bytes: -2 is not in -1..",
            "--log_level=loud": "'loud' is not debug",
            "--drain_timeout_s=nan": "--drain_timeout_s: nan is not in",
            "stray": "unexpected argument 'stray'"}
        ends = harness.run_together(([harness.SERVER, flag] for flag in messages),
                                    env=self.ENVIRONMENT)
        for (flag, message), done in zip(messages.items(), ends):
            self.assertEqual(done.returncode, 2, flag)
            self.assertIn(message, done.stderr)

    def test_a_last_flag_without_its_value_ends_the_start(self):
        for flag in ("--listen", "--lanes"):
            done = subprocess.run([harness.SERVER, flag], capture_output=True, text=True,
                                  timeout=30)
            self.assertEqual(done.returncode, 1, done.stderr)
            self.assertIn(f"Missing the value for the flag '{flag[2:]}'", done.stderr)

    def test_a_gpu_that_is_not_there_stops_the_start_and_is_named(self):
        done = subprocess.run([harness.SERVER, "--device=cuda:1000", "--log_format=json"],
                              capture_output=True, text=True, timeout=harness.PATIENCE,
                              env=self.ENVIRONMENT)
        self.assertEqual(done.returncode, 1)
        record = json.loads(done.stderr.splitlines()[-1])
        self.assertEqual(record["msg"], "cannot use the device")
        self.assertTrue(record["error"].startswith("cuda:1000: "), record["error"])


if __name__ == "__main__":
    harness.main()
