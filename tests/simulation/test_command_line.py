"""Output and exit status of `python -m simulation`."""

import io
import signal

import pytest

from simulation import __main__ as command
from simulation.policies import PolicyClasses
from simulation.report import MAX_LINES
from simulation.run import RunResult, run
from simulation.scenario import Scenario
from simulation.scenario_generator import generate_scenario
from simulation.sweep import ProgressBar
from tests.simulation.planted_bugs import FreesDuringReads

BROKEN = PolicyClasses(import_table=FreesDuringReads)


def run_broken(scenario: Scenario) -> RunResult:
    return run(scenario, BROKEN)


def first_broken(seeds: range) -> int | None:
    return next((seed for seed in seeds if run_broken(generate_scenario(seed)).violation is not None), None)


def test_good_seeds_are_counted(capsys: pytest.CaptureFixture[str]):
    assert command.main(["--first", "10", "--seeds", "2"]) == 0
    assert "2 seeds from 10" in (printed := capsys.readouterr().out)
    assert printed.endswith("0 violations\n")


def test_the_first_violation_ends_with_a_shrunk_trace(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(command, "run", run_broken)
    monkeypatch.setattr(command, "failing_seed", first_broken)
    first = first_broken(range(1, 100))
    assert command.main(["--first", str(first), "--seeds", "20"]) == 1
    printed = capsys.readouterr().out
    assert "VIOLATION I1" in printed
    assert f"on with --first {first}\n" in printed
    assert f"python -m simulation --seed {first} --trace" in printed


def test_a_stopped_run_tells_where_to_go_on(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch):
    """Also where the shell that started it in the background has SIGINT ignored."""

    def stop_at_12(seeds: range) -> None:
        if 12 in seeds:
            signal.raise_signal(signal.SIGINT)

    monkeypatch.setattr(command, "failing_seed", stop_at_12)
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        assert command.main(["--first", "10", "--seeds", "9"]) == command.INTERRUPTED
    finally:
        signal.signal(signal.SIGINT, before)
    assert capsys.readouterr().out == "stopped after 3 good seeds; on with --first 13\n"


def test_one_seed_prints_its_whole_trace(capsys: pytest.CaptureFixture[str]):
    assert command.main(["--seed", "10", "--trace"]) == 0
    printed = capsys.readouterr().out.splitlines()
    assert printed[0] == "seed 10: no violation"
    assert len(printed) > MAX_LINES


def test_progress_is_drawn_on_a_terminal_only(monkeypatch: pytest.MonkeyPatch):
    out = io.StringIO()
    ProgressBar(0, 40, out).show(20)
    assert out.getvalue() == ""
    monkeypatch.setattr(out, "isatty", lambda: True)
    ProgressBar(0, 40, out).show(20)
    assert out.getvalue().startswith("\r[" + "#" * 15 + "." * 15 + "] 20/40 seeds from 0, ")
