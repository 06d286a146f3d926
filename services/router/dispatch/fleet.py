"""The workers as this router knows them: their last announcements, channels to them, and who is out of use.

Follows the registry from a task of its own; when the reception book cannot be reached the last known records stay in
use. `booking` asks it for pairs, `attempt` for stubs and for news of a worker's end. Which links rest is `quarantine`'s
business, what was sent lately `in_flight`'s. Knows no request.

    announced and ready --(a call to it broke)--> suspected, for one TTL --(still announced)--> ready
        `--(replaced by a new incarnation, or silent for two TTLs, or stuck in a step)--> lost: its attempts end
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Sequence
from dataclasses import dataclass, field

from baton.domain.errors import Interrupted
from baton.domain.ids import AttemptId, Incarnation, PageKey
from baton.domain.roll import Roll
from baton.domain.trust import OPEN_CLUSTER, ClusterTrust
from baton.domain.worker import WorkerRecord, WorkerRole
from baton.rpc.client import Channels
from baton.rpc.gen.decode_pb2_grpc import DecodeStub
from baton.rpc.gen.prefill_pb2_grpc import PrefillStub
from baton.state.base import StateUnavailable, WorkerRegistry
from baton.telemetry.logs import get_logger
from baton.telemetry.metrics import QUARANTINED_LINKS
from services.router.dispatch.in_flight import InFlight
from services.router.dispatch.placement import Ask, Pair, PrefixIndex, capacity_tokens, choose, linked_pairs, placeable
from services.router.dispatch.quarantine import Quarantine, RestLimits

MAX_INDEXED_PAGES = 1 << 18

log = get_logger(__name__)


@dataclass(frozen=True, slots=True)
class FleetLimits:
    """`worker_ttl_s`: how long an announcement is believed. `max_step_age_s`: a longer step is a stuck engine."""

    worker_ttl_s: float
    heartbeat_interval_s: float
    max_step_age_s: float
    link_rest: RestLimits = field(default_factory=RestLimits)


class Fleet:
    """Current workers of one model. Owned by one event loop; `start` before use, `close` after."""

    def __init__(
        self,
        registry: WorkerRegistry,
        channels: Channels,
        model: str,
        limits: FleetLimits,
        on_degraded: Callable[[bool], None] = lambda degraded: None,
        clock: Callable[[], float] = time.monotonic,
        trust: ClusterTrust = OPEN_CLUSTER,
    ) -> None:
        """`on_degraded` hears after each look whether the registry could not be read."""
        self._registry = registry
        self._channels = channels
        self._model = model
        self._limits = limits
        self._on_degraded = on_degraded
        self._now = clock
        self._trust = trust
        self._records: dict[Incarnation, WorkerRecord] = {}
        self._roll = Roll(limits.worker_ttl_s)
        self._vouched: set[Incarnation] = set()  # whose last record has a good badge: told at a look, not a request
        self._suspected_until: dict[Incarnation, float] = {}
        self._watchers: dict[Incarnation, set[Callable[[], None]]] = {}
        self._index = PrefixIndex(MAX_INDEXED_PAGES)
        self._in_flight = InFlight(memory_s=2 * limits.heartbeat_interval_s)
        self._quarantine = Quarantine(limits.link_rest)
        self._listeners: list[Callable[[], None]] = []
        self._changed = asyncio.Event()
        self._num_choices = 0
        self._following: asyncio.Task[None] | None = None

    def start(self) -> asyncio.Task[None]:
        """Begins to follow the registry; the task ends only with `close`, or by a bug that its owner must hear of."""
        self._following = asyncio.create_task(self._follow(), name="fleet")
        return self._following

    async def close(self) -> None:
        """Stops following; idempotent. Channels belong to the caller."""
        following, self._following = self._following, None
        if following is not None:
            following.cancel()
            await asyncio.gather(following, return_exceptions=True)

    @property
    def records(self) -> tuple[WorkerRecord, ...]:
        """All workers not known to be lost, by id."""
        return tuple(sorted(self._records.values(), key=lambda record: record.id))

    def readiness(self) -> tuple[bool, str]:
        """Whether a pair has moved bytes and takes requests, and in words what is there or missing."""
        pairs = self._announced_pairs()
        if pairs:
            return True, f"{len(pairs)} linked prefill/decode pairs"
        eligible = [record.role for record in self._records.values() if self._eligible(record)]
        counts = ", ".join(f"{eligible.count(role)} {role.value}" for role in WorkerRole)
        strangers = sorted({r.model for r in self._records.values() if r.model != self._model})
        others = f"; workers announced {', '.join(strangers)} instead of {self._model}" if strangers else ""
        refused = "".join(f"; {self._trust.complaint(r)}" for r in self.records if not self._trust.vouches(r))
        return False, f"no linked prefill/decode pair ({counts} ready{others}{refused})"

    def max_request_tokens(self) -> int | None:
        """Most tokens, prompt and output, that some pair can hold; None without a linked pair."""
        return max(map(capacity_tokens, self._announced_pairs()), default=None)

    def max_rows(self) -> int | None:
        """Most requests that all decode workers with a link can run at once; None without a linked pair."""
        rows = {pair.decode.incarnation: pair.decode.load.max_rows for pair in self._announced_pairs()}
        return sum(rows.values()) if rows else None

    def answers_like(self, fingerprint: str) -> bool:
        """Whether some linked pair makes the tokens that workers of `fingerprint` make; "" for any."""
        return not fingerprint or any(pair.answers_like(fingerprint) for pair in self._announced_pairs())

    def listen(self, on_look: Callable[[], None]) -> None:
        """Calls `on_look` after every look at the registry, for as long as the fleet lives."""
        self._listeners.append(on_look)

    def page_sizes(self) -> frozenset[int]:
        """Page sizes in use (one, unless workers are being exchanged)."""
        return frozenset(record.page_size for record in self._records.values())

    def choose(self, ask: Ask) -> Pair | None:
        """The best pair now, with loads that include what was just sent; None when no pair can take `ask`."""
        now = self._now()
        records = [r for r in self._records.values() if self._eligible(r) and self._trusted(r, now)]
        pairs = linked_pairs(self._in_flight.adjust(record, now) for record in records)
        pairs = [pair for pair in pairs if self._quarantine.admits(pair.incarnations, now)]
        self._num_choices += 1
        return choose(pairs, ask, self._index, self._num_choices)

    def placed(self, id: AttemptId, pair: Pair, num_tokens: int) -> None:
        """An attempt was given to a pair: counts as load until announcements show it."""
        self._in_flight.place(id, pair, num_tokens, self._now())
        self._quarantine.place(id, pair.incarnations)

    def settled(self, id: AttemptId) -> None:
        """The attempt is over."""
        self._in_flight.settle(id)
        self._quarantine.settle(id)

    def landed(self, id: AttemptId, pair: Pair) -> None:
        """Pages of the attempt have come from one to the other: if the link was on trial, it is trusted again."""
        if self._quarantine.land(id):
            QUARANTINED_LINKS.set(len(self._quarantine))
            log.info("link_trusted_again", prefill=pair.prefill.id, decode=pair.decode.id)
            self._ring()

    def link_lost(self, id: AttemptId, pair: Pair, reason: Interrupted) -> bool:
        """The attempt was lost, perhaps for its link, which rests for a while; whether the loss is to be counted."""
        loss = self._quarantine.lose(id, pair.incarnations, self._now())
        if loss is None:
            return True
        QUARANTINED_LINKS.set(len(self._quarantine))
        names = {"prefill": pair.prefill.id, "decode": pair.decode.id}
        log.warning("link_rests", rest_s=loss.rest_s, code=reason.code, reason=str(reason), **names)
        return not loss.excused

    def holds(self, record: WorkerRecord, keys: Sequence[PageKey]) -> None:
        """The worker has just computed or received these pages."""
        self._index.remember(record.incarnation, keys)

    def prefill_stub(self, record: WorkerRecord) -> PrefillStub:
        return PrefillStub(self._channels.get(record.address, record.incarnation))

    def decode_stub(self, record: WorkerRecord) -> DecodeStub:
        return DecodeStub(self._channels.get(record.address, record.incarnation))

    def suspect(self, record: WorkerRecord, reason: Interrupted) -> None:
        """A call to the worker broke: no new requests for it until its announcement has had time to expire."""
        self._suspected_until[record.incarnation] = self._now() + self._limits.worker_ttl_s
        log.warning("worker_suspected", worker=record.id, code=reason.code, reason=str(reason))

    def watch(self, incarnation: Incarnation, on_lost: Callable[[], None]) -> Callable[[], None]:
        """Calls `on_lost` once when this worker process is known to be gone; returns what ends the watch."""
        watchers = self._watchers.setdefault(incarnation, set())
        watchers.add(on_lost)

        def unwatch() -> None:
            watchers.discard(on_lost)
            if not watchers:
                self._watchers.pop(incarnation, None)

        return unwatch

    async def changed(self) -> None:
        """Waits for the next look at the registry, at the latest a heartbeat interval away, or other news of a pair."""
        await self._changed.wait()

    async def _follow(self) -> None:
        changes = self._registry.changes()
        try:
            await self._look_at(changes)
        finally:
            if isinstance(changes, AsyncGenerator):
                await changes.aclose()

    async def _look_at(self, changes: AsyncIterator[None]) -> None:
        async for _ in changes:
            try:
                announced = await self._registry.workers()
            except StateUnavailable as error:
                self._keep_all(error)
            else:
                self._on_degraded(False)
                await self._update(announced)
            for on_look in self._listeners:
                on_look()
            self._ring()

    def _ring(self) -> None:
        changed, self._changed = self._changed, asyncio.Event()
        changed.set()

    def _keep_all(self, error: StateUnavailable) -> None:
        """The book's silence says nothing of the workers: they get a new TTL to announce themselves after it."""
        self._on_degraded(True)
        log.warning("registry_unavailable", reason=str(error))
        self._roll.no_look(self._now())

    async def _update(self, announced: list[WorkerRecord]) -> None:
        now = self._now()
        self._roll.look([record.incarnation for record in announced], now)
        current = {record.id: record.incarnation for record in announced}
        lost = [r for r in self._records.values() if self._is_lost(r, current.get(r.id), now)]
        for record in lost:
            self._forget(record)
        # A restarted worker may have the old address: the old channel goes before the new record can be chosen.
        await asyncio.gather(*(self._channels.forget(record.address) for record in lost))
        for record in announced:
            if self._trust.vouches(record):
                self._vouched.add(record.incarnation)
            else:
                self._vouched.discard(record.incarnation)
            if record.incarnation not in self._records and record.incarnation not in self._vouched:
                log.warning("worker_not_trusted", worker=record.id, why=self._trust.complaint(record))
            self._records[record.incarnation] = record
            if record.load.step_age_s > self._limits.max_step_age_s:
                self._tell_watchers(record.incarnation)
        present = [record for record in self._records.values() if self._roll.has(record.incarnation, now)]
        self._quarantine.retain({pair.incarnations for pair in linked_pairs(present)})
        QUARANTINED_LINKS.set(len(self._quarantine))

    def _is_lost(self, record: WorkerRecord, current: Incarnation | None, now: float) -> bool:
        if current is None:
            return self._roll.is_gone(record.incarnation, now)
        return current != record.incarnation

    def _forget(self, record: WorkerRecord) -> None:
        log.warning("worker_lost", worker=record.id, incarnation=record.incarnation)
        self._roll.forget(record.incarnation)
        self._vouched.discard(record.incarnation)
        for table in (self._records, self._suspected_until):
            table.pop(record.incarnation, None)
        self._index.retain(frozenset(self._records))
        self._tell_watchers(record.incarnation)

    def _tell_watchers(self, incarnation: Incarnation) -> None:
        for on_lost in self._watchers.pop(incarnation, set()):
            on_lost()

    def _announced_pairs(self) -> list[Pair]:
        return linked_pairs(record for record in self._records.values() if self._eligible(record))

    def _eligible(self, record: WorkerRecord) -> bool:
        return (
            self._roll.has(record.incarnation, self._now())
            and record.incarnation in self._vouched
            and record.model == self._model
            and placeable(record, self._limits.max_step_age_s)
        )

    def _trusted(self, record: WorkerRecord, now: float) -> bool:
        return self._suspected_until.get(record.incarnation, now) <= now
