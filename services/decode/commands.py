"""Commands to the decode engine, sent through its mailbox."""

from __future__ import annotations

from dataclasses import dataclass

from baton.domain.errors import BatonError, PageVerdict
from baton.domain.handoff import PublishedChunk
from baton.domain.ids import AttemptId, PageId, PageKey, ReservationId, WorkerId
from baton.domain.request import EngineRequest
from baton.engine.messages import Abort
from baton.engine.reply import Reply
from baton.transfer.base import PullEvent
from services.decode.kv_import import Busy, Reserved, SealInfo


@dataclass(frozen=True, slots=True)
class Reserve:
    """Request of a router for pages and a row."""

    id: AttemptId
    num_tokens: int
    keys: tuple[PageKey, ...]
    deadline_s: float
    reply: Reply[Reserved | Busy]
    max_new_tokens: int = 0


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


DecodeCommand = (
    Reserve
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
    | AllocateProbePages
    | FreeProbePages
)
