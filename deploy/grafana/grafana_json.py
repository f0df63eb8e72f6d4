"""Dashboards as Grafana reads them (schema version 38, Grafana 10), from short descriptions.

In a query, <servers> is what the variables on top of a dashboard select, and <window> is Grafana's
$__rate_interval.
"""

import dataclasses

DATASOURCE = {"type": "prometheus", "uid": "${datasource}"}
GRID_COLUMNS = 24
SERVERS = 'job=~"$job", instance=~"$instance"'


@dataclasses.dataclass
class Panel:
    """One panel. `queries` maps PromQL to the legend of its series."""
    title: str
    unit: str  # https://grafana.com/docs: s, bytes, Bps, reqps, percentunit, short...
    queries: dict
    description: str
    kind: str = "timeseries"  # or stat, heatmap
    stacked: bool = False


@dataclasses.dataclass
class Variable:
    """A choice among the values of a label, several or all of them."""
    name: str
    label: str
    query: str


def quantile(q, metric, by="", where="<servers>"):
    """PromQL of the quantile `q` of a histogram, one series per value of the labels `by`."""
    labels = f"le, {by}" if by else "le"
    return f"histogram_quantile({q}, sum by ({labels}) (rate({metric}_bucket{{{where}}}[<window>])))"


def mean(metric, by="", where="<servers>"):
    """PromQL of the mean of a histogram."""
    sums, counts = (f"sum by ({by}) (rate({metric}_{part}{{{where}}}[<window>]))"
                    for part in ("sum", "count"))
    return f"{sums} / {counts}"


def _target(expression, legend, ref_id, panel):
    return {
        "datasource": DATASOURCE,
        "editorMode": "code",
        "expr": expression.replace("<servers>", SERVERS).replace("<window>", "$__rate_interval"),
        "format": "heatmap" if panel.kind == "heatmap" else "time_series",
        "instant": False,
        "legendFormat": legend,
        "range": True,
        "refId": ref_id,
    }


def _timeseries(panel):
    custom = {
        "drawStyle": "line",
        "fillOpacity": 60 if panel.stacked else 10,
        "lineWidth": 1,
        "showPoints": "never",
        "spanNulls": False,
        "stacking": {"group": "A", "mode": "normal" if panel.stacked else "none"},
    }
    options = {
        "legend": {"calcs": [], "displayMode": "list", "placement": "bottom", "showLegend": True},
        "tooltip": {"mode": "multi", "sort": "desc"},
    }
    return {"color": {"mode": "palette-classic"}, "custom": custom, "min": 0}, options


def _stat(_):
    options = {
        "colorMode": "none",
        "graphMode": "area",
        "justifyMode": "auto",
        "orientation": "auto",
        "reduceOptions": {"calcs": ["lastNotNull"], "fields": "", "values": False},
        "textMode": "auto",
    }
    return {}, options


def _heatmap(panel):
    options = {
        "calculate": False,
        "cellGap": 0,
        "color": {"mode": "scheme", "scheme": "Oranges", "steps": 64, "exponent": 0.5},
        "legend": {"show": True},
        "rowsFrame": {"layout": "auto"},
        "tooltip": {"show": True, "yHistogram": False},
        "yAxis": {"axisPlacement": "left", "unit": panel.unit},
    }
    return {}, options


_KINDS = {"timeseries": _timeseries, "stat": _stat, "heatmap": _heatmap}


def _panel(panel, panel_id, position):
    defaults, options = _KINDS[panel.kind](panel)
    return {
        "id": panel_id,
        "title": panel.title,
        "description": panel.description,
        "type": panel.kind,
        "datasource": DATASOURCE,
        "gridPos": position,
        "fieldConfig": {"defaults": {"unit": panel.unit, **defaults}, "overrides": []},
        "options": options,
        "targets": [_target(expression, legend, chr(ord("A") + i), panel)
                    for i, (expression, legend) in enumerate(panel.queries.items())],
        "transformations": [],
        "transparent": False,
    }


def _panels(rows):
    panels, y = [], 0
    for row in rows:
        width = GRID_COLUMNS // len(row)
        height = 4 if row[0].kind == "stat" else 8
        for column, panel in enumerate(row):
            position = {"x": column * width, "y": y, "w": width, "h": height}
            panels.append(_panel(panel, len(panels) + 1, position))
        y += height
    return panels


def _variable(variable):
    return {
        "name": variable.name,
        "label": variable.label,
        "type": "query",
        "datasource": DATASOURCE,
        "definition": variable.query,
        "query": {"query": variable.query, "refId": variable.name},
        "allValue": ".*",
        "current": {"selected": True, "text": ["All"], "value": ["$__all"]},
        "hide": 0,
        "includeAll": True,
        "multi": True,
        "options": [],
        "refresh": 2,
        "regex": "",
        "skipUrlSync": False,
        "sort": 1,
    }


DATASOURCE_VARIABLE = {
    "name": "datasource",
    "label": "Data source",
    "type": "datasource",
    "query": "prometheus",
    "hide": 0,
    "includeAll": False,
    "multi": False,
    "options": [],
    "refresh": 1,
    "regex": "",
    "skipUrlSync": False,
}


def dashboard(uid, title, description, variables, rows):
    """The JSON of a dashboard: `rows` are lists of panels, from top to bottom."""
    return {
        "uid": uid,
        "title": title,
        "description": description,
        "tags": ["flashcore"],
        "schemaVersion": 38,
        "version": 1,
        "editable": True,
        "graphTooltip": 1,
        "refresh": "15s",
        "time": {"from": "now-1h", "to": "now"},
        "timezone": "browser",
        "style": "dark",
        "annotations": {"list": []},
        "links": [{
            "title": "FlashCore", "type": "dashboards", "tags": ["flashcore"], "icon": "dashboard",
            "asDropdown": False, "includeVars": True, "keepTime": True, "targetBlank": False,
            "tooltip": "", "url": "",
        }],
        "templating": {"list": [DATASOURCE_VARIABLE, *map(_variable, variables)]},
        "panels": _panels(rows),
    }
