"""The probe times a real model's steps."""

import multiprocessing
import os
import signal
import time
from typing import Any

import pytest

from baton.bundled import MODEL_DIR
from baton.services.cli.calibration import step_probe
from baton.services.cli.calibration.calibrate import calibrate
from baton.services.cli.calibration.prediction import choose
from baton.services.cli.calibration.step_probe import CHUNKS, NUM_ROWS, ProbePlan

pytestmark = pytest.mark.slow


def plan(model: str) -> ProbePlan:
    core = min(os.sched_getaffinity(0))
    flags = {"model": model, "page_size": 8, "dtype": "float32"}
    return ProbePlan(flags, (core,), (core,), 1, (core,), 1)


def test_a_models_steps_are_timed_and_lead_to_a_choice():
    found, is_new = calibrate(plan("bundled"), MODEL_DIR, None)
    assert is_new
    assert found.times is not None, found.why
    assert found.times.num_rows == NUM_ROWS
    assert sorted(found.times.mixed_s) == sorted(CHUNKS)
    choice = choose(found.times)
    assert choice.chosen.requests_per_s > 0
    assert {choice.chosen.deployment, choice.other.deployment} == {"split", "colocated"}


def test_a_model_that_cannot_be_loaded_is_named(tmp_path):
    found, _ = calibrate(plan(str(tmp_path)), tmp_path, None)
    assert found.times is None
    assert "config.json" in found.why


def run_two(monkeypatch, first, second, deadline_s: float = 60.0) -> list:
    """What two children give, which build no engine."""
    monkeypatch.setattr(step_probe, "_timer", lambda flags, threads: None)
    cores = tuple(os.sched_getaffinity(0))
    runs: list[Any] = [(cores, 1, {}, run) for run in (first, second)]
    return step_probe._run(multiprocessing.get_context("fork"), time.monotonic() + deadline_s, *runs)


def wait_for_ever(timer) -> None:
    signal.pause()


def test_results_come_in_order(monkeypatch):
    assert run_two(monkeypatch, lambda timer: 1, lambda timer: 2) == [1, 2]


def test_the_first_failure_ends_all(monkeypatch):
    def fail(timer) -> None:
        raise ValueError("no room")

    with pytest.raises(RuntimeError, match="no room"):
        run_two(monkeypatch, wait_for_ever, fail)
    with pytest.raises(RuntimeError, match="ended before"):
        run_two(monkeypatch, wait_for_ever, lambda timer: os._exit(3))
    assert multiprocessing.active_children() == []


def test_late_children_are_ended(monkeypatch):
    with pytest.raises(RuntimeError, match="no step times within"):
        run_two(monkeypatch, wait_for_ever, wait_for_ever, deadline_s=0.2)
    assert multiprocessing.active_children() == []


def test_a_child_ends_with_the_probe(monkeypatch):
    """Killed, so that it ends nothing itself."""
    read_end, write_end = os.pipe()
    probe = os.fork()
    if probe == 0:
        os.close(read_end)

        def tell(timer) -> None:
            os.write(write_end, b"x")
            signal.pause()

        run_two(monkeypatch, tell, tell)
        os._exit(0)
    os.close(write_end)
    assert os.read(read_end, 1) == b"x"
    assert os.read(read_end, 1) == b"x"
    os.kill(probe, signal.SIGKILL)
    os.waitpid(probe, 0)
    assert os.read(read_end, 1) == b"", "nobody has the other end any more"
    os.close(read_end)
