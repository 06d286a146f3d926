"""Commands about KV imports and links, sent through the mailbox of the engine that imports."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from baton.domain.errors import BatonError, PageVerdict
from baton.domain.handoff import PublishedChunk
from baton.domain.ids import AttemptId, PageId, PageKey, WorkerId
from baton.engine.reply import Reply


@dataclass(frozen=True, slots=True)
class LeasesRenewed:
    """Leases that prefill keeps until `lease_ends_at` on this worker's clock, even if the attempt is aborted."""

    ids: tuple[AttemptId, ...]
    lease_ends_at: float


@dataclass(frozen=True, slots=True)
class SourceReplaced:
    """A new process has taken a prefill worker's name. Reads from it return other bytes than were published."""

    source: WorkerId


@dataclass(frozen=True, slots=True)
class CommitReplied:
    """Prefill's answer to a commit: `valid` says whether the pins were held. None: no answer came."""

    id: AttemptId
    valid: bool | None


@dataclass(frozen=True, slots=True)
class VerdictArrived:
    """The source's answer about an attempt's suspects. None: no answer came."""

    id: AttemptId
    verdict: PageVerdict | None
    message: str


@dataclass(frozen=True, slots=True)
class QuarantineArrived:
    """Keys of pages that a source took out of use, because their bytes were wrong or computed from wrong ones."""

    source: WorkerId
    keys: tuple[PageKey, ...]


@dataclass(frozen=True, slots=True)
class AllocateProbePages:
    """Request for a probe's pages, held as draining until `FreeProbePages`. Reply None: too few are free."""

    num_pages: int
    reply: Reply[list[PageId] | None]


@dataclass(frozen=True, slots=True)
class FreeProbePages:
    """Return of a probe's pages after its last read."""

    pages: tuple[PageId, ...]


@dataclass(frozen=True, slots=True)
class ExportAnswer:
    """The answer of a source that was asked for cached pages: what it announced, or why it gives none."""

    id: AttemptId
    answer: PublishedChunk | BatonError


LinkCommand = SourceReplaced | AllocateProbePages | FreeProbePages
ImportCommand = LinkCommand | LeasesRenewed | CommitReplied | VerdictArrived | QuarantineArrived
PageImportCommand = ImportCommand | ExportAnswer


class LinkMailbox(Protocol):
    """Mailbox of an engine that imports, for its links."""

    def put(self, command: LinkCommand) -> None:
        """See `Mailbox.put`."""
        ...


class ImportMailbox(Protocol):
    """Mailbox of an engine that imports, for the answers of sources."""

    def put(self, command: ImportCommand) -> None:
        """See `Mailbox.put`."""
        ...


class PageImportMailbox(Protocol):
    """Mailbox of an engine that imports cached pages."""

    def put(self, command: PageImportCommand) -> None:
        """See `Mailbox.put`."""
        ...
