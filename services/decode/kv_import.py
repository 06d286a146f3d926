"""One KV import: its state, its pulls and the proof of its pages. Also its first and last values, up to a row. Pure."""

from __future__ import annotations

import enum
from collections import deque
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field

from baton.domain.errors import LinkBroken
from baton.domain.handoff import ImportEvent, ImportState, PublishedChunk, Suspect, advance_import
from baton.domain.ids import AttemptId, PageId, ReservationId, WorkerId
from baton.domain.request import EngineRequest, FinishReason, SampledToken
from baton.domain.timing.attempt_times import ImportTimes, to_us
from baton.domain.timing.row_timer import RowTimer
from baton.engine.transition_log import log_transition
from baton.kv.geometry import PageWindow
from baton.kv.growth import RowGrowth
from baton.kv.page_table import PageTable
from baton.kv.page_tags import TAG_BYTES, PageTag, page_identities
from baton.transfer.base import Pull


@dataclass(frozen=True, slots=True)
class ImportLimits:
    """Bounds of the imports of one worker. `max_reservations` None: only `max_rows` bounds them.

    `window`: of pages with a window part, which is then read only where it is needed; None: whole pages are read.
    """

    page_size: int
    max_rows: int
    max_window_pages: int
    pull_deadline_s: float
    max_pull_attempts: int = 2
    max_reservations: int | None = None
    window: PageWindow | None = None

    def has_row(self, num_rows: int, num_imports: int) -> bool:
        """True if there is a row for a new reservation beside `num_rows` rows and `num_imports` imports."""
        most = self.max_rows if self.max_reservations is None else self.max_reservations
        return num_rows + num_imports < self.max_rows and num_imports < most

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

    def growth(self) -> RowGrowth:
        """The row as the growth reserve sees it."""
        num_output, pages = self.num_output_tokens, self.table.pages
        max_rest = self.request.stop.max_tokens - num_output
        return RowGrowth(len(self.tokens), num_output, max_rest, len(pages), self.table.num_own_pages)
