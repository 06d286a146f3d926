"""What the decode engine can be told: the vocabulary of its mailbox."""

from __future__ import annotations

from dataclasses import dataclass

from baton.domain.errors import BatonError
from baton.domain.handoff import PublishedChunk
from baton.domain.ids import AttemptId, PageId, PageKey, ReservationId, WorkerId
from baton.domain.request import EngineRequest
from baton.engine.messages import Abort
from baton.engine.reply import Reply
from baton.transfer.base import PullEvent
from services.decode.import_types import Busy, Reserved, SealInfo


@dataclass(frozen=True, slots=True)
class Reserve:
    """A router asks for room."""

    id: AttemptId
    num_tokens: int
    keys: tuple[PageKey, ...]
    deadline_s: float
    reply: Reply[Reserved | Busy]


@dataclass(frozen=True, slots=True)
class Claim:
    """`Generate` came, at `received_at`. `deadline_s` is for the import, from when the engine takes the command.

    Without a `source` the prompt is to be computed here.
    """

    reservation_id: ReservationId
    request: EngineRequest
    source: WorkerId | None
    deadline_s: float
    received_at: float


@dataclass(frozen=True, slots=True)
class SealArrived:
    """Prefill announced its last."""

    id: AttemptId
    seal: SealInfo


@dataclass(frozen=True, slots=True)
class SourceLost:
    """The handoff cannot be followed any more."""

    id: AttemptId
    error: BatonError


@dataclass(frozen=True, slots=True)
class LeasesRenewed:
    """Prefill holds its pins for these until `lease_ends_at`, on this worker's clock, whatever happens."""

    ids: tuple[AttemptId, ...]
    lease_ends_at: float


@dataclass(frozen=True, slots=True)
class SourceReplaced:
    """Another process runs under a prefill worker's name: what is read there from now on is not what was published."""

    source: WorkerId


@dataclass(frozen=True, slots=True)
class CommitReplied:
    """Prefill's word on whether its pins held; None: it could not be asked."""

    id: AttemptId
    valid: bool | None


@dataclass(frozen=True, slots=True)
class AllocateProbePages:
    """Room for a link's probe: pages held as draining until `FreeProbePages`; answered None when there is none."""

    num_pages: int
    reply: Reply[list[PageId] | None]


@dataclass(frozen=True, slots=True)
class FreeProbePages:
    """The probe's pages back, after its last read."""

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
    | Abort
    | AllocateProbePages
    | FreeProbePages
)
