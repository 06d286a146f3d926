"""Subcommands of experiments pass their arguments on, and report a missing checkout."""

import runpy
import sys

import pytest

from baton.services.cli.bench import experiments
from baton.services.cli.bench.experiments import EXPERIMENTS, ExperimentCommand
from baton.services.cli.main import run


@pytest.mark.parametrize("experiment", EXPERIMENTS, ids=lambda experiment: experiment.command)
@pytest.mark.filterwarnings("ignore:.*found in sys.modules:RuntimeWarning")
def test_help_is_the_experiments_own(experiment, monkeypatch, capsys):
    """The program runs in this process, which has imported torch, and not in one that replaces it."""

    def become(program: str, command: list[str], environment: dict[str, str]) -> None:
        python, option, module, *flags = command
        assert (program, python, option) == (sys.executable, sys.executable, "-m")
        monkeypatch.setattr(sys, "argv", [module, *flags])
        runpy.run_module(module, run_name="__main__", alter_sys=True)

    monkeypatch.setattr("os.execve", become)
    with pytest.raises(SystemExit) as ended:
        run(["bench", experiment.command, "--help"])
    assert ended.value.code == 0
    shown = capsys.readouterr().out
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
