"""KV imports: decode's side of a handoff, from the reservation to the commit. Pure: returns the pulls to start.

An import's life (the table is `baton.domain.handoff.IMPORT_TRANSITIONS`):

1. *reserved*: `reserve` sets pages and a row aside by number. The prompt's cached prefix is matched and held. The
   missing pages go on serving the cache until the first chunk comes.
2. *allocated*: the first `on_chunk` allocates the missing pages.
3. *pulling*: published pages are read into local ones, at most `max_window_pages` at a time. A page with a wrong
   digest is read once more; a second mismatch fails the import.
4. *committed*: the seal has come, every page was read, a proof (`ProofKind`) covers them, and the matched pages were
   checked. The row may join the batch.
5. An import that ends earlier is *draining* until its last read ends; then its pages are released. Its proven leading
   pages stay in the prefix cache, so a replay moves only the rest.
"""

from __future__ import annotations

import itertools
from collections.abc import Collection, Sequence

from baton.domain.arithmetic import ceil_div
from baton.domain.errors import Broken, ContextOverflow, IntegrityFailure, LinkBroken, PageVerdict
from baton.domain.handoff import ImportEvent, ImportState, PublishedChunk, Suspect
from baton.domain.ids import AttemptId, PageId, PageKey, ReservationId, WorkerId
from baton.domain.request import EngineRequest
from baton.engine.handoff.attempt_fence import AttemptFence
from baton.kv.page_table import PageTable
from baton.kv.pages import Hold, Owner
from baton.kv.prefix_cache import PrefixCache
from baton.services.decode.kv_import import (
    Busy,
    ImportedPrompt,
    ImportLimits,
    KvImport,
    LocalPrompt,
    ProofKind,
    Reserved,
    SealInfo,
)
from baton.transfer.base import Pull, PullEvent, PullOutcome


class ImportTable:
    """The imports of one decode worker. Owned by the engine thread. `limits` may change: imports above them go on."""

    def __init__(self, cache: PrefixCache, limits: ImportLimits) -> None:
        self._cache = cache
        self.limits = limits
        self._imports: dict[AttemptId, KvImport] = {}
        self._draining: list[KvImport] = []
        self._by_pull: dict[int, KvImport] = {}
        self._fence = AttemptFence()
        self._numbers = itertools.count(1)
        self.num_reserved_pages = 0

    def __len__(self) -> int:
        return len(self._imports)

    @property
    def num_draining(self) -> int:
        return len(self._draining)

    def get(self, id: AttemptId) -> KvImport | None:
        return self._imports.get(id)

    def ids(self) -> list[AttemptId]:
        """Attempts with an import that is not draining."""
        return list(self._imports)

    def attempt_of_pull(self, pull_id: int) -> AttemptId | None:
        """Attempt that a read belongs to; None once its import has ended, though its pages may still be draining."""
        kv_import = self._by_pull.get(pull_id)
        return kv_import.id if kv_import is not None and kv_import.id in self._imports else None

    def reserve(
        self, id: AttemptId, num_tokens: int, keys: Sequence[PageKey], num_rows: int, now: float, deadline_s: float,
        computes_prompt: bool = False,
    ) -> Reserved | Busy:  # fmt: skip
        """Reserves a row, beside `num_rows` running ones, and the pages of `num_tokens` + 1 slots.

        `computes_prompt`: the prompt is computed here behind its cached prefix, so windows reach into that.

        The same attempt gets the same reservation again. Raises `Superseded` for an attempt older than one seen and
        `ContextOverflow` for a prompt that never fits.
        """
        known = self._imports.get(id)
        if known is not None:
            known.computes_prompt |= computes_prompt
            return Reserved(known.reservation_id, known.prefix_len)
        self.fence(id)
        size, total = self.limits.page_size, self._cache.pool.num_usable
        if ceil_div(num_tokens + 1, size) > total:
            raise ContextOverflow(f"{num_tokens} tokens do not fit a pool of {total} pages of {size}")
        table = PageTable(self._cache, size, "", Hold.RESERVED)
        prefix_len = table.match(keys[: (num_tokens - 1) // size], None if computes_prompt else num_tokens)
        num_missing = table.num_missing(num_tokens + 1)
        has_row = self.limits.has_row(num_rows, len(self._imports))
        lacks_pages = num_missing > self.num_reservable_pages
        step_tokens = self.limits.step_tokens(num_tokens, computes_prompt)
        if not has_row or lacks_pages or not table.reserve_windows(*step_tokens):
            table.release()
            return Busy(self.num_reserved_pages)
        reservation_id = ReservationId(f"{id}#{next(self._numbers)}")
        self._imports[id] = KvImport(
            id, reservation_id, num_tokens, prefix_len, table, num_missing, now + deadline_s,
            computes_prompt=computes_prompt, num_published=prefix_len // size,
        )  # fmt: skip
        self.num_reserved_pages += num_missing
        return Reserved(reservation_id, prefix_len)

    def settle(self, pages: Sequence[PageId]) -> None:
        """Takes the digests of those of `pages`, all completely written, that have none."""
        if pages:
            self._cache.settle(pages)

    @property
    def num_reservable_pages(self) -> int:
        """Available pages that are not reserved."""
        return self._cache.num_available - self.num_reserved_pages

    def claim(
        self,
        reservation_id: ReservationId,
        request: EngineRequest,
        source: WorkerId,
        deadline: float,
        received_at: float = 0.0,
    ) -> bool:
        """Binds a request, received at `received_at`, to its reservation.

        False when the reservation has ended or was for another request.
        """
        kv_import = self._find_reserved(reservation_id, request)
        if kv_import is None:
            return False
        kv_import.request, kv_import.source, kv_import.deadline = request, source, deadline
        kv_import.received_at = received_at
        return True

    def claim_local(self, reservation_id: ReservationId, request: EngineRequest) -> LocalPrompt | None:
        """Claims a reservation for a prompt that is computed here. The prompt takes all pages; the import ends."""
        kv_import = self._find_reserved(reservation_id, request)
        if kv_import is None or not kv_import.table.can_continue:
            return None
        if not kv_import.table.reserve_windows(*self.limits.step_tokens(kv_import.num_tokens, computes_prompt=True)):
            return None
        kv_import.table.reach_back(kv_import.prefix_len)
        self._allocate_pages(kv_import)
        kv_import.advance(ImportEvent.COMMIT)
        del self._imports[kv_import.id]
        kv_import.table.change_hold(Hold.LIVE)
        return LocalPrompt(request, kv_import.table, kv_import.prefix_len)

    def on_chunk(
        self, chunk: PublishedChunk, now: float, *, check_digests: bool = True, tagged: str | None = None
    ) -> list[Pull]:
        """Allocates pages for published ones and returns the reads to start now.

        `tagged`: the fingerprint that the pages' tags have to bind; None: tags are not checked.

        Ignores chunks of unknown imports, and pages that are cached here or were published before. Raises
        `LinkBroken` for a chunk that leaves a gap."""
        id, first_page, pages = chunk.id, chunk.first_page, chunk.pages
        digests = chunk.digests if check_digests else None
        kv_import = self._imports.get(id)
        if kv_import is None or kv_import.source is None:
            return []
        if kv_import.state is ImportState.RESERVED:
            self._allocate_pages(kv_import)
            kv_import.table.pass_windows(kv_import.num_tokens)  # of a match for a prompt to be computed here
            kv_import.table.cover_windows(kv_import.num_tokens, kv_import.num_tokens + 1)
            step_tokens = self.limits.step_tokens(kv_import.num_tokens, computes_prompt=False)
            kv_import.table.reserve_windows(*step_tokens)  # no longer those of a chunk
            kv_import.first_chunk_at = now
        end = first_page + len(pages)
        if first_page > kv_import.num_published or end > kv_import.num_prompt_pages(self.limits.page_size):
            raise LinkBroken(f"{id}: pages [{first_page}, {end}) do not continue the first {kv_import.num_published}")
        if digests is not None and len(digests) != len(pages):
            raise LinkBroken(f"{id}: {len(digests)} digests came with {len(pages)} pages")
        if len(chunk.window_slots) not in (0, len(pages)):
            raise LinkBroken(f"{id}: {len(chunk.window_slots)} window slots came with {len(pages)} pages")
        tags = None if tagged is None else kv_import.tags_of(chunk, self.limits.page_size, tagged)
        local = kv_import.table.pages[first_page:end]
        for read, num_parts in self.limits.reads(kv_import.num_published, end, kv_import.num_tokens):
            part = slice(read.start - first_page, read.stop - first_page)
            if num_parts is not None:
                self._cache.pool.digests.mark_windowless(local[part])
            kv_import.queued_pulls.append(
                kv_import.make_pull(
                    next(self._numbers), self.limits.pull_deadline_s, pages[part], local[part],
                    digests[part] if digests else None, tags[part] if tags else None, num_parts,
                    chunk.window_slots[part],
                )
            )  # fmt: skip
        kv_import.num_published = max(kv_import.num_published, end)
        return self._start_pulls(kv_import, now)

    def on_seal(self, id: AttemptId, seal: SealInfo, now: float) -> None:
        """Records the seal. Raises `LinkBroken` if pages of the prompt were not published."""
        kv_import = self._imports.get(id)
        if kv_import is None:
            return
        num_pages = kv_import.num_prompt_pages(self.limits.page_size)
        if kv_import.num_published != num_pages:
            raise LinkBroken(f"{id}: sealed with {kv_import.num_published} of {num_pages} pages published")
        kv_import.seal, kv_import.sealed_at = seal, now

    def on_pull_event(self, event: PullEvent, now: float) -> list[Pull]:
        """Records the outcome of a read; returns further reads to start.

        Raises `Interrupted` if the import cannot go on. The caller then aborts it."""
        kv_import = self._by_pull.get(event.pull.id)
        if kv_import is None:
            return []
        if event.outcome is PullOutcome.LATE:
            raise LinkBroken(f"{kv_import.id}: a read was not over after {event.pull.deadline_s} s")
        del self._by_pull[event.pull.id]
        del kv_import.in_flight[event.pull.id]
        if kv_import.state is ImportState.DRAINING:
            self._release_if_drained(kv_import)
            return []
        kv_import.num_bytes += event.num_bytes
        kv_import.last_pull_at = now
        if event.outcome is PullOutcome.FAILED:
            raise LinkBroken(f"{kv_import.id}: a read failed: {event.reason}")
        self._record_pull(kv_import, event, now)
        return self._start_pulls(kv_import, now)

    def is_ready(self, id: AttemptId) -> bool:
        """True when the seal has come, every published page was read and every matched one checked."""
        kv_import = self._imports.get(id)
        return bool(
            kv_import
            and kv_import.seal
            and kv_import.request
            and not kv_import.queued_pulls
            and not kv_import.in_flight
            and not kv_import.unchecked
        )

    def num_joining(self, since: float) -> int:
        """Imports sealed at `since` or later whose last reads are under way: their rows are about to join.

        A read that takes longer, of a source that hangs, counts no more."""
        return sum(
            one.seal is not None
            and one.sealed_at >= since
            and one.state is not ImportState.DRAINING
            and bool(one.in_flight)
            for one in self._imports.values()
        )

    def on_leases_renewed(self, ids: Sequence[AttemptId], lease_ends_at: float) -> None:
        """Extends the leases of `ids` to `lease_ends_at` on this worker's clock."""
        for id in ids:
            if (kv_import := self._imports.get(id)) is not None:
                kv_import.proof.extend_lease(lease_ends_at)

    def is_proven(self, id: AttemptId) -> bool:
        """True if every page of a ready import is proven by a digest or a lease."""
        kv_import, size = self._imports[id], self.limits.page_size
        return kv_import.num_usable(size, self._cache.pool.digests) == kv_import.num_prompt_pages(size)

    def unfinished(self, source: WorkerId) -> list[AttemptId]:
        """Imports from `source` that are not ready."""
        return [one.id for one in self._imports.values() if one.source == source and not self.is_ready(one.id)]

    def commit(self, id: AttemptId, proof: ProofKind, now: float) -> ImportedPrompt:
        """Removes a ready import that `proof` validated and returns it for the scheduler."""
        kv_import = self._imports[id]
        if kv_import.request is None or kv_import.source is None or kv_import.seal is None:
            raise Broken(f"{id} was committed before it was ready")
        kv_import.advance(ImportEvent.COMMIT)
        del self._imports[id]
        kv_import.table.change_hold(Hold.LIVE)
        kv_import.table.cache_full_pages(kv_import.request.tokens, kv_import.num_tokens)
        return ImportedPrompt(
            kv_import.request, kv_import.table, kv_import.seal.first_token, kv_import.source, kv_import.prefix_len,
            kv_import.received_at, kv_import.times(proof, now),
        )  # fmt: skip

    def abort(self, id: AttemptId) -> WorkerId | None:
        """Ends an import in any state. Its pages are released when its last read has ended. Idempotent.

        Proven leading pages stay in the prefix cache. Returns the source to notify, if there is one.
        """
        kv_import = self._imports.pop(id, None)
        if kv_import is None:
            return None
        self.num_reserved_pages -= kv_import.num_reserved
        kv_import.num_reserved = 0
        kv_import.queued_pulls.clear()
        kv_import.advance(ImportEvent.ABORT)
        if kv_import.request is not None:
            size = self.limits.page_size
            num_usable = kv_import.num_usable(size, self._cache.pool.digests)
            kv_import.table.cache_full_pages(kv_import.request.tokens, num_usable * size)
        kv_import.table.change_hold(Hold.DRAINING)
        self._draining.append(kv_import)
        self._release_if_drained(kv_import)
        return kv_import.source

    def expire(self, now: float) -> list[AttemptId]:
        """Imports past their deadline, for the caller to fail."""
        return [kv_import.id for kv_import in self._imports.values() if kv_import.deadline <= now]

    def next_deadline(self) -> float | None:
        return min((kv_import.deadline for kv_import in self._imports.values()), default=None)

    def fence(self, id: AttemptId) -> None:
        """Remembers the newest attempt of a request. Raises `Superseded` for an older one."""
        self._fence.pass_newest(id, len(self._imports))

    def _find_reserved(self, reservation_id: ReservationId, request: EngineRequest) -> KvImport | None:
        """The unclaimed import that was reserved for exactly these tokens."""
        kv_import = self._imports.get(request.id)
        if kv_import is None or kv_import.reservation_id != reservation_id or kv_import.request is not None:
            return None
        num_cached_pages = kv_import.prefix_len // self.limits.page_size
        has_length = kv_import.num_tokens == len(request.tokens)
        if not has_length or not kv_import.table.verify_prefix(request, num_cached_pages):
            return None
        kv_import.table.set_priority(request.priority)
        return kv_import

    def _allocate_pages(self, kv_import: KvImport) -> None:
        kv_import.advance(ImportEvent.ALLOCATE)
        self.num_reserved_pages -= kv_import.num_reserved
        kv_import.num_reserved = 0
        if kv_import.table.extend(kv_import.num_tokens + 1):
            return
        if self._cache.pool.num_owned(Owner.RETIRED):  # since the reservation, perhaps
            raise IntegrityFailure(f"{kv_import.id}: pages that it had reserved retired", PageVerdict.PULLER)
        raise Broken(f"{kv_import.id}: reserved pages were not there")

    def _start_pulls(self, kv_import: KvImport, now: float) -> list[Pull]:
        started: list[Pull] = []
        while kv_import.queued_pulls:
            num_pages = len(kv_import.queued_pulls[0].local_pages)
            if kv_import.in_flight and kv_import.num_in_flight_pages + num_pages > self.limits.max_window_pages:
                break
            pull = kv_import.queued_pulls.popleft()
            kv_import.in_flight[pull.id] = pull
            self._by_pull[pull.id] = kv_import
            kv_import.advance(ImportEvent.PULL)
            started.append(pull)
        if started and kv_import.first_pull_at is None:
            kv_import.first_pull_at = now
        return started

    def _record_pull(self, kv_import: KvImport, event: PullEvent, now: float) -> None:
        corrupt = set(event.corrupt)
        landed = [page for i, page in enumerate(event.pull.local_pages) if i not in corrupt]
        kv_import.proof.record_read(landed, now, matched=event.pull.digests is not None)
        self._settle(kv_import, event, corrupt)
        kv_import.num_pages += len(landed)
        if event.outcome is not PullOutcome.CORRUPT:
            return
        again = event.pull.again(next(self._numbers), sorted(corrupt))
        kv_import.num_re_reads += len(again.local_pages)
        assert again.digests is not None
        if any(kv_import.num_tries[page] >= self.limits.max_pull_attempts for page in again.local_pages):
            indices = map(kv_import.table.pages.index, again.local_pages)
            kv_import.suspects += map(Suspect, indices, again.remote_pages, again.digests)
            num_pages = len(again.local_pages)
            raise IntegrityFailure(f"{kv_import.id}: {num_pages} pages did not match their digests or tags, twice")
        kv_import.count_tries(again.local_pages)
        kv_import.queued_pulls.appendleft(again)

    def _settle(self, kv_import: KvImport, event: PullEvent, corrupt: Collection[int]) -> None:
        """Keeps the digests of the pages that matched the announced ones. The row goes on writing a partial last page.

        A windowless page settles with the digest that it has here, of which the leading parts were announced.
        """
        pull = event.pull
        if pull.digests is None:
            return
        digests = pull.digests if pull.num_parts is None else event.found
        num_full = kv_import.num_tokens // self.limits.page_size
        partial = kv_import.table.pages[num_full : kv_import.num_prompt_pages(self.limits.page_size)]
        for i, (page, digest) in enumerate(zip(pull.local_pages, digests, strict=True)):
            if i not in corrupt and page not in partial:
                self._cache.pool.digests.set(page, digest)

    def _release_if_drained(self, kv_import: KvImport) -> None:
        if kv_import.in_flight:
            return
        kv_import.advance(ImportEvent.DRAINED)
        kv_import.table.release()
        self._draining.remove(kv_import)
