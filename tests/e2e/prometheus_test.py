"""Runs every query of the dashboards, rules and alerts on a real Prometheus that scrapes a server
under load."""

import math
import re
import shutil
import sys
import unittest

import harness
import monitoring
from harness import wait_until
from prometheus import fill_in, load, watched_server

LOAD_SECONDS = 3600  # more than the test takes; it stops the load


def of_a_gpu(promql):
    """Whether a query needs the DCGM exporter on a GPU machine."""
    return "DCGM_" in promql


@harness.stress
class PrometheusTest(unittest.TestCase):
    @classmethod
    def setUpClass(cls):
        cls.server, cls.prometheus = cls.enterClassContext(watched_server())
        cls.benches = cls.enterClassContext(load(cls.server, LOAD_SECONDS))

    def numbers(self, promql):
        return [value for series in self.prometheus.query(promql)
                if not math.isnan(value := float(series["value"][1]))]

    def test_the_load_goes_on(self):
        self.assertEqual([bench.poll() for bench in self.benches], [None] * len(self.benches))

    def test_every_panel_has_data(self):
        for board, panel, promql in monitoring.panel_queries():
            with self.subTest(board=board, panel=panel, promql=promql):
                if of_a_gpu(promql):
                    self.numbers(fill_in(promql))  # is a query
                else:
                    wait_until(lambda: self.numbers(fill_in(promql)), "there is data")

    def test_what_moved_shows(self):
        for promql in ('rate(flashcore_request_duration_seconds_count{rpc="Attend"}[10s])',
                       'rate(flashcore_request_duration_seconds_count{rpc="AttendStream"}[10s])',
                       'rate(flashcore_rejected_requests_total{reason="INVALID_ARGUMENT"}[10s])',
                       'rate(flashcore_rejected_requests_total{reason="SEQUENCE_LOST"}[10s])',
                       'rate(grpc_server_handled_total{grpc_code="InvalidArgument"}[10s])',
                       'rate(flashcore_request_phase_seconds_count{phase="kernel"}[10s])',
                       "sum(rate(flashcore_kv_read_bytes_total[10s]))",
                       'flashcore_kv_bytes{segment="hot", state="used"}',
                       "flashcore_sequences", "flashcore_serving"):
            with self.subTest(promql=promql):
                wait_until(lambda: max(self.numbers(promql), default=0) > 0, "it moves")

    def test_every_variable_has_values(self):
        for query in monitoring.variable_queries():
            series, label = re.fullmatch(r"label_values\((.*), (\w+)\)", query).groups()

            def values():
                return self.prometheus.get(f"label/{label}/values", **{"match[]": fill_in(series)})

            with self.subTest(query=query):
                if of_a_gpu(query):
                    self.assertFalse(values())
                else:
                    wait_until(values, "there are values")

    def test_rules_evaluate_without_error(self):
        def rules():
            return [r for group in self.prometheus.get("rules")["groups"] for r in group["rules"]]

        wait_until(lambda: all(rule["health"] != "unknown" for rule in rules()), "all are evaluated")
        alerts = [rule["name"] for rule in rules() if rule["type"] == "alerting"]
        self.assertEqual(sorted(alerts), sorted(monitoring.alerts()))
        for rule in rules():
            with self.subTest(rule=rule["name"]):
                self.assertEqual((rule["health"], rule.get("lastError", "")), ("ok", ""))
                if rule["type"] == "recording":
                    wait_until(lambda: self.numbers(rule["name"]), "it has data")

    def test_it_scrapes_with_the_token_and_not_without(self):
        def health():
            return {target["labels"]["job"]: target["health"]
                    for target in self.prometheus.get("targets")["activeTargets"]}

        wait_until(lambda: health().get("flashcore") == "up", "it scrapes")
        self.assertEqual(self.server.probe("/metrics"), 401)


if __name__ == "__main__":
    if shutil.which("prometheus") is None:
        print("skipped: prometheus is not installed")
        sys.exit(harness.NO_DEVICE)
    harness.main()
