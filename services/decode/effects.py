"""What the decode policy wants done. The loop performs these; the policy never performs anything."""

from __future__ import annotations

from dataclasses import dataclass

from baton.domain.attempt_times import DecodeTimes, ImportTimes
from baton.domain.ids import AttemptId, WorkerId
from baton.domain.request import FinishReason, OutputToken
from baton.engine.messages import Fail
from baton.transfer.base import Pull


@dataclass(frozen=True, slots=True)
class AskCommit:
    """Everything was read but cannot be checked here (digests are off): ask the source whether its pins held (V1)."""

    id: AttemptId
    source: WorkerId


@dataclass(frozen=True, slots=True)
class ConfirmCommit:
    """Everything was read and matched (V3): tell the source, so that it unpins."""

    id: AttemptId
    source: WorkerId


@dataclass(frozen=True, slots=True)
class AbortHandoff:
    """The import ended before its commit: tell the source, so that it unpins."""

    id: AttemptId
    source: WorkerId


@dataclass(frozen=True, slots=True)
class ReportImported:
    """The import committed: figures for the router and the metrics.

    The policy knows neither `times.join_us` nor transport and path: the loop and the outbox fill them in.
    """

    id: AttemptId
    source: WorkerId
    received_at: float
    num_prompt_tokens: int
    num_cached_tokens: int
    times: ImportTimes


@dataclass(frozen=True, slots=True)
class EmitTokens:
    """The next tokens of a request, in order; `finish` and `times` come with the last."""

    id: AttemptId
    tokens: tuple[OutputToken, ...]
    finish: FinishReason | None
    times: DecodeTimes | None = None


OutwardEffect = AskCommit | ConfirmCommit | AbortHandoff | ReportImported | EmitTokens | Fail
"""Performed in the asyncio loop."""

DecodeEffect = Pull | OutwardEffect
"""A `Pull` is started by the engine thread itself."""
