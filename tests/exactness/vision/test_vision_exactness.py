"""Chats with images: tokens of both engines equal those of transformers' `generate()`, family by family.

The pair has the real loops, schedulers and caches of both workers and copies pages from pool to pool. Chunks of 16 and
64 tokens cut images; a second run finds all pages of the first one; chats of text run beside.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import GenerationConfig

from baton.domain.request import SamplingParams, StopParams
from baton.engine.media.embedding_format import EmbeddingFormat
from baton.engine.media.settled_embedding import SettledEmbedding
from baton.model.loading.config import DtypeChoice
from baton.model.loading.loader import DecoderChoice, LoadedModel, load_model
from baton.model.vision.embedding import MediaEmbedding
from baton.services.local.pair import LocalPair, PairLimits
from tests.exactness.vision.families import FAMILIES, Chat, make_chats, pictures_of
from tests.unit.model.loading.test_multimodal import save_random

pytestmark = pytest.mark.exactness

PAGE_SIZE = 8
NUM_NEW_TOKENS = 10
ALL = 4096
GREEDY, STOP = SamplingParams(temperature=0.0), StopParams(NUM_NEW_TOKENS)


def own_tokens(model: Any, chat: Chat) -> list[int]:
    model.generation_config = GenerationConfig(do_sample=False, max_new_tokens=NUM_NEW_TOKENS, pad_token_id=0)
    model.model.rope_deltas = None
    ids = torch.tensor([chat.ids])
    output = model.generate(ids, attention_mask=torch.ones_like(ids), **chat.inputs())
    return output[0, len(chat.ids) :].tolist()


def embeddings(model: LoadedModel, chats: list[Chat]) -> dict[bytes, MediaEmbedding]:
    """Each picture through the loaded tower, by itself."""
    assert model.tower is not None
    found = {}
    for picture in pictures_of(chats):
        (found[picture.identity],) = model.tower.encode(picture.inputs, [sum(picture.runs)])
    return found


def served_tokens(pair: LocalPair, chats: list[Chat], emitted: Sequence[Sequence[int]] = ()) -> list[list[int]]:
    """All chats at once. `emitted`: what an earlier attempt of each has emitted."""
    order = []
    for chat, before in zip(chats, emitted or [()] * len(chats), strict=True):
        id = pair.submit(tuple(chat.ids), GREEDY, STOP, media=tuple(chat.media), emitted=tuple(before))
        assert id is not None
        order.append(id)
    tokens: dict[object, list[int]] = {id: [] for id in order}
    ended: set[object] = set()
    while len(ended) < len(order):
        for part in pair.run():
            tokens[part.id] += [one.token for one in part.tokens]
            if part.finish is not None:
                ended.add(part.id)
    return [tokens[id] for id in order]


@pytest.fixture(scope="module", params=FAMILIES)
def world(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[str, Path, Any]:
    """A family, a directory with its random model, and that model."""
    directory = tmp_path_factory.mktemp(request.param)
    return request.param, directory, save_random(FAMILIES[request.param].config(), directory)


@pytest.mark.parametrize("decoder", [DecoderChoice.LEAN, DecoderChoice.STOCK])
def test_chats_with_images_get_the_models_own_tokens(decoder: DecoderChoice, world: tuple[str, Path, Any]) -> None:
    name, directory, whole = world
    chats = make_chats(FAMILIES[name])
    expected = [own_tokens(whole, chat) for chat in chats]
    blind = [own_tokens(whole, replace(chat, pictures=[])) for chat in chats]
    assert [one == other for one, other in zip(expected, blind, strict=True)] == [False] * 3 + [True] * 2
    model = load_model(directory, dtype=DtypeChoice.FLOAT32, page_size=PAGE_SIZE, decoder=decoder, vision=True)
    source = embeddings(model, chats)
    for budget in (16, 64, ALL) if decoder is DecoderChoice.LEAN else (16,):
        pair = LocalPair(model, PairLimits(token_budget=budget), source)
        assert served_tokens(pair, chats) == expected
        assert served_tokens(pair, chats) == expected, "with warm caches"
        activity = pair.prefill.load().activity
        assert activity is not None
        assert activity.num_cached_tokens >= sum((len(chat.ids) - 1) // PAGE_SIZE * PAGE_SIZE for chat in chats)


def test_replays_with_embeddings_of_an_encode_worker(world: tuple[str, Path, Any]) -> None:
    """Both workers are new, as if the others had been killed behind some tokens; then their caches are warm.

    The embeddings come as an encode worker gives them: as bytes, with digests.
    """
    name, directory, whole = world
    chats = make_chats(FAMILIES[name])
    expected = [own_tokens(whole, chat) for chat in chats]
    model = load_model(directory, dtype=DtypeChoice.FLOAT32, page_size=PAGE_SIZE, vision=True)
    source = {identity: pulled(model, made) for identity, made in embeddings(model, chats).items()}
    for budget, num_emitted in ((16, 1), (64, 4), (ALL, NUM_NEW_TOKENS - 1)):
        pair = LocalPair(model, PairLimits(token_budget=budget), source)
        before, behind = [one[:num_emitted] for one in expected], [one[num_emitted:] for one in expected]
        assert served_tokens(pair, chats, before) == behind
        assert served_tokens(pair, chats, before) == behind, "with warm caches"
        assert served_tokens(pair, chats) == expected, "the whole answer, behind pages of the replay"
    assert all(one.is_intact(0, len(one.rows)) for one in source.values())


def pulled(model: LoadedModel, made: MediaEmbedding) -> SettledEmbedding:
    """An embedding on its way from an encode worker: no bit of it changes."""
    assert model.tower is not None
    shape = EmbeddingFormat(model.tower.hidden_size, model.tower.depth, model.config.dtype)
    sent = shape.to_bytes(made)
    found = shape.from_bytes(bytearray(sent.data), sent.digests, sent.num_rows, made.rows.device)
    assert all(map(torch.equal, (found.rows, *found.deep), (made.rows, *made.deep)))
    return found


def test_red_then_blue(world: tuple[str, Path, Any]) -> None:
    """Two pictures of equal size behind the same words: the second chat shares the words' pages and no others."""
    name, directory, whole = world
    family, chats = FAMILIES[name], []
    for number in (6, 12):
        chat = Chat(ids=list(range(3, 20)))
        chat.show(family.draw(number))
        chat.ids += range(20, 40)
        chats.append(chat)
    red, blue = chats
    assert red.ids == blue.ids
    expected = [own_tokens(whole, chat) for chat in chats]
    assert expected[0] != expected[1], "the picture does not show"
    model = load_model(directory, dtype=DtypeChoice.FLOAT32, page_size=PAGE_SIZE, vision=True)
    pair = LocalPair(model, PairLimits(), embeddings(model, chats))
    assert [served_tokens(pair, [chat])[0] for chat in chats] == expected
    activity = pair.prefill.load().activity
    assert activity is not None
    assert activity.num_cached_tokens == 2 * PAGE_SIZE, "two pages of words"
    assert [served_tokens(pair, [chat])[0] for chat in (red, blue, red)] == [*expected, expected[0]]
