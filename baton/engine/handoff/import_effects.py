"""Effects of an import's policy on its source. The engine's loop has them performed; the policy stays pure."""

from __future__ import annotations

from dataclasses import dataclass

from baton.domain.handoff import Suspect
from baton.domain.ids import AttemptId, Incarnation, PageKey, WorkerId


@dataclass(frozen=True, slots=True)
class AskExport:
    """Ask a source for those of `keys`, a prompt's full pages, that it has cached, from `first_page` on."""

    id: AttemptId
    source: WorkerId
    incarnation: Incarnation
    keys: tuple[PageKey, ...]
    first_page: int


@dataclass(frozen=True, slots=True)
class ConfirmCommit:
    """Confirm the commit to the source, which then unpins: all pages were read and matched (V3)."""

    id: AttemptId
    source: WorkerId


@dataclass(frozen=True, slots=True)
class AbortHandoff:
    """Abort the handoff at the source, which then unpins: the import ended before its commit."""

    id: AttemptId
    source: WorkerId


@dataclass(frozen=True, slots=True)
class AskVerdict:
    """Abort the handoff like `AbortHandoff`, and ask the source about pages that did not match in two reads.

    `message` describes the failure of the attempt, which is reported with the verdict.
    """

    id: AttemptId
    source: WorkerId
    suspects: tuple[Suspect, ...]
    message: str
