"""What the prefill engine can be told, and what it tells: the two vocabularies of its mailbox and its outbox."""

from __future__ import annotations

from dataclasses import dataclass

from baton.domain.handoff import PublishedChunk
from baton.domain.ids import AttemptId
from baton.domain.request import EngineRequest
from baton.engine.messages import Abort, Fail
from baton.engine.reply import Reply
from services.prefill.scheduler import ExportExpired, Progress, Seal


@dataclass(frozen=True, slots=True)
class AddPrompt:
    """A new prompt, received at `received_at`; `deadline_s` counts from when the engine takes it."""

    request: EngineRequest
    decode_prefix_len: int
    deadline_s: float
    received_at: float


@dataclass(frozen=True, slots=True)
class ReleaseExport:
    """Decode gave the import up and reads no more. Legal in every state; idempotent."""

    id: AttemptId
    reason: str


@dataclass(frozen=True, slots=True)
class RenewLeases:
    """Leases of a decode worker's handoffs; answered with those that have ended."""

    ids: tuple[AttemptId, ...]
    reply: Reply[list[AttemptId]]


@dataclass(frozen=True, slots=True)
class CommitExport:
    """Decode read everything; answered with whether the pins were held all the while."""

    id: AttemptId
    reply: Reply[bool]


PrefillCommand = AddPrompt | Abort | ReleaseExport | RenewLeases | CommitExport


@dataclass(frozen=True, slots=True)
class ExportEnded:
    """The export is over (committed or aborted): nobody needs its announcements any more."""

    id: AttemptId
    reason: str


PrefillEvent = PublishedChunk | Progress | Seal | Fail | ExportExpired | ExportEnded
