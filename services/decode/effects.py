"""Effects of the decode policy. The loop performs them; the policy stays pure."""

from __future__ import annotations

from dataclasses import dataclass

from baton.domain.ids import AttemptId, WorkerId
from baton.domain.request import FinishReason, OutputToken
from baton.domain.timing.attempt_times import DecodeTimes, ImportTimes
from baton.engine.handoff.import_effects import AbortHandoff, AskVerdict, ConfirmCommit
from baton.engine.messages import Fail, Scored
from baton.transfer.base import Pull


@dataclass(frozen=True, slots=True)
class AskCommit:
    """Ask the source whether its pins were held (V1): all pages were read, and digests are off."""

    id: AttemptId
    source: WorkerId


@dataclass(frozen=True, slots=True)
class ReportImported:
    """Report a committed import to the router and the metrics.

    `first_token` is the one of the seal; the router compares it with prefill's own answer. The loop fills in
    `times.join_us`, the outbox transport and path.
    """

    id: AttemptId
    source: WorkerId
    received_at: float
    num_prompt_tokens: int
    num_cached_tokens: int
    times: ImportTimes
    first_token: OutputToken


@dataclass(frozen=True, slots=True)
class EmitTokens:
    """Send the next tokens of a request, in order. `finish` and `times` come with the last one."""

    id: AttemptId
    tokens: tuple[OutputToken, ...]
    finish: FinishReason | None
    times: DecodeTimes | None = None


OutwardEffect = AskCommit | ConfirmCommit | AbortHandoff | AskVerdict | ReportImported | Scored | EmitTokens | Fail
"""Performed in the asyncio loop."""

DecodeEffect = Pull | OutwardEffect
"""A `Pull` is started by the engine thread itself."""
