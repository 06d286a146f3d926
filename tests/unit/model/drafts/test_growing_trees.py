"""Trees that heads and draft models make: each node is the token that its rank says after its path, by the formula."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest
import torch

from baton.domain.ids import AttemptId, PageId, RequestId
from baton.domain.request import EngineRequest, SamplingParams, StopParams
from baton.engine.batch import Batch, Row, SampleSpec, WantedDrafts
from baton.engine.drafts.base import DRAFT_PLACEHOLDER, ROOT, draft_path, sibling_ranks
from baton.engine.runner import _draft_row
from baton.model.drafts.chains import DraftRow, by_shape
from baton.model.drafts.growing_trees import Generation, make_trees
from baton.model.drafts.tree_support import tree_refusal
from baton.model.loading.loader import DecoderChoice, LoadedModel
from baton.model.sampling.gumbel import draw_key, sample_by_gumbel
from baton.model.sampling.sampler import TorchSampler
from tests.unit.model.drafts.test_eagle import CHUNKS, Sequences, models, target
from tests.unit.model.drafts.tiny_heads import KINDS, HeadReference, random_head, save_head

__all__ = ["models", "target"]

BUSH = (ROOT, ROOT, 0, 1, 0, 3, 1)
"""Two siblings have children, in another order than that of generations: a node's parent is not the place before it."""
STAR, DEEP = (ROOT, ROOT, ROOT), (ROOT, 0, 1, 2, 2)
VOCAB_SIZE, TEMPERATURE = 40, 0.8
TABLE = 2 * torch.randn(VOCAB_SIZE, VOCAB_SIZE, generator=torch.Generator().manual_seed(5))
"""A drafter's logits after each token."""


def ranked(reference: HeadReference, tokens: list[int], path: list[int], rank: int) -> int:
    """The token of that rank behind `tokens` and the drafts of `path`, each from everything before it."""
    features, read = reference.features(tokens[:-1]), tokens[1:]
    for draft in path:
        _, outputs = reference.run(read, features)
        read, features = [*read, draft], torch.cat([features, outputs[-1:]])
    logits, _ = reference.run(read, features)
    return int(logits[-1].argsort(descending=True, stable=True)[rank])


def grown(sequences: Sequences, shapes: Sequence[tuple[int, ...]]) -> list[list[int]]:
    """One step in which each sequence wants a tree of its own shape; () for a chain of three. Tokens by node."""
    made: list[list[int]] = []
    drafts = sequences.runner._drafts
    assert drafts is not None
    make = drafts.make

    def spy(rows: Sequence[DraftRow]) -> list[tuple[int, ...]]:
        made.extend(list(each) for each in make(rows))
        return [tuple(each) for each in made]

    drafts.make = spy  # type: ignore[method-assign]
    rows = []
    for index, (tokens, parents) in enumerate(zip(sequences.tokens, shapes, strict=True)):
        row = sequences._row(index, len(tokens) - 1, len(tokens))
        wanted = (DRAFT_PLACEHOLDER,) * (len(parents) or 3)
        rows.append(row.with_drafts(sequences._request(index), wanted, parents))
    sequences._take(range(len(rows)), sequences.runner.run(Batch(tuple(rows))))
    drafts.make = make  # type: ignore[method-assign]
    return made


@pytest.mark.parametrize("kind", ["eagle", "eagle3", "mtp"])
def test_nodes_are_those_of_the_published_formula(
    target: Path, models: dict[DecoderChoice, LoadedModel], tmp_path: Path, kind: str
) -> None:
    """Twice, with other shapes: the state behind a walked tree is that of plain steps."""
    head = random_head(kind, num_drafted_ids=500)
    reference = HeadReference.of(kind, head, target)
    sequences = Sequences(models[DecoderChoice.AUTO].with_head(save_head(head, tmp_path)))
    sequences.prefill(*CHUNKS["page edges"])
    for shapes in ([STAR, BUSH, ()], [(), STAR, BUSH]):
        before = [list(tokens) for tokens in sequences.tokens]
        for tokens, parents, drafts in zip(before, shapes, grown(sequences, shapes), strict=True):
            chain = parents or (ROOT, 0, 1)
            for node, rank in enumerate(sibling_ranks(chain)):
                path = [drafts[each] for each in draft_path(chain, node)][:-1]
                assert drafts[node] == ranked(reference, tokens, path, rank), f"node {node} of {chain}"


def test_a_draft_model_makes_trees(target: Path, models: dict[DecoderChoice, LoadedModel]) -> None:
    """The target as its own draft model: first children are always right, and others are what it says next."""
    plain = models[DecoderChoice.AUTO]
    sequences = Sequences(plain.with_draft(plain))
    sequences.prefill(*CHUNKS["whole"])
    reference = HeadReference.of("eagle", {}, target)
    for shapes in ([STAR, BUSH, ()], [(), DEEP, STAR]):
        before = [list(tokens) for tokens in sequences.tokens]
        made = grown(sequences, shapes)
        for tokens, after, parents, drafts in zip(before, sequences.tokens, shapes, made, strict=True):
            chain = parents or (ROOT, 0, 1)
            for node, rank in enumerate(sibling_ranks(chain)):
                path = [drafts[each] for each in draft_path(chain, node)][:-1]
                logits = reference.target(input_ids=torch.tensor([[*tokens, *path]])).logits[0, -1]
                assert drafts[node] == int(logits.argsort(descending=True, stable=True)[rank])
            longest = max(len(draft_path(chain, node)) for node in range(len(chain)) if _is_first(chain, node))
            assert len(after) - len(tokens) > longest, "all first children are right"


def test_a_head_of_several_layers_refuses_trees(models: dict[DecoderChoice, LoadedModel], tmp_path: Path) -> None:
    """Workers ask first and say so by name; a tree that comes nevertheless is an error."""
    model = models[DecoderChoice.AUTO].with_head(save_head(random_head(KINDS[3]), tmp_path))
    assert tree_refusal(model) == "a head of several MTP layers"
    sequences = Sequences(model)
    assert sequences.runner.tree_refusal == tree_refusal(model)
    with pytest.raises(ValueError, match="make no trees"):
        grown(sequences, [STAR, STAR, STAR])


def _is_first(parents: Sequence[int], node: int) -> bool:
    ranks = sibling_ranks(parents)
    return all(ranks[each] == 0 for each in draft_path(parents, node))


def row(seed: int, sampling: SamplingParams, parents: tuple[int, ...]) -> DraftRow:
    prompt = [1, 2, seed]
    request = EngineRequest(AttemptId(RequestId(str(seed)), 1), tuple(prompt), 3, sampling, StopParams(20))
    wanted = WantedDrafts(request, len(parents), parents)
    return _draft_row(Row(request.id, [seed], 2, [PageId(0)], SampleSpec.of(request, prompt)), wanted, VOCAB_SIZE)


def logits_of(generation: Generation) -> torch.Tensor:
    return TABLE[[generation.ids[at] for at in generation.keep]]


@pytest.mark.parametrize("sharpness", [1.0, 2.0])
def test_siblings_are_drawn_without_the_elder_ones(sharpness: float) -> None:
    """With the key of their place, which all share."""
    rows = [row(seed, SamplingParams(temperature=TEMPERATURE, seed=seed), BUSH) for seed in range(20)]
    for seed, drafts in enumerate(make_trees(rows, logits_of, TorchSampler(), sharpness)):
        drawn: dict[int, list[int]] = {}
        for node, parent in enumerate(BUSH):
            elder = drawn.setdefault(parent, [])
            logits = TABLE[drafts[parent] if parent != ROOT else seed].clone()
            logits[elder] = -torch.inf
            weights = (logits / TEMPERATURE).softmax(-1).pow(sharpness)
            depth = len(draft_path(BUSH, node))
            assert drafts[node] == int(sample_by_gumbel(weights[None], [draw_key(seed, 2 + depth)]))
            elder.append(drafts[node])


def test_where_one_token_is_allowed_siblings_are_equal() -> None:
    for sampling in (
        SamplingParams(temperature=0.0, allowed_token_ids=(7,)),
        SamplingParams(temperature=1e-3, seed=3, allowed_token_ids=(7,), repetition_penalty=1.7),
    ):
        (drafts,) = make_trees([row(3, sampling, STAR)], logits_of, TorchSampler(), 2.0)
        assert drafts == (7, 7, 7)


def test_rows_are_made_by_their_shape() -> None:
    greedy = SamplingParams(temperature=0.0)
    rows = [row(3, greedy, STAR), row(4, greedy, ()), row(5, greedy, BUSH)]
    asked: list[list[int]] = []

    def make(rows: Sequence[DraftRow]) -> list[tuple[int, ...]]:
        asked.append([each.token for each in rows])
        return [(each.token,) for each in rows]

    assert by_shape(rows, make, make) == [(3,), (4,), (5,)]
    assert asked == [[4], [3, 5]]


@pytest.mark.parametrize("parents", [(0,), (ROOT, 1), (-2,), (ROOT, 2, 0)])
def test_parents_come_first(parents: tuple[int, ...]) -> None:
    with pytest.raises(ValueError, match="not the parents of a tree"):
        make_trees([row(3, SamplingParams(temperature=0.0), parents)], logits_of, TorchSampler())
