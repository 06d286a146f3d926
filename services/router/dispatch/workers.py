"""Keeps the records of live workers and the channels to them. Used by `reserve` and `attempt`; knows no request.

A task reads the registry; without the state store the last records stay in use. `link_breaker` keeps failed links.

    announced and ready --(a call to it failed)--> suspected: see `suspicions` --(still announced)--> ready
        `--(replaced by a new incarnation, not announced for two TTLs, or stuck in a step)--> lost: its attempts end
"""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Mapping, Sequence
from dataclasses import dataclass, field

from baton.domain.errors import Interrupted
from baton.domain.ids import AttemptId, Incarnation, PageKey, WorkerId
from baton.domain.liveness import Liveness
from baton.domain.timing.prompt_cost import CostBasis
from baton.domain.timing.row_limit import within_tpot
from baton.domain.trust import RecordVerifier
from baton.domain.worker import WorkerRecord, WorkerRole
from baton.rpc.channel_pool import ChannelPool
from baton.rpc.gen.decode_pb2_grpc import DecodeStub
from baton.rpc.gen.encode_pb2_grpc import EncodeStub
from baton.rpc.gen.prefill_pb2_grpc import PrefillStub
from baton.services.router.dispatch.cache_index.index import CacheIndex
from baton.services.router.dispatch.cache_index.known_pages import KnownPages
from baton.services.router.dispatch.cache_index.page_source import PageSourceChoice, choose_page_source
from baton.services.router.dispatch.in_flight import InFlight
from baton.services.router.dispatch.link_breaker import BreakerState, LinkBreakerLimits, LinkBreakers, LinkId
from baton.services.router.dispatch.media.encoder_choice import has_tower, makes_embeddings
from baton.services.router.dispatch.media.encoder_mismatch import MismatchLog, mismatch_note
from baton.services.router.dispatch.placement.absence import WorkerAbsence
from baton.services.router.dispatch.placement.choice import choose_pair
from baton.services.router.dispatch.placement.eligible import EligibleWorkers
from baton.services.router.dispatch.placement.pair import (
    LinkedPairs,
    Pair,
    capacity_tokens,
    kernels_note,
    linked_pairs,
)
from baton.services.router.dispatch.placement.policy import BY_CACHE, PlacementRules
from baton.services.router.dispatch.placement.query import PlacementQuery
from baton.services.router.dispatch.placement.worker_filter import WorkerFilter
from baton.services.router.dispatch.sessions.worker_sessions import WorkerSessions
from baton.services.router.dispatch.suspicions import Suspicions
from baton.store.notifier import wait_for_event
from baton.store.store import StoreUnavailable, WorkerRegistry
from baton.telemetry.logs import get_logger
from baton.telemetry.metrics import OPEN_LINK_BREAKERS, PLACEMENTS_TOTAL
from baton.telemetry.series.worker_series import WorkerSeries

MAX_INDEXED_PAGES = 1 << 18
FIRST_READ_S = 2.0
"""Longest wait of a router that starts for its first reading of the registry."""

_NUM_PLACED = {basis: PLACEMENTS_TOTAL.labels(basis.value) for basis in CostBasis}

log = get_logger(__name__)


@dataclass(frozen=True, slots=True)
class WorkerLimits:
    """`worker_ttl_s`: life of an announcement. `max_step_age_s`: else it is stuck. `max_tpot_s`: see `within_tpot`."""

    worker_ttl_s: float
    heartbeat_interval_s: float
    max_step_age_s: float
    link_breaker: LinkBreakerLimits = field(default_factory=LinkBreakerLimits)
    policies: PlacementRules = BY_CACHE
    max_tpot_s: float = math.inf


class WorkerSet:
    """Live workers of one model. Owned by one event loop; `start` before use, `close` after."""

    def __init__(
        self,
        registry: WorkerRegistry,
        channels: ChannelPool,
        worker_filter: WorkerFilter,
        limits: WorkerLimits,
        on_degraded: Callable[[bool], None] = lambda degraded: None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Calls `on_degraded` after each read of the registry: True when it failed."""
        self._registry = registry
        self._channels = channels
        self._filter = worker_filter
        self._verifier = RecordVerifier(worker_filter.trust)
        self._limits = limits
        self._on_degraded = on_degraded
        self._now = clock
        self._records: dict[Incarnation, WorkerRecord] = {}
        self._liveness = Liveness(limits.worker_ttl_s)
        self._eligible = EligibleWorkers(self._records, self._liveness, worker_filter, limits.max_step_age_s)
        self._series = WorkerSeries(worker_filter.model, limits.worker_ttl_s)
        self._unread = "starting: the state store has not answered yet"
        self._refused = set[tuple[str, WorkerId]]()  # of the last reading, with the reasons
        self.suspicions = Suspicions(limits.worker_ttl_s)
        self._watchers: dict[Incarnation, set[Callable[[], None]]] = {}
        self.cache_index = CacheIndex()
        self.known_pages = KnownPages(MAX_INDEXED_PAGES, self.cache_index, clock)
        self.worker_sessions: WorkerSessions | None = None  # None: a call for each attempt
        self._in_flight = InFlight(window_s=2 * limits.heartbeat_interval_s)
        self._link_breakers = LinkBreakers(limits.link_breaker)
        self._listeners: list[Callable[[], None]] = [MismatchLog(self.served).report]
        self._changed, self._read_once = asyncio.Event(), asyncio.Event()
        self._num_choices, self._pairs = 0, LinkedPairs()
        self._refresh_task: asyncio.Task[None] | None = None

    def start(self) -> asyncio.Task[None]:
        """Starts to read the registry. The task ends with `close`, or with a bug that its owner must handle."""
        self._series.start()
        self._refresh_task = asyncio.create_task(self._run(), name="workers")
        return self._refresh_task

    async def close(self) -> None:
        """Stops reading. Idempotent. The caller closes the channels."""
        task, self._refresh_task = self._refresh_task, None
        if task is not None:
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)

    async def wait_for_first_read(self) -> None:
        """Waits up to `FIRST_READ_S` until the registry was read. Until then it seems that there are no workers."""
        if not self._read_once.is_set():
            await wait_for_event(self._read_once, FIRST_READ_S)

    @property
    def records(self) -> tuple[WorkerRecord, ...]:
        """All workers that are not lost, by id."""
        return tuple(sorted(self._records.values(), key=lambda record: record.id))

    def readiness(self) -> tuple[bool, str]:
        """Returns True when a linked pair takes requests, and a description of what is there or missing."""
        pairs, ready = self._eligible_pairs(), self._eligible.all(self._now())
        if pairs:
            return True, f"{len(pairs)} linked prefill/decode pairs{kernels_note(ready)}{mismatch_note(ready)}"
        roles = [one.role for one in ready]
        counts = ", ".join(f"{roles.count(role)} {role.value}" for role in (WorkerRole.PREFILL, WorkerRole.DECODE))
        others = self._filter.strangers_note(self.records)
        refused = "".join(f"; {why}" for why, _ in sorted(self._refused))
        unread = f"; {self._unread}" if self._unread else ""
        return False, f"no linked prefill/decode pair ({counts} ready{others}{refused}{unread})"

    def num_ready(self) -> int:
        """Counts the workers that take requests."""
        return len(self._eligible.all(self._now()))

    def max_request_tokens(self) -> int | None:
        """Most tokens, prompt and output, that a pair can hold; None without a linked pair."""
        return max(map(capacity_tokens, self._eligible_pairs()), default=None)

    def max_rows(self, context_tokens: float = 0.0) -> int | None:
        """Rows of all linked decode workers, within `max_tpot_s` for rows of `context_tokens`; None without a pair."""
        most = self._limits.max_tpot_s
        decodes = {pair.decode.incarnation: pair.decode for pair in self._eligible_pairs()}
        return sum(within_tpot(one, most, context_tokens).budgets.rows for one in decodes.values()) if decodes else None

    def has_model(self, fingerprint: str, processor: str = "") -> bool:
        """True when a linked pair has this fingerprint and serves images of this processor, or `fingerprint` is ""."""
        return not fingerprint or bool(self.encoders(processor, fingerprint))

    def encodes(self, processor: str) -> bool:
        """True when a linked pair serves images of this processor, also one whose encode workers are suspected."""
        return bool(self.encoders(processor))

    def encoders(self, processor: str, fingerprint: str = "") -> frozenset[Incarnation]:
        """The prefill workers that encode images with this processor, or have them encoded; for "" all of any pair."""
        pairs = (pair for pair in self._eligible_pairs() if pair.encodes(processor) and pair.matches(fingerprint))
        able = {pair.prefill.incarnation: pair.prefill for pair in pairs}
        return frozenset(id for id, one in able.items() if not processor or has_tower(one) or self._makers(one))

    def encode_workers(self, prefill: WorkerRecord) -> list[WorkerRecord]:
        """The encode workers that take images for a prefill worker now."""
        return [one for one in self._makers(prefill) if self.absence(one) is WorkerAbsence.NONE]

    def _makers(self, prefill: WorkerRecord) -> list[WorkerRecord]:
        return [one for one in self._eligible.all(self._now()) if makes_embeddings(one, prefill)]

    def add_listener(self, on_refresh: Callable[[], None]) -> None:
        """Calls `on_refresh` after every read of the registry."""
        self._listeners.append(on_refresh)

    def page_sizes(self) -> set[int]:
        """Page sizes in use: one, except during a rollout."""
        return {record.page_size for record in self._records.values() if record.page_size}  # encode workers have none

    def choose(self, query: PlacementQuery) -> Pair | None:
        """Returns the best pair now; None when no pair can take `query`. Loads include what was just placed."""
        now, suspicions, most = self._now(), self.suspicions, self._limits.max_tpot_s
        able = self._eligible.all(now)
        if suspicions.any:
            able = [one for one in able if not suspicions.holds(one.incarnation, now)]
        bounded = able if most == math.inf else [within_tpot(one, most, query.num_tokens) for one in able]
        loaded = {one.incarnation: one for one in self._in_flight.adjust_all(bounded, now)}
        links = [pair.incarnations for pair in self._pairs.of(able)]
        pairs = [Pair(loaded[a], loaded[b]) for a, b in links if self._link_breakers.allows((a, b), now)]
        if query.processor:
            pairs = [pair for pair in pairs if has_tower(pair.prefill) or self.encode_workers(pair.prefill)]
        self._num_choices += 1
        pair = choose_pair(pairs, query, self.known_pages, self._num_choices, self._limits.policies)
        if pair is not None:
            _NUM_PLACED[pair.cost_basis].inc()
        return pair

    def on_placed(self, id: AttemptId, pair: Pair, query: PlacementQuery) -> None:
        """Counts what an attempt has to compute as load of its pair until announcements show it."""
        num_cached = min(query.num_tokens, self.known_pages.num_hit_tokens(pair.prefill, query.keys))
        self._in_flight.add(id, pair, query.num_tokens, self._now(), num_cached)
        self._link_breakers.on_placed(id, pair.incarnations)

    def on_ended(self, id: AttemptId) -> None:
        """Records the end of an attempt."""
        self._in_flight.remove(id)
        self._link_breakers.on_ended(id)

    def on_imported(self, id: AttemptId, pair: Pair) -> None:
        """Records that pages of the attempt moved over the link. Closes the breaker of a probed link."""
        if self._link_breakers.on_imported(id):
            OPEN_LINK_BREAKERS.set(len(self._link_breakers))
            log.info("link_breaker_closed", **_log_fields(id), prefill=pair.prefill.id, decode=pair.decode.id)
            self._notify_change()

    def on_link_failure(self, id: AttemptId, pair: Pair, reason: Interrupted) -> bool:
        """Opens the breaker of a link that may be broken. Returns True when the failure counts as an attempt."""
        failure = self._link_breakers.on_failure(id, pair.incarnations, self._now())
        if failure is None:
            return True
        OPEN_LINK_BREAKERS.set(len(self._link_breakers))
        names = {**_log_fields(id), "prefill": pair.prefill.id, "decode": pair.decode.id}
        log.warning("link_breaker_opened", open_s=failure.open_s, code=reason.code, reason=str(reason), **names)
        return not failure.in_grace

    def add_cached_pages(self, record: WorkerRecord, keys: Sequence[PageKey]) -> None:
        """Records that the worker has computed or imported these pages."""
        self.known_pages.add(record.incarnation, keys)

    def find_page_source(
        self, pair: Pair, num_tokens: int, keys: Sequence[PageKey], known: Mapping[Incarnation, int]
    ) -> PageSourceChoice | None:
        """The worker whose cached pages of a prompt the pair's prefill worker may import; see `page_source`."""
        if not pair.prefill.links:
            return None  # it reads nobody's pages
        matchable, now = keys[: max(0, num_tokens - 1) // pair.prefill.page_size], self._now()
        workers = {id: one for id, one in self._records.items() if not self.suspicions.holds(id, now)}
        return choose_page_source(pair, matchable, known, workers, self.cache_index, now)

    def served(self) -> list[WorkerRecord]:
        """The workers of this router's model that are not lost."""
        return [record for record in self._records.values() if self._filter.serves(record)]

    def absence(self, record: WorkerRecord) -> WorkerAbsence:
        """The reason why the router gives a known worker nothing, as far as it is not the worker's own status."""
        now, incarnation = self._now(), record.incarnation
        if not self._liveness.is_present(incarnation, now):
            return WorkerAbsence.SILENT
        if self.suspicions.holds(incarnation, now):
            return WorkerAbsence.SUSPECTED
        stuck = record.load.step_age_s > self._limits.max_step_age_s
        return WorkerAbsence.STUCK if stuck else WorkerAbsence.NONE

    def breakers(self) -> dict[LinkId, BreakerState]:
        """The links whose circuit breaker is not closed."""
        return self._link_breakers.states(self._now())

    def prefill_stub(self, record: WorkerRecord) -> PrefillStub:
        return self._channels.stub(PrefillStub, record.address, record.incarnation)

    def encode_stub(self, record: WorkerRecord) -> EncodeStub:
        return self._channels.stub(EncodeStub, record.address, record.incarnation)

    def decode_stub(self, record: WorkerRecord) -> DecodeStub:
        return self._channels.stub(DecodeStub, record.address, record.incarnation)

    def suspect(
        self, record: WorkerRecord, reason: Interrupted, id: AttemptId | None = None, refuses: bool = False
    ) -> None:
        """Gives no new requests to a worker whose call failed, for a TTL or until `on_answer`; see `suspicions`."""
        if record.incarnation in self._records:  # else it is lost already, and nothing would remove the entry
            self.suspicions.add(record.incarnation, self._now(), refuses=refuses)
        log.warning("worker_suspected", worker=record.id, code=reason.code, reason=reason.log_text, **_log_fields(id))

    def on_answer(self, record: WorkerRecord) -> None:
        """Records a good answer to a request of this process. Called if `suspicions.any`."""
        if self.suspicions.on_answer(record.incarnation, self._now()):
            log.info("worker_trusted", worker=record.id)
            self._notify_change()

    def watch(self, incarnation: Incarnation, on_lost: Callable[[], None]) -> Callable[[], None]:
        """Calls `on_lost` once when this worker process is lost. Returns a function that ends the watch."""
        (watchers := self._watchers.setdefault(incarnation, set())).add(on_lost)

        def unwatch() -> None:
            watchers.discard(on_lost)
            if not watchers:
                self._watchers.pop(incarnation, None)

        return unwatch

    async def wait_for_change(self) -> None:
        """Waits for the next read of the registry (at most a heartbeat interval), or for a link breaker that closes."""
        await self._changed.wait()

    async def _run(self) -> None:
        changes = self._registry.changes()
        try:
            await self._refresh_on(changes)
        finally:
            if isinstance(changes, AsyncGenerator):
                await changes.aclose()

    async def _refresh_on(self, changes: AsyncIterator[None]) -> None:
        async for _ in changes:
            try:
                announced = await self._registry.workers()
            except StoreUnavailable as error:
                self._on_registry_unavailable(error)
            else:
                self._on_degraded(False)
                self._unread = ""
                await self._update(announced)
                self._read_once.set()
            now, pairs = self._now(), self._eligible_pairs()
            self._series.show(((r, self._liveness.is_present(r.incarnation, now)) for r in self.served()), len(pairs))
            for on_refresh in self._listeners:
                on_refresh()
            self._notify_change()

    def _notify_change(self) -> None:
        changed, self._changed = self._changed, asyncio.Event()
        changed.set()

    def _on_registry_unavailable(self, error: StoreUnavailable) -> None:
        """An outage of the store proves nothing about workers. They get a new TTL to announce themselves after it."""
        self._on_degraded(True)
        self._unread = f"waiting for the state store: {error}"
        log.warning("registry_unavailable", reason=str(error))
        self._liveness.observe_outage(self._now())
        self._eligible.changed()

    async def _update(self, announced: list[WorkerRecord]) -> None:
        now = self._now()
        checked = [(record, self._verifier.accept(record)) for record in announced]
        accepted = [record for record, is_good in checked if is_good]
        self._note_refused([record for record, is_good in checked if not is_good])
        numbers = {record.incarnation: record.announcement for record in accepted}
        self._liveness.observe(numbers.keys(), now, numbers)
        self._eligible.changed()
        self._series.observe(accepted, now)
        current = {record.id: record.incarnation for record in accepted}
        lost = [r for r in self._records.values() if self._is_lost(r, current.get(r.id), now)]
        for record in lost:
            self._remove(record)
        await asyncio.gather(*(self._channels.forget(record.address, record.incarnation) for record in lost))
        for record in accepted:
            self._records[record.incarnation] = record
            if record.load.step_age_s > self._limits.max_step_age_s:
                self._notify_watchers(record.incarnation)
        self._eligible.changed()
        self._verifier.retain(self._records.keys())
        if self.worker_sessions is not None:
            self.worker_sessions.follow(self.served())
        present = [record for record in self._records.values() if self._liveness.is_present(record.incarnation, now)]
        self._link_breakers.retain({pair.incarnations for pair in linked_pairs(present)})
        OPEN_LINK_BREAKERS.set(len(self._link_breakers))

    def _note_refused(self, refused: list[WorkerRecord]) -> None:
        """Logs each reason once. A refused record changes nothing: neither worker nor liveness."""
        reasons = {(self._verifier.reason(record), record.id) for record in refused}
        for why, id in sorted(reasons - self._refused):
            log.warning("worker_untrusted", worker=id, why=why)
        self._refused = reasons

    def _is_lost(self, record: WorkerRecord, current: Incarnation | None, now: float) -> bool:
        return self._liveness.is_gone(record.incarnation, now) if current is None else current != record.incarnation

    def _remove(self, record: WorkerRecord) -> None:
        self._series.remove(record)
        self._liveness.forget(record.incarnation)
        self.suspicions.forget(record.incarnation)
        self._records.pop(record.incarnation, None)
        self._eligible.changed()
        self.known_pages.retain(frozenset(self._records))
        self._notify_watchers(record.incarnation)

    def _notify_watchers(self, incarnation: Incarnation) -> None:
        for on_lost in self._watchers.pop(incarnation, set()):
            on_lost()

    def _eligible_pairs(self) -> list[Pair]:
        return self._pairs.of(self._eligible.all(self._now()))


def _log_fields(id: AttemptId | None) -> dict[str, str | int]:
    return {} if id is None else {"request_id": id.request_id, "attempt": id.attempt}
