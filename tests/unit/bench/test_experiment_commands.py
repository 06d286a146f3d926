"""`baton bench engine` and its like: they hand their words on, and say what is missing without a checkout."""

import sys

import pytest

from services.cli.bench import experiments
from services.cli.bench.experiments import EXPERIMENTS, Experiment
from services.cli.main import run


@pytest.mark.parametrize("experiment", EXPERIMENTS, ids=lambda experiment: experiment.command)
def test_help_is_the_experiments_own(experiment, capfd):
    assert run(["bench", experiment.command, "--help"]) == 0
    shown = capfd.readouterr().out
    assert f"python -m {experiment.module}" in shown
    assert "--rotations" in shown


def test_words_and_exit_code_are_handed_on(monkeypatch):
    ran: list[list[str]] = []

    class Ended:
        returncode = 7

    def note(command: list[str], *, env: dict[str, str], check: bool) -> Ended:
        ran.append(command)
        assert env["OMP_NUM_THREADS"] == "1"
        assert not check
        return Ended()

    monkeypatch.setattr("subprocess.run", note)
    assert run(["bench", "engine", "--shape", "tiny", "--rotations", "2", "--parts", "host"]) == 7
    assert ran == [[sys.executable, "-m", "bench.engine", "--shape", "tiny", "--rotations", "2", "--parts", "host"]]


@pytest.mark.parametrize("module", ["no_such_package.engine", "bench.no_such_experiment"])
def test_without_a_checkout_it_is_said_in_words(module, monkeypatch, capsys):
    missing = Experiment("engine", module, "")
    monkeypatch.setattr(experiments, "EXPERIMENTS", (missing,))
    with pytest.raises(experiments.NoCheckout, match=r"part of the repository and of no wheel.*make install-dev"):
        experiments.run_experiment(missing, [])
