"""Pages that decode computed come back to prefill: for the next turn, and for a row that is sent back.

Exact, and nothing is computed twice.
"""

from __future__ import annotations

import random
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from baton.bundled import MODEL_DIR
from baton.transfer.nixl_agent import nixl_available
from tests.cluster import Cluster, completion_tokens, eventually
from tests.exactness.reference import Reference
from tests.exactness.test_cluster_exactness import PAGE_SIZE, random_prompt

pytestmark = [pytest.mark.exactness, pytest.mark.integration]

NUM_PROMPT, NUM_OUTPUT, NUM_NEXT = 5 * PAGE_SIZE + 3, 6 * PAGE_SIZE, PAGE_SIZE + 2
LINK_S = 60.0


class Conversations:
    """Conversations of two turns with a cluster, each compared with the model's own tokens."""

    def __init__(self, cluster: Cluster, seed: int) -> None:
        self.cluster = cluster
        self.rng = random.Random(seed)
        self.reference = Reference(MODEL_DIR)

    def first_turn(self) -> list[int]:
        """All tokens of a new conversation after its first answer, and the next question."""
        prompt = random_prompt(self.rng, NUM_PROMPT)
        return prompt + self.answer(prompt, NUM_OUTPUT) + random_prompt(self.rng, NUM_NEXT)

    def answer(self, prompt: list[int], num_tokens: int = 4) -> list[int]:
        options = {"max_tokens": num_tokens, "return_token_ids": True, "ignore_eos": True}
        answer = self.cluster.complete(prompt, **options)
        self.usage = answer["usage"]
        tokens = completion_tokens(answer)
        assert tokens == self.reference.generate(prompt, num_tokens)
        return tokens

    def wait_for_import(self) -> None:
        """Returns once a second turn has imported pages: the links are up, and the router has read of them."""

        def imports() -> bool:
            self.answer(self.first_turn())
            return self.imported > 0

        eventually(imports, LINK_S, "a second turn imports pages")

    @property
    def imported(self) -> float:
        return self.cluster.metric("prefill-0", "baton_imported_tokens_total", source="decode")


@pytest.mark.parametrize("transport", ["stream", "nixl"])
def test_a_second_turn_computes_only_what_is_new(tmp_path: Path, transport: str) -> None:
    if transport == "nixl" and (missing := nixl_available()):
        pytest.skip(missing)
    flags = {"page-size": PAGE_SIZE}
    always = {"page-sharing": "always"}
    with Cluster(tmp_path, transport=transport, flags=flags, prefill_flags=always) as cluster:
        talk = Conversations(cluster, seed=11)
        talk.wait_for_import()

        def prefill(metric: str, **labels: str) -> float:
            return cluster.metric("prefill-0", metric, **labels)

        prompt = talk.first_turn()
        computed, moved, imported = (
            prefill("baton_step_tokens_sum"),
            prefill("baton_transfer_bytes_total"),
            talk.imported,
        )
        talk.answer(prompt)
        known = (NUM_PROMPT + NUM_OUTPUT - 1) // PAGE_SIZE * PAGE_SIZE  # decode has no KV of its last token
        own = NUM_PROMPT // PAGE_SIZE * PAGE_SIZE
        assert prefill("baton_step_tokens_sum") - computed == len(prompt) - known
        assert talk.imported - imported == known - own
        assert prefill("baton_transfer_bytes_total") - moved == (known - own) / PAGE_SIZE * cluster.page_bytes(
            "prefill-0"
        )
        assert talk.usage["prompt_tokens_details"]["cached_tokens"] == known
        assert cluster.tokens_recomputed == 0
        cluster.wait_pages_free(LINK_S)


SMALL_POOL, LONG_OUTPUT = 40, 21 * PAGE_SIZE
"""Two rows of a prompt of five pages grow to 52 pages, one of them to 26."""


def test_a_row_that_is_sent_back_goes_on_elsewhere_from_its_pages(tmp_path: Path) -> None:
    """Two rows with one cache key outgrow a worker without host memory, while its peer is idle."""
    flags = {"page-size": PAGE_SIZE, "num-pages": SMALL_POOL}
    with Cluster(
        tmp_path,
        num_decode=2,
        transport="stream",
        flags=flags,
        prefill_flags={"page-sharing": "always", "num-pages": 4 * SMALL_POOL},
        decode_flags={"host-pages": 0, "max-rows": 64},
    ) as cluster:
        cluster.wait_links(2)
        talk = Conversations(cluster, seed=12)
        talk.wait_for_import()
        names = [process.name for process in cluster.workers("decode")]
        options = {"return_token_ids": True, "ignore_eos": True, "prompt_cache_key": "same worker"}
        cluster.complete(random_prompt(talk.rng, 5 * PAGE_SIZE), max_tokens=2, **options)

        def totals() -> Counter[str]:
            sent_back = sum(cluster.metric(name, "baton_send_backs_total") for name in names)
            computed = cluster.metric("prefill-0", "baton_step_tokens_sum")
            return Counter(sent_back=int(sent_back), computed=int(computed), imported=int(talk.imported))

        def outgrow() -> Counter[str]:
            """Answers two prompts at once; counts tokens beside those of the prompts."""
            prompts, before = [random_prompt(talk.rng, 5 * PAGE_SIZE) for _ in range(2)], totals()
            with ThreadPoolExecutor(2) as clients:
                tasks = [clients.submit(cluster.complete, one, max_tokens=LONG_OUTPUT, **options) for one in prompts]
            for prompt, task in zip(prompts, tasks, strict=True):
                assert completion_tokens(task.result()) == talk.reference.generate(prompt, LONG_OUTPUT)
            before["computed"] += sum(map(len, prompts))
            return totals() - before

        def goes_on() -> Counter[str] | None:
            """Under load the next attempt may ask too late; then another pair of prompts has to show it."""
            found = outgrow()
            return found if found["sent_back"] and found["imported"] >= 7 * PAGE_SIZE else None

        counted = eventually(goes_on, LINK_S, "a row goes on from the pages that it has left")
        # Not given: what the other row has taken by then, at most six pages, and needs for its next step. A row's last
        # page is not full.
        assert 0 < counted["computed"] <= 8 * PAGE_SIZE * counted["sent_back"]
        assert sum(cluster.metric(name, "baton_send_backs_given_total") for name in names) >= 1
        assert cluster.tokens_recomputed == 0
        cluster.wait_pages_free(LINK_S)
