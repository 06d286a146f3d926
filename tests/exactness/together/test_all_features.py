"""One cluster with every scheduling feature on at once gives the tokens of `generate()`, and each feature has acted.

Both pools and both tiers are too small for the work: pages are evicted, copied, read back and given to the other
worker, and rows are preempted. Counts are read from the workers' own metrics.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from baton.grammar import sources
from tests.cluster import Cluster, completion_tokens, eventually
from tests.exactness.constrained_reference import ConstrainedReference
from tests.exactness.reference import Reference
from tests.tiny_models import VOCAB_SIZE, add_tokenizer, save_random_model

pytestmark = [pytest.mark.exactness, pytest.mark.integration]

PAGE_SIZE = 8
LINK_S = 60.0
FLAGS = {"page-size": PAGE_SIZE, "priority-scheduling": "true", "chunking": "equal", "eviction-policy": "slru"}
PREFILL = {
    **{"num-pages": 48, "token-budget": 40, "prefill-policy": "lpm", "long-prefill-token-threshold": 16},
    **{"page-sharing": "always", "host-tier-mib": 1, "host-tier-write": "back"},
    **{"file-tier-bytes": 4 * 1024 * 1024, "file-tier-write": "through"},
}
DECODE = {
    **{
        "num-pages": 44,
        "max-rows": 8,
        "token-budget": 24,
        "growth-reserve": "ratio",
        "growth-clip-tokens": 32,
        "drafter": "ngram",
    },
    **{"page-sharing": "always"},
}
WORDS = {"type": "array", "items": {"enum": ["a", "bc", "def"]}, "minItems": 14, "maxItems": 30}


@dataclass
class Asked:
    """A cluster and the model's own tokens. Every answer is compared."""

    cluster: Cluster
    reference: Reference
    cached: list[int] = field(default_factory=list)

    def answer(self, prompt: list[int], num_tokens: int, **fields: Any) -> list[int]:
        body = self.cluster.complete(prompt, max_tokens=num_tokens, ignore_eos=True, return_token_ids=True, **fields)
        tokens = completion_tokens(body)
        self.cached.append(body["usage"]["prompt_tokens_details"]["cached_tokens"])
        assert tokens == self.reference.generate(prompt, num_tokens), f"{len(prompt)} tokens, {fields}"
        return tokens

    def answers(self, prompts: Sequence[list[int]], num_tokens: int) -> None:
        """All at once, of priorities that differ."""
        with ThreadPoolExecutor(len(prompts)) as pool:
            asked = [
                pool.submit(self.answer, prompt, num_tokens, priority=number % 3 - 1)
                for number, prompt in enumerate(prompts)
            ]
            for one in asked:
                one.result()

    def total(self, name: str, metric: str, **labels: str) -> float:
        return self.cluster.metric(name, metric, **labels)


def random_prompt(rng: random.Random, num_tokens: int) -> list[int]:
    return [rng.randrange(9, VOCAB_SIZE) for _ in range(num_tokens)]


def looping_prompt(rng: random.Random, num_tokens: int) -> list[int]:
    return (random_prompt(rng, 11) * num_tokens)[:num_tokens]


def test_everything_at_once(tmp_path: Path) -> None:
    model = add_tokenizer(save_random_model("qwen3", tmp_path / "model"))
    prefill = {**PREFILL, "file-tier-dir": str(tmp_path / "pages")}
    with Cluster(
        tmp_path, model=str(model), transport="stream", flags=FLAGS, prefill_flags=prefill, decode_flags=DECODE
    ) as cluster:
        asked = Asked(cluster, Reference(model))
        _give_pages_back(asked, random.Random(1))
        _share_a_prefix(asked, random.Random(2))
        _preempt_beside_prompts(asked, model, random.Random(3))
        _read_from_both_tiers(asked, random.Random(4))
        _check_all_acted(asked)
        cluster.wait_pages_free(5.0)


def _give_pages_back(asked: Asked, rng: random.Random) -> None:
    """Second turns, until prefill has imported the first answer's pages from decode. A short third one stays there."""

    def imported() -> bool:
        prompt = random_prompt(rng, 5 * PAGE_SIZE + 3)
        prompt += asked.answer(prompt, 6 * PAGE_SIZE) + random_prompt(rng, 4 * PAGE_SIZE)
        prompt += asked.answer(prompt, 4) + random_prompt(rng, 3)
        asked.answer(prompt, 4)
        return asked.total("prefill-0", "baton_imported_tokens_total", source="decode") > 0

    eventually(imported, LINK_S, "a second turn imports pages")


def _share_a_prefix(asked: Asked, rng: random.Random) -> None:
    """Prompts with one new prefix, all at once: it is computed by one of them, once a worker."""
    shared = random_prompt(rng, 12 * PAGE_SIZE)
    num_before = len(asked.cached)
    asked.answers([shared + random_prompt(rng, 5 + number) for number in range(6)], 4)
    num_shared = sum(cached >= len(shared) - PAGE_SIZE for cached in asked.cached[num_before:])
    assert num_shared >= 4, "each worker computes the prefix once at most"


def _preempt_beside_prompts(asked: Asked, model: Path, rng: random.Random) -> None:
    """Rows that outgrow the pool, some drafted, one constrained, with prompts between them."""
    prompts = [looping_prompt(rng, 20) for _ in range(5)] + [random_prompt(rng, 60 + number) for number in range(3)]
    constrained = looping_prompt(rng, 30)
    expected = ConstrainedReference(model).generate(sources.json_schema_grammar(WORDS), constrained, 60)[0]
    with ThreadPoolExecutor(1) as pool:
        fields = {"guided_json": WORDS, "max_tokens": 60, "return_token_ids": True, "priority": 1}
        body = pool.submit(asked.cluster.complete, constrained, **fields)
        asked.answers(prompts, 90)
        assert completion_tokens(body.result()) == expected


def _read_from_both_tiers(asked: Asked, rng: random.Random) -> None:
    """More pages than pool and host tier have, until some that come again were in memory, and others in files.

    The last two prompts do not come again: decode has their pages, and would compute the rest itself. A busy link or a
    late write may still answer for a tier, so that a round need not find both.
    """

    def both_read() -> bool:
        prompts = [random_prompt(rng, 24 * PAGE_SIZE + number) for number in range(9)]
        for prompt in (*prompts, *prompts[-4:-2], *prompts[:2]):
            asked.answer(prompt, 2)
        return all(asked.total("prefill-0", "baton_cached_tokens_total", tier=tier) for tier in ("host", "file"))

    eventually(both_read, LINK_S, "pages are read from both tiers")


def _check_all_acted(asked: Asked) -> None:
    counts = {
        "pages given back": asked.total("prefill-0", "baton_imported_tokens_total", source="decode"),
        "prefix cache": asked.total("prefill-0", "baton_cached_tokens_total", tier="device"),
        "host tier": asked.total("prefill-0", "baton_cached_tokens_total", tier="host"),
        "file tier": asked.total("prefill-0", "baton_cached_tokens_total", tier="file"),
        "preemption": asked.total("decode-0", "baton_preemptions_total"),
        "drafts": asked.total("decode-0", "baton_draft_accepted_total"),
        "constraint": asked.total("decode-0", "baton_mask_seconds_count"),
        "split": asked.total("router-0", "baton_ttft_seconds_count", path="split"),
        "local": asked.total("router-0", "baton_ttft_seconds_count", path="local"),
    }
    assert {name: count for name, count in counts.items() if not count} == {}
    assert asked.cluster.tokens_recomputed == 0
