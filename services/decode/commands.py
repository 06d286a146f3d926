"""Commands to the decode engine, sent through its mailbox."""

from __future__ import annotations

from dataclasses import dataclass

from baton.domain.errors import BatonError
from baton.domain.handoff import PublishedChunk
from baton.domain.ids import AttemptId, PageKey, ReservationId, WorkerId
from baton.domain.request import EngineRequest
from baton.engine.handoff.export_commands import ExportCommand
from baton.engine.handoff.import_commands import (
    AllocateProbePages,
    CommitReplied,
    FreeProbePages,
    LeasesRenewed,
    QuarantineArrived,
    SourceReplaced,
    VerdictArrived,
)
from baton.engine.messages import Abort
from baton.engine.reply import Reply
from baton.services.decode.kv_import import Busy, Reserved, SealInfo
from baton.transfer.base import PullEvent
from baton.worker.budget_control import ChangeBudgets


@dataclass(frozen=True, slots=True)
class Reserve:
    """Request of a router for pages and a row. `computes_prompt`: the prompt is to be computed here."""

    id: AttemptId
    num_tokens: int
    keys: tuple[PageKey, ...]
    deadline_s: float
    reply: Reply[Reserved | Busy]
    max_new_tokens: int = 0
    computes_prompt: bool = False


@dataclass(frozen=True, slots=True)
class Claim:
    """Claim of a reservation by `Generate`, received at `received_at`.

    `deadline_s` bounds the import, counted from when the engine takes the command. `source` None: the prompt is
    computed here.
    """

    reservation_id: ReservationId
    request: EngineRequest
    source: WorkerId | None
    deadline_s: float
    received_at: float


@dataclass(frozen=True, slots=True)
class SealArrived:
    """Seal of a handoff: prefill publishes nothing more."""

    id: AttemptId
    seal: SealInfo


@dataclass(frozen=True, slots=True)
class SourceLost:
    """End of the watch of a handoff before its seal."""

    id: AttemptId
    error: BatonError


DecodeCommand = (
    Reserve
    | ChangeBudgets
    | Claim
    | PublishedChunk
    | SealArrived
    | SourceLost
    | SourceReplaced
    | LeasesRenewed
    | PullEvent
    | CommitReplied
    | VerdictArrived
    | QuarantineArrived
    | Abort
    | ExportCommand
    | AllocateProbePages
    | FreeProbePages
)
