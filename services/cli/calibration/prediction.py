"""Predicts what a split and a colocated deployment serve, from step times of this machine, and chooses one. Pure.

Prompts and answers have fixed lengths, and as many sequences run at once as were measured. Split: prefill computes
prompts while decode's rows run, so the slower of both bounds the requests. Colocated: every step has the rows, and a
chunk of a prompt as long as there is one (chunked prefill, Sarathi-Serve), so a gap between tokens is as long as the
step with its chunk. Requests count where no gap is longer than `GAP_FACTOR` times that of the rows alone on all cores.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum

PROMPT_TOKENS = 512
OUTPUT_TOKENS = 128
GAP_FACTOR = 2.0
MIN_GAIN = 1.1
"""Colocated is chosen for so many times the requests: split has the more even gaps, and prompts apart from them."""


class Deployment(StrEnum):
    """Workers of `baton up`. SPLIT: prefill and decode apart. COLOCATED: a decode worker on all cores does both.

    AUTO: on at most four cores what a calibration predicts to serve more, else split.
    """

    AUTO = "auto"
    SPLIT = "split"
    COLOCATED = "colocated"


@dataclass(frozen=True, slots=True)
class StepCalibration:
    """Step times of one model on one machine, in seconds.

    `num_rows`: sequences in each step. `row_s`: a step of rows alone on all cores. `mixed_s`: with a chunk of so many
    prompt tokens. `split_row_s`: on decode's cores while prefill computes prompts on its own, `split_prompt_rate`
    tokens a second.
    """

    num_rows: int
    row_s: float
    mixed_s: Mapping[int, float]
    split_row_s: float
    split_prompt_rate: float


@dataclass(frozen=True, slots=True)
class DeploymentPrediction:
    """What a deployment serves. `chunk_tokens`: prompt tokens a step of a colocated worker; 0 for split."""

    deployment: Deployment
    requests_per_s: float
    gap_s: float
    chunk_tokens: int = 0


@dataclass(frozen=True, slots=True)
class DeploymentChoice:
    """The chosen prediction and the other one."""

    chosen: DeploymentPrediction
    other: DeploymentPrediction


def predict_split(times: StepCalibration) -> DeploymentPrediction:
    """Prefill and decode work side by side: the slower one bounds the rate."""
    prompts = times.split_prompt_rate / PROMPT_TOKENS
    outputs = times.num_rows / (OUTPUT_TOKENS * times.split_row_s)
    return DeploymentPrediction(Deployment.SPLIT, min(prompts, outputs), times.split_row_s)


def predict_colocated(times: StepCalibration, chunk_tokens: int) -> DeploymentPrediction:
    """A request takes steps with its chunks, and its share of the steps of its answer that have no chunk."""
    num_mixed, num_steps = PROMPT_TOKENS / chunk_tokens, OUTPUT_TOKENS / times.num_rows
    seconds = num_mixed * times.mixed_s[chunk_tokens] + max(0.0, num_steps - num_mixed) * times.row_s
    return DeploymentPrediction(Deployment.COLOCATED, 1 / seconds, times.mixed_s[chunk_tokens], chunk_tokens)


def choose(times: StepCalibration) -> DeploymentChoice:
    """Split, unless colocated serves `MIN_GAIN` times as much within the bound of gaps, or split exceeds that bound."""
    bound_s = GAP_FACTOR * times.row_s
    split, colocated = predict_split(times), _best_colocated(times, bound_s)
    if _served(colocated, bound_s) > MIN_GAIN * _served(split, bound_s):
        return DeploymentChoice(colocated, split)
    return DeploymentChoice(split, colocated)


def _best_colocated(times: StepCalibration, bound_s: float) -> DeploymentPrediction:
    """The chunk that serves most within the bound; where none is, the one with the shortest gaps."""
    all_chunks = [predict_colocated(times, chunk_tokens) for chunk_tokens in times.mixed_s]
    within = [each for each in all_chunks if each.gap_s <= bound_s]
    if within:
        return max(within, key=lambda each: each.requests_per_s)
    return min(all_chunks, key=lambda each: each.gap_s)


def _served(prediction: DeploymentPrediction, bound_s: float) -> float:
    return prediction.requests_per_s if prediction.gap_s <= bound_s else 0.0
