"""One KV import: its state, its pulls and the proof of its pages. Also its first and last values, up to a row. Pure."""

from __future__ import annotations

import enum
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field

from baton.domain.arithmetic import ceil_div
from baton.domain.errors import LinkBroken
from baton.domain.handoff import ImportEvent, ImportState, PublishedChunk, Suspect, advance_import
from baton.domain.ids import AttemptId, PageId, ReservationId, WorkerId
from baton.domain.request import EngineRequest, FinishReason, SampledToken
from baton.domain.timing.attempt_times import ImportTimes, to_us
from baton.domain.timing.row_timer import RowTimer
from baton.engine.batch import HostCopy, Row
from baton.engine.drafts.base import emitted_tokens
from baton.engine.transition_log import log_transition
from baton.kv.geometry import PageWindow
from baton.kv.growth import RowGrowth
from baton.kv.page_digests import PageDigests
from baton.kv.page_table import PageTable
from baton.kv.page_tags import TAG_BYTES, PageTag, page_identities
from baton.transfer.base import Pull


@dataclass(frozen=True, slots=True)
class ImportLimits:
    """Bounds of the imports of one worker. `max_reservations` None: only `max_rows` bounds them.

    `window`: of pages with a window part, which is then read only where it is needed; None: whole pages are read.
    `max_row_tokens`: most tokens of a row in a step, with drafts. `max_chunk_tokens`: of a prompt computed here.
    """

    page_size: int
    max_rows: int
    max_window_pages: int
    pull_deadline_s: float
    max_pull_attempts: int = 2
    max_reservations: int | None = None
    window: PageWindow | None = None
    max_row_tokens: int = 2
    max_chunk_tokens: int = 0

    def has_row(self, num_rows: int, num_imports: int) -> bool:
        """True if there is a row for a new reservation beside `num_rows` rows and `num_imports` imports."""
        most = self.max_rows if self.max_reservations is None else self.max_reservations
        return num_rows + num_imports < self.max_rows and num_imports < most

    def step_tokens(self, num_tokens: int, computes_prompt: bool) -> tuple[int, int, int]:
        """Tokens of a prompt of `num_tokens` in a step, for window slots: at most, and as few as they may allow.

        The third number is the end of its first step as a row.
        """
        row = self.max_row_tokens
        most, least = (max(row, self.max_chunk_tokens), max(row, self.page_size)) if computes_prompt else (row, row)
        return most, least, num_tokens + row

    def reads(self, first: int, end: int, num_tokens: int) -> Iterator[tuple[range, int | None]]:
        """Cuts pages [first, end) of a prompt of `num_tokens` into reads.

        With each comes the number of leading parts to read of its pages; None: all.
        """
        edge = 0 if self.window is None else self.window.first_page(num_tokens)
        for start, stop, window in ((first, min(end, edge), self.window), (max(first, edge), end, None)):
            for at in range(start, stop, self.max_window_pages):
                yield range(at, min(at + self.max_window_pages, stop)), None if window is None else window.num_parts


@dataclass(frozen=True, slots=True)
class Reserved:
    """Reservation of pages and a row until the deadline. The first `prefix_len` tokens are cached here."""

    id: ReservationId
    prefix_len: int


@dataclass(frozen=True, slots=True)
class Busy:
    """Refusal for now. `queued_pages` are reserved for other requests. `no_prompts`: none is computed here now."""

    queued_pages: int
    no_prompts: bool = False


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


class ProofKind(enum.Enum):
    """Proof by which an import was validated; the label of `baton_commit`. See `docs/protocol.md`.

    PINS (V1): the source answers that its pins were held. LEASE (V2): each read ended within a granted lease. DIGESTS
    (V3): each page matches its digest.
    """

    PINS = "v1"
    LEASE = "v2"
    DIGESTS = "v3"


@dataclass(slots=True)
class ImportProof:
    """Reads that ended, and the end of the lease, on this worker's clock."""

    lease_ends_at: float | None = None
    _matched: set[PageId] = field(default_factory=set)
    _read_at: dict[PageId, float] = field(default_factory=dict)

    def record_read(self, pages: Iterable[PageId], now: float, matched: bool) -> None:
        """Records reads into local `pages` that ended at `now` at the latest. `matched`: their digests matched."""
        for page in pages:
            self._read_at[page] = now
            if matched:
                self._matched.add(page)

    def extend_lease(self, lease_ends_at: float) -> None:
        """Extends the lease. An older answer that arrives late does not shorten it."""
        self.lease_ends_at = max(lease_ends_at, self.lease_ends_at or lease_ends_at)

    def covers(self, page: PageId) -> bool:
        """True if a digest (V3) or a lease (V2) proves the page."""
        return page in self._matched or self._within_lease(page)

    def _within_lease(self, page: PageId) -> bool:
        read_at = self._read_at.get(page)
        return read_at is not None and self.lease_ends_at is not None and read_at < self.lease_ends_at


@dataclass(slots=True)
class KvImport:
    """One handoff being received. Internal to `ImportTable`; tests may read it."""

    id: AttemptId
    reservation_id: ReservationId
    num_tokens: int
    prefix_len: int
    table: PageTable
    num_reserved: int  # pages reserved and not yet allocated
    deadline: float
    max_new_tokens: int = 0  # of the reservation
    computes_prompt: bool = False  # it was made for a prompt to compute here
    state: ImportState = ImportState.RESERVED
    request: EngineRequest | None = None
    source: WorkerId | None = None
    queued_pulls: deque[Pull] = field(default_factory=deque)
    in_flight: dict[int, Pull] = field(default_factory=dict)
    identities: list[bytes] = field(default_factory=list)  # of the prompt's pages, where tags are checked
    num_tries: dict[PageId, int] = field(default_factory=dict)  # local page -> reads started
    proof: ImportProof = field(default_factory=ImportProof)
    num_published: int = 0  # leading pages that are cached here or were published
    received_at: float = 0.0
    first_chunk_at: float | None = None
    seal: SealInfo | None = None
    sealed_at: float = 0.0
    first_pull_at: float | None = None
    last_pull_at: float = 0.0
    num_bytes: int = 0
    num_pages: int = 0
    num_re_reads: int = 0
    checks_queued: bool = False
    unchecked: list[PageId] = field(default_factory=list)  # matched pages to check before the row may join
    suspects: list[Suspect] = field(default_factory=list)  # pages that did not match in two reads

    @property
    def num_in_flight_pages(self) -> int:
        return sum(len(pull.local_pages) for pull in self.in_flight.values())

    @property
    def growth(self) -> RowGrowth:
        """The row that this import becomes, as the growth reserve sees it."""
        num_pages = len(self.table.pages) + self.num_reserved
        num_own_pages = self.table.num_own_pages + self.num_reserved
        num_output = 1 if self.request is None else self.request.num_emitted + 1
        return RowGrowth(self.num_tokens + 1, num_output, max(0, self.max_new_tokens - 1), num_pages, num_own_pages)

    def num_prompt_pages(self, page_size: int) -> int:
        """Pages of the prompt. The table may have one more, for the first output token."""
        return ceil_div(self.num_tokens, page_size)

    def num_usable(self, page_size: int, digests: PageDigests) -> int:
        """Leading pages of the prompt that may be read: cached here before, or proven, and none condemned since."""
        for i, page in enumerate(self.table.pages[: self.num_prompt_pages(page_size)]):
            if i * page_size >= self.prefix_len and not self.proof.covers(page):
                return i
            if digests.is_condemned(page):
                return i
        return min(len(self.table.pages), self.num_prompt_pages(page_size))

    def make_pull(
        self,
        number: int,
        deadline_s: float,
        remote: Sequence[PageId],
        local: Sequence[PageId],
        digests: Sequence[int] | None,
        tags: Sequence[PageTag] | None,
        num_parts: int | None,
        windows: Sequence[int],
    ) -> Pull:
        """A read of pages of this import. `windows`: slots of the remote pages' window parts, if they have any.

        Raises `LinkBroken` if window parts are to be read that the source has not kept.
        """
        assert self.source is not None
        if num_parts is None and min(windows, default=0) < 0:
            raise LinkBroken(f"{self.id}: window parts were not published that are needed")
        self.count_tries(local)
        return Pull(
            number, self.source, tuple(remote), tuple(local),
            None if digests is None else tuple(digests), deadline_s, tags, num_parts, tuple(windows),
        )  # fmt: skip

    def count_tries(self, pages: Iterable[PageId]) -> None:
        """Counts a read into local `pages`."""
        for page in pages:
            self.num_tries[page] = self.num_tries.get(page, 0) + 1

    def advance(self, event: ImportEvent) -> None:
        """Changes the state. Raises `Broken` for an event that the state does not allow."""
        before, self.state = self.state, advance_import(self.state, event)
        if self.state is not before:
            log_transition("import", self.id, event.value, self.state)

    def tags_of(self, chunk: PublishedChunk, page_size: int, fingerprint: str) -> tuple[PageTag, ...]:
        """Tags of a chunk's pages with the identities of this prompt. Raises `LinkBroken` unless each page has one."""
        if chunk.tags is None:
            raise LinkBroken(f"{self.id}: pages came without tags, which are checked here (--page-tags)")
        if len(chunk.tags) != len(chunk.pages) or any(not tag or len(tag) % TAG_BYTES for tag in chunk.tags):
            raise LinkBroken(f"{self.id}: {len(chunk.pages)} pages need as many tags of {TAG_BYTES} bytes a part")
        if not self.identities and self.request is not None:
            self.identities = page_identities(self.request, page_size, fingerprint)
        identities = self.identities[chunk.first_page : chunk.first_page + len(chunk.pages)]
        return tuple([PageTag(*pair) for pair in zip(identities, chunk.tags, strict=True)])

    def times(self, proof: ProofKind, now: float) -> ImportTimes:
        """Times of an import that commits at `now`. `ReportImported` names the fields that are filled in later."""
        first_chunk_at = now if self.first_chunk_at is None else self.first_chunk_at
        pull_s = 0.0 if self.first_pull_at is None else self.last_pull_at - self.first_pull_at
        return ImportTimes(
            transport="",
            path="",
            first_chunk_us=to_us(first_chunk_at - self.received_at),
            pull_us=to_us(pull_s),
            exposed_us=to_us(now - self.sealed_at),
            commit_us=to_us(now - self.received_at),
            join_us=0,
            bytes=self.num_bytes,
            pages=self.num_pages,
            proof=proof.value,
            re_reads=self.num_re_reads,
        )


@dataclass(slots=True, eq=False)  # a queue is searched for a row by identity, every step
class DecodeRow:
    """The row's tokens, prompt and output, and where their KV lies. `arrival_number`: order of arrival.

    `num_filled`: positions whose KV is in place. `host_slots`: of its pages while it is preempted. `level`,
    `preempted_at` and `resumed_with` belong to `rows.order`.
    """

    arrival_number: int
    request: EngineRequest
    table: PageTable
    tokens: list[int]
    num_filled: int
    timer: RowTimer
    host_slots: tuple[int, ...] = ()
    level: float = 0.0
    preempted_at: float = 0.0
    resumed_with: int | None = None

    @property
    def num_output_tokens(self) -> int:
        return len(self.tokens) - self.request.num_prompt_tokens

    def emitted(self, stepped: Row, sampled: tuple[SampledToken, ...]) -> tuple[SampledToken, ...]:
        """The tokens that the row emits of those that were sampled for it in a step."""
        if not stepped.drafted:
            return sampled
        drafts = stepped.tokens[stepped.num_known_tokens :]
        return emitted_tokens(drafts, sampled, self.request.stop, self.num_output_tokens)

    def cover_windows(self, end: int) -> None:
        """Holds the window parts for a step up to position `end`. Raises `Broken` without those that were reserved."""
        self.table.cover_windows(self.num_filled, end)

    def most_tokens(self, budget: int) -> int:
        """Most tokens of a chunk of the row's prompt: `budget`, or fewer if there are no window slots for it."""
        slots = self.table.max_step_tokens(self.num_filled)
        return budget if slots is None else min(budget, slots)

    def reserve_windows(self, max_tokens: int, num_spare: int = 0) -> bool:
        """Makes sure of the window slots for the row's next step, of up to `max_tokens`.

        They grow with the row until it is as long as the window. False, without a change, for too few; see
        `PageTable.reserve_windows`.
        """
        return self.table.reserve_windows(max_tokens, end=len(self.tokens) + max_tokens, num_spare=num_spare)

    def take_next(self, max_tokens: int, num_free: int) -> bool:
        """Takes what the row's next step needs: window slots, and pages, of which `num_free` may be had.

        False, perhaps with slots reserved, for too few.
        """
        if not self.reserve_windows(max_tokens):
            return False
        num_missing = self.table.num_missing(len(self.tokens))
        return num_missing == 0 or (num_missing <= num_free and self.table.extend(len(self.tokens)))

    def take_room(self, max_tokens: int, num_running: int) -> bool:
        """Takes pages for all tokens of a preempted row, and window slots for steps of `max_tokens`.

        A slot is left for each of `num_running` rows. False, without a change, if there are too few.
        """
        if not self.reserve_windows(max_tokens, num_running):
            return False
        has_room = self.table.extend(len(self.tokens))
        if not has_room:
            self.table.release()
        return has_room

    def copy_out(self, slots: tuple[int, ...]) -> HostCopy:
        """The copy of the row's filled pages to host `slots`."""
        return self._copy(slots, to_host=True)

    def copy_back(self, slots: tuple[int, ...]) -> HostCopy:
        """The copy of the row's pages from host `slots` into new ones, with the window parts that it still reads."""
        self.cover_windows(len(self.tokens))
        return self._copy(slots, to_host=False)

    def _copy(self, slots: tuple[int, ...], *, to_host: bool) -> HostCopy:
        pages, window_slots = self.table.pages[: len(slots)], self.table.window_slots[: len(slots)]
        return HostCopy(tuple(pages), slots, to_host, window_slots)

    def growth(self) -> RowGrowth:
        """The row as the growth reserve sees it."""
        num_output, pages = self.num_output_tokens, self.table.pages
        max_rest = self.request.stop.max_tokens - num_output
        return RowGrowth(len(self.tokens), num_output, max_rest, len(pages), self.table.num_own_pages)
