"""Placement over caches in simulated time: close to an oracle's hits, and no worker that all prompts follow."""

from __future__ import annotations

import pytest

from bench.router.placement_replay import ORACLE, ReplayResult, conversations, replay_all, replayed

NUM_WORKERS = 8


@pytest.fixture(scope="module")
def results() -> dict[str, ReplayResult]:
    prompts = replayed(conversations(200, seed=2), NUM_WORKERS, load=0.5)
    return replay_all(prompts, NUM_WORKERS, num_pages=400)


def test_placement_finds_nine_tenths_of_what_an_oracle_finds(results: dict[str, ReplayResult]) -> None:
    """The oracle has all pools in one, so it never computes a page that is cached anywhere."""
    assert results["cache-aware, cache events"].hit_share >= 0.9 * results[ORACLE].hit_share
    assert results["least-load"].hit_share < 0.5 * results[ORACLE].hit_share, "a trace in which any placement does"


def test_placement_by_caches_alone_would_end_in_one_worker(results: dict[str, ReplayResult]) -> None:
    """All prompts share their first page. Whoever has it gets the next prompt, and so the one after it."""
    assert results["most cached, whatever waits"].busiest > 0.9 * NUM_WORKERS


def test_placement_makes_no_hot_spot(results: dict[str, ReplayResult]) -> None:
    product, unaware = results["cache-aware, cache events"], results["round-robin"]
    assert product.busiest <= 1.8
    assert product.p50_s < 0.7 * unaware.p50_s
    assert product.p99_s < 0.7 * unaware.p99_s


def test_a_replay_gives_the_same_figures_again() -> None:
    prompts = replayed(conversations(20, seed=2), 2, load=0.7)
    assert replay_all(prompts, 2, num_pages=60) == replay_all(prompts, 2, num_pages=60)


def test_a_prompt_beyond_every_pool_is_computed_and_kept_nowhere() -> None:
    [row, *_] = conversations(1, seed=3)
    prompts = replayed([row, row], 2, load=0.5)
    results = replay_all(prompts, 2, num_pages=max(1, len(row.block_ids) // 4))
    assert {result.hit_share for result in results.values()} == {0.0}
