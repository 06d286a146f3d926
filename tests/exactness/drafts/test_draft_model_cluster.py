"""A cluster with a draft model answers as one without, over HTTP, and its drafts survive the handoff and a kill.

The model drafts for itself, so every draft that is verified must be accepted: a draft layer that came over wrongly, or
was not replayed, would show.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.cluster import Cluster, completion_tokens
from tests.exactness.drafts.test_speculation_exactness import (
    CHUNKS,
    DRAWS,
    NUM_TOKENS,
    PAGES,
    PlainEngine,
    complete,
    kill_busy,
    looping_prompt,
    model,
    plain,
)
from tests.lateness import met
from tests.stream_client import ask, tokens

pytestmark = [pytest.mark.exactness, pytest.mark.integration]

__all__ = ["model", "plain"]  # fixtures of this module, too
DRAFTING = {"drafter": "draft-model"}


@pytest.fixture(scope="module")
def cluster(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    flags = {**PAGES, "draft-model": str(model)}
    folder = tmp_path_factory.mktemp("draft-model")
    with Cluster(
        folder, model=str(model), num_decode=2, flags=flags, prefill_flags=CHUNKS, decode_flags=DRAFTING
    ) as cluster:
        yield cluster


def drafts(cluster: Cluster, name: str) -> tuple[float, float]:
    """Drafts that a decode worker has verified, and accepted."""
    names = "baton_draft_tokens_total", "baton_draft_accepted_total"
    drafted, accepted = (cluster.metric(name, metric, drafter="draft-model") for metric in names)
    return drafted, accepted


def test_tokens_of_every_draw_from_the_handoff_and_from_caches(cluster: Cluster, plain: PlainEngine) -> None:
    for seed, name in enumerate(DRAWS):
        prompt = looping_prompt(60 + seed)
        expected = plain.tokens(prompt, DRAWS[name])
        for _ in range(2):
            assert completion_tokens(complete(cluster, prompt, DRAWS[name])) == expected
    counts = [drafts(cluster, process.name) for process in cluster.workers("decode")]
    assert all(drafted == accepted for drafted, accepted in counts)
    assert sum(accepted for _, accepted in counts) > NUM_TOKENS
    assert cluster.bytes_moved > 0
    assert cluster.tokens_recomputed == 0


def test_a_kill_in_the_middle_is_replayed_with_draft_layers(cluster: Cluster, plain: PlainEngine) -> None:
    prompt, fields, num_tokens = looping_prompt(71), DRAWS["seeded"], 600
    expected = plain.tokens(prompt, fields, num_tokens)
    body = {"model": cluster.model_name, "prompt": prompt, "max_tokens": num_tokens, "stream": True}
    body |= {**fields, "return_token_ids": True, "ignore_eos": True}
    with ask(cluster.url, body) as events:
        seen = list(itertools.islice(events, 8))
        counts = {process.name: drafts(cluster, process.name) for process in cluster.workers("decode")}
        busy = kill_busy(cluster, lambda name: True)
        (other,) = {"decode-0", "decode-1"} - {busy}
        before = counts[other]  # two readings, but it was idle
        seen += events
    assert [token for token in tokens(seen) if token is not None] == expected
    drafted, accepted = (now - then for now, then in zip(drafts(cluster, other), before, strict=True))
    assert drafted == accepted
    met(accepted, "the kill and the answer")
