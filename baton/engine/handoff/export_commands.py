"""Commands about KV exports, sent by the puller's side through the mailbox of the engine that exports."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from baton.domain.errors import PageVerdict
from baton.domain.handoff import PublishedChunk, Suspect
from baton.domain.ids import AttemptId, PageKey
from baton.engine.reply import Reply


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
class OpenExport:
    """Request of another worker for those of `keys`, a prompt's full pages, that are cached here, from `first_page` on.

    The reply has the pages, pinned under a lease.
    """

    id: AttemptId
    keys: tuple[PageKey, ...]
    first_page: int
    reply: Reply[PublishedChunk]


ExportCommand = ReleaseExport | RenewLeases | CommitExport | OpenExport


class ExportMailbox(Protocol):
    """Mailbox of an engine that exports."""

    def put(self, command: ExportCommand) -> None:
        """See `Mailbox.put`."""
        ...
