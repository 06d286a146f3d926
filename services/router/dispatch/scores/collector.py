"""Joins the scores of one attempt's prompt, and refuses what is not all of them. Called by `attempt`; pure."""

from __future__ import annotations

from baton.domain.errors import LinkBroken
from baton.domain.request import EngineRequest
from baton.domain.scores.prompt_scores import PromptScores, join_scores

FIRST = 1
"""Position of the first token that has a score."""


class ScoreCollector:
    """The scores of the prompt of `request`, from a worker whose model has `vocab_size` tokens."""

    def __init__(self, request: EngineRequest, vocab_size: int) -> None:
        self._wanted = request.prompt_logprobs
        self._k = min(self._wanted or 0, vocab_size)
        self._num_prompt_tokens = request.num_prompt_tokens
        self._parts: list[PromptScores] = []

    def add(self, part: PromptScores) -> None:
        """Adds the next part. One from the first position on begins again. Raises `LinkBroken` if it does not fit."""
        if part.first == FIRST:
            self._parts.clear()
        end = self._parts[-1].end if self._parts else FIRST
        fits = part.first == end and part.end <= self._num_prompt_tokens and len(part) > 0
        if self._wanted is None or not fits or part.k != self._k:
            asked = f"{self._k} best tokens from position {end} of {self._num_prompt_tokens}"
            raise LinkBroken(f"scores of [{part.first}, {part.end}) with {part.k} best tokens came in place of {asked}")
        self._parts.append(part)

    def take(self) -> PromptScores | None:
        """All scores; None if none were asked for. Raises `LinkBroken` if some are missing."""
        if self._wanted is None:
            return None
        end = self._parts[-1].end if self._parts else FIRST
        if end != self._num_prompt_tokens:
            raise LinkBroken(f"scores of the prompt end at {end}, not at {self._num_prompt_tokens}")
        return join_scores(self._parts) if self._parts else PromptScores(FIRST, self._k, b"", b"", b"", b"")
