"""Writes Grafana's dashboards to docker/grafana/boards and their list, docs/dashboards.md, from the tables beside it.

    python docker/grafana/build.py

Needs the standard library only; a test compares what it makes with what is committed. Panels flow from left to
right over 24 columns, and a row begins a new line.
"""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE))

from cluster_boards import OVERVIEW, SPLIT  # noqa: E402 - beside this script
from panels import Board, Panel, Row  # noqa: E402
from request_boards import CACHE, RELIABILITY, REQUESTS, TENANTS  # noqa: E402

BOARDS = (OVERVIEW, SPLIT, REQUESTS, CACHE, RELIABILITY, TENANTS)
FOLDER = HERE / "boards"
SOURCE = {"type": "prometheus", "uid": "prometheus"}
COLUMNS = 24
HEIGHTS = {"stat": 4, "timeseries": 8, "heatmap": 9}
NO_VALUE = "no traffic"
PAGE = HERE.parents[1] / "docs" / "dashboards.md"
PAGE_HEAD = (
    "# Dashboards",
    "",
    "<!-- Written by docker/grafana/build.py. -->",
    "",
    "Every panel of Grafana's dashboards ([operations.md](operations.md#watching)). Each of their expressions has a",
    "value in `tests/integration/monitoring/test_boards.py`: a Prometheus scrapes a cluster under load, and no",
    "expression may be empty, fail, or give no number. That Grafana draws them is not tested.",
)
METRIC = re.compile(r"\b(?:(?:\w+:)?(?:baton|process)[\w:]*|up)\b")


def build(board: Board) -> dict[str, Any]:
    """One dashboard as Grafana reads it."""
    links = [
        {"title": other.title, "type": "link", "url": f"/d/{other.uid}", "keepTime": True}
        for other in BOARDS
        if other is not board
    ]
    return {
        "uid": board.uid,
        "title": board.title,
        "description": board.description,
        "tags": ["baton"],
        "schemaVersion": 39,
        "version": 1,
        "editable": False,
        "graphTooltip": 1,
        "refresh": "10s",
        "time": {"from": "now-30m", "to": "now"},
        "timezone": "browser",
        "templating": {"list": []},
        "annotations": {"list": []},
        "links": links,
        "panels": _place(board.parts),
    }


def _place(parts: tuple[Row | Panel, ...]) -> list[dict[str, Any]]:
    placed: list[dict[str, Any]] = []
    x = y = height = 0
    for part in parts:
        wide, high = (COLUMNS, 1) if isinstance(part, Row) else (part.width, HEIGHTS[part.kind])
        if x + wide > COLUMNS:
            x, y, height = 0, y + height, 0
        at = {"x": x, "y": y, "w": wide, "h": high}
        placed.append(_row(part, at) if isinstance(part, Row) else _panel(part, at))
        placed[-1]["id"] = len(placed)
        x, height = x + wide, max(height, high)
    return placed


def _row(row: Row, at: dict[str, int]) -> dict[str, Any]:
    return {"type": "row", "title": row.title, "collapsed": False, "gridPos": at, "panels": []}


def _panel(panel: Panel, at: dict[str, int]) -> dict[str, Any]:
    defaults: dict[str, Any] = {"unit": panel.unit, "noValue": NO_VALUE}
    options: dict[str, Any] = {}
    if panel.kind == "timeseries":
        stacking = {"stacking": {"mode": "normal", "group": "A"}} if panel.stacked else {}
        defaults |= {
            "min": 0,
            "custom": {"fillOpacity": 30 if panel.stacked else 10, "showPoints": "never", **stacking},
        }
        options = {
            "legend": {"displayMode": "list", "placement": "bottom", "showLegend": True},
            "tooltip": {"mode": "multi", "sort": "desc"},
        }
    elif panel.kind == "stat":
        steps = [{"color": "green", "value": None}, *({"color": c, "value": v} for v, c in panel.steps)]
        defaults["thresholds"] = {"mode": "absolute", "steps": steps}
        options = {"reduceOptions": {"calcs": ["lastNotNull"]}, "colorMode": "value", "graphMode": "area"}
    else:
        options = {"calculate": False, "yAxis": {"unit": panel.unit}, "exemplars": {"color": "rgba(255,0,255,0.7)"}}
    return {
        "type": panel.kind,
        "title": panel.title,
        "description": panel.description,
        "datasource": SOURCE,
        "gridPos": at,
        "fieldConfig": {"defaults": defaults, "overrides": []},
        "options": options,
        "targets": [_target(panel, number, *query) for number, query in enumerate(panel.queries)],
    }


def _target(panel: Panel, number: int, expression: str, legend: str) -> dict[str, Any]:
    target: dict[str, Any] = {
        "refId": chr(ord("A") + number),
        "datasource": SOURCE,
        "expr": expression,
        "legendFormat": legend,
    }
    if panel.kind == "heatmap":
        target["format"] = "heatmap"
    if panel.exemplars:
        target["exemplar"] = True
    return target


def text(board: Board) -> str:
    """The file of a dashboard."""
    return json.dumps(build(board), indent=1, ensure_ascii=False) + "\n"


def page() -> str:
    """docs/dashboards.md: every panel, what it shows, and the metrics that it reads."""
    lines = [*PAGE_HEAD]
    for board in BOARDS:
        panels = [part for part in board.parts if isinstance(part, Panel)]
        lines += ["", f"## {board.title}", "", board.description, "", "| panel | shows | metrics |", "|---|---|---|"]
        for panel in panels:
            series = dict.fromkeys(name for expression, _ in panel.queries for name in METRIC.findall(expression))
            names = ", ".join(f"`{name}`" for name in series)
            lines.append(f"| {panel.title} | {panel.description.replace('|', '/')} | {names} |")
    return "\n".join(lines) + "\n"


def main() -> None:
    """Writes every dashboard, and their list."""
    PAGE.write_text(page(), encoding="utf-8")
    for board in BOARDS:
        (FOLDER / f"{board.uid}.json").write_text(text(board), encoding="utf-8")


if __name__ == "__main__":
    main()
