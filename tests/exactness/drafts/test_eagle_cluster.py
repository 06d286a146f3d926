"""A cluster whose EAGLE head grows trees answers as one without, over HTTP and both transfers, and after a kill."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from pathlib import Path

import pytest

from baton.transfer.nixl_agent import nixl_available
from tests.cluster import Cluster, completion_tokens, eventually, links_in
from tests.exactness.drafts.test_speculation_exactness import (
    CHUNKS,
    DRAWS,
    ONLY_FEW,
    PAGES,
    PlainEngine,
    _kill,
    branching_prompt,
    complete,
    kill_busy,
    looping_prompt,
    model,
    num_off_chain,
    plain,
)
from tests.lateness import met
from tests.stream_client import ask, tokens
from tests.unit.model.drafts.tiny_heads import HeadReference, random_head, save_head

pytestmark = [pytest.mark.exactness, pytest.mark.integration]

__all__ = ["model", "plain"]  # fixtures of this module, too
CASES = [(looping_prompt(80 + seed), DRAWS[name]) for seed, name in enumerate(("greedy", "seeded", "bias"))]
UNSURE = branching_prompt(1, 45), {"temperature": 0, "logit_bias": ONLY_FEW}
"""A prompt on whose output the head is not fitted: its first guess is often wrong where its second one is right."""


@pytest.fixture(scope="module")
def cluster(model: Path, plain: PlainEngine, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    """Two decode workers with one head; one of them has the stream transport alone."""
    reference = HeadReference.of("eagle3", random_head("eagle3"), model)
    reference.fit([[*prompt, *plain.tokens(prompt, fields)] for prompt, fields in CASES], num_steps=120)
    folder = tmp_path_factory.mktemp("eagle")
    head = save_head(reference.tensors, folder / "head")
    flags = {**PAGES, "draft-model": str(head)}
    with Cluster(
        folder,
        model=str(model),
        flags=flags,
        prefill_flags=CHUNKS,
        decode_flags={"drafter": "eagle", "draft-tree": "3,2"},
    ) as cluster:
        cluster.start("decode", "decode-1", {"transport": "stream"})
        cluster.wait_links(2)
        yield cluster


def accepted(cluster: Cluster, name: str) -> float:
    return cluster.metric(name, "baton_draft_accepted_total", drafter="eagle")


def test_tokens_over_both_transports_and_after_a_kill(cluster: Cluster, plain: PlainEngine) -> None:
    expected = [plain.tokens(prompt, fields) for prompt, fields in CASES]
    for _ in range(3):
        for (prompt, fields), output in zip(CASES, expected, strict=True):
            assert completion_tokens(complete(cluster, prompt, fields)) == output
    assert all(accepted(cluster, process.name) > 0 for process in cluster.workers("decode"))
    assert cluster.bytes_moved > 0
    assert cluster.tokens_recomputed == 0
    used = {way for process in cluster.workers("decode") for way in links_in(process.log.read_text())}
    assert used == ({"nixl", "stream"} if nixl_available() is None else {"stream"})
    other = save_head(random_head("eagle"), cluster.directory / "other")
    stranger = cluster.start("decode", "decode-2", {"draft-model": str(other)})
    source = cluster.processes["prefill-0"]
    eventually(lambda: "draft_model" in _refusals(source.log), 60.0, "another head is refused by name")
    _kill(cluster, stranger.name)
    (prompt, fields), num_tokens = UNSURE, 600
    whole = plain.tokens(prompt, fields, num_tokens)
    body = {"model": cluster.model_name, "prompt": prompt, "max_tokens": num_tokens, "stream": True}
    body |= {**fields, "return_token_ids": True, "ignore_eos": True}
    before = {process.name: num_off_chain(cluster, process.name) for process in cluster.workers("decode")}
    with ask(cluster.url, body) as events:
        seen = list(itertools.islice(events, 8))
        kill_busy(cluster, lambda name: num_off_chain(cluster, name) > before[name])
        (survivor,) = [p.name for p in cluster.workers("decode") if p.expected_running]
        drafted = accepted(cluster, survivor)
        seen += events
    assert [token for token in tokens(seen) if token is not None] == whole
    met(accepted(cluster, survivor) > drafted, "the kill and the answer")


def _refusals(log: Path) -> str:
    return "\n".join(line for line in log.read_text().splitlines() if "link_refused" in line)
