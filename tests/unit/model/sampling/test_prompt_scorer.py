"""The scorer reads a few rows of logits at a time, and gives each row of a batch its own numbers."""

from __future__ import annotations

import torch

from baton.engine.batch import ScoreSpec
from baton.model.decoders.base import read_in_parts
from baton.model.sampling.prompt_scorer import PromptScorer

VOCAB_SIZE = 151_936


def test_no_more_logits_than_a_part_exist_at_once():
    """A chunk of 512 tokens with the vocabulary of Qwen: 311 MB of logits if they were made at once."""
    scorer, generator, sizes = PromptScorer(torch.device("cpu")), torch.Generator().manual_seed(1), list[int]()
    head = torch.randn(VOCAB_SIZE, 4, generator=generator)
    hidden = torch.randn(300, 4, generator=generator)
    targets = torch.randint(VOCAB_SIZE, (300,), generator=generator).tolist()
    scorer.add_row(0, 0, 0, ScoreSpec(2, targets[:100]))
    scorer.add_row(3, 100, 16, ScoreSpec(0, targets[100:]))

    def logits(rows: torch.Tensor) -> torch.Tensor:
        sizes.append(len(rows))
        return rows @ head.T

    read_in_parts(scorer, hidden, logits)
    scores = scorer.read()
    assert (sum(sizes), max(sizes)) == (300, scorer.max_rows)
    assert max(sizes) * VOCAB_SIZE * 4 < 40_000_000
    assert [(row, found.first, len(found), found.k) for row, found in scores.items()] == [
        (0, 1, 100, 2),
        (3, 17, 200, 0),
    ]
    tokens = scores[0].tokens(2) + scores[3].tokens(2)
    for at in (0, 63, 64, 99, 100, 299):
        row = (hidden[at : at + 1] @ head.T).log_softmax(-1)[0]
        assert abs(tokens[at].logprob - float(row[targets[at]])) < 1e-5
        assert abs(tokens[at].rank - int((row >= row[targets[at]]).sum())) <= 3, "near ties, in another product"
        assert [token for token, _ in tokens[at].top] == (row.topk(2).indices.tolist() if at < 100 else [])


def test_the_best_token_has_the_same_bits_in_both_places():
    scorer, logits = PromptScorer(torch.device("cpu")), torch.randn(9, 50)
    best = logits.argmax(-1).tolist()
    scorer.add_row(0, 0, 0, ScoreSpec(1, best))
    scorer.add(logits)
    [scores] = scorer.read().values()
    assert all(score.top == ((token, score.logprob),) for token, score in zip(best, scores.tokens(1), strict=True))
    assert {score.rank for score in scores.tokens(1)} == {1}
