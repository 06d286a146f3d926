"""The head of the bundled model: small enough to ship, and right often enough to show that drafts are accepted."""

from __future__ import annotations

import pytest
from tokenizers import Tokenizer

from baton.bundled import HEAD_DIR, MODEL_DIR
from baton.domain.request import SamplingParams, StopParams
from baton.engine.drafts.policy import DraftPolicy
from baton.engine.drafts.runner_drafter import RunnerDrafter
from baton.model.drafts.head_files import is_eagle_head
from baton.model.loading.loader import LoadedModel, load_model
from baton.services.local.pair import LocalPair, PairLimits
from baton.settings.base import SettingsError
from baton.settings.model_source import ModelFiles, resolve_model

MAX_BYTES = 2_000_000
NUM_DRAFTS = 4
QUESTIONS = ("What is Baton?", "Tell me a story about a fox.", "how does the handoff work", "Count to ten.")


def answers(model: LoadedModel, with_drafts: bool) -> tuple[list[list[int]], DraftPolicy]:
    """Greedy answers to the questions, and what became of the drafts."""
    pair = LocalPair(model, PairLimits(num_pages=64, max_rows=4))
    scheduler = pair.decode._scheduler
    policy = DraftPolicy(RunnerDrafter(), NUM_DRAFTS, model.geometry.page_size, scheduler._imports._cache.pool)
    if with_drafts:
        scheduler._drafts = policy
    tokenizer, found = Tokenizer.from_file(str(MODEL_DIR / "tokenizer.json")), []
    for question in QUESTIONS:
        text = f"<|im_start|>user\n{question}<|im_end|>\n<|im_start|>assistant\n"
        prompt = tuple(tokenizer.encode(text, add_special_tokens=False).ids)
        assert pair.submit(prompt, SamplingParams(temperature=0.0), StopParams(60, 0, frozenset({2}))) is not None
        found.append([token.token for part in pair.run() for token in part.tokens])
    return found, policy


def test_it_fits_into_the_wheel() -> None:
    assert is_eagle_head(HEAD_DIR)
    assert sum(path.stat().st_size for path in HEAD_DIR.iterdir()) <= MAX_BYTES


def test_it_is_named_as_what_drafts_only() -> None:
    assert resolve_model("bundled-head", ModelFiles.DRAFT) == HEAD_DIR
    with pytest.raises(SettingsError, match="no such directory"):
        resolve_model("bundled-head")


def test_answers_are_those_without_it_and_many_drafts_are_right() -> None:
    model = load_model(MODEL_DIR)
    plain, _ = answers(model, with_drafts=False)
    drafted, policy = answers(model.with_head(HEAD_DIR), with_drafts=True)
    assert drafted == plain
    accepted = policy.totals.num_accepted / policy.totals.num_proposals
    assert accepted > 1.5, f"{accepted:.2f} drafts of {NUM_DRAFTS} are accepted a step: {policy.totals}"
