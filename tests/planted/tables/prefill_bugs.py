"""Planted bugs in the order of prompts and in the file tier; a part of the table in `bugs`."""

from __future__ import annotations

from tests.planted.runner import PlantedBug

FAIRNESS, PAGES = "fairness", "right pages"
PREFILL = "tests/unit/prefill"

PREFILL_BUGS = (
    PlantedBug(
        FAIRNESS,
        "a long prompt takes the whole step",
        "services/prefill/policy.py",
        "= self.contested_tokens if is_bounded else self.token_budget",
        "= self.token_budget",
        f"{PREFILL}/test_packing.py",
    ),
    PlantedBug(
        FAIRNESS,
        "a long prompt leaves a part of each step to longer ones",
        "services/prefill/policy.py",
        "= self.contested_tokens if is_bounded else self.token_budget",
        "= self.contested_tokens",
        f"{PREFILL}/test_packing.py",
    ),
    PlantedBug(
        FAIRNESS,
        "a long prompt takes what one before it leaves to short ones",
        "services/prefill/policy.py",
        "is_bounded = is_bounded or leaves_some",
        "is_bounded = leaves_some",
        f"{PREFILL}/test_packing.py",
    ),
    PlantedBug(
        FAIRNESS,
        "the oldest prompt has no share",
        "services/prefill/scheduler.py",
        "self._give(step, oldest, limits.guaranteed_tokens)",
        "pass",
        f"{PREFILL}/test_packing.py {PREFILL}/test_waiting_bounds.py",
    ),
    PlantedBug(
        FAIRNESS,
        "a prompt without pages is overtaken for ever",
        "services/prefill/policy.py",
        "return prompt.num_overtaken >= self._max_overtakes",
        "return False",
        f"{PREFILL}/test_order.py",
    ),
    PlantedBug(
        FAIRNESS,
        "cached tokens count as work",
        "services/prefill/scheduler.py",
        "num_left = len(prompt.request.tokens) - num_known",
        "num_left = len(prompt.request.tokens)",
        f"{PREFILL}/test_order.py",
    ),
    PlantedBug(
        FAIRNESS,
        "an owner that ends still holds prompts up",
        "services/prefill/queue.py",
        "            self._pending.remove(prompt)\n            prompt.state = PromptState.ENDED",
        "            prompt.state = PromptState.ENDED",
        f"{PREFILL}/test_prefix_sharing.py",
    ),
    PlantedBug(
        FAIRNESS,
        "an owner keeps its rank",
        "services/prefill/queue.py",
        "min(ranks[owner], rank), min(numbers[owner], number)",
        "ranks[owner], min(numbers[owner], number)",
        f"{PREFILL}/test_prefix_sharing.py",
    ),
    PlantedBug(
        PAGES,
        "a copy is matched before its write has ended",
        "baton/kv/tiers/tier.py",
        "if copy is None or copy.state is CopyState.WRITING:",
        "if copy is None:",
        "tests/unit/file_tier/test_tier_rules.py",
    ),
    PlantedBug(
        PAGES,
        "what is read back is not compared",
        "baton/kv/tiers/tier.py",
        "return copy.digest if digest is not None and is_same(digest, copy.digest, self._num_parts) else None",
        "return copy.digest",
        "tests/unit/file_tier",
    ),
    PlantedBug(
        PAGES,
        "copies of what a wrong page led to stay",
        "baton/engine/tiers/controller.py",
        "            self._drop(key)\n            self._fresh",
        "            pass\n            self._fresh",
        "tests/unit/file_tier/test_tier_failures.py",
    ),
    PlantedBug(
        FAIRNESS,
        "the oldest prompt's share is one of tokens, whatever they take",
        "baton/engine/chunking.py",
        "        if start > 0:\n",
        "        if start < 0:\n",
        f"{PREFILL}/test_equal_time.py",
    ),
    PlantedBug(
        PAGES,
        "copies of what a peer has quarantined stay",
        "baton/engine/tiers/controller.py",
        "for key in (*keys, *foreign):",
        "for key in keys:",
        "tests/unit/host_tier/test_host_tier.py",
    ),
)
