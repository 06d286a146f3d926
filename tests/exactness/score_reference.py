"""The model's own scores of a prompt, which those of workers are compared with."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from baton.domain.scores.prompt_scores import ScoredToken

TOLERANCE = 1e-5


class ScoreReference:
    """A stock Hugging Face model in float32: the whole prompt in one forward pass."""

    def __init__(self, directory: Path) -> None:
        self._model: Any = transformers.AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32).eval()

    def table(self, tokens: Sequence[int]) -> torch.Tensor:
        """Log probabilities [len(tokens), vocab_size] of the token after each."""
        with torch.inference_mode():
            logits: torch.Tensor = self._model(torch.tensor([list(tokens)])).logits[0]
        return logits.log_softmax(-1)

    def check(self, tokens: Sequence[int], scores: Sequence[ScoredToken], k: int) -> None:
        """Compares the scores of all tokens but the first. Ranks may differ where log probabilities are near ties."""
        table = self.table(tokens)
        assert len(scores) == len(tokens) - 1
        for row, token, score in zip(table, tokens[1:], scores, strict=False):
            assert score.logprob == pytest.approx(float(row[token]), abs=TOLERANCE)
            best = row.topk(k)
            assert [logprob for _, logprob in score.top] == pytest.approx(best.values.tolist(), abs=TOLERANCE)
            assert all(abs(float(row[id]) - logprob) <= TOLERANCE for id, logprob in score.top)
            certain = int((row >= row[token] + TOLERANCE).sum()), int((row >= row[token] - TOLERANCE).sum())
            assert certain[0] <= score.rank <= certain[1]

    def check_logprobs(self, tokens: Sequence[int], logprobs: dict[str, Any], k: int) -> None:
        """Compares the parallel lists of an echoed prompt, perhaps with an answer's behind them."""
        table = self.table(tokens)
        assert logprobs["token_logprobs"][0] is None
        assert logprobs["top_logprobs"][0] is None
        assert len({len(column) for column in logprobs.values()}) == 1
        for row, token, logprob, top in zip(
            table, tokens[1:], logprobs["token_logprobs"][1:], logprobs["top_logprobs"][1:], strict=False
        ):
            assert logprob == pytest.approx(float(row[token]), abs=TOLERANCE)
            best = row.topk(k).values.tolist()
            assert max(top.values()) == pytest.approx(max(best[0], logprob) if k else logprob, abs=TOLERANCE)

    def check_listed(self, tokens: Sequence[int], listed: list[Any], k: int) -> None:
        """Compares `prompt_logprobs` of a response."""
        assert listed[0] is None
        scores = []
        for token, entry in zip(tokens[1:], listed[1:], strict=True):
            own = entry[str(token)]
            by_rank = sorted(entry.items(), key=lambda item: -item[1]["logprob"])[:k]
            top = tuple((int(id), each["logprob"]) for id, each in by_rank)
            scores.append(ScoredToken(own["logprob"], own["rank"], top))
        self.check(tokens, scores, k)
