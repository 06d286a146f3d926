"""From saved runs to the table of goals in docs/performance.md, and to plots of every run.

    python -m bench.report runs/*.json [--page docs/performance.md] [--plots DIRECTORY]

The table stands between two markers and is written anew: goal, what was measured, how much of the run counted, the
limit and the command. Figures are medians with their 95 % bootstrap interval over the steady rotations, or over all of
them where none was steady, which the table says. All runs given are shown, by the names of their files. Without
`--page` the table is printed and nothing is written; plots need matplotlib (the extra `bench`) and are left out, in
words, without it.
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
from bench.goals import GOALS, SHOWN_WHOLE, UNMEASURED, Goal, Unmeasured, findings_for
from bench.harness.rotations import Block, Finding, Remark
from services.cli.bench.results.intervals import Interval

BEGIN = "<!-- begin: written by bench.report -->"
END = "<!-- end: written by bench.report -->"


class ReportError(BatonError):
    """A run or a page that no report can be made of."""

    code = "bad_report"


@dataclass(frozen=True, slots=True)
class ExperimentResult:
    """One file of `bench.harness.rotations.save`. `ended`: ISO 8601."""

    experiment: str
    ended: str
    findings: tuple[Finding, ...]
    blocks: tuple[Block, ...]
    remarks: tuple[Remark, ...] = ()
    num_planned: int | None = None
    """Rotations that were asked for; unknown of files from before it was noted."""

    @property
    def progress(self) -> str:
        """How many rotations there are: fewer than asked for in a run that was ended early."""
        num_rotations = len({block.rotation for block in self.blocks})
        asked = num_rotations if self.num_planned is None else self.num_planned
        return f"{num_rotations} of {asked} rotations"


def load_result(path: Path) -> ExperimentResult:
    """Reads a run. Raises `ReportError`, `OSError`."""
    try:
        return msgspec.json.decode(path.read_bytes(), type=ExperimentResult)
    except msgspec.DecodeError as error:
        raise ReportError(f"{path} is not a run of an experiment: {error}") from None


def make_report(runs: Mapping[str, ExperimentResult]) -> str:
    """The text between the markers: the table of goals, then what a reader has to know of every run, by its name."""
    lines = ["| goal | what | to reach | measured | kept | limit | run |", "|---|---|---|---|---|---|---|"]
    asked: list[Goal | Unmeasured] = [*GOALS, *UNMEASURED]
    for line in sorted(asked, key=lambda line: int(line.number[1:])):
        lines += _gap_rows(line) if isinstance(line, Unmeasured) else _goal_rows(line, runs)
    for name, run in runs.items():
        lines += ["", f"Run `{name}`, ended {run.ended[:16].replace('T', ' ')} UTC, {run.progress}:", ""]
        lines += [f"- {remark.name}: {remark.text}" for remark in run.remarks] or ["- no remarks"]
        if run.experiment in SHOWN_WHOLE or run.experiment not in {goal.experiment for goal in GOALS}:
            lines += ["", *_finding_rows(run.findings)]
    return "\n".join(lines)


def put_into(page: str, report: str) -> str:
    """`page` with `report` between its markers. Raises `ReportError` for a page without them."""
    before, begin, rest = page.partition(BEGIN)
    _, end, after = rest.partition(END)
    if not begin or not end:
        raise ReportError(f"the page has no {BEGIN} and {END}")
    return f"{before}{BEGIN}\n\n{report}\n\n{END}{after}"


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("runs", nargs="*", type=Path)
    parser.add_argument("--page", type=Path, help="a page with the two markers; default: print the table")
    parser.add_argument("--plots", type=Path, help="a directory for PNG files")
    flags = parser.parse_args()
    console = Console(stderr=True)
    runs = {path.stem: load_result(path) for path in flags.runs}
    report = make_report(runs)
    if flags.page is None:
        print(report)
    else:
        flags.page.write_text(put_into(flags.page.read_text(encoding="utf-8"), report), encoding="utf-8")
        console.print(f"wrote {flags.page}")
    if flags.plots is not None:
        _plot(runs, flags.plots, console)


def _gap_rows(gap: Unmeasured) -> list[str]:
    return [f"| {gap.number} | {gap.what} | {gap.target} | not measured: {gap.reason} | | {gap.limit} | |"]


def _goal_rows(goal: Goal, all_runs: Mapping[str, ExperimentResult]) -> list[str]:
    """A row for every finding, or one that says why there is none."""
    runs = {name: run for name, run in all_runs.items() if run.experiment == goal.experiment}
    rows = [_row(goal, finding, name) for name, run in runs.items() for finding in findings_for(goal, run.findings)]
    reason = "the run left it out" if runs else "no run of it was given"
    missing = f"| {goal.number} | {goal.what} | {goal.target} | not measured: {reason} | | {goal.limit} | "
    return rows or [f"{missing}`{goal.command}` |"]


def _row(goal: Goal, finding: Finding, run: str) -> str:
    interval = finding.steady or finding.overall
    measured = f"{_format(goal, interval)}: {goal.verdict(finding)}"
    kept = f"{finding.num_steady}/{finding.num_rotations}"
    what = f"{goal.what} ({finding.name})"
    return f"| {goal.number} | {what} | {goal.target} | {measured} | {kept} | {goal.limit} | {run} |"


def _finding_rows(findings: Sequence[Finding]) -> list[str]:
    """A table of everything found."""
    lines = ["| what | unit | steady rotations | all rotations | kept |", "|---|---|---|---|---|"]
    for finding in findings:
        kept = "-" if finding.steady is None else _plain(finding.steady)
        share = f"{finding.num_steady}/{finding.num_rotations}"
        lines.append(f"| {finding.name} | {finding.unit} | {kept} | {_plain(finding.overall)} | {share} |")
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
