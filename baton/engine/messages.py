"""Messages of both engines: the command that ends an attempt, its error, and the scores of its prompt."""

from __future__ import annotations

from dataclasses import dataclass

from baton.domain.errors import BatonError
from baton.domain.ids import AttemptId
from baton.domain.scores.prompt_scores import PromptScores
from baton.domain.timing.attempt_times import DecodeTimes


@dataclass(frozen=True, slots=True)
class Abort:
    """Ends an attempt. Legal in every state; idempotent."""

    id: AttemptId
    reason: str


@dataclass(frozen=True, slots=True)
class Fail:
    """End of an attempt with a typed error. `times`: of a row that had joined decode's batch."""

    id: AttemptId
    error: BatonError
    times: DecodeTimes | None = None


@dataclass(frozen=True, slots=True)
class Scored:
    """Scores of the prompt tokens after a chunk's, in order. From position 1 on: the prompt has started (again)."""

    id: AttemptId
    scores: PromptScores
