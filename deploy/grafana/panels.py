"""Grafana's classic dashboard model (schemaVersion 39), as far as our boards need it.

Boards say what is asked and what the answer means; where panels stand, and all that Grafana wants besides,
is here.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from typing import Any

__all__ = [
    "Board",
    "Panel",
    "Row",
    "bars",
    "datasource",
    "heatmap",
    "lines",
    "quantiles",
    "stat",
    "table",
    "variable",
]

SCHEMA = 39
COLUMNS = 24
DATASOURCE = {"type": "prometheus", "uid": "${datasource}"}
"""A variable, never a data source's own id: boards are for everybody's Grafana."""
Query = tuple[str, str]
"""PromQL and the legend."""


@dataclass(frozen=True)
class Panel:
    """One panel; `width` of 24 columns."""

    kind: str
    title: str
    about: str
    queries: tuple[Query, ...]
    unit: str = "short"
    width: int = 8
    height: int = 8
    defaults: dict[str, Any] = field(default_factory=dict)
    options: dict[str, Any] = field(default_factory=dict)
    instant: bool = False
    transformations: tuple[dict[str, Any], ...] = ()

    def model(self, number: int, x: int, y: int) -> dict[str, Any]:
        """As Grafana wants it, at its place."""
        model: dict[str, Any] = {
            "id": number,
            "type": self.kind,
            "title": self.title,
            "description": self.about,
            "datasource": DATASOURCE,
            "gridPos": {"h": self.height, "w": self.width, "x": x, "y": y},
            "fieldConfig": {"defaults": {"unit": self.unit, **self.defaults}, "overrides": []},
            "options": self.options,
            "targets": [self._target(i, *query) for i, query in enumerate(self.queries)],
        }
        if self.transformations:
            model["transformations"] = list(self.transformations)
        return model

    def _target(self, i: int, expr: str, legend: str) -> dict[str, Any]:
        target: dict[str, Any] = {
            "refId": chr(ord("A") + i),
            "datasource": DATASOURCE,
            "editorMode": "code",
            "expr": expr,
            "legendFormat": legend,
            "instant": self.instant,
            "range": not self.instant,
            # Exemplars carry trace ids; only histograms of single exchanges have any.
            "exemplar": self.kind == "timeseries" and "_seconds_bucket" in expr,
        }
        if self.kind == "heatmap":
            target["format"] = "heatmap"
        elif self.kind == "table":
            target["format"] = "table"
        return target


@dataclass(frozen=True)
class Row:
    """A title over panels that belong together."""

    title: str
    panels: tuple[Panel, ...]


@dataclass(frozen=True)
class Board:
    """One dashboard."""

    uid: str
    title: str
    about: str
    variables: tuple[dict[str, Any], ...]
    rows: tuple[Row, ...]

    def model(self, others: tuple[Board, ...]) -> dict[str, Any]:
        """The whole JSON; `others` are linked."""
        return {
            "id": None,
            "uid": self.uid,
            "title": self.title,
            "description": self.about,
            "tags": ["llmtap"],
            "schemaVersion": SCHEMA,
            "version": 1,
            "editable": True,
            "graphTooltip": 1,
            "refresh": "30s",
            "timezone": "",
            "time": {"from": "now-1h", "to": "now"},
            "links": [_link(board) for board in others if board is not self],
            "annotations": {"list": []},
            "templating": {"list": list(self.variables)},
            "panels": _placed(self.rows),
        }


def _link(board: Board) -> dict[str, Any]:
    return {
        "type": "link",
        "title": board.title,
        "url": f"/d/{board.uid}",
        "icon": "external link",
        "keepTime": True,
        "includeVars": True,
        "asDropdown": False,
        "targetBlank": False,
        "tags": [],
    }


def _placed(rows: tuple[Row, ...]) -> list[dict[str, Any]]:
    """From left to right, and on in the next line where one is full."""
    found: list[dict[str, Any]] = []
    y = 0
    for row in rows:
        found.append(
            {
                "id": len(found) + 1,
                "type": "row",
                "title": row.title,
                "collapsed": False,
                "panels": [],
                "gridPos": {"h": 1, "w": COLUMNS, "x": 0, "y": y},
            }
        )
        y += 1
        x = height = 0
        for panel in row.panels:
            if x + panel.width > COLUMNS:
                x, y, height = 0, y + height, 0
            found.append(panel.model(len(found) + 1, x, y))
            x, height = x + panel.width, max(height, panel.height)
        y += height
    return found


# ---------------------------------------------------------------- panels


def lines(title: str, about: str, *queries: Query, unit: str = "s", **more: Any) -> Panel:
    """Curves over time."""
    custom = {"drawStyle": "line", "lineWidth": 1, "fillOpacity": 5, "showPoints": "never"}
    return Panel(
        "timeseries",
        title,
        about,
        queries,
        unit,
        defaults={"custom": custom, "min": more.pop("low", 0)},
        options={
            "legend": {"displayMode": "table", "placement": "bottom", "calcs": ["lastNotNull", "max"]},
            "tooltip": {"mode": "multi", "sort": "desc"},
        },
        **more,
    )


def bars(title: str, about: str, *queries: Query, unit: str = "reqps", **more: Any) -> Panel:
    """Parts of a whole over time, one on another."""
    custom = {
        "drawStyle": "bars",
        "lineWidth": 0,
        "fillOpacity": 80,
        "showPoints": "never",
        "stacking": {"mode": "normal", "group": "A"},
    }
    return Panel(
        "timeseries",
        title,
        about,
        queries,
        unit,
        defaults={"custom": custom, "min": 0},
        options={
            "legend": {"displayMode": "list", "placement": "bottom", "calcs": []},
            "tooltip": {"mode": "multi", "sort": "desc"},
        },
        **more,
    )


def quantiles(title: str, about: str, metric: str, labels: str, by: str = "", **more: Any) -> Panel:
    """p50, p90 and p99 of a histogram, together or by a label."""
    group = f"le, {by}" if by else "le"
    told = f"{{{{{by}}}}} " if by else ""
    rate = f"sum by ({group}) (rate({metric}_bucket{{{labels}}}[$__rate_interval]))"
    shown = [(f"histogram_quantile(0.{q}, {rate})", f"{told}p{q}") for q in (50, 90, 99)]
    return lines(title, about, *shown, **more)


def heatmap(title: str, about: str, metric: str, labels: str, **more: Any) -> Panel:
    """A histogram over time."""
    query = f"sum by (le) (increase({metric}_bucket{{{labels}}}[$__rate_interval]))"
    return Panel(
        "heatmap",
        title,
        about,
        ((query, "{{le}}"),),
        "short",
        options={
            "calculate": False,
            "cellGap": 1,
            "color": {"mode": "scheme", "scheme": "Spectral", "steps": 64},
            "filterValues": {"le": 1e-9},
            "legend": {"show": True},
            "tooltip": {"mode": "single", "yHistogram": True},
            "yAxis": {"axisPlacement": "left", "unit": "s"},
        },
        **more,
    )


def stat(title: str, about: str, *queries: Query, unit: str = "short", **more: Any) -> Panel:
    """Numbers as they are now; `steps`: colours from values on."""
    steps = more.pop("steps", [("green", None)])
    thresholds = {"mode": "absolute", "steps": [{"color": c, "value": v} for c, v in steps]}
    return Panel(
        "stat",
        title,
        about,
        queries,
        unit,
        height=more.pop("height", 5),
        instant=True,
        defaults={"thresholds": thresholds, "color": {"mode": "thresholds"}, **more.pop("defaults", {})},
        options={
            "colorMode": "value",
            "graphMode": "none",
            "justifyMode": "auto",
            "textMode": "value_and_name",
            "orientation": "auto",
            "reduceOptions": {"calcs": ["lastNotNull"], "fields": "", "values": False},
        },
        **more,
    )


def table(title: str, about: str, *queries: Query, unit: str = "short", **more: Any) -> Panel:
    """A row for each set of labels, a column for each query, named by its legend."""
    names = {f"Value #{chr(ord('A') + i)}": legend for i, (_, legend) in enumerate(queries)}
    if len(queries) == 1:
        names = {"Value": queries[0][1]}
    return Panel(
        "table",
        title,
        about,
        queries,
        unit,
        instant=True,
        options={"showHeader": True, "cellHeight": "sm", "footer": {"show": False}},
        transformations=(
            {"id": "merge", "options": {}},
            {"id": "organize", "options": {"excludeByName": {"Time": True}, "renameByName": names}},
        ),
        **more,
    )


# ---------------------------------------------------------------- variables


def datasource() -> dict[str, Any]:
    return {
        "type": "datasource",
        "name": "datasource",
        "label": "Data source",
        "query": "prometheus",
        "regex": "",
        "hide": 0,
        "includeAll": False,
        "multi": False,
        "refresh": 1,
        "options": [],
        "current": {},
    }


def variable(name: str, query: str, *, label: str) -> dict[str, Any]:
    """Values of a label, several at a time, or All."""
    assert re.fullmatch(r"label_values\(.+, \w+\)", query)
    return {
        "type": "query",
        "name": name,
        "label": label,
        "datasource": DATASOURCE,
        "definition": query,
        "query": {"query": query, "refId": f"variable-{name}"},
        "regex": "",
        "includeAll": True,
        "multi": True,
        "allValue": ".*",
        "refresh": 2,
        "sort": 1,
        "hide": 0,
        "options": [],
        "current": {"text": ["All"], "value": ["$__all"], "selected": True},
    }
