"""Server, table of metrics, dashboards and alerts agree, and have the formats of their readers."""

import re
import shutil
import subprocess
import sys
import unittest

import harness
import monitoring

sys.path.insert(0, str(monitoring.GRAFANA))
import dashboards as dashboard_source

# Metrics of other exporters: Prometheus's own, and the default counters of dcgm-exporter (3.3).
OTHERS = {"up", *(f"DCGM_FI_{field}" for field in (
    "DEV_SM_CLOCK", "DEV_MEM_CLOCK", "DEV_MEMORY_TEMP", "DEV_GPU_TEMP", "DEV_POWER_USAGE",
    "DEV_TOTAL_ENERGY_CONSUMPTION", "DEV_PCIE_REPLAY_COUNTER", "DEV_GPU_UTIL", "DEV_MEM_COPY_UTIL",
    "DEV_ENC_UTIL", "DEV_DEC_UTIL", "DEV_XID_ERRORS", "DEV_FB_FREE", "DEV_FB_USED",
    "DEV_NVLINK_BANDWIDTH_TOTAL", "DEV_VGPU_LICENSE_STATUS", "DEV_UNCORRECTABLE_REMAPPED_ROWS",
    "DEV_CORRECTABLE_REMAPPED_ROWS", "DEV_ROW_REMAP_FAILURE", "PROF_GR_ENGINE_ACTIVE",
    "PROF_PIPE_TENSOR_ACTIVE", "PROF_DRAM_ACTIVE", "PROF_PCIE_TX_BYTES", "PROF_PCIE_RX_BYTES"))}
# Keys that the JSON schema of Grafana 10.0 (github.com/grafana/grok) requires, except the id of a
# variable, which Grafana itself leaves out; and keys that we want too.
BOARD_KEYS = {"uid", "title", "style", "editable", "graphTooltip", "schemaVersion", "time",
              "templating", "panels"}
VARIABLE_KEYS = {"type", "name", "label", "hide", "skipUrlSync"}
PANEL_KEYS = {"id", "type", "title", "description", "transparent", "transformations", "options",
              "fieldConfig", "gridPos", "targets"}
UNITS = {"_seconds": "seconds", "_bytes": "bytes"}


def scrape():
    """(type, sorted labels, help) of each family that a server serves; without the label "le"."""
    with harness.Server() as server:
        text = server.metrics_text()
    helps = dict(re.findall(r"^# HELP (\S+) (.*)$", text, re.MULTILINE))
    types = dict(re.findall(r"^# TYPE (\S+) (.*)$", text, re.MULTILINE))
    labels = {name: [] for name in types}
    for name, pairs in re.findall(r"^(\w+)\{(.*)\} \S+$", text, re.MULTILINE):
        known = labels[monitoring.family(name, types)]
        known += [label for label in re.findall(r'(\w+)="', pairs)
                  if label != "le" and label not in known]
    return {name: (types[name], sorted(labels[name]), helps[name]) for name in types}


class TableTest(unittest.TestCase):
    @classmethod
    def setUpClass(cls):
        cls.families = scrape()

    def panels_of(self, metric):
        panels = [f"{board}: {panel}" for board, panel, promql in monitoring.panel_queries()
                  if metric in {monitoring.family(name, self.families)
                                for name in monitoring.metrics_of(promql)}]
        return "; ".join(dict.fromkeys(panels)) or "none"

    def test_a_row_for_each_metric_says_what_the_server_and_the_dashboards_say(self):
        table = monitoring.table()
        self.assertEqual(list(table), list(self.families))
        for name, (kind, labels, meaning) in self.families.items():
            unit = table[name][3]
            want = [f"`{name}`", kind, ", ".join(f"`{label}`" for label in labels), unit, meaning,
                    self.panels_of(name)]
            self.assertEqual(table[name], want)

    def test_units_are_those_of_the_names(self):
        for name, cells in monitoring.table().items():
            base = name.removesuffix("_total")
            unit = next((unit for suffix, unit in UNITS.items() if base.endswith(suffix)), None)
            if unit is None:
                self.assertNotIn(cells[3], {*UNITS.values(), ""}, name)
            else:
                self.assertEqual(cells[3], unit, name)

    def test_queries_name_only_metrics_that_exist(self):
        rules = [path.read_text() for path in monitoring.RULE_FILES]
        recorded = set(re.findall(r"record: (\S+)", rules[0]))
        for promql in (*(promql for _, _, promql in monitoring.panel_queries()),
                       *monitoring.variable_queries(), *rules):
            for name in monitoring.metrics_of(promql):
                self.assertIn(monitoring.family(name, self.families), {*self.families, *OTHERS})
            self.assertLessEqual(monitoring.recorded_metrics_of(promql), recorded)


class DashboardTest(unittest.TestCase):
    def test_the_files_are_what_the_script_writes(self):
        written = {path: path.read_text() for path in monitoring.GRAFANA.glob("dashboards/*.json")}
        self.assertEqual(written, dashboard_source.files(), "run deploy/grafana/dashboards.py")

    def test_they_have_what_grafana_requires(self):
        boards = monitoring.dashboards().values()
        self.assertEqual({board["uid"] for board in boards},
                         {f"flashcore-{name}" for name in ("service", "time", "memory", "gpu")})
        for board in boards:
            self.assertLessEqual(BOARD_KEYS, set(board))
            for variable in board["templating"]["list"]:
                self.assertLessEqual(VARIABLE_KEYS, set(variable))
            for panel in board["panels"]:
                self.assertLessEqual(PANEL_KEYS, set(panel))
                self.assertTrue(panel["targets"], panel["title"])

    def test_every_query_asks_the_datasource_that_the_reader_chose(self):
        for board in monitoring.dashboards().values():
            chosen, *others = board["templating"]["list"]
            self.assertEqual((chosen["type"], chosen["name"]), ("datasource", "datasource"))
            parts = [part for panel in board["panels"] for part in (panel, *panel["targets"])]
            self.assertEqual({part["datasource"]["uid"] for part in (*others, *parts)},
                             {"${datasource}"})

    def test_panels_do_not_overlap(self):
        for board in monitoring.dashboards().values():
            self.assertEqual(len({panel["id"] for panel in board["panels"]}), len(board["panels"]))
            taken = set()
            for panel in board["panels"]:
                place = panel["gridPos"]
                cells = {(x, y) for x in range(place["x"], place["x"] + place["w"])
                         for y in range(place["y"], place["y"] + place["h"])}
                self.assertTrue(taken.isdisjoint(cells), panel["title"])
                self.assertLessEqual(place["x"] + place["w"], 24)
                taken |= cells

    def test_rates_follow_the_time_range_shown(self):
        for _, panel, promql in monitoring.panel_queries():
            self.assertLessEqual(set(re.findall(r"\[(.*?)\]", promql)), {"$__rate_interval"}, panel)


@unittest.skipIf(shutil.which("promtool") is None, "promtool is not installed")
class RulesTest(unittest.TestCase):
    def promtool(self, *args):
        done = subprocess.run(["promtool", *args], capture_output=True, text=True, timeout=60,
                              cwd=monitoring.PROMETHEUS)
        self.assertEqual(done.returncode, 0, done.stdout + done.stderr)

    def test_promtool_accepts_them(self):
        self.promtool("check", "config", "--lint=all", "--lint-fatal", "prometheus.yml")
        self.promtool("check", "rules", "--lint=all", "--lint-fatal",
                      *(path.name for path in monitoring.RULE_FILES))

    def test_alerts_fire_when_they_should_and_only_then(self):
        self.promtool("test", "rules", "alerts_test.yml")

    def test_every_alert_is_tested_both_ways(self):
        cases = (monitoring.PROMETHEUS / "alerts_test.yml").read_text()
        for alert in monitoring.alerts():
            self.assertRegex(cases, rf"alertname: {alert}, eval_time", alert)
            self.assertRegex(cases, rf"alertname: {alert}\n.*eval_time.*\n.*exp_alerts:", alert)

    def test_every_alert_says_what_to_do(self):
        sections = re.findall(r"^## (\w+)$", (monitoring.PROMETHEUS / "RUNBOOK.md").read_text(),
                              re.MULTILINE)
        self.assertEqual(sections, list(monitoring.alerts()))
        for alert, text in monitoring.alerts().items():
            for part in ("severity: (critical|warning)", "summary: .+", "description: .+",
                         f"runbook_url: deploy/prometheus/RUNBOOK.md#{alert.lower()}\n"):
                self.assertRegex(text, part, alert)


if __name__ == "__main__":
    harness.main()
