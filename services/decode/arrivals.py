"""Arrivals: turns what is heard about a landing into effects, and boards it when it is validated. Pure.

Between the landing book (one handoff's state) and the scheduler (rows) stands this short list of rules: who may come
in, what a failure of a landing means, when a landing counts as validated. The loop calls it, and the simulator.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from baton.domain.errors import (
    BatonError,
    ContextOverflow,
    DeadlineExceeded,
    Interrupted,
    LeaseEnded,
    LinkBroken,
    Superseded,
    WorkerLost,
)
from baton.domain.ids import AttemptId, PageId, PageKey, PromiseId, WorkerId
from baton.domain.request import EngineRequest
from baton.kv.pages import PagePool
from baton.transfer.base import Pull, PullEvent
from services.decode.boarding import Busy, Promised, SealInfo
from services.decode.effects import (
    AbortHandoff,
    AskCommit,
    ConfirmCommit,
    DecodeEffect,
    Fail,
    ReportLanded,
    StartPull,
    TakenIn,
)
from services.decode.evidence import Proof
from services.decode.landing import LandingBook
from services.decode.scheduler import DecodeScheduler


@dataclass(frozen=True, slots=True)
class ArrivalRules:
    """`digests`: pages are checked here (V3), so a commit need not ask the source (V1) or count on leases (V2)."""

    page_size: int
    digests: bool


class Arrivals:
    """The door of the decode engine."""

    def __init__(self, pool: PagePool, landings: LandingBook, scheduler: DecodeScheduler, rules: ArrivalRules) -> None:
        self._pool = pool
        self._landings = landings
        self._scheduler = scheduler
        self._rules = rules

    def promise(
        self, id: AttemptId, num_tokens: int, keys: Sequence[PageKey], now: float, deadline_s: float
    ) -> tuple[Promised | Busy, list[DecodeEffect]]:
        """Room for one attempt; an older attempt of the same request that is still here ends. Raises `Superseded`,
        also for an attempt that is decoding here already."""
        if id in self._scheduler.ids():
            raise Superseded(f"{id} is decoding here already")
        effects = self._end_older(id)
        if self._scheduler.num_preempted:  # who was here first comes back first
            self._landings.fence(id)
            return Busy(self._landings.num_reserved_pages), effects
        reply = self._landings.promise(id, num_tokens, keys, self._scheduler.num_rows, now, deadline_s)
        return reply, effects

    def claim(
        self, promise_id: PromiseId, request: EngineRequest, source: WorkerId | None, deadline: float
    ) -> list[DecodeEffect]:
        """`Generate` came for a promise; a promise that has ended, or a request that can never fit, fails at once.

        Without a `source` the prompt is computed here.
        """
        num_tokens = request.num_prompt_tokens + request.stop.max_tokens
        num_pages = -(-num_tokens // self._rules.page_size)
        if num_pages > self._pool.num_pages:
            message = f"{num_tokens} tokens need {num_pages} pages, this worker has {self._pool.num_pages}"
            return self.fail(request.id, ContextOverflow(message))
        if source is None and (prompt := self._landings.take(promise_id, request)) is not None:
            self._scheduler.add_prompt(prompt)
            return [TakenIn(request.id, len(request.tokens), prompt.prefix_len)]
        if source is not None and self._landings.claim(promise_id, request, source, deadline):
            return []
        return self.fail(request.id, LeaseEnded(f"{request.id}: promise {promise_id} has ended"))

    def chunk(
        self, id: AttemptId, first_page: int, pages: Sequence[PageId], digests: Sequence[int] | None, now: float
    ) -> list[DecodeEffect]:
        """Prefill published pages."""
        if self._rules.digests and digests is None and self._landings.get(id) is not None:
            return self.fail(id, LinkBroken(f"{id}: pages came without digests, which are checked here"))
        try:
            checked = digests if self._rules.digests else None
            return _starts(self._landings.chunk(id, first_page, pages, checked, now))
        except Interrupted as error:
            return self.fail(id, error)

    def sealed(self, id: AttemptId, seal: SealInfo, now: float) -> list[DecodeEffect]:
        """Prefill published its last. A first token that is also the last leaves nothing to decode."""
        if seal.finish is not None:
            return self.abort(id)
        try:
            self._landings.sealed(id, seal, now)
        except Interrupted as error:
            return self.fail(id, error)
        return self._advance(id, now)

    def source_lost(self, id: AttemptId, error: BatonError) -> list[DecodeEffect]:
        """The handoff's event stream broke. Before the seal that ends the landing; after it the reads decide."""
        landing = self._landings.get(id)
        if landing is None or landing.seal is not None:
            return []
        return self.fail(id, error)

    def pulled(self, event: PullEvent, now: float) -> list[DecodeEffect]:
        """A read's outcome."""
        id = self._landings.owner(event.pull.id)
        try:
            effects = _starts(self._landings.pulled(event, now))
        except Interrupted as error:
            return [] if id is None else self.fail(id, error)
        return effects if id is None else effects + self._advance(id, now)

    def renewed(self, ids: Sequence[AttemptId], lease_ends_at: float) -> None:
        """The source has promised to hold its pins until then, on our clock."""
        self._landings.renewed(ids, lease_ends_at)

    def source_replaced(self, source: WorkerId) -> list[DecodeEffect]:
        """A new process has taken the source's name: a read that has not ended may find anything there."""
        lost = WorkerLost(f"{source} restarted in the middle of a handoff")
        return [effect for id in self._landings.unfinished(source) for effect in self.fail(id, lost)]

    def commit_answer(self, id: AttemptId, valid: bool | None, now: float) -> list[DecodeEffect]:
        """The source's word on an `AskCommit`; None when it could not be asked, and its leases have to prove it."""
        if not self._landings.ready(id):
            return []
        if valid:
            return self._board(id, Proof.PINS, now)
        if valid is None and self._landings.proven(id):
            return self._board(id, Proof.LEASE, now)
        why = "were not held" if valid is False else "cannot be asked for, and no lease covers every read"
        return self.fail(id, LeaseEnded(f"{id}: prefill's pins {why}"))

    def abort(self, id: AttemptId) -> list[DecodeEffect]:
        """Ends an attempt in whatever room it is. Idempotent, legal in every state."""
        self._scheduler.abort(id)
        source = self._landings.abort(id)
        return [] if source is None else [AbortHandoff(id, source)]

    def fail(self, id: AttemptId, error: BatonError) -> list[DecodeEffect]:
        """`abort`, and the router hears why."""
        return [*self.abort(id), Fail(id, error)]

    def expire(self, now: float) -> list[DecodeEffect]:
        """Ends landings past their deadline."""
        effects: list[DecodeEffect] = []
        for id in self._landings.expire(now):
            claimed = (landing := self._landings.get(id)) is not None and landing.request is not None
            error = DeadlineExceeded(f"{id}: not landed in time") if claimed else WorkerLost(f"{id}: never claimed")
            effects += self.fail(id, error)
        return effects

    def next_wakeup(self) -> float | None:
        return self._landings.next_deadline()

    def _advance(self, id: AttemptId, now: float) -> list[DecodeEffect]:
        if not self._landings.ready(id):
            return []
        if self._rules.digests:
            return self._board(id, Proof.DIGESTS, now)
        landing = self._landings.get(id)
        return [] if landing is None or landing.source is None else [AskCommit(id, landing.source)]

    def _board(self, id: AttemptId, proof: Proof, now: float) -> list[DecodeEffect]:
        boarding = self._landings.commit(id, now)
        self._scheduler.add(boarding)
        report = ReportLanded(
            id,
            source=boarding.source,
            proof=proof,
            num_prompt_tokens=len(boarding.request.tokens),
            num_cached_tokens=boarding.prefix_len,
            num_bytes=boarding.num_bytes,
            num_pages=boarding.num_pages,
            pull_s=boarding.pull_s,
            exposed_s=boarding.exposed_s,
        )
        return [ConfirmCommit(id, boarding.source), report] if self._rules.digests else [report]

    def _end_older(self, id: AttemptId) -> list[DecodeEffect]:
        here = (*self._landings.ids(), *self._scheduler.ids())
        older = [one for one in here if one.request_id == id.request_id and one.attempt < id.attempt]
        return [effect for one in older for effect in self.abort(one)]


def _starts(pulls: Sequence[Pull]) -> list[DecodeEffect]:
    return [StartPull(pull) for pull in pulls]
