"""Values that the import policy, the import table and the scheduler exchange."""

from __future__ import annotations

from dataclasses import dataclass

from baton.domain.attempt_times import ImportTimes
from baton.domain.ids import ReservationId, WorkerId
from baton.domain.request import EngineRequest, FinishReason, SampledToken
from baton.kv.page_table import PageTable


@dataclass(frozen=True, slots=True)
class Reserved:
    """Reservation of pages and a row until the deadline. The first `prefix_len` tokens are cached here."""

    id: ReservationId
    prefix_len: int


@dataclass(frozen=True, slots=True)
class Busy:
    """Refusal for now. `queued_pages` are reserved for other requests."""

    queued_pages: int


@dataclass(frozen=True, slots=True)
class SealInfo:
    """Seal of a handoff: the first output token and the number of pages of the whole prompt."""

    first_token: SampledToken
    finish: FinishReason | None
    num_pages: int


@dataclass(frozen=True, slots=True)
class ImportedPrompt:
    """A validated import, handed to the scheduler."""

    request: EngineRequest
    table: PageTable
    first_token: SampledToken
    source: WorkerId
    prefix_len: int
    received_at: float
    times: ImportTimes


@dataclass(frozen=True, slots=True)
class LocalPrompt:
    """A prompt with reserved pages that is computed here. The KV of its first `prefix_len` tokens is in place."""

    request: EngineRequest
    table: PageTable
    prefix_len: int
