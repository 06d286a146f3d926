"""Imports of cached pages from other workers into a prefix cache, for prompts that wait. Pure: returns effects.

An import's life (states as in `baton.domain.handoff.IMPORT_TRANSITIONS`):

1. *reserved*: `begin` holds the prompt's own cached pages and asks the source for those that follow (`AskExport`).
2. *allocated*, *pulling*: `on_opened` allocates pages for the announced ones, at most `max_pages` of all imports
   together, and returns the reads. A page with a wrong digest or tag is read once more; a second mismatch ends the
   import, and the source is asked for its verdict.
3. *committed*: every page was read and matched its digest (V3); all of them enter the prefix cache.
4. *draining*: it ended earlier, by a failure, its deadline, a quarantined page or the end of its prompt. The leading
   pages that matched enter the cache all the same. Pages of reads in flight are held until these have ended.

However it ends, the prompt then computes what is missing: an import can cost its wait and nothing else. Of several
prompts that lack the same page one imports it, and the others wait for that import.
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field

from baton.domain.errors import BatonError, LinkBroken
from baton.domain.handoff import ImportEvent, ImportState, PublishedChunk, Suspect, advance_import
from baton.domain.ids import AttemptId, PageId, PageKey, WorkerId
from baton.domain.worker import WorkerRole
from baton.engine.handoff.import_effects import AbortHandoff, AskExport, AskVerdict, ConfirmCommit
from baton.engine.handoff.page_source import MIN_IMPORT_PAGES, ImportCostModel, PageSource
from baton.engine.transition_log import log_transition
from baton.kv.events.event import PageContents, no_contents
from baton.kv.page_tags import PageTag, page_identity
from baton.kv.pages import Hold
from baton.kv.prefix_cache import PrefixCache
from baton.kv.windows.arrival_slots import ArrivalSlots
from baton.settings.choices import PageSharingKind
from baton.transfer.base import Pull, PullEvent, PullOutcome

MAX_TRIES = 2
"""Reads of one page."""

PageImportEffect = AskExport | Pull | ConfirmCommit | AbortHandoff | AskVerdict


@dataclass(frozen=True, slots=True)
class PageImportLimits:
    """`max_pages`: of all imports at once. `tagged`: fingerprint that tags bind; None: tags are not checked."""

    max_pages: int
    max_window_pages: int
    pull_deadline_s: float
    tagged: str | None = None


@dataclass(slots=True, eq=False)
class PageImport:
    """One import of pages [`first`, ...) of `keys`. Internal to `PageImports`; tests may read it.

    `followers`: prompts that wait for the same pages. `held`: the prompt's own pages before `first`.
    """

    id: AttemptId
    source: PageSource
    keys: tuple[PageKey, ...]
    first: int
    asked_at: float
    deadline: float
    held: list[PageId]
    slots: ArrivalSlots
    contents: PageContents = no_contents
    state: ImportState = ImportState.RESERVED
    followers: list[AttemptId] = field(default_factory=list)
    pages: list[PageId] = field(default_factory=list)
    in_flight: dict[int, Pull] = field(default_factory=dict)
    num_tries: dict[PageId, int] = field(default_factory=dict)
    proven: set[PageId] = field(default_factory=set)
    suspects: list[Suspect] = field(default_factory=list)

    def advance(self, event: ImportEvent) -> None:
        """Changes the state. Raises `Broken` for an event that the state does not allow."""
        before, self.state = self.state, advance_import(self.state, event)
        if self.state is not before:
            log_transition("page_import", self.id, event.value, self.state)

    @property
    def is_over(self) -> bool:
        return self.state in (ImportState.COMMITTED, ImportState.DRAINING, ImportState.RELEASED)


class PageImports:
    """The imports of one pool. Owned by the engine thread; time is an argument."""

    def __init__(self, cache: PrefixCache, limits: PageImportLimits, costs: ImportCostModel) -> None:
        self._cache = cache
        self._limits = limits
        self._costs = costs
        self._imports: dict[AttemptId, PageImport] = {}
        self._draining: list[PageImport] = []
        self._by_pull: dict[int, PageImport] = {}
        self._numbers = itertools.count(1)
        self._effects: list[PageImportEffect] = []
        self._ended: list[AttemptId] = []
        self._fresh: dict[PageKey, WorkerRole] = {}  # imported, used by no prompt yet

    def __len__(self) -> int:
        return len(self._imports) + len(self._draining)

    def begin(
        self,
        id: AttemptId,
        keys: Sequence[PageKey],
        source: PageSource | None,
        now: float,
        contents: PageContents = no_contents,
    ) -> bool:
        """Starts to import what a prompt with the full pages `keys` lacks. False if computing it is as good."""
        if source is None:
            return False
        first, last = self._cache.num_matching(keys), min(source.num_pages, len(keys))
        if last - first < MIN_IMPORT_PAGES:
            return False
        for other in self._imports.values():
            if first < len(other.keys) and other.first <= first and other.keys[first] == keys[first]:
                other.followers.append(id)
                return True
        wait_s = self._costs.wait_s(source, last - first, first, now)
        if wait_s is None:
            return False
        held = self._cache.match(keys[:first], Hold.LIVE)
        wanted = tuple(keys[:last])
        slots = ArrivalSlots(self._cache)
        self._imports[id] = PageImport(id, source, wanted, first, now, now + wait_s, held, slots, contents)
        self._effects.append(AskExport(id, source.worker_id, source.incarnation, wanted, first))
        return True

    def on_opened(self, id: AttemptId, answer: PublishedChunk | BatonError, now: float) -> None:
        """Starts the reads of the announced pages. An import that has ended meanwhile gives them back."""
        one = self._imports.get(id)
        if one is None or one.state is not ImportState.RESERVED:
            if isinstance(answer, PublishedChunk):
                self._effects.append(AbortHandoff(id, WorkerId("")))
            return
        if isinstance(answer, BatonError):
            return self._fail(one, now)
        self._costs.on_answer(one.source.worker_id, now - one.asked_at)
        try:
            remote, digests, tags = self._read_chunk(one, answer)
        except LinkBroken:
            return self._fail(one, now)
        num_taken = sum(len(other.pages) for other in (*self._imports.values(), *self._draining))
        num_pages = min(len(remote), max(0, self._limits.max_pages - num_taken), self._cache.num_available)
        if self._cache.pool.windows is None:  # whole pages are read here
            num_pages = next((at for at, slot in enumerate(answer.window_slots[:num_pages]) if slot < 0), num_pages)
        if not num_pages:
            return self._end(one, AbortHandoff(id, one.source.worker_id) if remote else None)
        one.advance(ImportEvent.ALLOCATE)
        one.pages = self._cache.allocate(num_pages, Hold.RESERVED) or []
        reads = self._reads(one, answer.window_slots)
        if not reads:  # no prompt could go on behind pages without window parts
            return self._end(one, AbortHandoff(id, one.source.worker_id))
        for part, num_parts in reads:
            pull = Pull(
                next(self._numbers), one.source.worker_id, tuple(remote[part]), tuple(one.pages[part]),
                tuple(digests[part]), self._limits.pull_deadline_s, None if tags is None else tags[part], num_parts,
                tuple(answer.window_slots[part]),
            )  # fmt: skip
            self._start(one, pull)

    def on_pull_event(self, event: PullEvent, now: float) -> None:
        """Records the outcome of a read."""
        one = self._by_pull.get(event.pull.id)
        if one is None:
            return
        if event.outcome is PullOutcome.LATE:
            return self._fail(one, now)
        del self._by_pull[event.pull.id]
        del one.in_flight[event.pull.id]
        if one.state is ImportState.DRAINING:
            one.slots.drop(event.pull.local_pages)
            self._cache.pool.drop(event.pull.local_pages, Hold.DRAINING)
            one.pages = [page for page in one.pages if page not in event.pull.local_pages]
            return self._release_if_drained(one)
        if event.outcome is PullOutcome.FAILED:
            return self._fail(one, now)
        self._costs.on_read(one.source.worker_id, event.num_bytes, event.seconds)
        self._record(one, event)
        if one.suspects:
            self._costs.on_failure(one.source.worker_id, now)
            why = f"{one.id}: {len(one.suspects)} cached pages did not match their digests or tags, twice"
            self._end(one, AskVerdict(one.id, one.source.worker_id, tuple(one.suspects), why))
        elif not one.in_flight:
            one.advance(ImportEvent.COMMIT)
            self._end(one, ConfirmCommit(one.id, one.source.worker_id))

    def on_keys_quarantined(self, keys: Collection[PageKey]) -> None:
        """Ends the imports of a page that was taken out at a source; none of their pages is used."""
        for one in [one for one in self._imports.values() if not one.is_over and not set(keys).isdisjoint(one.keys)]:
            one.proven.clear()
            self._end(one, AbortHandoff(one.id, one.source.worker_id))

    def on_source_replaced(self, source: WorkerId, now: float) -> None:
        """Ends the imports from a process that is gone."""
        for one in [one for one in self._imports.values() if one.source.worker_id == source]:
            self._fail(one, now)

    def abort(self, id: AttemptId) -> None:
        """The prompt has ended. Its import ends as well, for others that wait for the same pages, too."""
        one = self._imports.get(id)
        if one is not None:
            self._end(one, AbortHandoff(id, one.source.worker_id))
        for other in self._imports.values():
            if id in other.followers:
                other.followers.remove(id)

    def expire(self, now: float) -> None:
        """Ends the imports that are past their deadline."""
        for one in [one for one in self._imports.values() if one.deadline <= now]:
            self._fail(one, now)

    def next_deadline(self) -> float | None:
        """Time of the first deadline; 0.0 while ended waits are not taken."""
        if self._ended:
            return 0.0
        return min((one.deadline for one in self._imports.values()), default=None)

    def on_admitted(self, keys: Sequence[PageKey]) -> Counter[WorkerRole]:
        """A prompt has matched `keys`. Counts those that were imported and that no other has used, by source."""
        return Counter(self._fresh.pop(key) for key in keys if key in self._fresh)

    def on_filled(self, keys: Sequence[PageKey]) -> None:
        """Pages of `keys` were computed here, perhaps again."""
        for key in keys if self._fresh else ():
            self._fresh.pop(key, None)

    def take_ended(self) -> list[AttemptId]:
        """Takes the prompts whose wait is over, however it ended."""
        ended, self._ended = self._ended, []
        return ended

    def take_effects(self) -> list[PageImportEffect]:
        """Takes what is to be done, in order."""
        effects, self._effects = self._effects, []
        return effects

    def _reads(self, one: PageImport, window_slots: Sequence[int]) -> list[tuple[slice, int | None]]:
        """Cuts the pages of an import into reads, with the number of leading parts to read of each; None: all.

        Where window parts have slots, only those are read that the token behind the pages reads. None at all if these
        are not there, or if there are no slots for them.
        """
        num_pages, window = len(one.pages), self._cache.window
        edge = one.slots.take(one.pages, one.first, lambda at: not window_slots or window_slots[at] >= 0)
        if edge == num_pages:
            return []
        reads: list[tuple[slice, int | None]] = []
        for first, end, of in ((0, edge, window), (edge, num_pages, None)):
            for at in range(first, end, self._limits.max_window_pages):
                part = slice(at, min(at + self._limits.max_window_pages, end))
                reads.append((part, None if of is None else of.num_parts))
        return reads

    def _read_chunk(
        self, one: PageImport, chunk: PublishedChunk
    ) -> tuple[Sequence[PageId], Sequence[int], Sequence[PageTag] | None]:
        """Pages with digests and tags, from the first that is missing. Raises `LinkBroken` unless all of them fit."""
        num_pages = len(chunk.pages)
        if chunk.first_page != one.first or one.first + num_pages > len(one.keys):
            raise LinkBroken(f"{one.id}: pages [{chunk.first_page}, +{num_pages}) were not asked for")
        if num_pages and (chunk.digests is None or len(chunk.digests) != num_pages):
            raise LinkBroken(f"{one.id}: cached pages came without digests")
        if self._limits.tagged is None:
            return chunk.pages, chunk.digests or (), None
        if len(chunk.tags or ()) != num_pages:
            raise LinkBroken(f"{one.id}: cached pages came without tags, which are checked here (--page-tags)")
        keys = one.keys[one.first : one.first + num_pages]
        identities = [page_identity(key, self._limits.tagged) for key in keys]
        tags = [PageTag(*pair) for pair in zip(identities, chunk.tags or (), strict=True)]
        return chunk.pages, chunk.digests or (), tags

    def _start(self, one: PageImport, pull: Pull) -> None:
        for page in pull.local_pages:
            one.num_tries[page] = one.num_tries.get(page, 0) + 1
        one.advance(ImportEvent.PULL)
        one.in_flight[pull.id] = pull
        self._by_pull[pull.id] = one
        self._effects.append(pull)

    def _record(self, one: PageImport, event: PullEvent) -> None:
        """Keeps the digests of the pages that matched, and reads the others again or suspects them."""
        pull, corrupt = event.pull, set(event.corrupt)
        assert pull.digests is not None
        digests = pull.digests if pull.num_parts is None else event.found
        for at, (page, digest) in enumerate(zip(pull.local_pages, digests, strict=True)):
            if at not in corrupt:
                self._cache.pool.digests.set(page, digest)
                one.proven.add(page)
        again = sorted(corrupt)
        if not again:
            return
        second = pull.again(next(self._numbers), again)
        if any(one.num_tries[page] >= MAX_TRIES for page in second.local_pages):
            indices = [one.first + one.pages.index(page) for page in second.local_pages]
            one.suspects += map(Suspect, indices, second.remote_pages, second.digests or ())
        else:
            self._start(one, second)

    def _fail(self, one: PageImport, now: float) -> None:
        """Ends an import for which its source or link is to blame."""
        if one.is_over:
            return
        self._costs.on_failure(one.source.worker_id, now)
        self._end(one, AbortHandoff(one.id, one.source.worker_id))

    def _end(self, one: PageImport, effect: PageImportEffect | None = None) -> None:
        """Enters the leading proven pages into the cache and releases all others that no read can touch."""
        if self._imports.pop(one.id, None) is None:
            return
        if effect is not None:
            self._effects.append(effect)
        self._ended += [one.id, *one.followers]
        if one.state is not ImportState.COMMITTED:
            one.advance(ImportEvent.ABORT)
        pool = self._cache.pool
        self._enter(one)
        in_flight = {page for pull in one.in_flight.values() for page in pull.local_pages}
        done = [page for page in one.pages if page not in in_flight]
        one.slots.drop(done)
        pool.drop(done, Hold.RESERVED)
        pool.move([page for page in one.pages if page in in_flight], Hold.RESERVED, Hold.DRAINING)
        pool.drop(one.held, Hold.LIVE)
        one.held, one.pages = [], list(in_flight)
        if one.state is ImportState.DRAINING:
            self._draining.append(one)
            self._release_if_drained(one)

    def _enter(self, one: PageImport) -> None:
        parent = one.keys[one.first - 1] if one.first else None
        if parent is not None and self._cache.find(parent) != one.held[-1]:
            return  # quarantined meanwhile
        num_pages = next((i for i, page in enumerate(one.pages) if page not in one.proven), len(one.pages))
        keys = one.keys[one.first : one.first + num_pages]
        contents = one.contents(one.first, one.first + num_pages)
        used = self._cache.insert(parent, keys, one.pages[:num_pages], Hold.RESERVED, contents, foreign=True)
        one.slots.follow(one.pages, used)
        one.pages[: len(used)] = used
        self._fresh |= dict.fromkeys(keys[: len(used)], one.source.role)
        if len(self._fresh) > self._cache.pool.num_pages:  # pages that were evicted before any use
            self._fresh = {key: role for key, role in self._fresh.items() if self._cache.find(key) is not None}

    def _release_if_drained(self, one: PageImport) -> None:
        if not one.in_flight:
            one.advance(ImportEvent.DRAINED)
            self._draining.remove(one)


def no_imports(cache: PrefixCache) -> PageImports:
    """For an engine that imports nothing."""
    return PageImports(cache, PageImportLimits(0, 1, 0.0), ImportCostModel(PageSharingKind.OFF, 1, lambda *_: 0.0))
