"""What is demanded of decode's side, whatever the rules do to it: the model that `decode_machine` drives.

A read moves its bytes when it ends, and not before: a page that was given to somebody else meanwhile is overwritten,
and the fake runner refuses the row that then reads it.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass, field

from hypothesis.stateful import RuleBasedStateMachine, invariant

from baton.domain.errors import BatonError, IntegrityFailure, SentBack, WorkerLost
from baton.domain.ids import AttemptId, PromiseId, RequestId
from baton.domain.request import EngineRequest, StopParams
from baton.engine.fake_runner import SLOT_BYTES
from baton.kv.pages import Owner
from baton.transfer.base import Pull, PullEvent, PullOutcome
from services.decode.arrivals import Arrivals
from services.decode.effects import (
    AbortHandoff,
    AskCommit,
    ConfirmCommit,
    DecodeEffect,
    EmitTokens,
    Fail,
    Preempted,
    ReportLanded,
    StartPull,
    TakenIn,
)
from services.decode.landing import LandingBook
from services.decode.scheduler import DecodeScheduler
from tests.worlds import (
    PAGE_BYTES,
    PAGE_SIZE,
    DecodeWorld,
    check_books,
    decode_world,
    num_pages,
    output_alone,
    page_bytes,
)

MAX_ROWS = 4
MAX_WINDOW_PAGES = 2
TOKEN_BUDGET = 5


@dataclass
class Client:
    """One request over all its attempts: what its client has received."""

    prompt: list[int]
    stop: StopParams
    seed: int
    received: list[int] = field(default_factory=list)
    attempt: int = 0
    done: bool = False


@dataclass
class Case:
    """One attempt as the prefill side and the router see it."""

    request: EngineRequest
    promise_id: PromiseId
    deadline: float
    next_page: int  # the first that is not announced
    claimed: bool = False
    sealed: bool = False
    ended: bool = False
    landed: bool = False
    pins_lost: bool = False
    corrupted: bool = False  # a page arrived wrong

    @property
    def num_pages(self) -> int:
        return num_pages(len(self.request.tokens))

    @property
    def landing(self) -> bool:
        return self.claimed and not self.ended and not self.landed

    @property
    def announcing(self) -> bool:
        return self.claimed and not self.sealed and self.next_page < self.num_pages

    @property
    def sealable(self) -> bool:
        return self.claimed and not self.sealed and self.next_page == self.num_pages


class WatchedDecode(RuleBasedStateMachine):
    """Decode's side with its clients and all that was heard of it. Its classes may be replaced by broken ones."""

    landing_book: type[LandingBook] = LandingBook
    decode_scheduler: type[DecodeScheduler] = DecodeScheduler
    arrivals: type[Arrivals] = Arrivals

    def __init__(self) -> None:
        super().__init__()
        self.now = 0.0
        self.digests = True
        self.world: DecodeWorld = self._make(True, 4)
        self.clients: dict[RequestId, Client] = {}
        self.cases: dict[AttemptId, Case] = {}
        self.pulls: list[Pull] = []
        self.cases_by_pull: dict[int, Case] = {}
        self.late: set[int] = set()
        self.asked: list[AttemptId] = []
        self.names = itertools.count()

    # -- what must hold

    @invariant()
    def books_agree(self) -> None:
        check_books(self.world.cache)
        landings = self.world.landings
        assert len(landings) + self.world.scheduler.num_rows <= MAX_ROWS
        reserved = [landing.num_reserved for id in landings.ids() if (landing := landings.get(id)) is not None]
        assert landings.num_reserved_pages == sum(reserved)
        assert self.world.cache.num_available >= sum(reserved), "more is promised than there is"

    @invariant()
    def nothing_touches_a_page_that_is_read_into(self) -> None:
        pages = [page for pull in self.pulls for page in pull.local_pages]
        assert len(set(pages)) == len(pages)
        assert {self.world.cache.pool.owner(page) for page in pages} <= {Owner.PROMISED, Owner.DRAINING}

    @invariant()
    def nobody_is_lost(self) -> None:
        here = {*self.world.landings.ids(), *self.world.scheduler.ids()}
        assert here == {id for id, case in self.cases.items() if not case.ended}

    @invariant()
    def one_attempt_at_a_time(self) -> None:
        for id, case in self.cases.items():
            assert case.ended or id.attempt == self.clients[id.request_id].attempt

    # -- what is heard

    def _make(self, digests: bool, num_host_pages: int) -> DecodeWorld:
        return decode_world(
            digests, num_host_pages, MAX_ROWS, 2, self.landing_book, self.decode_scheduler, self.arrivals, TOKEN_BUDGET
        )

    def _end_pull(self, pull: Pull, outcome: PullOutcome) -> None:
        corrupt: tuple[int, ...] = ()
        if outcome is PullOutcome.LATE:
            self.late.add(pull.id)
        else:
            self.pulls.remove(pull)
            corrupt = (len(pull.local_pages) - 1,) if outcome is PullOutcome.CORRUPT else ()
            self._move_bytes(pull, corrupt)
            self.cases_by_pull[pull.id].corrupted |= bool(corrupt)
        num_bytes = PAGE_BYTES * len(pull.local_pages)
        self._hear(self.world.arrivals.pulled(PullEvent(pull, outcome, num_bytes, 0.1, "", corrupt), self.now))

    def _move_bytes(self, pull: Pull, corrupt: tuple[int, ...]) -> None:
        case = self.cases_by_pull[pull.id]
        for at, (index, local) in enumerate(zip(pull.remote_pages, pull.local_pages, strict=True)):
            data = page_bytes(case.request.tokens, index)
            wrong = at in corrupt or case.pins_lost
            self.world.memory.page(local)[: len(data)] = bytes(SLOT_BYTES * PAGE_SIZE)[: len(data)] if wrong else data

    def _hear(self, effects: list[DecodeEffect]) -> None:
        for effect in effects:
            match effect:
                case StartPull(pull):
                    self._hear_pull(pull)
                case AskCommit(id):
                    assert not self.digests
                    self._check_complete(id)
                    self.asked.append(id)
                case ConfirmCommit(id):
                    assert self.digests
                    self._check_complete(id)
                case ReportLanded(id):
                    assert self.cases[id].landing
                    self.cases[id].landed = True
                case TakenIn(id):
                    assert self.cases[id].landing
                    self.cases[id].landed = True
                case AbortHandoff(id):
                    assert self.cases[id].claimed
                case EmitTokens():
                    self._hear_tokens(effect)
                case Preempted(id):
                    assert self.cases[id].landed
                case Fail(id, error):
                    self._hear_failure(id, error)

    def _hear_pull(self, pull: Pull) -> None:
        landing_id = self.world.landings.owner(pull.id)
        case = next(case for id, case in self.cases.items() if id == landing_id)
        self.cases_by_pull[pull.id] = case
        self.pulls.append(pull)
        in_flight = [one for one in self.pulls if self.cases_by_pull[one.id] is case]
        assert len(in_flight) == 1 or sum(len(one.local_pages) for one in in_flight) <= 2

    def _check_complete(self, id: AttemptId) -> None:
        case = self.cases[id]
        assert case.sealed
        assert case.next_page == case.num_pages
        assert not any(self.cases_by_pull[pull.id] is case for pull in self.pulls), "committed before all was read"

    def _hear_tokens(self, effect: EmitTokens) -> None:
        case, client = self.cases[effect.id], self.clients[effect.id.request_id]
        assert case.landed
        assert not case.ended
        expected = output_alone(case.request)
        for token in effect.tokens:
            assert token.index == len(client.received), "a gap or a duplicate"
            assert token.token == expected[token.index]
            client.received.append(token.token)
        assert (effect.finish is not None) == (len(client.received) == len(expected))
        case.ended = client.done = effect.finish is not None

    def _hear_failure(self, id: AttemptId, error: BatonError) -> None:
        case = self.cases[id]
        assert case.claimed or isinstance(error, WorkerLost)
        assert not case.landed or isinstance(error, SentBack)
        assert case.corrupted or not isinstance(error, IntegrityFailure), "promised pages were not there"
        case.ended = True
