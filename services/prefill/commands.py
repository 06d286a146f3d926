"""Commands to the prefill engine, sent through its mailbox, and the events that it returns."""

from __future__ import annotations

from dataclasses import dataclass

from baton.domain.errors import PageVerdict
from baton.domain.handoff import PublishedChunk, Suspect
from baton.domain.ids import AttemptId, PageKey
from baton.domain.request import EngineRequest
from baton.engine.messages import Abort, Fail
from baton.engine.reply import Reply
from services.prefill.scheduler import ExportExpired, Progress, Seal


@dataclass(frozen=True, slots=True)
class AddPrompt:
    """A new prompt, received at `received_at`. `deadline_s` counts from when the engine takes the command."""

    request: EngineRequest
    decode_prefix_len: int
    deadline_s: float
    received_at: float


@dataclass(frozen=True, slots=True)
class ReleaseExport:
    """End of decode's reads: it aborted the import. Legal in every state; idempotent.

    `suspects` are compared with their digests first; the reply tells where they were damaged, None if unknown.
    """

    id: AttemptId
    reason: str
    suspects: tuple[Suspect, ...] = ()
    reply: Reply[PageVerdict | None] | None = None


@dataclass(frozen=True, slots=True)
class RenewalAnswer:
    """Handoffs that have ended; page keys quarantined since the asked number, and the number to ask with next."""

    ended: tuple[AttemptId, ...]
    quarantined: tuple[PageKey, ...] = ()
    quarantine_number: int = 0


@dataclass(frozen=True, slots=True)
class RenewLeases:
    """Renewal of the leases of a decode worker's handoffs, which has acted on the first `quarantine_seen` keys."""

    ids: tuple[AttemptId, ...]
    reply: Reply[RenewalAnswer]
    quarantine_seen: int = 0


@dataclass(frozen=True, slots=True)
class CommitExport:
    """Commit by decode, which has read everything. The reply says whether the pins were held all the time."""

    id: AttemptId
    reply: Reply[bool]


@dataclass(frozen=True, slots=True)
class TierEnded:
    """A read or write of the file tier has ended: ends the wait for commands."""


PrefillCommand = AddPrompt | Abort | ReleaseExport | RenewLeases | CommitExport | TierEnded


@dataclass(frozen=True, slots=True)
class ExportEnded:
    """End of an export by commit or abort. Its events are not needed any more."""

    id: AttemptId
    reason: str


PrefillEvent = PublishedChunk | Progress | Seal | Fail | ExportExpired | ExportEnded
