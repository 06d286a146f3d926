"""Runs every expression of Grafana's dashboards against a live Prometheus and reports those without a value.

    python docker/check_dashboard.py http://127.0.0.1:9090

Run it while requests are being served; tests/unit/docker uses it, too. Needs the standard library only. An expression
must not give an error, an empty answer, or only NaN. Grafana's rendering is not checked.
"""

from __future__ import annotations

import json
import math
import sys
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

BOARDS = Path(__file__).parent / "grafana" / "boards"
RATE_INTERVAL = "1m"
"""Value of `$__rate_interval`: there must have been requests within it."""

TIMEOUT_S = 10.0
USAGE = "usage: check_dashboard.py PROMETHEUS_URL\n"


class QueryFailed(Exception):
    """Prometheus did not evaluate an expression."""


@dataclass(frozen=True, slots=True)
class Target:
    """One expression of a panel."""

    panel: str
    expression: str


def targets(folder: Path = BOARDS) -> Iterator[Target]:
    """All expressions of all dashboards, in order, including collapsed rows."""
    for board in sorted(folder.glob("*.json")):
        yield from _targets(json.loads(board.read_text(encoding="utf-8"))["panels"])


def _targets(panels: list[dict[str, Any]]) -> Iterator[Target]:
    for panel in panels:
        yield from (Target(panel["title"], target["expr"]) for target in panel.get("targets", []))
        yield from _targets(panel.get("panels", []))


def query(url: str, expression: str) -> list[float]:
    """Current values of all series of `expression`. Raises `QueryFailed`."""
    parameters = urllib.parse.urlencode({"query": expression})
    try:
        with urllib.request.urlopen(f"{url.rstrip('/')}/api/v1/query?{parameters}", timeout=TIMEOUT_S) as reply:
            answer = json.load(reply)
    except urllib.error.HTTPError as error:
        with error:
            raise QueryFailed(error.read().decode(errors="replace")) from None
    except OSError as error:
        raise QueryFailed(str(error)) from None
    return [float(series["value"][1]) for series in answer["data"]["result"]]


def fault(url: str, target: Target, rate_interval: str = RATE_INTERVAL) -> str | None:
    """Reason why a panel shows nothing for `target` now; None if it shows a value."""
    try:
        values = query(url, target.expression.replace("$__rate_interval", rate_interval))
    except QueryFailed as error:
        return f"error: {error}"
    if not values:
        return "empty"
    return None if any(math.isfinite(value) for value in values) else "not a number"


def main(arguments: list[str]) -> int:
    """Prints one line an expression. Returns 0 if all have a value, 1 if one has none, 2 for wrong usage."""
    if len(arguments) != 1:
        sys.stderr.write(USAGE)
        return 2
    num_faults = num_targets = 0
    for target in targets():
        found = fault(arguments[0], target)
        num_targets += 1
        num_faults += found is not None
        sys.stdout.write(f"{found or 'ok':<6}  {target.panel}: {target.expression}\n")
    sys.stdout.write(f"{num_targets - num_faults} of {num_targets} expressions show something\n")
    return 1 if num_faults else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
