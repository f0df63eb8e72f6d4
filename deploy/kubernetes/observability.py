#!/usr/bin/env python3
"""Prints the rules of deploy/prometheus as PrometheusRules, and the dashboards of deploy/grafana as
ConfigMaps for Grafana's sidecar:

    deploy/kubernetes/observability.py | kubectl apply --namespace flashcore -f -

Kustomize can do neither: it reads no files outside its folder, and fills no custom resource from a
file."""

import json
import pathlib
import textwrap

DEPLOY = pathlib.Path(__file__).resolve().parents[1]


def prometheus_rule(path):
    """A rule file's text as the spec of a PrometheusRule."""
    return (f"apiVersion: monitoring.coreos.com/v1\nkind: PrometheusRule\n"
            f"metadata:\n  name: flashcore-{path.stem.replace('_', '-')}\n"
            f"spec:\n{textwrap.indent(path.read_text(), '  ')}")


def dashboard(path):
    """A dashboard's file as a ConfigMap, in JSON, which is valid YAML."""
    return json.dumps({
        "apiVersion": "v1", "kind": "ConfigMap",
        "metadata": {"name": path.stem, "labels": {"grafana_dashboard": "1"}},
        "data": {path.name: path.read_text()}}) + "\n"


def main():
    rules = [path for path in sorted((DEPLOY / "prometheus").glob("*.yml"))
             if "\ngroups:" in "\n" + path.read_text() and not path.stem.endswith("_test")]
    dashboards = sorted((DEPLOY / "grafana" / "dashboards").glob("*.json"))
    if not rules or not dashboards:
        raise SystemExit(f"no rules or no dashboards under {DEPLOY}")
    print("---\n".join([*map(prometheus_rule, rules), *map(dashboard, dashboards)]), end="")


if __name__ == "__main__":
    main()
