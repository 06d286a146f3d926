"""One prompt at a prefill worker: its pages, its progress and its times. Owned by `scheduler`."""

from __future__ import annotations

from dataclasses import dataclass, field

from baton.domain.request import EngineRequest
from baton.domain.timing.attempt_times import MAX_CHUNK_TIMES, PrefillTimes, to_us
from baton.kv.page_table import PageTable


@dataclass(slots=True)
class Prompt:
    """`num_published`: pages, with those that decode has already. `identities`: of all pages, where they are tagged."""

    request: EngineRequest
    table: PageTable
    deadline: float
    received_at: float
    first_chunk_at: float | None = None
    compute_s: float = 0.0
    chunks: list[tuple[int, int]] = field(default_factory=list)  # (start_us, tokens) of the first chunks
    num_cached: int = 0
    num_filled: int = 0
    num_published: int = 0  # pages, with those that decode has already
    num_pinned: int = 0
    identities: list[bytes] = field(default_factory=list)  # of all pages, where pages are tagged

    @property
    def num_remaining(self) -> int:
        return len(self.request.tokens) - self.num_filled

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
        )
