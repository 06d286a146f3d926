"""What the prefill engine can be told, and what it tells: the two vocabularies of its mailbox and its outbox."""

from __future__ import annotations

from dataclasses import dataclass

from baton.domain.ids import AttemptId, PageId
from baton.domain.request import EngineRequest
from baton.engine.reply import Reply
from services.prefill.scheduler import Fail, Progress, Seal, Unpinned


@dataclass(frozen=True, slots=True)
class AddPrompt:
    """A new prompt; `deadline_s` counts from when the engine takes it."""

    request: EngineRequest
    decode_prefix_len: int
    deadline_s: float


@dataclass(frozen=True, slots=True)
class Abort:
    """The attempt is over for its router. Legal in every state; idempotent."""

    id: AttemptId
    reason: str


@dataclass(frozen=True, slots=True)
class Release:
    """Decode gave the landing up and reads no more. Legal in every state; idempotent."""

    id: AttemptId
    reason: str


@dataclass(frozen=True, slots=True)
class Renew:
    """Leases of a decode worker's handoffs; answered with those that have ended."""

    ids: tuple[AttemptId, ...]
    reply: Reply[list[AttemptId]]


@dataclass(frozen=True, slots=True)
class Commit:
    """Decode read everything; answered with whether the pins were held all the while."""

    id: AttemptId
    reply: Reply[bool]


PrefillCommand = AddPrompt | Abort | Release | Renew | Commit


@dataclass(frozen=True, slots=True)
class Announced:
    """A published chunk with its pages' digests (None when they are off)."""

    id: AttemptId
    first_page: int
    pages: tuple[PageId, ...]
    digests: tuple[int, ...] | None


@dataclass(frozen=True, slots=True)
class Ended:
    """The offer is over (committed or aborted): nobody needs its announcements any more."""

    id: AttemptId
    reason: str


PrefillEvent = Announced | Progress | Seal | Fail | Unpinned | Ended
