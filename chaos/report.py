"""Reports of matrix and soak: on the terminal, and in docs/reliability.md between its markers."""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path

from rich.table import Table

from chaos.faults import ClusterFault
from chaos.matrix import CellResult
from chaos.phases import RequestPhase
from chaos.soak import SoakReport

END = "<!-- end -->"
MIB = 1024 * 1024
NOT_PLAYED = "-"


class CellTable:
    """All results so far, by cell."""

    def __init__(self, results: Sequence[CellResult]) -> None:
        self._by_cell: defaultdict[tuple[str, RequestPhase], list[CellResult]] = defaultdict(list)
        for result in results:
            self._by_cell[result.cell.fault_name, result.cell.phase].append(result)

    @property
    def faults(self) -> list[str]:
        """Names of the faults that ran, single ones first, in the order of `ClusterFault`."""
        order = {fault.value: n for n, fault in enumerate(ClusterFault)}
        played = {name for name, _ in self._by_cell}
        return sorted(played, key=lambda name: (" + " in name, [order[part] for part in name.split(" + ")]))

    def entry(self, fault: str, phase: RequestPhase) -> str:
        """`passed/played, longest gap`, and how many calls were sent again that no store had."""
        results = self._by_cell.get((fault, phase))
        if not results:
            return NOT_PLAYED
        passed = sum(not result.problems for result in results)
        gap_s = max(result.longest_gap_s for result in results)
        dropped = sum(result.num_dropped for result in results)
        return f"{passed}/{len(results)}, {gap_s:.1f} s" + (f", {dropped} sent again" if dropped else "")

    @property
    def phases(self) -> list[RequestPhase]:
        """Phases that ran, in order."""
        played = {phase for _, phase in self._by_cell}
        return [phase for phase in RequestPhase if phase in played]

    @property
    def headings(self) -> list[str]:
        """Names of the columns."""
        return ["fault", *(phase.value for phase in self.phases)]

    def rows(self) -> list[list[str]]:
        """A row a fault: its name, then an entry a phase."""
        return [[fault, *(self.entry(fault, phase) for phase in self.phases)] for fault in self.faults]


def terminal_table(results: Sequence[CellResult]) -> Table:
    """A table for the terminal."""
    cells = CellTable(results)
    table = Table(*cells.headings, title="passed/played, longest silence of a client that was answered")
    for row in cells.rows():
        table.add_row(*row)
    return table


def markdown_table(results: Sequence[CellResult]) -> str:
    """A markdown table for the docs."""
    cells = CellTable(results)
    return _markdown([cells.headings, *cells.rows()])


GROWTH_HEADINGS = ["process", "RSS, MiB", "slope over the half, MiB", "open files", "slope", "threads", "slope"]


def soak_summary(report: SoakReport) -> str:
    """Requests, ends and faults of a soak, a line each."""
    load = report.load
    ends = ", ".join(f"{end} {num}" for end, num in load.ends.most_common())
    faults = ", ".join(f"{fault} {num}" for fault, num in sorted(report.faults.items()))
    head = f"{report.minutes:.1f} minutes, seed {report.seed}, {report.num_rounds} rounds"
    received = (
        f"{load.num_tokens} tokens received, {load.num_resumes} resumptions, {load.num_dropped} unstored calls sent "
        f"again, {load.num_lost} lost with both copies"
    )
    return "\n".join(
        (
            f"- {head}, {len(report.problems)} problems",
            f"- tenants: {load.shares.summary() or 'one'}",
            f"- ends: {ends}",
            f"- {received}, longest silence {load.longest_gap_s:.1f} s; the harness itself stood still for at most "
            f"{report.longest_stall_s:.2f} s",
            f"- {sum(report.faults.values())} faults: {faults}",
        )
    )


def soak_table(report: SoakReport) -> Table:
    """Resources of processes that lived through the second half: at its beginning, its end, and the slope."""
    table = Table(*GROWTH_HEADINGS, title="second half of the soak")
    for row in _growth_rows(report):
        table.add_row(*row)
    return table


def soak_markdown(report: SoakReport) -> str:
    """The same as markdown."""
    return _markdown([GROWTH_HEADINGS, *_growth_rows(report)])


def _growth_rows(report: SoakReport) -> list[list[str]]:
    return [
        [
            growth.name,
            f"{growth.first.rss_bytes / MIB:.1f} -> {growth.last.rss_bytes / MIB:.1f}",
            f"{growth.rss_bytes / MIB:+.1f}",
            f"{growth.first.num_fds} -> {growth.last.num_fds}",
            f"{growth.num_fds:+.1f}",
            f"{growth.first.num_threads} -> {growth.last.num_threads}",
            f"{growth.num_threads:+.1f}",
        ]
        for growth in report.growths
    ]


def _markdown(lines: list[list[str]]) -> str:
    lines = [lines[0], ["---"] * len(lines[0]), *lines[1:]]
    return "\n".join(f"| {' | '.join(cell.replace('|', chr(92) + '|') for cell in line)} |" for line in lines)


def write_into(page: Path, name: str, block: str) -> None:
    """Replaces the text between the page's markers of that name. Raises `ValueError` if it has none."""
    begin = f"<!-- measured: {name} -->"
    head, found, rest = page.read_text().partition(begin)
    _, end, tail = rest.partition(END)
    if not found or not end:
        raise ValueError(f"{page} has no {begin} ... {END}")
    page.write_text(f"{head}{begin}\n{block}\n{END}{tail}")


def as_json(results: Sequence[CellResult]) -> str:
    """JSON with one object for each result."""
    rows = [
        {
            "phase": result.cell.phase.value,
            "fault": result.cell.fault_name,
            "problems": list(result.problems),
            "num_answers": result.num_answers,
            "num_resumes": result.num_resumes,
            "num_dropped": result.num_dropped,
            "longest_gap_s": round(result.longest_gap_s, 3),
            "settled_s": round(result.settled_s, 3),
            "wall_s": round(result.wall_s, 3),
        }
        for result in results
    ]
    return json.dumps(rows, indent=1)
