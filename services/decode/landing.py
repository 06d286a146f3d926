"""Landings: decode's side of a handoff, from the promise to the commit. Pure: it says what to pull, others pull.

A landing's life (the table is `baton.domain.handoff.LANDING_TABLE`):

1. *promised*: `promise` sets pages and a row aside by number. The prompt's cached prefix is matched and held, so that
   what was promised to be here stays here; the missing pages keep serving the cache until they are needed.
2. *bound*: the first `chunk` allocates the missing pages.
3. *pulling*: published pages are read into ours, at most `max_window_pages` at a time. A page whose digest does not
   match is read once more, then the landing fails.
4. *committed*: the seal is here, every page landed, and there is a proof (`services.decode.evidence`) that the bytes
   were right. The row may board.
5. A landing that ends before that is *draining* until its last read is over: only then are its pages given back. The
   leading pages that are proven stay in the prefix cache, so that a replay moves only the rest.
"""

from __future__ import annotations

import itertools
from collections import OrderedDict, deque
from collections.abc import Sequence
from dataclasses import dataclass, field

from baton.domain.errors import Broken, ContextOverflow, IntegrityFailure, LinkBroken, Superseded
from baton.domain.handoff import LandingEvent, LandingState, advance_landing
from baton.domain.ids import AttemptId, PageId, PageKey, PromiseId, RequestId, WorkerId
from baton.domain.request import EngineRequest
from baton.kv.pages import Hold
from baton.kv.radix import RadixCache
from baton.kv.table import PageTable
from baton.transfer.base import Pull, PullEvent, PullOutcome
from services.decode.boarding import Boarding, Busy, LocalPrompt, Promised, SealInfo
from services.decode.evidence import Evidence

_MAX_REMEMBERED = 4096
"""Requests whose newest attempt is remembered, to refuse a message of an older one."""


@dataclass(frozen=True, slots=True)
class LandingLimits:
    """What landings may hold and how long they may take."""

    page_size: int
    max_rows: int
    max_window_pages: int
    pull_deadline_s: float
    max_pull_attempts: int = 2


@dataclass(slots=True)
class Landing:
    """One handoff being received. Internal to the book; tests and metrics may read it."""

    id: AttemptId
    promise_id: PromiseId
    num_tokens: int
    prefix_len: int
    table: PageTable
    num_reserved: int  # pages promised and not yet allocated
    deadline: float
    state: LandingState = LandingState.PROMISED
    request: EngineRequest | None = None
    source: WorkerId | None = None
    waiting: deque[Pull] = field(default_factory=deque)
    in_flight: dict[int, Pull] = field(default_factory=dict)
    num_tries: dict[PageId, int] = field(default_factory=dict)  # local page -> reads started
    evidence: Evidence = field(default_factory=Evidence)
    num_announced: int = 0  # leading pages that are here already or were published
    seal: SealInfo | None = None
    sealed_at: float = 0.0
    first_pull_at: float | None = None
    num_bytes: int = 0
    num_pages: int = 0

    @property
    def num_in_flight_pages(self) -> int:
        return sum(len(pull.local_pages) for pull in self.in_flight.values())


class LandingBook:
    """All landings of one decode worker. Owned by the engine thread."""

    def __init__(self, cache: RadixCache, limits: LandingLimits) -> None:
        self._cache = cache
        self._limits = limits
        self._landings: dict[AttemptId, Landing] = {}
        self._draining: list[Landing] = []
        self._by_pull: dict[int, Landing] = {}
        self._newest: OrderedDict[RequestId, int] = OrderedDict()
        self._numbers = itertools.count(1)
        self.num_reserved_pages = 0

    def __len__(self) -> int:
        return len(self._landings)

    @property
    def num_draining(self) -> int:
        return len(self._draining)

    def get(self, id: AttemptId) -> Landing | None:
        return self._landings.get(id)

    def ids(self) -> list[AttemptId]:
        """Every landing that is not draining."""
        return list(self._landings)

    def owner(self, pull_id: int) -> AttemptId | None:
        """Whose read it is; None for one whose landing has ended (its pages may still be draining)."""
        landing = self._by_pull.get(pull_id)
        return landing.id if landing is not None and landing.id in self._landings else None

    def promise(
        self, id: AttemptId, num_tokens: int, keys: Sequence[PageKey], num_rows: int, now: float, deadline_s: float
    ) -> Promised | Busy:
        """Guarantees the pages of `num_tokens` + 1 slots and a row, beside `num_rows` rows that already run.

        The same attempt asking again gets the same promise. Raises `Superseded` for an older attempt than one seen and
        `ContextOverflow` for what could never fit.
        """
        known = self._landings.get(id)
        if known is not None:
            return Promised(known.promise_id, known.prefix_len)
        self.fence(id)
        size, total = self._limits.page_size, self._cache.pool.num_pages
        if -(-(num_tokens + 1) // size) > total:
            raise ContextOverflow(f"{num_tokens} tokens do not fit a pool of {total} pages of {size}")
        table = PageTable(self._cache, size, "", Hold.PROMISED)
        prefix_len = table.match(keys[: (num_tokens - 1) // size])
        num_missing = table.num_missing(num_tokens + 1)
        if num_rows + len(self._landings) >= self._limits.max_rows or num_missing > self.num_promisable:
            table.release()
            return Busy(self.num_reserved_pages)
        promise_id = PromiseId(f"{id}#{next(self._numbers)}")
        self._landings[id] = Landing(
            id, promise_id, num_tokens, prefix_len, table, num_missing, now + deadline_s,
            num_announced=prefix_len // size,
        )  # fmt: skip
        self.num_reserved_pages += num_missing
        return Promised(promise_id, prefix_len)

    @property
    def num_promisable(self) -> int:
        """Pages that are available and promised to nobody."""
        return self._cache.num_available - self.num_reserved_pages

    def claim(self, promise_id: PromiseId, request: EngineRequest, source: WorkerId, deadline: float) -> bool:
        """`Generate` has come: the promise gets its request. False when the promise has ended or was for another."""
        landing = self._promised(promise_id, request)
        if landing is None:
            return False
        landing.request, landing.source, landing.deadline = request, source, deadline
        return True

    def take(self, promise_id: PromiseId, request: EngineRequest) -> LocalPrompt | None:
        """`claim` by a prompt that is computed here: the landing is over at once, all its pages are the prompt's."""
        landing = self._promised(promise_id, request)
        if landing is None:
            return None
        self._bind(landing)
        landing.state = advance_landing(landing.state, LandingEvent.COMMIT)
        del self._landings[landing.id]
        landing.table.rehold(Hold.LIVE)
        return LocalPrompt(request, landing.table, landing.prefix_len)

    def chunk(
        self, id: AttemptId, first_page: int, pages: Sequence[PageId], digests: Sequence[int] | None, now: float
    ) -> list[Pull]:
        """Published pages: returns the reads to start now. Chunks of unknown landings are ignored, and so are pages
        that are here or were published before. Raises `LinkBroken` for a chunk that does not continue them."""
        landing = self._landings.get(id)
        if landing is None or landing.source is None:
            return []
        if landing.state is LandingState.PROMISED:
            self._bind(landing)
        end = first_page + len(pages)
        if first_page > landing.num_announced or end > self._num_prompt_pages(landing):
            raise LinkBroken(f"{id}: pages [{first_page}, {end}) do not continue the first {landing.num_announced}")
        if digests is not None and len(digests) != len(pages):
            raise LinkBroken(f"{id}: {len(digests)} digests came with {len(pages)} pages")
        local, window = landing.table.pages[first_page:end], self._limits.max_window_pages
        for at in range(landing.num_announced - first_page, len(pages), window):
            part = slice(at, at + window)
            landing.waiting.append(self._pull(landing, pages[part], local[part], digests[part] if digests else None))
        landing.num_announced = max(landing.num_announced, end)
        return self._start(landing, now)

    def sealed(self, id: AttemptId, seal: SealInfo, now: float) -> None:
        """The last chunk has been announced. Raises `LinkBroken` when pages of the prompt have not."""
        landing = self._landings.get(id)
        if landing is None:
            return
        num_pages = self._num_prompt_pages(landing)
        if landing.num_announced != num_pages:
            raise LinkBroken(f"{id}: sealed with {landing.num_announced} of {num_pages} pages published")
        landing.seal, landing.sealed_at = seal, now

    def pulled(self, event: PullEvent, now: float) -> list[Pull]:
        """A read's outcome; returns further reads to start. Raises `Interrupted` when the landing cannot go on: the
        caller then aborts it."""
        landing = self._by_pull.get(event.pull.id)
        if landing is None:
            return []
        if event.outcome is PullOutcome.LATE:
            raise LinkBroken(f"{landing.id}: a read was not over after {event.pull.deadline_s} s")
        del self._by_pull[event.pull.id]
        del landing.in_flight[event.pull.id]
        if landing.state is LandingState.DRAINING:
            self._reap(landing)
            return []
        landing.num_bytes += event.num_bytes
        if event.outcome is PullOutcome.FAILED:
            raise LinkBroken(f"{landing.id}: a read failed: {event.reason}")
        self._book_landed(landing, event, now)
        return self._start(landing, now)

    def ready(self, id: AttemptId) -> bool:
        """Whether the seal is here and every published page has landed."""
        landing = self._landings.get(id)
        return bool(landing and landing.seal and landing.request and not landing.waiting and not landing.in_flight)

    def renewed(self, ids: Sequence[AttemptId], lease_ends_at: float) -> None:
        """The source has granted these landings a lease, on our clock."""
        for id in ids:
            if (landing := self._landings.get(id)) is not None:
                landing.evidence.renewed(lease_ends_at)

    def proven(self, id: AttemptId) -> bool:
        """Whether there is evidence for every page of a landing that is `ready`."""
        landing = self._landings[id]
        return self._num_proven_tokens(landing) == landing.num_tokens

    def unfinished(self, source: WorkerId) -> list[AttemptId]:
        """Landings that still have something to hear from a source or to read there."""
        return [one.id for one in self._landings.values() if one.source == source and not self.ready(one.id)]

    def commit(self, id: AttemptId, now: float) -> Boarding:
        """Hands a validated landing over; it must be `ready`."""
        landing = self._landings[id]
        if landing.request is None or landing.source is None or landing.seal is None:
            raise Broken(f"{id} was committed before it was ready")
        landing.state = advance_landing(landing.state, LandingEvent.COMMIT)
        del self._landings[id]
        landing.table.rehold(Hold.LIVE)
        landing.table.settle(landing.request.tokens, landing.num_tokens)
        pull_s = 0.0 if landing.first_pull_at is None else now - landing.first_pull_at
        return Boarding(
            landing.request, landing.table, landing.seal.first_token, landing.source, landing.prefix_len,
            landing.num_bytes, landing.num_pages, pull_s, now - landing.sealed_at,
        )  # fmt: skip

    def abort(self, id: AttemptId) -> WorkerId | None:
        """Ends a landing in any state; its pages go back when its last read is over. Idempotent.

        The leading pages that are proven may serve the cache. Returns the source that should be told, if there is one.
        """
        landing = self._landings.pop(id, None)
        if landing is None:
            return None
        self.num_reserved_pages -= landing.num_reserved
        landing.num_reserved = 0
        landing.waiting.clear()
        landing.state = advance_landing(landing.state, LandingEvent.ABORT)
        if landing.request is not None:
            landing.table.settle(landing.request.tokens, self._num_proven_tokens(landing))
        landing.table.rehold(Hold.DRAINING)
        self._draining.append(landing)
        self._reap(landing)
        return landing.source

    def expire(self, now: float) -> list[AttemptId]:
        """Landings past their deadline; the caller aborts them and tells whom it concerns."""
        return [landing.id for landing in self._landings.values() if landing.deadline <= now]

    def next_deadline(self) -> float | None:
        return min((landing.deadline for landing in self._landings.values()), default=None)

    def fence(self, id: AttemptId) -> None:
        """Remembers the newest attempt of the request. Raises `Superseded` for one that is older."""
        newest = self._newest.get(id.request_id, 0)
        if id.attempt < newest:
            raise Superseded(f"{id}: attempt {newest} was seen already")
        self._newest[id.request_id] = id.attempt
        self._newest.move_to_end(id.request_id)
        while len(self._newest) > _MAX_REMEMBERED + len(self._landings):
            self._newest.popitem(last=False)

    def _promised(self, promise_id: PromiseId, request: EngineRequest) -> Landing | None:
        """The landing that was promised for exactly these tokens, and that nobody has claimed yet."""
        landing = self._landings.get(request.id)
        if landing is None or landing.promise_id != promise_id or landing.request is not None:
            return None
        num_cached_pages = landing.prefix_len // self._limits.page_size
        if landing.num_tokens != len(request.tokens):
            return None
        return landing if landing.table.begins(request.tokens, request.salt, num_cached_pages) else None

    def _bind(self, landing: Landing) -> None:
        landing.state = advance_landing(landing.state, LandingEvent.BIND)
        self.num_reserved_pages -= landing.num_reserved
        landing.num_reserved = 0
        if not landing.table.extend(landing.num_tokens + 1):
            raise Broken(f"{landing.id}: promised pages were not there")

    def _num_prompt_pages(self, landing: Landing) -> int:
        return -(-landing.num_tokens // self._limits.page_size)

    def _pull(
        self, landing: Landing, remote: Sequence[PageId], local: Sequence[PageId], digests: Sequence[int] | None
    ) -> Pull:
        assert landing.source is not None
        for page in local:
            landing.num_tries[page] = landing.num_tries.get(page, 0) + 1
        return Pull(
            next(self._numbers), landing.source, tuple(remote), tuple(local),
            None if digests is None else tuple(digests), self._limits.pull_deadline_s,
        )  # fmt: skip

    def _start(self, landing: Landing, now: float) -> list[Pull]:
        started: list[Pull] = []
        while landing.waiting:
            num_pages = len(landing.waiting[0].local_pages)
            if landing.in_flight and landing.num_in_flight_pages + num_pages > self._limits.max_window_pages:
                break
            pull = landing.waiting.popleft()
            landing.in_flight[pull.id] = pull
            self._by_pull[pull.id] = landing
            landing.state = advance_landing(landing.state, LandingEvent.PULL)
            started.append(pull)
        if started and landing.first_pull_at is None:
            landing.first_pull_at = now
        return started

    def _book_landed(self, landing: Landing, event: PullEvent, now: float) -> None:
        corrupt = set(event.corrupt)
        landed = [page for i, page in enumerate(event.pull.local_pages) if i not in corrupt]
        landing.evidence.read(landed, now, matched=event.pull.digests is not None)
        landing.num_pages += len(landed)
        if event.outcome is not PullOutcome.CORRUPT:
            return
        again = [i for i in range(len(event.pull.local_pages)) if i in corrupt]
        local = [event.pull.local_pages[i] for i in again]
        if any(landing.num_tries[page] >= self._limits.max_pull_attempts for page in local):
            raise IntegrityFailure(f"{landing.id}: {len(local)} pages did not match their digests, twice")
        assert event.pull.digests is not None
        remote = [event.pull.remote_pages[i] for i in again]
        digests = [event.pull.digests[i] for i in again]
        landing.waiting.appendleft(self._pull(landing, remote, local, digests))

    def _num_proven_tokens(self, landing: Landing) -> int:
        num_tokens = 0
        for i, page in enumerate(landing.table.pages):
            if i * self._limits.page_size >= landing.prefix_len and not landing.evidence.proves(page):
                break
            num_tokens += self._limits.page_size
        return min(num_tokens, landing.num_tokens)

    def _reap(self, landing: Landing) -> None:
        if landing.in_flight:
            return
        landing.state = advance_landing(landing.state, LandingEvent.DRAINED)
        landing.table.release()
        self._draining.remove(landing)
