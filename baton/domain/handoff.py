"""Both sides of a handoff as tables `(state, event) -> state`, and the chunk that passes between them.

See `docs/protocol.md`.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass

from baton.domain.errors import Broken
from baton.domain.ids import AttemptId, PageId


@dataclass(frozen=True, slots=True)
class PublishedChunk:
    """Pages [first_page, first_page + len(pages)) of a request's page table, final and pinned in prefill's pool.

    `digests` are those of the pages' bytes, in order (`baton.kv.page_digests`); None if digests are off or not computed
    yet. `tags` authenticate the bytes (`baton.kv.page_tags`); None if they are off. `window_slots`: of window parts, -1
    for one that is not there; empty if window parts are in their pages.
    """

    id: AttemptId
    first_page: int
    pages: tuple[PageId, ...]
    digests: tuple[int, ...] | None = None
    tags: tuple[bytes, ...] | None = None
    window_slots: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class Suspect:
    """A page that did not match its announced digest in two reads: its index in the request, its id at the source."""

    index: int
    page: PageId
    digest: int


class ExportState(enum.Enum):
    """State of an export on the prefill side. Pages are pinned in the first three states only.

    ABANDONED: the attempt has ended, but decode may read until its granted lease ends or it releases the export.
    """

    PINNED = "pinned"
    SEALED = "sealed"
    ABANDONED = "abandoned"
    COMMITTED = "committed"
    EXPIRED = "expired"
    ABORTED = "aborted"


class ExportEvent(enum.Enum):
    """Event of an export."""

    PUBLISH = "publish"
    SEAL = "seal"
    RENEW = "renew"
    COMMIT = "commit"
    LEASE_END = "lease_end"
    ABORT = "abort"
    ABANDON = "abandon"


class ImportState(enum.Enum):
    """State of an import on the decode side. A row may run only from COMMITTED."""

    RESERVED = "reserved"
    ALLOCATED = "allocated"
    PULLING = "pulling"
    COMMITTED = "committed"
    DRAINING = "draining"
    RELEASED = "released"


class ImportEvent(enum.Enum):
    """Event of an import."""

    ALLOCATE = "allocate"
    PULL = "pull"
    COMMIT = "commit"
    ABORT = "abort"
    DRAINED = "drained"


_S, _SE, _L, _LE = ExportState, ExportEvent, ImportState, ImportEvent

EXPORT_TRANSITIONS: dict[tuple[ExportState, ExportEvent], ExportState] = {
    (_S.PINNED, _SE.PUBLISH): _S.PINNED,
    (_S.PINNED, _SE.SEAL): _S.SEALED,
    **{(s, _SE.RENEW): s for s in (_S.PINNED, _S.SEALED)},
    (_S.SEALED, _SE.COMMIT): _S.COMMITTED,
    **{(s, _SE.ABANDON): _S.ABANDONED for s in (_S.PINNED, _S.SEALED)},
    **{(s, _SE.LEASE_END): _S.EXPIRED for s in (_S.PINNED, _S.SEALED, _S.ABANDONED)},
    **{(s, _SE.ABORT): _S.ABORTED for s in (_S.PINNED, _S.SEALED, _S.ABANDONED)},
}

IMPORT_TRANSITIONS: dict[tuple[ImportState, ImportEvent], ImportState] = {
    (_L.RESERVED, _LE.ALLOCATE): _L.ALLOCATED,
    (_L.ALLOCATED, _LE.PULL): _L.PULLING,
    (_L.PULLING, _LE.PULL): _L.PULLING,
    (_L.ALLOCATED, _LE.COMMIT): _L.COMMITTED,  # decode's prefix cache held all but the last page
    (_L.PULLING, _LE.COMMIT): _L.COMMITTED,
    **{(s, _LE.ABORT): _L.DRAINING for s in (_L.RESERVED, _L.ALLOCATED, _L.PULLING)},
    (_L.COMMITTED, _LE.ABORT): _L.RELEASED,
    (_L.DRAINING, _LE.DRAINED): _L.RELEASED,
}


def advance_export(state: ExportState, event: ExportEvent) -> ExportState:
    """The export's state after `event`. Raises `Broken` for a pair that is not in the table."""
    try:
        return EXPORT_TRANSITIONS[state, event]
    except KeyError:
        raise Broken(f"export in state {state.value} cannot {event.value}") from None


def advance_import(state: ImportState, event: ImportEvent) -> ImportState:
    """The import's state after `event`. Raises `Broken` for a pair that is not in the table."""
    try:
        return IMPORT_TRANSITIONS[state, event]
    except KeyError:
        raise Broken(f"import in state {state.value} cannot {event.value}") from None
