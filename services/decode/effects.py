"""What the decode policy wants done. The loop performs these; the policy never performs anything."""

from __future__ import annotations

from dataclasses import dataclass

from baton.domain.ids import AttemptId, WorkerId
from baton.domain.request import FinishReason, OutputToken
from baton.engine.messages import Fail
from baton.transfer.base import Pull
from services.decode.import_proof import ProofKind


@dataclass(frozen=True, slots=True)
class StartPull:
    """Hand a read to the puller."""

    pull: Pull


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
    """The import committed, by `proof`; figures for the client's router and the metrics."""

    id: AttemptId
    source: WorkerId
    proof: ProofKind
    num_prompt_tokens: int
    num_cached_tokens: int
    num_bytes: int
    num_pages: int
    pull_s: float
    exposed_s: float


@dataclass(frozen=True, slots=True)
class ReportLocalPrompt:
    """A prompt that is computed here has its pages; figures for the metrics."""

    id: AttemptId
    num_prompt_tokens: int
    num_cached_tokens: int


@dataclass(frozen=True, slots=True)
class EmitTokens:
    """The next tokens of a request, in order; with the last comes `finish`."""

    id: AttemptId
    tokens: tuple[OutputToken, ...]
    finish: FinishReason | None


@dataclass(frozen=True, slots=True)
class Preempted:
    """A row's pages went to host memory; it will be back."""

    id: AttemptId
    num_pages: int


OutwardEffect = (
    AskCommit | ConfirmCommit | AbortHandoff | ReportImported | ReportLocalPrompt | EmitTokens | Preempted | Fail
)
"""What is performed in the asyncio loop; reads are started by the engine thread itself."""

DecodeEffect = StartPull | OutwardEffect
