"""Writes saved runs into the docs: one row a goal into docs/performance.md, one page a run into docs/results, plots.

    python -m bench.report runs/*.json [--page docs/performance.md] [--results docs/results] [--plots DIRECTORY]

The page's table stands between two markers. A goal's row shows the newest run that measured it, and of that run the
finding that is least favourable; a goal that no given run measured keeps the row that it has. A page of `--results` has
every finding of one run. Figures are medians with a 95 % bootstrap interval over the steady rotations, or over all
rotations where none was steady. Without `--page` the table is printed. Plots need matplotlib (the extra `bench`).
"""

from __future__ import annotations

import argparse
import importlib.util
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import msgspec
from rich.console import Console

from baton.domain.errors import BatonError
from baton.services.cli.bench.results.intervals import Interval
from bench.goals import GOALS, UNMEASURED, VERDICTS, Goal, Unmeasured, findings_for
from bench.harness.rotations import Block, Finding, Remark

BEGIN = "<!-- begin: written by bench.report -->"
END = "<!-- end: written by bench.report -->"
BY_CPU = ", by CPU time"
_HEAD = ("| goal | what | to reach | measured | kept | limit | run |", "|---|---|---|---|---|---|---|")


class ReportError(BatonError):
    """A run or a page that no report can be made of."""

    code = "bad_report"


@dataclass(frozen=True, slots=True)
class ExperimentResult:
    """One file of `bench.harness.rotations.save`. `ended`: ISO 8601. `num_planned`: rotations asked for, if known."""

    experiment: str
    ended: str
    findings: tuple[Finding, ...]
    blocks: tuple[Block, ...]
    remarks: tuple[Remark, ...] = ()
    num_planned: int | None = None

    @property
    def progress(self) -> str:
        """Rotations done and asked for; fewer are done in a run that was ended early."""
        num_rotations = len({block.rotation for block in self.blocks})
        asked = num_rotations if self.num_planned is None else self.num_planned
        return f"{num_rotations} of {asked} rotations"


def load_result(path: Path) -> ExperimentResult:
    """Reads a run. Raises `ReportError`, `OSError`."""
    try:
        return msgspec.json.decode(path.read_bytes(), type=ExperimentResult)
    except msgspec.DecodeError as error:
        raise ReportError(f"{path} is not a run of an experiment: {error}") from None


def make_goal_table(runs: Mapping[str, ExperimentResult], old_rows: Mapping[tuple[str, str], str]) -> str:
    """One row a goal. `old_rows`: rows of an earlier table by goal and description, for goals that no run measured."""
    goals: list[Goal | Unmeasured] = [*GOALS, *UNMEASURED]
    ordered = sorted(goals, key=lambda goal: int(goal.number[1:]))
    rows = [_goal_row(goal, runs) or old_rows.get((goal.number, goal.what)) or _missing_row(goal) for goal in ordered]
    return "\n".join([*_HEAD, *rows])


def rows_of(page: str) -> dict[tuple[str, str], str]:
    """The rows of the page's table, by goal and description."""
    table = page.partition(BEGIN)[2].partition(END)[0]
    cells = {line: [cell.strip() for cell in line.strip("|").split("|")] for line in table.splitlines()}
    return {(row[0], row[1]): line for line, row in cells.items() if line.startswith("| G")}


def make_run_page(name: str, run: ExperimentResult) -> str:
    """Everything that one run found, and its remarks."""
    ended = run.ended[:16].replace("T", " ")
    lines = [f"# Run `{name}`", "", "<!-- Written by bench.report. -->", "", f"Ended {ended} UTC, {run.progress}.", ""]
    lines += [f"- {remark.name}: {remark.text}" for remark in run.remarks] or ["- no remarks"]
    goals = [goal for goal in GOALS if goal.experiment == run.experiment]
    verdicts = [_row(goal, finding, goal.what, "") for goal in goals for finding in findings_for(goal, run.findings)]
    if verdicts:
        lines += ["", "| goal | what | to reach | measured | kept | limit |", "|---|---|---|---|---|---|", *verdicts]
    return "\n".join([*lines, "", *_finding_rows(run.findings), ""])


def put_into(page: str, table: str) -> str:
    """`page` with `table` between its markers. Raises `ReportError` for a page without them."""
    before, begin, rest = page.partition(BEGIN)
    _, end, after = rest.partition(END)
    if not begin or not end:
        raise ReportError(f"the page has no {BEGIN} and {END}")
    return f"{before}{BEGIN}\n\n{table}\n\n{END}{after}"


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("runs", nargs="*", type=Path)
    parser.add_argument("--page", type=Path, help="a page with the two markers; default: print the table")
    parser.add_argument("--results", type=Path, help="a directory for one page a run")
    parser.add_argument("--plots", type=Path, help="a directory for PNG files")
    flags = parser.parse_args()
    console = Console(stderr=True)
    runs = {path.stem: load_result(path) for path in flags.runs}
    if flags.page is None:
        print(make_goal_table(runs, {}))
    else:
        page = flags.page.read_text(encoding="utf-8")
        _write(flags.page, put_into(page, make_goal_table(runs, rows_of(page))), console)
    for name, run in runs.items() if flags.results is not None else ():
        flags.results.mkdir(parents=True, exist_ok=True)
        _write(flags.results / f"{name}.md", make_run_page(name, run), console)
    if flags.plots is not None:
        _plot(runs, flags.plots, console)


def _write(path: Path, text: str, console: Console) -> None:
    path.write_text(text, encoding="utf-8")
    console.print(f"wrote {path}")


def _goal_row(goal: Goal | Unmeasured, runs: Mapping[str, ExperimentResult]) -> str | None:
    """The least favourable finding of the newest run that measured the goal; None without such a run."""
    if isinstance(goal, Unmeasured):
        return None
    found = {name: findings_for(goal, run.findings) for name, run in runs.items() if run.experiment == goal.experiment}
    measured = [name for name, findings in found.items() if findings]
    if not measured:
        return None
    newest = max(measured, key=lambda name: runs[name].ended)
    wall = [finding for finding in found[newest] if not finding.name.endswith(BY_CPU)] or found[newest]
    worst = min(wall, key=lambda finding: (VERDICTS.index(goal.verdict(finding)), goal.margin(finding)))
    return _row(goal, worst, goal.what, f" [{newest}](results/{newest}.md) |")


def _missing_row(goal: Goal | Unmeasured) -> str:
    reason, command = (goal.reason, "") if isinstance(goal, Unmeasured) else ("no run of it yet", f"`{goal.command}`")
    return f"| {goal.number} | {goal.what} | {goal.target} | not measured: {reason} | | {goal.limit} | {command} |"


def _row(goal: Goal, finding: Finding, what: str, link: str) -> str:
    interval = finding.steady or finding.overall
    figure = f"{_format(goal, interval)}: {goal.verdict(finding)} ({finding.name})"
    kept = f"{finding.num_steady}/{finding.num_rotations}"
    return f"| {goal.number} | {what} | {goal.target} | {figure} | {kept} | {goal.limit} |{link}"


def _finding_rows(findings: Sequence[Finding]) -> list[str]:
    """A table of all findings."""
    lines = ["| what | unit | steady rotations | all rotations | kept |", "|---|---|---|---|---|"]
    for finding in findings:
        steady = "-" if finding.steady is None else _plain(finding.steady)
        kept = f"{finding.num_steady}/{finding.num_rotations}"
        lines.append(f"| {finding.name} | {finding.unit} | {steady} | {_plain(finding.overall)} | {kept} |")
    return lines


def _plain(interval: Interval) -> str:
    return f"{interval.median:.3g} [{interval.low:.3g}, {interval.high:.3g}]"


def _format(goal: Goal, interval: Interval) -> str:
    return f"{goal.shown(interval.median)} [{goal.shown(interval.low)}, {goal.shown(interval.high)}]"


def _plot(runs: Mapping[str, ExperimentResult], directory: Path, console: Console) -> None:
    if importlib.util.find_spec("matplotlib") is None:
        console.print("no plots: matplotlib is not installed; it comes with the extra `bench`")
        return
    from bench.plots import plot_run

    directory.mkdir(parents=True, exist_ok=True)
    for name, run in runs.items():
        for path in plot_run(name, run.findings, directory):
            console.print(f"wrote {path}")


if __name__ == "__main__":
    main()
