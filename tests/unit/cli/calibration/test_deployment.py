"""Which workers `baton up` starts, and what it says about them."""

from dataclasses import replace
from types import SimpleNamespace

import pytest

from baton.bundled import MODEL_DIR
from baton.services.cli.calibration import deployment as module
from baton.services.cli.calibration.calibrate import TimedSteps
from baton.services.cli.calibration.deployment import choose_deployment
from baton.services.cli.calibration.prediction import StepCalibration
from baton.services.cli.main import build_app, run
from baton.services.cli.settings import UpSettings

CORES = [0, 1]
COLOCATED = StepCalibration(8, 0.05, {16: 0.06, 32: 0.08, 64: 0.2}, 0.2, 100.0)
SPLIT = replace(COLOCATED, split_row_s=0.05, split_prompt_rate=10_000.0)


@pytest.fixture
def measured(monkeypatch):
    """Answers of a calibration that is not run, and the plans it was given."""

    found = SimpleNamespace(times=COLOCATED, why="", path=None, plans=[])

    def calibrate(plan, directory, cache):
        found.plans.append(plan)
        return TimedSteps(found.times, 2.5, 0.0, found.why, found.path), len(found.plans) == 1

    monkeypatch.setattr(module, "calibrate", calibrate)
    return found


def parsed(*flags: str) -> UpSettings:
    """Settings as the command makes them, for a model that is not bundled."""
    command = ["up", str(MODEL_DIR), *flags]
    bound = build_app().parse_args(command, exit_on_error=False, print_error=False)[1]
    return bound.kwargs.get("settings", UpSettings()).model_copy(update={"model": bound.args[0]})


def workers(settings: UpSettings) -> tuple[int, int, int, int | None]:
    return settings.prefill, settings.decode, settings.decode_token_budget, settings.threads


def test_step_times_decide_on_a_small_machine(measured):
    chosen = choose_deployment(parsed(), CORES)
    assert workers(chosen.settings) == (0, 1, 40, 2), "chunks of 32 beside 8 rows"
    assert chosen.note.startswith("deployment: colocated, chunks of 32: ")
    assert "; split: " in chosen.note
    assert "measured in 2.5 s" in chosen.note
    assert "--deployment split" in chosen.note
    measured.times = SPLIT
    chosen = choose_deployment(parsed(), CORES)
    assert workers(chosen.settings) == (1, 1, 0, None)
    assert chosen.note.startswith("deployment: split: ")
    assert "measured 1970-01-01" in chosen.note, "kept ones"


def test_the_probe_has_the_workers_cores_and_flags(measured):
    choose_deployment(parsed("--page-size=8", "--kv-dtype=int8", "--max-rows=3"), CORES)
    choose_deployment(parsed("--threads=2"), range(4))
    choose_deployment(parsed(), range(4))
    choose_deployment(parsed(), [3])
    plan, more_threads, more_cores, one_core = measured.plans
    assert (more_threads.prefill_cores, more_threads.decode_cores) == ((0, 1), (2, 3))
    assert (more_threads.all_cores, more_threads.all_threads) == ((0, 1), 2)
    assert (more_cores.all_cores, more_cores.all_threads) == ((0, 1, 2), 3), "one is left to the router"
    assert (one_core.prefill_cores, one_core.all_cores, one_core.all_threads) == ((3,), (3,), 1)
    assert (plan.prefill_cores, plan.decode_cores, plan.threads) == ((0,), (1,), 1)
    assert (plan.all_cores, plan.all_threads) == ((0, 1), 2)
    assert plan.flags == {"model": str(MODEL_DIR), "page_size": 8, "kv_dtype": "int8", "dtype": "auto"}


@pytest.mark.parametrize(
    ("flags", "cores"),
    [
        ((), range(5)),
        (("--prefill=1",), CORES),
        (("--decode=2",), CORES),
        (("--decode-token-budget=64",), CORES),
        (("--token-budget=64",), CORES),
        (("--deployment=split",), CORES),
        (("--demo",), CORES),
        (("--vision=local",), CORES),
        (("--file-tier-dir=/tmp/pages",), CORES),
        (("--prefill-policy=fcfs",), CORES),
        (("--host-tier-mib=64",), CORES),
    ],
)
def test_named_workers_and_large_machines_are_not_measured(measured, flags, cores):
    settings = parsed(*flags)
    chosen = choose_deployment(settings, cores)
    assert (chosen.settings, chosen.note, measured.plans) == (settings, "", [])


@pytest.mark.parametrize("model", ["bundled", "bundled-vision"])
def test_the_bundled_models_show_a_split_deployment(measured, model):
    assert choose_deployment(UpSettings(model=model), CORES).settings.prefill == 1
    assert measured.plans == []


def test_variables_name_workers_too(measured, monkeypatch):
    monkeypatch.setenv("BATON_PREFILL", "1")
    choose_deployment(parsed(), CORES)
    assert measured.plans == []


def test_what_cannot_be_measured_is_split_and_said(measured, monkeypatch, tmp_path):
    measured.times, measured.why = None, "an engine ended before its steps were timed"
    chosen = choose_deployment(parsed(), CORES)
    assert chosen.settings.prefill == 1
    assert chosen.note.endswith("could not be measured: an engine ended before its steps were timed")
    measured.path = tmp_path / "kept.json"
    assert f"(remove {measured.path} to try again)" in choose_deployment(parsed(), CORES).note


@pytest.mark.parametrize(
    ("flag", "why"), [("--device=cuda", "the model runs on a GPU"), ("--drafter=ngram", "rows have drafts")]
)
def test_what_step_times_do_not_know_is_split_and_said(measured, flag, why):
    assert choose_deployment(parsed(flag), CORES).note == f"deployment: split; not measured: {why}"
    assert measured.plans == []


def test_engines_that_do_not_fit_are_not_started(measured, monkeypatch):
    monkeypatch.setattr(module, "available_bytes", lambda root: 2**20)
    assert "do not fit in 0.0 GiB" in choose_deployment(parsed(), CORES).note
    assert measured.plans == []


def test_a_model_that_shows_images_keeps_its_prefill_workers(measured, tmp_path):
    (tmp_path / "config.json").write_text('{"vision_config": {}}')
    (tmp_path / "tokenizer.json").write_text("{}")
    (tmp_path / "model.safetensors").write_bytes(b"")
    chosen = choose_deployment(UpSettings(model=str(tmp_path)), CORES)
    assert (chosen.settings.prefill, measured.plans) == (1, [])
    assert "encode the images" in chosen.note


def test_a_colocated_deployment_can_be_asked_for(measured):
    chosen = choose_deployment(parsed("--deployment=colocated", "--decode-token-budget=100"), range(16))
    assert workers(chosen.settings) == (0, 1, 100, 4)
    chosen = choose_deployment(UpSettings(deployment="colocated"), CORES)
    assert workers(chosen.settings) == (0, 1, 64, 2)
    chosen = choose_deployment(UpSettings(deployment="colocated", decode=2), CORES)
    assert workers(chosen.settings) == (0, 2, 64, 1)
    assert measured.plans == []


def test_a_colocated_deployment_has_no_prefill_workers(capsys):
    assert run(["up", "--deployment=colocated", "--prefill=1"]) == 2
    assert "leave out prefill and encode" in capsys.readouterr().err
    assert run(["up", "--deployment=colocated", "--vision=local"]) == 2
    assert "leave out vision" in capsys.readouterr().err
