"""One prompt at a prefill worker: its pages, its progress and its times. Owned by `scheduler`."""

from __future__ import annotations

import enum
from dataclasses import dataclass, field

from baton.domain.ids import AttemptId, PageKey
from baton.domain.request import EngineRequest, SampledToken, finish_reason
from baton.domain.timing.attempt_times import MAX_CHUNK_TIMES, PrefillTimes, to_us
from baton.domain.worker import WorkerRole
from baton.engine.batch import Row, SampleSpec, ScoreSpec
from baton.engine.handoff.export_events import Seal
from baton.kv.events.event import PageContent
from baton.kv.keys import page_keys
from baton.kv.page_table import PageTable
from baton.kv.pages import Hold
from baton.kv.prefix_cache import PrefixCache
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
    `most_in_step`: tokens of the next step while others want it. `owner`: fills pages for which this one is held.
    `num_overtaken`: admissions of others since pages are missing for it. `num_filled`: tokens whose KV is here;
    `num_scheduled`: with those of steps that are not committed, behind which the next chunk begins. `num_starts`:
    counts how often it has begun again. `num_published`: pages, with those that decode has already. `identities`: of
    all pages, where they are tagged.
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
    most_in_step: int = 0
    owner: Prompt | None = None
    num_overtaken: int = 0
    first_chunk_at: float | None = None
    compute_s: float = 0.0
    encode_s: float = 0.0  # steps that encoded images for which it waited
    chunks: list[tuple[int, int]] = field(default_factory=list)  # (start_us, tokens) of the first chunks
    num_cached: int = 0
    num_filled: int = 0
    num_scheduled: int = 0
    num_starts: int = 0
    num_published: int = 0  # pages, with those that decode has already
    num_pinned: int = 0
    tail_digest: int | None = None  # of the partial last page, once it was computed beside the engine thread
    identities: list[bytes] = field(default_factory=list)  # of all pages, where pages are tagged
    tier_use: TierUse | None = None  # where there are tiers below the pool
    num_from_tiers: dict[str, int] = field(
        default_factory=dict
    )  # tokens of `num_cached` that tiers had, by their names
    num_imported: dict[WorkerRole, int] = field(default_factory=dict)  # tokens of `num_cached`, by their source

    @classmethod
    def of(
        cls,
        request: EngineRequest,
        cache: PrefixCache,
        page_size: int,
        decode_prefix_len: int,
        times: tuple[float, float],
    ) -> Prompt:
        """A prompt without pages, of which decode has the first `decode_prefix_len` tokens.

        `times`: its deadline, and when it was received.
        """
        table = PageTable(cache, page_size, request.salt, Hold.LIVE, request.media)
        table.set_priority(request.priority)
        num_tokens = len(request.tokens)
        num_decode_pages = min(decode_prefix_len, num_tokens - 1) // page_size  # the last page is always published
        prompt = cls(request, table, *times, num_published=num_decode_pages)
        prompt.keys = page_keys(request.tokens, page_size, request.salt, request.media)
        # A cached position has no hidden state to score from: a prompt that is scored is computed from the first token.
        prompt.num_matchable = (num_tokens - 1) // page_size if request.prompt_logprobs is None else 0
        return prompt

    @property
    def num_remaining(self) -> int:
        return len(self.request.tokens) - self.num_filled

    @property
    def num_unscheduled(self) -> int:
        """Tokens that no step computes yet."""
        return len(self.request.tokens) - self.num_scheduled

    def begin(self, num_cached: int) -> None:
        """The KV of the first `num_cached` tokens is here, and all pages are."""
        self.num_cached = self.num_filled = self.num_scheduled = num_cached

    def contents(self, first: int, end: int) -> list[PageContent]:
        """What readers of cache events learn of its pages [first, end)."""
        return self.table.contents(self.request.tokens, first, end)

    def start_again(self) -> None:
        """Releases all pages."""
        self.table.release()
        self.num_cached = self.num_filled = self.num_scheduled = 0
        self.num_starts += 1
        self.tail_digest = None
        self.num_imported, self.num_from_tiers = {}, {}

    def next_chunk(self, num_tokens: int, now: float) -> Row:
        """The next `num_tokens` tokens as a row of a step that is scheduled at `now`.

        Raises `Broken` without the window parts that it needs: they were reserved.
        """
        request, start, end = self.request, self.num_scheduled, self.num_scheduled + num_tokens
        self.table.cover_windows(start, end)
        spec = SampleSpec.of(request, request.tokens) if end == len(request.tokens) else None
        score = ScoreSpec.of(request, start, end)
        self.num_scheduled = end
        self._note_chunk(num_tokens, now)
        return Row(request.id, request.tokens[start:end], start, self.table.pages, spec, score, media=request.media)

    def _note_chunk(self, num_tokens: int, now: float) -> None:
        if self.first_chunk_at is None:
            self.first_chunk_at = now
        if len(self.chunks) < MAX_CHUNK_TIMES:
            self.chunks.append((to_us(now - self.received_at), num_tokens))

    def seal(self, num_pages: int, sampled: SampledToken, now: float) -> Seal:
        """The end of a prompt of `num_pages` pages after which `sampled` was drawn."""
        request = self.request
        finish = finish_reason(request.stop, sampled.token, request.num_emitted + 1)
        cached = self.num_from_tiers, self.num_imported
        return Seal(request.id, request.num_emitted, sampled, finish, num_pages, self.times(now), *cached)

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
