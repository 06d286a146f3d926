"""What passes between decode's door, its import table and its scheduler. Values only."""

from __future__ import annotations

from dataclasses import dataclass

from baton.domain.attempt_times import ImportTimes
from baton.domain.ids import ReservationId, WorkerId
from baton.domain.request import EngineRequest, FinishReason, SampledToken
from baton.kv.page_table import PageTable


@dataclass(frozen=True, slots=True)
class Reserved:
    """Room is guaranteed until the deadline; `prefix_len` leading tokens are here already."""

    id: ReservationId
    prefix_len: int


@dataclass(frozen=True, slots=True)
class Busy:
    """Not now; `queued_pages` are reserved to others."""

    queued_pages: int


@dataclass(frozen=True, slots=True)
class SealInfo:
    """What prefill said last: the first token and how many pages the whole prompt has."""

    first_token: SampledToken
    finish: FinishReason | None
    num_pages: int


@dataclass(frozen=True, slots=True)
class ImportedPrompt:
    """An import that is validated: the scheduler takes over request, pages and first token."""

    request: EngineRequest
    table: PageTable
    first_token: SampledToken
    source: WorkerId
    prefix_len: int
    received_at: float
    times: ImportTimes


@dataclass(frozen=True, slots=True)
class LocalPrompt:
    """A prompt that was reserved room and is computed here: its first `prefix_len` tokens are in place."""

    request: EngineRequest
    table: PageTable
    prefix_len: int
