"""Draws a snapshot of the cluster for a terminal. Pure: a snapshot in, lines out.

Colours repeat what a word says. Lines that do not fit are cut; sections that do not fit are counted.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Any

from rich.text import Text

from baton.services.router.cluster.snapshot import ClusterSnapshot, LinkRow, OpenRequestRow, WorkerRow

BAR_CELLS = 12
_OWNERS = (("live", "#"), ("pinned", "^"), ("reserved", "+"), ("draining", "~"), ("retired", "x"), ("cached", "-"))
"""Owners of pages and their sign in a bar; what is left is free."""
LEGEND = " ".join(f"{sign}{owner}" for owner, sign in _OWNERS[:3]) + " -cached .free"
_GOOD, _WARN, _BAD, _DIM = "green", "yellow", "bold red", "dim"
_STATE_STYLES = {
    "ready": _GOOD,
    "up": _GOOD,
    "draining": _WARN,
    "half_open": _WARN,
    "silent": _WARN,
    "suspected": _WARN,
}
_LEVEL_STYLES = {"good": _GOOD, "warn": _WARN, "bad": _BAD}
_LINK_WORDS = {"half_open": "on trial", "open": "paused"}
_MIB = 1024 * 1024


class WorkerSelection(Enum):
    """The order in which workers stand on the screen."""

    NAME = "name"
    ROWS = "rows"
    QUEUE = "queue"
    PAGES = "pages"

    @property
    def next(self) -> WorkerSelection:
        """The order that `s` changes to."""
        orders = list(WorkerSelection)
        return orders[(orders.index(self) + 1) % len(orders)]


_ORDER_KEYS: dict[WorkerSelection, Callable[[WorkerRow], Any]] = {
    WorkerSelection.NAME: lambda worker: 0,
    WorkerSelection.ROWS: lambda worker: -worker.rows,
    WorkerSelection.QUEUE: lambda worker: -worker.queue,
    WorkerSelection.PAGES: lambda worker: worker.pages.get("free", 0) + worker.pages.get("cached", 0),
}


@dataclass(frozen=True, slots=True)
class ScreenOptions:
    """Size of the terminal and what the keys have chosen. `problem`: why there is no newer snapshot."""

    width: int = 80
    height: int = 24
    order: WorkerSelection = WorkerSelection.NAME
    paused: bool = False
    problem: str = ""


def draw(snapshot: ClusterSnapshot, options: ScreenOptions, *, keys: bool) -> Text:
    """The whole screen. `keys`: with a line that names them, cut to the height; else everything is listed."""
    parts = [[*_header(snapshot, options), *_workers(snapshot, options)], _links(snapshot), _requests(snapshot)]
    parts.append(_events(snapshot))
    room = options.height - 1 if keys else None
    lines = _fit(parts, room)
    if keys:
        state = " PAUSED" if options.paused else ""
        footer = f"[q]uit [p]ause [s]ort: {options.order.value}{state}   {LEGEND}"
        lines = [*lines, *[Text()] * (options.height - 1 - len(lines)), Text(footer, style=_DIM)]
    for line in lines:
        line.no_wrap = True
        line.truncate(options.width, overflow="ellipsis")
    return Text("\n").join(lines)


def _fit(parts: Sequence[list[Text]], room: int | None) -> list[Text]:
    """The parts with an empty line between them. Without room the later parts are shortened first."""
    lines: list[Text] = []
    for index, part in enumerate(parts):
        if not part:
            continue
        if room is None:
            lines += [*([Text()] if lines else []), *part]
            continue
        later = sum(1 for other in parts[index + 1 :] if other) * 4
        left = room - len(lines) - (1 if lines else 0)
        allowed = max(left - later, min(left, 4)) if index else left
        if allowed < 2 and index:
            continue
        shown = (
            part if len(part) <= allowed else [*part[: allowed - 1], Text(f"  +{len(part) - allowed + 1} more", _DIM)]
        )
        lines += [*([Text()] if lines else []), *shown]
    return lines


def _header(snapshot: ClusterSnapshot, options: ScreenOptions) -> list[Text]:
    window, limits = snapshot.window, snapshot.objectives
    line = Text(f"baton top: {snapshot.model}", style="bold")
    others = len(snapshot.routers) - 1
    line.append(f"  {snapshot.router}{f' and {others} more' if others else ''}", style="none")
    _figure(line, "TTFT p95", _ms(window.ttft_p95_ms), bad=(window.ttft_p95_ms or 0.0) > limits.ttft_p95_ms)
    _figure(line, "ITL p99", _ms(window.itl_p99_ms))
    _figure(line, "errors", f"{100 * window.error_ratio:.1f} %", bad=window.error_ratio > limits.error_ratio)
    _figure(line, "refused", str(window.refused), bad=window.refused > 0)
    line.append(f"  {window.output_tok_s:.0f} tok/s", style="none")
    lines = [line]
    if snapshot.degraded:
        away = ", ".join(snapshot.degraded)
        lines.append(Text(f"! {away} away: running requests go on, new ones are not durable", style=_BAD))
    mute = [f"{router.id} ({router.status})" for router in snapshot.routers if router.open is None]
    if mute:
        lines.append(Text(f"! not shown: the requests of {', '.join(mute)}", style=_WARN))
    if snapshot.scope == "own":
        lines.append(Text("an operator's key shows workers and links (baton key --operator)", style=_DIM))
    if options.problem:
        lines.append(Text(f"! {options.problem}", style=_BAD))
    return lines


def _figure(line: Text, name: str, value: str, *, bad: bool = False) -> None:
    line.append(f"  {name} ", style=_DIM)
    line.append(f"{value}!" if bad else value, style=_BAD if bad else "none")


def _workers(snapshot: ClusterSnapshot, options: ScreenOptions) -> list[Text]:
    order = _ORDER_KEYS[options.order]
    workers = sorted(snapshot.workers, key=lambda worker: (order(worker), -ord(worker.role[0]), worker.id))
    width = max([len(worker.id) for worker in workers] + [6])
    title = f" ROLE    {'WORKER':<{width}} STATE     ROWS  QUEUE  TOK/S HIT  PAGES"
    lines = [Text(title, style=_DIM), *(_worker(worker, width) for worker in workers)]
    if not workers and snapshot.scope != "own":
        lines.append(Text(" no worker is registered; start one: baton serve decode", style=_WARN))
    if snapshot.num_workers > len(workers) and workers:
        lines.append(Text(f" +{snapshot.num_workers - len(workers)} more", style=_DIM))
    return lines


def _worker(worker: WorkerRow, width: int) -> Text:
    line = Text(f" {worker.role:<7} {worker.id:<{width}} ")
    line.append(f"{worker.status:<9}", style=_STATE_STYLES.get(worker.status, _BAD))
    if worker.gone_ms is not None:
        return line.append(f" gone for {worker.gone_ms / 1000:.0f} s", style=_DIM)
    rate = "-" if worker.tok_s is None else _count(worker.tok_s)
    hits = "-" if worker.hit_ratio is None else f"{worker.hit_ratio:.0%}"
    rows = "-" if worker.role == "encode" else str(worker.rows)
    bar = _media_bar(worker.media) if worker.role == "encode" and worker.media else _bar(worker)
    if worker.role != "encode" and worker.media and worker.media["num_held"]:
        bar += f", {worker.media['num_held']} images {_mib_of(worker.media)}"
    line.append(f"{rows:>5} {worker.queue:>6} {rate:>6} {hits:>4} {bar}")
    return line


def _media_bar(media: dict[str, int]) -> str:
    """Bytes of images that an encode worker holds, of those that it may hold."""
    used, most = media["num_bytes"], max(1, media["max_bytes"])
    cells = "#" * min(BAR_CELLS, -(-BAR_CELLS * used // most))
    return f"[{cells:.<{BAR_CELLS}}] {media['num_encoded']} embeddings, {_mib_of(media)}"


def _mib_of(media: dict[str, int]) -> str:
    """Bytes of the images that a worker holds, of those that it may hold."""
    return f"{media['num_bytes'] / _MIB:.1f}/{media['max_bytes'] / _MIB:.0f} MiB"


def _bar(worker: WorkerRow) -> str:
    """Pages by owner. An owner with any page has at least one cell, if there is room."""
    total = worker.total_pages or sum(worker.pages.values())
    cells = ""
    for owner, sign in _OWNERS:
        num_pages = worker.pages.get(owner, 0)
        if num_pages and total:
            cells += sign * max(1, round(BAR_CELLS * num_pages / total))
    return f"[{cells[:BAR_CELLS]:.<{BAR_CELLS}}] {worker.pages.get('free', 0)} free"


def _links(snapshot: ClusterSnapshot) -> list[Text]:
    return [_link(link) for link in snapshot.links]


def _link(link: LinkRow) -> Text:
    line = Text(f" {link.prefill} > {link.decode} ")
    line.append(f"{_LINK_WORDS.get(link.state, link.state)} ", style=_STATE_STYLES.get(link.state, _BAD))
    speed = f"{link.gib_s:.1f} GiB/s" if link.gib_s is not None else "idle"
    if link.gib_s is None and link.probe_gib_s is not None:
        speed = f"idle (probe {link.probe_gib_s:.1f} GiB/s)"
    path = link.path.rpartition("(")[2].rstrip(")") or "unknown"  # `nixl/ucx (cma)` is the cma path
    line.append(f"{path}  {speed}  {link.moved_bytes / _MIB:.1f} MiB moved")
    return line.append(f"  {link.reason}", style=_WARN) if link.reason else line


def _requests(snapshot: ClusterSnapshot) -> list[Text]:
    """Open sequences: those that wait, then those that run, oldest first."""
    if not snapshot.num_requests:
        return [Text(" no open requests", style=_DIM)]
    counts = "  ".join(f"{name} {count}" for name, count in snapshot.counts.items() if count)
    lines = [Text(f" STREAMS {snapshot.num_requests}: {counts}", style=_DIM)]
    return [*lines, *(_request(row) for row in sorted(snapshot.requests, key=lambda row: -row.age_ms))]


def _request(row: OpenRequestRow) -> Text:
    pair = " > ".join(name for name in (row.prefill, row.decode) if name) or "-"
    line = Text(f" {row.id:<21.21} {row.state:<9} {pair}  {row.output_tokens} out {row.age_ms / 1000:.1f} s  ")
    line.append(f"{row.prompt_tokens} prompt, {row.cached_tokens} cached")
    return line.append(f"  attempt {row.attempt}", style=_WARN) if row.attempt > 1 else line


def _events(snapshot: ClusterSnapshot) -> list[Text]:
    """What happened, newest first, with its age."""
    lines = []
    for event in reversed(snapshot.events):
        age_s = max(0.0, (snapshot.now_ms - event.at_ms) / 1000)
        line = Text(f" {_age(age_s):>5} ago ", style=_DIM)
        lines.append(line.append(_one_line(event.text), style=_LEVEL_STYLES.get(event.level, "none")))
    return lines


def _one_line(text: str) -> str:
    return "".join(c if c.isprintable() else " " for c in text)


def _age(seconds: float) -> str:
    if seconds < 100:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 6000 else f"{seconds / 3600:.0f} h"


def _ms(value: float | None) -> str:
    if value is None:
        return "-"
    return f"{value:.0f} ms" if value < 1000 else f"{value / 1000:.2f} s"


def _count(value: float) -> str:
    return f"{value:.0f}" if value < 1000 else f"{value / 1000:.1f}k"
