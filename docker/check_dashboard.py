"""Runs every expression of Grafana's dashboard against a live Prometheus, and says which a person would see nothing in.

    python docker/check_dashboard.py http://127.0.0.1:9090

Called by a developer while requests are being served, and by tests/unit/docker. Needs the standard library only; knows
no metric: what an expression must not give is an error, nothing at all, or only numbers that are none. Rendering is
Grafana's own and is not checked.
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

BOARD = Path(__file__).parent / "grafana" / "boards" / "baton.json"
RATE_INTERVAL = "1m"
"""What Grafana would put for `$__rate_interval` or a little more: there must have been requests within it."""

TIMEOUT_S = 10.0
USAGE = "usage: check_dashboard.py PROMETHEUS_URL\n"


class QueryFailed(Exception):
    """Prometheus did not evaluate an expression; says why."""


@dataclass(frozen=True, slots=True)
class Target:
    """One expression of a panel, as the dashboard has it."""

    panel: str
    expression: str


def targets(board: Path = BOARD) -> Iterator[Target]:
    """All expressions of a dashboard, in its order, those of collapsed rows included."""
    yield from _targets(json.loads(board.read_text(encoding="utf-8"))["panels"])


def _targets(panels: list[dict[str, Any]]) -> Iterator[Target]:
    for panel in panels:
        yield from (Target(panel["title"], target["expr"]) for target in panel.get("targets", []))
        yield from _targets(panel.get("panels", []))


def query(url: str, expression: str) -> list[float]:
    """The present values of all series that `expression` gives. Raises `QueryFailed`."""
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


def fault(url: str, target: Target) -> str | None:
    """Why a panel would show nothing for `target` now; None when it shows something."""
    try:
        values = query(url, target.expression.replace("$__rate_interval", RATE_INTERVAL))
    except QueryFailed as error:
        return f"error: {error}"
    if not values:
        return "empty"
    return None if any(math.isfinite(value) for value in values) else "not a number"


def main(arguments: list[str]) -> int:
    """One line an expression. Returns 0 when all show something, 1 when one does not, 2 for wrong usage."""
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
