#!/usr/bin/env python3
"""Draws the main panels of the dashboard Service from a real Prometheus, for deploy/README.md.

Needs the environment that tests/e2e/CMakeLists.txt gives the tests, and python3-matplotlib:
  tests/bench/dashboard_picture.py [FILE.png] [SECONDS_OF_LOAD]
"""

import math
import pathlib
import re
import sys
import time

import matplotlib
matplotlib.use("Agg")
import matplotlib.pyplot as plt
import numpy as np

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[1] / "e2e"))
import monitoring
from prometheus import fill_in, load, watched_server

PANELS = ("Requests", "Errors by reason", "Errors by code", "Request latency",
          "Request latency heatmap", "p99 latency by RPC")
UNITS = {"reqps": "per second", "s": "seconds"}


def legend(template, labels):
    return re.sub(r"\{\{(\w+)\}\}", lambda match: labels.get(match[1], ""), template)


def series_of(target, prometheus, start, end):
    """(legend, times, values) of each series of a query that has a value above 0."""
    result = prometheus.get("query_range", query=fill_in(target["expr"]), start=start, end=end, step=1)
    for series in result["result"]:
        times, values = zip(*((time - start, float(value)) for time, value in series["values"]))
        if any(value > 0 for value in values):
            yield legend(target["legendFormat"], series["metric"]), times, values


def draw_lines(axes, panel, prometheus, start, end):
    for target in panel["targets"]:
        for name, times, values in series_of(target, prometheus, start, end):
            axes.plot(times, values, linewidth=1.2, label=name)
    if panel["fieldConfig"]["defaults"]["unit"] == "s":
        axes.set_yscale("log")
    else:
        axes.set_ylim(bottom=0)
    axes.legend(fontsize=7, frameon=False, ncols=2)


def draw_heatmap(axes, panel, prometheus, start, end):
    by_bound = {float(bound): np.interp(np.arange(int(end - start)), times, values)
                for bound, times, values in series_of(panel["targets"][0], prometheus, start, end)
                if bound != "+Inf"}
    bounds = sorted(by_bound)
    counts = np.diff([by_bound[bound] for bound in bounds], axis=0, prepend=0).clip(0)
    edges = [bounds[0] / 2, *bounds]
    axes.pcolormesh(np.arange(counts.shape[1] + 1), edges, np.sqrt(counts), cmap="Oranges")
    axes.set_yscale("log")


def draw(prometheus, start, end, path):
    board = monitoring.dashboards()["Service"]
    panels = {panel["title"]: panel for panel in board["panels"]}
    figure, grid = plt.subplots(2, 3, figsize=(13, 6), layout="constrained")
    for axes, title in zip(grid.flat, PANELS):
        panel = panels[title]
        axes.set_title(title, fontsize=10, loc="left")
        axes.set_ylabel(UNITS[panel["fieldConfig"]["defaults"]["unit"]], fontsize=8)
        axes.set_xlabel("seconds", fontsize=8)
        axes.tick_params(labelsize=8)
        axes.spines[["top", "right"]].set_visible(False)
        drawer = draw_heatmap if panel["type"] == "heatmap" else draw_lines
        drawer(axes, panel, prometheus, start, end)
    figure.savefig(path, dpi=80)


def main():
    path = pathlib.Path(sys.argv[1]) if len(sys.argv) > 1 else monitoring.GRAFANA / "service.png"
    seconds = int(sys.argv[2]) if len(sys.argv) > 2 else 90
    with watched_server() as (server, prometheus):
        start = math.floor(time.time())
        time.sleep(5)
        with load(server, seconds - 15):
            time.sleep(seconds - 5)
        draw(prometheus, start, start + seconds, path)


if __name__ == "__main__":
    main()
