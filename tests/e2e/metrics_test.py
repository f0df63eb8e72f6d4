"""/metrics has the right values in the format of Prometheus."""

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
                    'flashcore_rejected_requests_total{reason="DEADLINE_EXCEEDED"}',
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
                'flashcore_request_duration_seconds_count{rpc="Attend",outcome="ok"}': 5,
                'flashcore_request_duration_seconds_count{rpc="Attend",outcome="client_error"}': 2,
                'flashcore_request_duration_seconds_count{rpc="AttendStream",transport="grpc"}': 3,
                'flashcore_request_phase_seconds_count{phase="receive"}': 10,
                'flashcore_request_phase_seconds_count{phase="queue"}': 8,
                'flashcore_request_phase_seconds_count{phase="kernel"}': 8,
                'flashcore_request_phase_seconds_count{phase="reply"}': 10,
                'flashcore_rejected_requests_total{reason="INVALID_ARGUMENT"}': 2,
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


if __name__ == "__main__":
    harness.main()
