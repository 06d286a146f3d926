"""Messages of both engines: the command that ends an attempt, and the effect that reports its error."""

from __future__ import annotations

from dataclasses import dataclass

from baton.domain.errors import BatonError
from baton.domain.ids import AttemptId
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
