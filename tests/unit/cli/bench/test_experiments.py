"""Subcommands of experiments pass their arguments on, and report a missing checkout."""

import subprocess
import sys

import pytest

from baton.services.cli.bench import experiments
from baton.services.cli.bench.experiments import EXPERIMENTS, ExperimentCommand
from baton.services.cli.main import run


@pytest.mark.parametrize("experiment", EXPERIMENTS, ids=lambda experiment: experiment.command)
def test_help_is_the_experiments_own(experiment):
    command = [sys.executable, "-m", "baton.services.cli.main", "bench", experiment.command, "--help"]
    shown = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    assert f"python -m {experiment.module}" in shown
    assert "--rotations" in shown


def test_the_process_is_replaced_by_the_experiment(monkeypatch):
    class Became(Exception):
        pass

    became: list[object] = []

    def note(program: str, command: list[str], environment: dict[str, str]) -> None:
        became.extend((program, *command))
        assert environment["OMP_NUM_THREADS"] == "1"
        raise Became

    monkeypatch.setattr("os.execve", note)
    with pytest.raises(Became):
        run(["bench", "engine", "--shape", "tiny", "--rotations", "2"])
    python = sys.executable
    assert became == [python, python, "-m", "bench.engine.steps", "--shape", "tiny", "--rotations", "2"]


@pytest.mark.parametrize("module", ["no_such_package.engine", "bench.no_such_experiment"])
def test_a_missing_checkout_is_reported(module, monkeypatch, capsys):
    missing = ExperimentCommand("engine", module, "")
    monkeypatch.setattr(experiments, "EXPERIMENTS", (missing,))
    with pytest.raises(experiments.CheckoutMissing, match=r"part of the repository and of no wheel.*make install-dev"):
        experiments.run_experiment(missing, [])
