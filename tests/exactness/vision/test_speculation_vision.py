"""Speculation over chats with images: it changes no token, in chunks of any size, with cold and warm caches.

Both engines in one process, all chats side by side, those of text among them. N-grams and a draft model must accept
drafts. A head is random and seldom right, so each of its drafts is compared with the published formula, whose inputs
are the rows of the images and transformers' hidden states.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from baton.engine.drafts.base import Drafter
from baton.engine.drafts.ngram import NGramDrafter
from baton.engine.drafts.policy import MAX_DRAFT_TOKENS, DraftPolicy, DraftTotals
from baton.engine.drafts.runner_drafter import RunnerDrafter
from baton.model.drafts.chains import DraftRow
from baton.model.drafts.eagle import EagleDrafts
from baton.model.loading.config import DtypeChoice
from baton.model.loading.loader import LoadedModel, load_model
from baton.model.vision.embedding import MediaEmbedding
from baton.services.local.pair import LocalPair, PairLimits
from tests.exactness.vision.families import FAMILIES, IMAGE, Chat, make_chats
from tests.exactness.vision.test_vision_exactness import (
    ALL,
    NUM_NEW_TOKENS,
    PAGE_SIZE,
    embeddings,
    own_tokens,
    served_tokens,
)
from tests.unit.model.drafts.tiny_heads import HeadReference, random_head, save_head
from tests.unit.model.loading.test_multimodal import save_random

pytestmark = pytest.mark.exactness

BUDGETS = (16, 64, ALL)


@dataclass(frozen=True)
class World:
    """A family's random model: transformers', ours with its tower, its chats and what `generate()` answers."""

    name: str
    directory: Path
    whole: Any
    model: LoadedModel
    chats: list[Chat]
    expected: list[list[int]]
    source: dict[bytes, MediaEmbedding]

    @classmethod
    def of(cls, name: str, directory: Path) -> World:
        whole = save_random(FAMILIES[name].config(), directory)
        chats = make_chats(FAMILIES[name])
        for chat in chats:
            chat.ids += chat.ids[-9:] * 2 if IMAGE not in chat.ids[-9:] else [7, 8, 9, 10] * 4
        model = load_model(directory, dtype=DtypeChoice.FLOAT32, page_size=PAGE_SIZE, vision=True)
        expected = [own_tokens(whole, chat) for chat in chats]
        return cls(name, directory, whole, model, chats, expected, embeddings(model, chats))

    def speculating(self, model: LoadedModel, drafter: Drafter, budget: int) -> tuple[LocalPair, DraftTotals]:
        pair = LocalPair(model, PairLimits(token_budget=budget), self.source)
        scheduler = pair.decode._scheduler
        pool = scheduler._imports._cache.pool
        scheduler._drafts = policy = DraftPolicy(drafter, MAX_DRAFT_TOKENS, PAGE_SIZE, pool)
        return pair, policy.totals


@pytest.fixture(scope="module", params=FAMILIES)
def world(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> World:
    return World.of(request.param, tmp_path_factory.mktemp(request.param))


def test_ngram(world: World) -> None:
    num_accepted = 0
    for budget in BUDGETS:
        pair, totals = world.speculating(world.model, NGramDrafter(), budget)
        for caches in ("cold", "warm"):
            assert served_tokens(pair, world.chats) == world.expected, f"{caches} caches, chunks of {budget}"
        num_accepted += totals.num_accepted
    assert num_accepted > 0


def test_draft_model(world: World) -> None:
    """The text model of the same checkpoint: right until an image tells otherwise."""
    text = load_model(world.directory, dtype=DtypeChoice.FLOAT32, page_size=PAGE_SIZE)
    for budget in (16, ALL):
        pair, totals = world.speculating(world.model.with_draft(text), RunnerDrafter(), budget)
        for caches in ("cold", "warm"):
            assert served_tokens(pair, world.chats) == world.expected, f"{caches} caches, chunks of {budget}"
        assert totals.num_accepted > NUM_NEW_TOKENS


class _Target:
    """transformers' model as the target of a head's formula, for one chat: image rows in place of placeholders."""

    def __init__(self, world: World, chat: Chat) -> None:
        self._whole, self._chat = world.whole, chat
        self._rows = [world.source[picture.identity].rows for picture in chat.pictures]
        self.lm_head = world.whole.lm_head

    def __call__(self, input_ids: torch.Tensor, output_hidden_states: bool) -> Any:
        """What each layer reads, DeepStack rows included, and what the head reads."""
        assert output_hidden_states
        inputs = self._chat.inputs()
        if "mm_token_type_ids" in inputs:
            inputs["mm_token_type_ids"] = (input_ids == IMAGE).long()
        states: list[torch.Tensor] = []

        def take(_: object, args: tuple[Any, ...], more: dict[str, Any]) -> None:
            states.append((args[0] if args else more["hidden_states"]).clone())

        layers = self._whole.model.language_model.layers
        hooks = [module.register_forward_pre_hook(take, with_kwargs=True) for module in (*layers, self.lm_head)]
        self._whole.model.rope_deltas = None
        with torch.inference_mode():
            self._whole(input_ids=input_ids, use_cache=False, **inputs)
        for hook in hooks:
            hook.remove()
        return SimpleNamespace(hidden_states=states)

    def get_input_embeddings(self) -> Any:
        def embed(ids: torch.Tensor) -> torch.Tensor:
            table = self._whole.get_input_embeddings()(ids).detach().clone()
            if self._rows:
                table[ids == IMAGE] = torch.cat(self._rows)
            return table

        return embed


@pytest.mark.parametrize("budget", BUDGETS)
@pytest.mark.parametrize(
    ("name", "kind"), [("llava", "mtp"), ("qwen2_vl", "eagle"), ("qwen3_vl", "eagle3"), ("gemma3", "mtp")]
)
def test_heads_read_the_rows_of_images(
    name: str, kind: str, budget: int, tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch
) -> None:
    world = World.of(name, tmp_path_factory.mktemp(name))
    head = random_head(kind)
    model = world.model.with_head(save_head(head, tmp_path_factory.mktemp("head")))
    made: dict[int, tuple[int, ...]] = {}
    make = EagleDrafts.make

    def recorded(drafts: EagleDrafts, rows: Sequence[DraftRow]) -> list[tuple[int, ...]]:
        (row,), found = rows, make(drafts, rows)
        made[row.start] = found[0]
        return found

    monkeypatch.setattr(EagleDrafts, "make", recorded)
    pair, totals = world.speculating(model, RunnerDrafter(), budget)
    for caches in ("cold", "warm"):
        for chat, expected in zip(world.chats[:3], world.expected, strict=False):
            made.clear()
            assert served_tokens(pair, [chat]) == [expected], f"{caches} caches"
            reference = HeadReference(kind, head, _Target(world, chat))
            tokens = chat.ids + expected
            assert len(made) > 3
            for start, drafts in list(made.items())[:3]:
                assert drafts == reference.greedy_drafts(tokens[: start + 1], len(drafts)), f"behind {start}"
    assert totals.num_drafts > 0
