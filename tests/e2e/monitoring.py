"""Reads deploy/: the table of metrics, the dashboards and the rules."""

import json
import pathlib
import re

REPOSITORY = pathlib.Path(__file__).resolve().parents[2]
GRAFANA = REPOSITORY / "deploy" / "grafana"
PROMETHEUS = REPOSITORY / "deploy" / "prometheus"
TABLE = REPOSITORY / "deploy" / "METRICS.md"
RULE_FILES = (PROMETHEUS / "recording_rules.yml", PROMETHEUS / "alerts.yml")

METRIC = re.compile(r"(?<![\w:])(?:(?:flashcore|grpc_server|process|DCGM_FI)_\w+|up)(?![\w:])")
RECORDED = re.compile(r"\bjob:\w+:\w+")
STRING = re.compile(r'"[^"]*"')


def dashboards():
    """The shipped dashboards, by their titles without "FlashCore: "."""
    boards = [json.loads(path.read_text()) for path in sorted(GRAFANA.glob("dashboards/*.json"))]
    return {board["title"].removeprefix("FlashCore: "): board for board in boards}


def panel_queries():
    """(dashboard, panel, PromQL) of every query of every panel."""
    return [(title, panel["title"], target["expr"])
            for title, board in dashboards().items()
            for panel in board["panels"] for target in panel["targets"]]


def variable_queries():
    """PromQL of every variable that queries Prometheus."""
    return [variable["definition"] for board in dashboards().values()
            for variable in board["templating"]["list"] if variable["type"] == "query"]


def alerts():
    """The text of each alert, by its name."""
    parts = re.split(r"- alert: (\w+)\n", (PROMETHEUS / "alerts.yml").read_text())
    return dict(zip(parts[1::2], parts[2::2]))


def metrics_of(promql):
    """The names of the scraped metrics in a query."""
    return set(METRIC.findall(STRING.sub('""', promql)))


def recorded_metrics_of(promql):
    """The names of the recorded metrics in a query."""
    return set(RECORDED.findall(promql))


def family(name, families):
    """The family that a metric, such as a histogram's _bucket, belongs to."""
    for suffix in ("_bucket", "_count", "_sum"):
        if name not in families and name.removesuffix(suffix) in families:
            return name.removesuffix(suffix)
    return name


def table():
    """The cells of each row of the table, by metric."""
    metrics = TABLE.read_text().partition("\nLabels:\n")[0]
    rows = [[cell.strip() for cell in line.strip("|").split("|")]
            for line in metrics.splitlines() if line.startswith("| `")]
    return {cells[0].strip("`"): cells for cells in rows}
