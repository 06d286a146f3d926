"""After a step with trees the pages are those of plain steps: the target's layers, a head's layer, and the tails."""

from __future__ import annotations

import random
from pathlib import Path

import pytest
import torch

from baton.engine.batch import Batch
from baton.engine.drafts.base import ROOT
from baton.model.loading.loader import DecoderChoice, LoadedModel
from baton.model.storage import PageStorage
from tests.unit.model.drafts.test_eagle import CHUNKS, COUNT, PAGE_SIZE, TABLES, Sequences, models, target
from tests.unit.model.drafts.tiny_heads import KINDS, HeadReference, random_head, save_head

__all__ = ["models", "target"]


def bushy(right: list[int], rng: random.Random) -> tuple[list[int], tuple[int, ...]]:
    """A tree of eight nodes that holds `right` as a path, among wrong ones."""
    tokens, parents, spine, depth = list[int](), list[int](), ROOT, 0
    while len(tokens) < 8:
        grows = depth < len(right) and (rng.random() < 0.5 or 8 - len(tokens) == len(right) - depth)
        parents.append(spine if grows else rng.randrange(-1, len(tokens)))
        tokens.append(right[depth] if grows else 3)
        if grows:
            spine, depth = len(tokens) - 1, depth + 1
    return tokens, tuple(parents)


def filled(storage: PageStorage, table: list[int], end: int) -> list[torch.Tensor]:
    """Everything that `storage` keeps of the first `end` places."""
    places = range(end)
    pages, slots = torch.tensor([table[n // PAGE_SIZE] for n in places]), torch.tensor([n % PAGE_SIZE for n in places])
    sides = [side(layer) for layer in range(len(storage.geometry.layers)) for side in (storage.keys, storage.values)]
    return [view.permute(0, 3, 1, 2, 4)[pages, slots] for view in sides]


@pytest.mark.parametrize("kind", KINDS[:3])
def test_trees_leave_the_pages_of_plain_steps(
    target: Path, models: dict[DecoderChoice, LoadedModel], tmp_path: Path, kind: str
) -> None:
    head = random_head(kind)
    model = models[DecoderChoice.AUTO].with_head(save_head(head, tmp_path))
    plain = Sequences(model)
    plain.prefill(*CHUNKS["whole"])
    for _ in range(8):
        plain.decode(0)
    whole, rng, num_moved = plain.tokens, random.Random(2), 0
    for num_right in range(5):
        drafted = Sequences(model)
        drafted.prefill(*CHUNKS["whole"])
        rows = []
        for index, tokens in enumerate(drafted.tokens):
            drafts, parents = bushy(whole[index][len(tokens) : len(tokens) + num_right], rng)
            row = drafted._row(index, len(tokens) - 1, len(tokens))
            rows.append(row.with_drafts(drafted._request(index), drafts, parents))
        output = drafted.runner.run(Batch(tuple(rows)))
        assert output.batch is not None
        for tokens, row, sampled in zip(drafted.tokens, output.batch.rows, output.sampled, strict=True):
            num_moved += row.path[:num_right] != tuple(range(num_right))
            tokens += [token.token for token in sampled[: num_right + 1]]
        ends = [len(tokens) - 1 for tokens in drafted.tokens]
        assert drafted.tokens == [tokens[: end + 1] for tokens, end in zip(whole, ends, strict=True)]
        for table, end in zip(TABLES, ends, strict=True):
            for made, wanted in zip(_all(drafted, table, end), _all(plain, table, end), strict=True):
                torch.testing.assert_close(made, wanted, rtol=1e-4, atol=1e-5)
        reference = HeadReference.of(kind, head, target)
        before = [list(tokens) for tokens in drafted.tokens]
        assert drafted.decode(COUNT) == [reference.greedy_drafts(tokens, COUNT) for tokens in before]
    assert num_moved > 6


def _all(sequences: Sequences, table: list, end: int) -> list[torch.Tensor]:
    """Target and head, and the tails of the pages that are full."""
    storage = sequences.storage
    tails = [storage.tails[page] for page in table[: end // PAGE_SIZE]]
    return [*filled(storage, table, end), *filled(storage.draft_view(), table, end), *tails]
