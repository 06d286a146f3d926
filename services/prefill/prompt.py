"""One prompt at a prefill worker: its pages, its progress and its times. Owned by `scheduler`."""

from __future__ import annotations

import enum
from dataclasses import dataclass, field

from baton.domain.ids import AttemptId, PageKey
from baton.domain.request import EngineRequest
from baton.domain.timing.attempt_times import MAX_CHUNK_TIMES, PrefillTimes, to_us
from baton.domain.worker import WorkerRole
from baton.kv.page_table import PageTable
from baton.kv.tiers.lower_tier import TierUse


class PromptState(enum.Enum):
    """The queue that a prompt is in."""

    IMPORTING = enum.auto()
    WAITING = enum.auto()
    CHUNKING = enum.auto()
    ENDED = enum.auto()


@dataclass(frozen=True, slots=True)
class Progress:
    """Progress of a prompt: `num_tokens` have their KV, cached ones included."""

    id: AttemptId
    num_tokens: int


@dataclass(slots=True, eq=False)
class Prompt:
    """`keys`: of the full pages; of the first `num_matchable`, pages may be taken from the cache.

    `number`: counts arrivals. `num_known`: tokens whose KV was here when the last step was scheduled, filled or cached.
    `owner`: fills pages for which this one is held. `num_overtaken`: admissions of others since pages are missing for
    it. `num_published`: pages, with those that decode has already. `identities`: of all pages, where they are tagged.
    """

    request: EngineRequest
    table: PageTable
    deadline: float
    received_at: float
    keys: list[PageKey] = field(default_factory=list)
    num_matchable: int = 0
    state: PromptState = PromptState.WAITING
    number: int = 0
    num_known: int = 0
    owner: Prompt | None = None
    num_overtaken: int = 0
    first_chunk_at: float | None = None
    compute_s: float = 0.0
    encode_s: float = 0.0  # steps that encoded images for which it waited
    chunks: list[tuple[int, int]] = field(default_factory=list)  # (start_us, tokens) of the first chunks
    num_cached: int = 0
    num_filled: int = 0
    num_published: int = 0  # pages, with those that decode has already
    num_pinned: int = 0
    identities: list[bytes] = field(default_factory=list)  # of all pages, where pages are tagged
    tier_use: TierUse | None = None  # where there are tiers below the pool
    num_from_tiers: dict[str, int] = field(
        default_factory=dict
    )  # tokens of `num_cached` that tiers had, by their names
    num_imported: dict[WorkerRole, int] = field(default_factory=dict)  # tokens of `num_cached`, by their source

    @property
    def num_remaining(self) -> int:
        return len(self.request.tokens) - self.num_filled

    def start_again(self) -> None:
        """Releases all pages."""
        self.table.release()
        self.num_cached = self.num_filled = 0
        self.num_imported, self.num_from_tiers = {}, {}

    def start_chunk(self, num_tokens: int, now: float) -> None:
        if self.first_chunk_at is None:
            self.first_chunk_at = now
        if len(self.chunks) < MAX_CHUNK_TIMES:
            self.chunks.append((to_us(now - self.received_at), num_tokens))

    def times(self, now: float) -> PrefillTimes:
        """Times of a prompt that is sealed at `now`."""
        first_chunk_at = now if self.first_chunk_at is None else self.first_chunk_at
        return PrefillTimes(
            queue_us=to_us(first_chunk_at - self.received_at),
            compute_us=to_us(self.compute_s),
            seal_us=to_us(now - self.received_at),
            chunks=tuple(self.chunks),
            computed_tokens=len(self.request.tokens) - self.num_cached,
            cached_tokens=self.num_cached,
            imported_tokens=sum(self.num_imported.values()),
            encode_us=to_us(self.encode_s),
        )
