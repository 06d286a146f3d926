"""Predictions by hand, and which deployment is chosen."""

from dataclasses import replace

import pytest

from baton.services.cli.calibration.prediction import (
    Deployment,
    StepCalibration,
    choose,
    predict_colocated,
    predict_split,
)

TWO_CORES = StepCalibration(
    num_rows=8, row_s=0.05, mixed_s={16: 0.075, 32: 0.1, 64: 0.16}, split_row_s=0.07, split_prompt_rate=256.0
)
"""Steps of a 0.5B model: a token of a prompt costs about 1.6 ms on both cores."""


def test_split_is_bounded_by_the_slower_side():
    prompts = predict_split(TWO_CORES)
    assert prompts.requests_per_s == pytest.approx(0.5), "256 tokens a second are half a prompt of 512"
    assert prompts.gap_s == 0.07
    outputs = predict_split(replace(TWO_CORES, split_prompt_rate=10_000.0))
    assert outputs.requests_per_s == pytest.approx(8 / (128 * 0.07))


def test_colocated_steps_have_a_chunk_while_there_are_prompts():
    long = predict_colocated(TWO_CORES, 16)  # 32 steps for the prompt, 16 for the share of the answer
    assert long.requests_per_s == pytest.approx(1 / (32 * 0.075))
    short = predict_colocated(TWO_CORES, 64)  # 8 steps with a chunk, 8 without
    assert short.requests_per_s == pytest.approx(1 / (8 * 0.16 + 8 * 0.05))
    assert short.gap_s == 0.16


def test_the_deployment_that_serves_more_within_the_bound_is_chosen():
    both = choose(TWO_CORES)
    assert both.chosen.deployment is Deployment.COLOCATED
    assert both.chosen.chunk_tokens == 32, "64 would double the gap and more"
    assert both.other.deployment is Deployment.SPLIT
    assert both.chosen.requests_per_s > 1.1 * both.other.requests_per_s


def test_a_small_gain_does_not_give_the_even_gaps_away():
    faster = replace(TWO_CORES, split_prompt_rate=512 * 0.6)
    assert choose(faster).chosen.deployment is Deployment.SPLIT


def test_split_workers_that_disturb_each_other_lose():
    one_core = replace(TWO_CORES, split_row_s=0.2, split_prompt_rate=512.0)
    assert choose(one_core).chosen.deployment is Deployment.COLOCATED


def test_split_is_kept_where_no_chunk_is_within_the_bound():
    slow = replace(TWO_CORES, mixed_s={16: 0.3, 32: 0.5})
    choice = choose(slow)
    assert choice.chosen.deployment is Deployment.SPLIT
    assert choice.other.chunk_tokens == 16, "the shortest gaps"
