"""Chooses the workers of `baton up`: prefill and decode apart, or one decode worker that does both.

A calibration decides only where the user has not named any worker, on at most `MAX_CORES` cores, for a model on a CPU
of which three engines fit. Everywhere else the deployment is split. That of the bundled models always is: they show it.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from time import localtime, strftime

from baton.services.cli.calibration.calibrate import TimedSteps, calibrate
from baton.services.cli.calibration.prediction import (
    OUTPUT_TOKENS,
    PROMPT_TOKENS,
    Deployment,
    DeploymentPrediction,
    choose,
)
from baton.services.cli.calibration.step_probe import NUM_ROWS, ProbePlan
from baton.services.cli.doctor.host import available_bytes
from baton.services.cli.forwarded_flags import flags_for, receivers
from baton.services.cli.plan import num_threads, share_cores
from baton.services.cli.settings import UpSettings
from baton.settings.choices import Device
from baton.settings.model_source import resolve_model, user_cache

MAX_CORES = 4
NUM_ENGINES = 3
"""Engines whose weights may be in memory at once."""
COLOCATED_BUDGET = 64
"""Tokens a step of a colocated worker where nothing was measured."""
WORKERS = frozenset({"prefill", "decode", "encode", "decode_token_budget", "token_budget", "vision"})
"""Settings by which a user names the workers. Flags of prefill or encode workers only name them, too."""
DRAFTS = frozenset({"drafter", "draft_model", "draft_tree"})
"""A step's drafts and chunks share one budget, which no step time here knows."""
STEP_FLAGS = (
    *("model", "dtype", "device", "page_size", "kv_dtype", "kv_head_groups", "latent_pages", "decoder", "pack_linears"),
    *("kernels", "quantization", "weight_sharing", "weight_cache_dir"),
)
"""Settings of a worker that shape its steps."""


@dataclass(frozen=True, slots=True)
class ChosenDeployment:
    """Settings with the workers that were chosen. `note`: a line for the user; empty: nothing was chosen."""

    settings: UpSettings
    note: str = ""


def choose_deployment(settings: UpSettings, cores: Sequence[int]) -> ChosenDeployment:
    """The workers to start on `cores`. Blocks while step times are measured."""
    if settings.deployment is Deployment.SPLIT:
        return ChosenDeployment(settings)
    if settings.deployment is Deployment.COLOCATED:
        return ChosenDeployment(_colocated(settings, cores, COLOCATED_BUDGET))
    if not is_open(settings, cores):
        return ChosenDeployment(settings)
    directory = resolve_model(settings.model)
    if (why := _why_not(settings, directory)) is not None:
        return ChosenDeployment(settings, f"deployment: split; not measured: {why}")
    cache = user_cache()
    found, is_new = calibrate(_plan(settings, cores), directory, None if cache is None else cache / "calibration")
    if found.times is None:
        return ChosenDeployment(settings, f"deployment: split; step times could not be measured: {_failure(found)}")
    choice = choose(found.times)
    note = _note(choice.chosen, choice.other, found, is_new=is_new)
    if choice.chosen.deployment is Deployment.SPLIT:
        return ChosenDeployment(settings, note)
    return ChosenDeployment(_colocated(settings, cores, choice.chosen.chunk_tokens + NUM_ROWS), note)


def is_open(settings: UpSettings, cores: Sequence[int]) -> bool:
    """True if the machine is small and no worker is named, nor a bundled model, which shows a split deployment."""
    is_bundled = settings.model.startswith("bundled")
    return len(cores) <= MAX_CORES and not is_bundled and not settings.demo and not names_workers(settings)


def names_workers(settings: UpSettings) -> bool:
    """True if a given flag is about workers: their numbers, or what only prefill or encode workers have."""
    given = settings.model_fields_set
    of_services = [receivers(name) for name in given]
    return bool(WORKERS & given) or any(found and not {"decode", "router"} & set(found) for found in of_services)


def _why_not(settings: UpSettings, directory: Path) -> str | None:
    """Why step times cannot be measured here, or do not decide; None if they can."""
    if getattr(settings, "device", None) is Device.CUDA:  # a forwarded flag
        return "the model runs on a GPU"
    if DRAFTS & settings.model_fields_set:
        return "rows have drafts"
    if shows_images(directory):
        return "prefill workers encode the images that the model may be shown"
    weights = sum(file.stat().st_size for file in directory.glob("*.safetensors"))
    available = available_bytes(Path("/"))
    if available is not None and NUM_ENGINES * weights > available:
        return f"{NUM_ENGINES} engines of {weights / 2**30:.1f} GiB do not fit in {available / 2**30:.1f} GiB"
    return None


def shows_images(directory: Path) -> bool:
    """True if the model's configuration has a vision tower."""
    try:
        config = json.loads((directory / "config.json").read_text(encoding="utf-8"))
    except (OSError, ValueError):  # told when the model is loaded
        return False
    return isinstance(config, dict) and "vision_config" in config


def _colocated(settings: UpSettings, cores: Sequence[int], token_budget: int) -> UpSettings:
    """Decode workers that share the cores. The rows of a step count, too."""
    budget = settings.decode_token_budget or max(token_budget, settings.page_size)
    chosen = {"prefill": 0, "encode": 0, "decode_token_budget": budget}
    return settings.model_copy(update={**chosen, "threads": _colocated_threads(settings, cores)})


def _colocated_threads(settings: UpSettings, cores: Sequence[int]) -> int:
    """A core is left to the router where there are more than two: two threads compute faster than one beside it."""
    alone = settings.model_copy(update={"prefill": 0, "encode": 0})
    return settings.threads or max(num_threads(alone, cores), min(2, len(cores) // settings.decode))


def _plan(settings: UpSettings, cores: Sequence[int]) -> ProbePlan:
    threads, all_threads = num_threads(settings, cores), _colocated_threads(settings, cores)
    prefill, decode = share_cores(cores, 2, threads)
    [all_cores] = share_cores(cores, 1, all_threads)
    flags = {name: value for name, value in flags_for("decode", settings).items() if name in STEP_FLAGS}
    plain = {name: str(value) if isinstance(value, Path) else value for name, value in flags.items()}
    return ProbePlan(plain, prefill, decode, threads, all_cores, all_threads)


def _failure(found: TimedSteps) -> str:
    return found.why if found.path is None else f"{found.why} (remove {found.path} to try again)"


def _note(chosen: DeploymentPrediction, other: DeploymentPrediction, found: TimedSteps, *, is_new: bool) -> str:
    when = f"measured in {found.seconds:.1f} s" if is_new else f"measured {strftime('%Y-%m-%d', localtime(found.at))}"
    load = f"prompts of {PROMPT_TOKENS} and answers of {OUTPUT_TOKENS} tokens, {NUM_ROWS} at once"
    return (
        f"deployment: {_told(chosen)}; {_told(other)} (predicted for {load}; step times {when}). "
        f"--deployment {other.deployment.value} starts the other one."
    )


def _told(prediction: DeploymentPrediction) -> str:
    chunks = f", chunks of {prediction.chunk_tokens}" if prediction.chunk_tokens else ""
    gap = f"{1000 * prediction.gap_s:.3g} ms between tokens beside prompts"
    return f"{prediction.deployment.value}{chunks}: {prediction.requests_per_s:.3g} requests/s, {gap}"
