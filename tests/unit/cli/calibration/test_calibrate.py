"""Step times are measured once for all that they depend on, and never read from a file that is not whole."""

import json
import os
import platform
import subprocess
from dataclasses import asdict, replace
from pathlib import Path

import pytest

from baton.services.cli.calibration import calibrate as module
from baton.services.cli.calibration.calibrate import calibrate, calibration_key, read_kept
from baton.services.cli.calibration.prediction import StepCalibration
from baton.services.cli.calibration.step_probe import ProbePlan

TASK = ProbePlan({"model": "m", "page_size": 16}, (0,), (1,), 1, (0, 1), 2)
TIMES = StepCalibration(8, 0.05, {16: 0.06, 32: 0.08}, 0.07, 300.0)


@pytest.fixture
def model(tmp_path) -> Path:
    directory = tmp_path / "model"
    directory.mkdir()
    (directory / "config.json").write_text("{}")
    return directory


@pytest.fixture
def probes(monkeypatch) -> list[ProbePlan]:
    """Plans that were measured; each gives `TIMES`."""
    plans: list[ProbePlan] = []

    def run(*args, **options):
        plans.append(ProbePlan(**json.loads(options["input"])))
        return subprocess.CompletedProcess(args, 0, json.dumps(asdict(TIMES)), "")

    monkeypatch.setattr(subprocess, "run", run)
    return plans


def test_times_are_measured_once(model, tmp_path, probes):
    cache = tmp_path / "cache"
    first, is_new = calibrate(TASK, model, cache)
    again, is_new_again = calibrate(TASK, model, cache)
    assert (is_new, is_new_again, len(probes)) == (True, False, 1)
    assert first.times == again.times == TIMES
    assert first == again
    assert list(cache.iterdir()) == [first.path], "nothing else is left"


def test_whatever_step_times_depend_on_is_in_the_key(model, monkeypatch):
    keys = [calibration_key(TASK, model)]
    for change in ({"threads": 2}, {"decode_cores": (0,)}, {"all_threads": 1}, {"flags": {"model": "m"}}):
        keys.append(calibration_key(replace(TASK, **change), model))
    monkeypatch.setattr(module, "__version__", "another")
    keys.append(calibration_key(TASK, model))
    monkeypatch.setattr(module, "cpu_name", lambda: "another")
    keys.append(calibration_key(TASK, model))
    os.utime(model / "config.json", ns=(1, 1))
    keys.append(calibration_key(TASK, model))
    (model / "model.safetensors").write_bytes(b"weights")
    keys.append(calibration_key(TASK, model))
    monkeypatch.setattr(module, "BUILT_DIR", model / "no kernels")
    keys.append(calibration_key(TASK, model))
    monkeypatch.setattr(platform, "node", lambda: "another")
    keys.append(calibration_key(TASK, model))
    assert len(set(keys)) == len(keys)


@pytest.mark.parametrize(
    "text",
    [
        "",
        "{",
        "[]",
        "{}",
        json.dumps({"times": {**asdict(TIMES), "row_s": 0.0}, "seconds": 1, "at": 1, "why": ""}),
        json.dumps({"times": {**asdict(TIMES), "row_s": float("nan")}, "seconds": 1, "at": 1, "why": ""}),
        json.dumps({"times": {**asdict(TIMES), "mixed_s": {}}, "seconds": 1, "at": 1, "why": ""}),
        json.dumps({"times": {**asdict(TIMES), "mixed_s": {"x": 1}}, "seconds": 1, "at": 1, "why": ""}),
        json.dumps({"times": {**asdict(TIMES), "more": 1}, "seconds": 1, "at": 1, "why": ""}),
        json.dumps({"times": asdict(TIMES), "seconds": 1, "at": 1}),
    ],
)
def test_a_file_that_is_not_whole_is_measured_again(model, tmp_path, probes, text):
    calibrate(TASK, model, tmp_path)
    [path] = tmp_path.glob("*.json")
    path.write_text(text)
    assert read_kept(path) is None
    assert calibrate(TASK, model, tmp_path)[1]
    assert read_kept(path) is not None


def test_a_cache_that_cannot_be_written_costs_the_next_start(model, tmp_path, probes):
    (tmp_path / "file").write_text("")
    assert calibrate(TASK, model, tmp_path / "file")[1]
    assert calibrate(TASK, model, None)[1]
    assert len(probes) == 2


@pytest.mark.parametrize(
    ("ended", "why"),
    [
        (subprocess.CompletedProcess([], 1, "", "a\nthe model runs on a GPU\n"), "the model runs on a GPU"),
        (subprocess.CompletedProcess([], -9, "", ""), "exit code -9"),
        (subprocess.CompletedProcess([], 0, "no json", "odd"), "odd"),
    ],
)
def test_a_probe_that_fails_says_why_and_is_kept(model, tmp_path, monkeypatch, ended, why):
    monkeypatch.setattr(subprocess, "run", lambda *args, **options: ended)
    found, is_new = calibrate(TASK, model, tmp_path / "cache")
    assert (found.times, found.why, is_new) == (None, why, True)
    assert calibrate(TASK, model, tmp_path / "cache") == (found, False), "the next start does not wait for it"


def test_a_probe_that_hangs_is_ended(model, monkeypatch):
    def run(*args, **options):
        raise subprocess.TimeoutExpired(args, options["timeout"])

    monkeypatch.setattr(subprocess, "run", run)
    assert calibrate(TASK, model, None)[0].why == "no step times within 180 s"


def test_variables_of_baton_do_not_reach_the_probe(model, monkeypatch):
    def run(*args, **options):
        assert [name for name in options["env"] if name.startswith("BATON_")] == []
        assert options["env"]["HOME"]
        return subprocess.CompletedProcess(args, 0, json.dumps(asdict(TIMES)), "")

    monkeypatch.setenv("BATON_DRAFT_MODEL", "another")
    monkeypatch.setenv("HOME", "/somewhere")
    monkeypatch.setattr(subprocess, "run", run)
    assert calibrate(TASK, model, None)[0].times == TIMES
