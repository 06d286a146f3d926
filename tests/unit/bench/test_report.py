"""The report: one row a goal, of the newest run; one page a run; figures come from saved runs only."""

import re
from dataclasses import replace
from pathlib import Path

import pytest

from baton.services.cli.bench.results.intervals import Interval
from bench.engine.arms import HostArm, PrefillArm
from bench.goals import GOALS, UNMEASURED, Goal, findings_for
from bench.harness.model_shapes import SHAPES
from bench.harness.rotations import Block, Finding, Remark, save
from bench.plots import plot_run
from bench.report import (
    BEGIN,
    END,
    ExperimentResult,
    ReportError,
    load_result,
    main,
    make_goal_table,
    make_run_page,
    put_into,
    rows_of,
)
from bench.router import overhead
from bench.system import exposed_transfer, goodput, interference, prefix_cache
from bench.system.deployments import MIXED, SPLIT, UNCHUNKED
from bench.transfer import throughput

ROOT = Path(__file__).resolve().parents[3]
PNG = b"\x89PNG"
G1 = next(goal for goal in GOALS if goal.number == "G1")
G8 = next(goal for goal in GOALS if goal.number == "G8")


def finding(name: str, low: float, high: float, *, kept: bool = True) -> Finding:
    interval = Interval((low + high) / 2.0, low, high)
    return Finding(name, "", 4, 3 if kept else 0, interval, interval if kept else None)


def result(*findings: Finding, experiment: str = "engine") -> ExperimentResult:
    return ExperimentResult(experiment, "2030-01-02T03:04:05Z", findings, (), (Remark("machine", "a box"),))


def rows(table: str) -> list[list[str]]:
    lines = [line for line in table.splitlines() if line.startswith("|")][2:]
    return [[cell.strip() for cell in line.strip("|").split(" | ")] for line in lines]


def row_of(table: str, goal: Goal) -> list[str]:
    return next(row for row in rows(table) if row[:2] == [goal.number, goal.what])


def test_without_runs_no_figure_is_given():
    table = rows(make_goal_table({}, {}))
    assert len(table) == len(GOALS) + len(UNMEASURED)
    assert all(re.match(r"not measured: \w+", row[3]) for row in table)


def test_every_goal_has_a_row():
    numbers = {goal.number for goal in GOALS} | {goal.number for goal in UNMEASURED}
    assert numbers == {f"G{n}" for n in range(1, 11)}
    assert len({(goal.number, goal.what) for goal in GOALS}) == len(GOALS)


def test_a_row_shows_the_least_favourable_finding_of_a_run():
    found = [
        finding("decode 1 x 256: read / ceiling", 0.81, 0.85),
        finding("decode 1 x 512: read / ceiling", 0.82, 0.83),
        finding("decode 1 x 2048: read / ceiling", 0.70, 0.75),
        finding("decode 1 x 4096: read / ceiling", 0.1, 0.2, kept=False),
        finding("decode 1 x 2048: read / ceiling, by CPU time", 0.1, 0.2),
    ]
    row = row_of(make_goal_table({"box": result(*found)}, {}), G1)
    assert row[3:5] == ["72.5 % [70 %, 75 %]: missed (decode 1 x 2048: read / ceiling)", "3/4"]
    assert row[6] == "[box](results/box.md)"


def test_a_row_shows_the_newest_run_that_measured_the_goal():
    good, bad = (finding("decode 1 x 256: read / ceiling", low, low + 0.01) for low in (0.9, 0.1))
    older = replace(result(bad), ended="2030-01-01T00:00:00Z")
    newest = replace(result(finding("x", 1, 2)), ended="2030-01-03T00:00:00Z")
    table = make_goal_table({"older": older, "newer": result(good), "newest": newest}, {})
    assert row_of(table, G1)[6] == "[newer](results/newer.md)"


def test_a_goal_that_no_run_measured_keeps_its_row():
    before = put_into(
        f"{BEGIN}{END}", make_goal_table({"box": result(finding("decode 1 x 256: read / ceiling", 1, 1))}, {})
    )
    after = make_goal_table({"loop": result(finding("loop 1 x 256: host / turn", 0.01, 0.01))}, rows_of(before))
    assert row_of(after, G1)[6] == "[box](results/box.md)"
    assert row_of(after, G8)[6] == "[loop](results/loop.md)"


def test_a_run_page_shows_verdicts_remarks_and_all_findings():
    found = (finding("decode 1 x 256: read / ceiling", 0.81, 0.85), finding("x", 1, 2, kept=False))
    page = make_run_page("box", result(*found))
    assert "83 % [81 %, 85 %]: reached (decode 1 x 256: read / ceiling)" in page
    assert "- machine: a box" in page
    assert "| x |  | - | 1.5 [1, 2] | 0/4 |" in page


def test_a_run_page_of_a_run_without_goals_has_no_verdicts():
    peers = result(finding("one stream: vllm / baton", 1.2, 1.4), experiment="peers")
    page = make_run_page("peers", peers)
    assert "| one stream: vllm / baton |  | 1.3 [1.2, 1.4] | 1.3 [1.2, 1.4] | 3/4 |" in page
    assert "| goal |" not in page


def test_a_run_that_was_ended_early_shows_its_rotations():
    early = ExperimentResult("engine", "2030-01-02T03:04:05Z", (), (block("a"),), (), num_planned=20)
    assert "Ended 2030-01-02 03:04 UTC, 1 of 20 rotations." in make_run_page("box", early)


@pytest.mark.parametrize(
    ("goal", "low", "high", "kept", "verdict"),
    [
        (G1, 0.8, 0.9, True, "reached"),
        (G1, 0.7, 0.79, True, "missed"),
        (G1, 0.7, 0.9, True, "undecided"),
        (G1, 0.9, 0.9, False, "no verdict, no rotation was steady"),
        (G8, 0.01, 0.02, True, "reached"),
        (G8, 0.021, 0.03, True, "missed"),
        (G8, 0.01, 0.03, True, "undecided"),
    ],
)
def test_only_a_whole_steady_interval_decides(goal, low, high, kept, verdict):
    assert goal.verdict(finding("x", low, high, kept=kept)) == verdict


def test_figures_by_cpu_time_belong_to_the_same_goal():
    both = [finding(name, 0.5, 0.5) for name in ("decode 1 x 256: read / ceiling", "decode 1 x 256: step")]
    both.append(finding("decode 1 x 256: read / ceiling, by CPU time", 0.5, 0.5))
    assert [found.name for found in findings_for(G1, both)] == [both[0].name, both[2].name]


def test_a_report_replaces_the_one_before():
    page = f"# Title\n\n{BEGIN}\n\nold\n\n{END}\n\nafter\n"
    once = put_into(page, "new")
    assert "old" not in once
    assert once == put_into(once, "new") == f"# Title\n\n{BEGIN}\n\nnew\n\n{END}\n\nafter\n"
    with pytest.raises(ReportError, match="has no"):
        put_into("# Title\n", "new")


def test_the_page_of_the_docs_has_one_row_a_goal_and_is_short():
    page = (ROOT / "docs" / "performance.md").read_text(encoding="utf-8")
    assert "NEW TABLE" in put_into(page, "NEW TABLE")
    measured = {(goal.number, goal.what) for goal in GOALS}
    assert set(rows_of(page)) == measured | {(goal.number, goal.what) for goal in UNMEASURED}
    assert len(page.splitlines()) <= 120


def test_a_saved_run_becomes_a_row_a_page_and_plots(tmp_path, monkeypatch):
    block = Block(0, "decode 1 x 256", 1.0, 1.0, (0.1,), (0.1,))
    run = tmp_path / "box.json"
    save(run, "engine", [block], [finding("decode 1 x 256: read / ceiling", 0.8, 0.9)], [Remark("machine", "a box")])
    assert load_result(run).blocks == (block,)
    page = tmp_path / "page.md"
    page.write_text(f"{BEGIN}{END}\n")
    flags = [str(run), "--page", str(page), "--results", str(tmp_path / "results"), "--plots", str(tmp_path / "plots")]
    monkeypatch.setattr("sys.argv", ["bench.report", *flags])
    main()
    assert "85 % [80 %, 90 %]: reached" in page.read_text()
    assert "85 % [80 %, 90 %]: reached" in (tmp_path / "results" / "box.md").read_text()
    assert [path.name for path in (tmp_path / "plots").iterdir()] == ["box-ratio.png"]


def test_without_matplotlib_the_table_is_printed_with_a_hint(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    monkeypatch.setattr("sys.argv", ["bench.report", "--plots", str(tmp_path / "plots")])
    main()
    said = capsys.readouterr()
    assert "not measured" in said.out
    assert "extra `bench`" in " ".join(said.err.split())
    assert not (tmp_path / "plots").exists()


def test_every_unit_has_a_plot(tmp_path):
    findings = [
        finding("a", 0.1, 0.2),
        finding("b", 0.1, 0.3, kept=False),
        Finding("c", "tokens/s", 2, 0, Interval(5, 4, 6), None),
    ]
    paths = plot_run("run", findings, tmp_path)
    assert {path.name for path in paths} == {"run-ratio.png", "run-tokens-a-s.png"}
    assert all(path.read_bytes().startswith(PNG) for path in paths)


def test_a_file_that_is_no_run_is_refused(tmp_path):
    path = tmp_path / "x.json"
    path.write_text("{}")
    with pytest.raises(ReportError, match=r"x\.json is not a run"):
        load_result(path)


def block(arm: str) -> Block:
    return Block(0, arm, 1.0, 1.0, (1.0,), (1.0,))


PREFIX_PLAN = prefix_cache.PrefixPlan(64, (50,), 16, 1)
PREFIX_ARMS = (
    prefix_cache.FRESH,
    prefix_cache.SALTED,
    prefix_cache.BOOKKEEPING,
    prefix_cache.cached_arm(50),
    prefix_cache.ideal_arm(50),
)
GAPS = interference.parse(["--budgets", "16"])
GAP_ARMS = [
    *map(interference.alone, (SPLIT, interference.LENT, interference.COLOCATED)),
    *map(interference.beside, GAPS.deployments),
]
EXPOSED = exposed_transfer.parse(["--transports", "nixl"])
EXPOSED_ARMS = [exposed_transfer.arm_of("nixl", num_tokens) for num_tokens in EXPOSED.prompt_tokens]
GOODPUT = goodput.parse(["--loads", "1"])
GOODPUT_ARMS = [goodput.arm_of(name, 1) for name in (SPLIT, MIXED, UNCHUNKED)]
FOUND = {
    "engine": [
        finding(arm_finding, 1, 1)
        for arm_finding in (
            *(f"decode {num_rows} x 256: read / ceiling" for num_rows in (1, 4)),
            *(f"prefill {num_tokens}: arithmetic / ceiling" for num_tokens in (512, 2048)),
            f"{PrefillArm(1024, 64).name}: speed / in one",
            f"{HostArm(1, 256, 1).name}: host / turn",
        )
    ],
    "prefix": prefix_cache.findings_of(PREFIX_PLAN, SHAPES["m150"], [block(arm) for arm in PREFIX_ARMS]),
    "transfer": throughput.findings_of([block("nixl"), block("stream")]),
    "router_overhead": overhead.findings_of([block(arm) for arm in ("direct", "direct again", "router", "router cpu")]),
    "interference": interference.findings_of(GAPS, [Block(0, arm, 1.0, 1.0, (1.0,) * 7) for arm in GAP_ARMS]),
    "exposed": exposed_transfer.findings_of(EXPOSED, [Block(0, arm, 1.0, 1.0, (0.1, 1.0)) for arm in EXPOSED_ARMS]),
    "goodput": goodput.findings_of(
        GOODPUT,
        goodput.GoodputObjectives(1.0, 1.0, 1.0),
        [Block(0, arm, 1.0, 1.0, (1.0, 0.1, 0.1, 0.1)) for arm in GOODPUT_ARMS],
    ),
}


@pytest.mark.parametrize("goal", [goal for goal in GOALS if goal.experiment in FOUND], ids=lambda goal: goal.pattern)
def test_every_goal_is_read_from_a_line_of_its_experiment(goal):
    assert findings_for(goal, FOUND[goal.experiment]) != []
