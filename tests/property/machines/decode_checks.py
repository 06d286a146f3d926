"""Invariants of decode's side, and the model of its clients that `decode_machine` drives.

A read moves its bytes when it ends. So it overwrites a page that was reused meanwhile, and the fake runner refuses the
row that reads it.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass, field

from hypothesis.stateful import RuleBasedStateMachine, invariant

from baton.domain.errors import BatonError, IntegrityFailure, SentBack, Superseded, WorkerLost
from baton.domain.ids import AttemptId, RequestId, ReservationId
from baton.domain.request import EngineRequest, StopParams
from baton.domain.worker import WorkerBudgets
from baton.engine.drafts.base import Drafter
from baton.engine.fake_runner import SLOT_BYTES
from baton.engine.handoff.import_effects import AbortHandoff, AskVerdict, ConfirmCommit
from baton.engine.messages import Fail
from baton.kv.growth import GrowthPolicy, GrowthReserve
from baton.kv.pages import Owner
from baton.services.decode.effects import AskCommit, DecodeEffect, EmitTokens, ReportImported
from baton.services.decode.import_policy import ImportPolicy
from baton.services.decode.import_table import ImportTable
from baton.services.decode.page_faults import PageFaults
from baton.services.decode.rows.order import RowOrder
from baton.services.decode.scheduler import DecodeScheduler
from baton.transfer.base import Pull, PullEvent, PullOutcome
from tests.tiny_workers import (
    PAGE_BYTES,
    PAGE_SIZE,
    TinyDecode,
    check_invariants,
    expected_output,
    num_pages,
    page_bytes,
    tiny_decode,
)

MAX_ROWS = 4
MAX_WINDOW_PAGES = 2
TOKEN_BUDGET = 5


@dataclass
class Client:
    """One request over all its attempts, with the tokens that its client received."""

    prompt: list[int]
    stop: StopParams
    seed: int
    received: list[int] = field(default_factory=list)
    attempt: int = 0
    done: bool = False


@dataclass
class Case:
    """One attempt as prefill and the router see it."""

    request: EngineRequest
    reservation_id: ReservationId
    deadline: float
    next_page: int  # the first that is not published
    claimed: bool = False
    sealed: bool = False
    ended: bool = False
    imported: bool = False
    pins_lost: bool = False
    corrupted: bool = False  # a page arrived corrupt

    @property
    def num_pages(self) -> int:
        return num_pages(len(self.request.tokens))

    @property
    def importing(self) -> bool:
        return self.claimed and not self.ended and not self.imported

    @property
    def publishing(self) -> bool:
        return self.claimed and not self.sealed and self.next_page < self.num_pages

    @property
    def sealable(self) -> bool:
        return self.claimed and not self.sealed and self.next_page == self.num_pages


class CheckedDecode(RuleBasedStateMachine):
    """Decode's side with its clients. Subclasses may replace its classes by broken ones."""

    import_table: type[ImportTable] = ImportTable
    decode_scheduler: type[DecodeScheduler] = DecodeScheduler
    import_policy: type[ImportPolicy] = ImportPolicy
    page_faults: type[PageFaults] = PageFaults
    order = RowOrder()
    num_window_slots: int | None = None

    def __init__(self) -> None:
        super().__init__()
        self.now = 0.0
        self.digests = True
        self.world: TinyDecode = self._new_world(True, 4)
        self.clients: dict[RequestId, Client] = {}
        self.cases: dict[AttemptId, Case] = {}
        self.pulls: list[Pull] = []
        self.cases_by_pull: dict[int, Case] = {}
        self.late: set[int] = set()
        self.commits_asked: list[AttemptId] = []
        self.damaged = False  # a byte was flipped, or the source quarantined a page
        self.flipped: set[int] = set()  # pages of the pool
        self.budgets = WorkerBudgets(TOKEN_BUDGET, MAX_ROWS)
        self.names = itertools.count()

    # -- invariants

    @invariant()
    def page_counts_agree(self) -> None:
        check_invariants(self.world.cache)
        imports = self.world.imports
        assert len(imports) + self.world.scheduler.num_rows <= MAX_ROWS
        reserved = [kv_import.num_reserved for id in imports.ids() if (kv_import := imports.get(id)) is not None]
        assert imports.num_reserved_pages == sum(reserved)
        assert self.world.cache.num_available >= sum(reserved), "more is reserved than there is"

    @invariant()
    def pages_being_read_are_not_reused(self) -> None:
        pages = [page for pull in self.pulls for page in pull.local_pages]
        assert len(set(pages)) == len(pages)
        assert {self.world.cache.pool.owner(page) for page in pages} <= {Owner.RESERVED, Owner.DRAINING}

    @invariant()
    def every_attempt_is_tracked(self) -> None:
        here = {*self.world.imports.ids(), *self.world.scheduler.ids()}
        assert here == {id for id, case in self.cases.items() if not case.ended}

    @invariant()
    def one_attempt_at_a_time(self) -> None:
        for id, case in self.cases.items():
            assert case.ended or id.attempt == self.clients[id.request_id].attempt

    # -- effects

    def _new_world(self, digests: bool, num_host_pages: int, mode: GrowthPolicy = GrowthPolicy.NONE) -> TinyDecode:
        return tiny_decode(
            digests,
            num_host_pages,
            MAX_ROWS,
            2,
            self.import_table,
            self.decode_scheduler,
            self.import_policy,
            TOKEN_BUDGET,
            self.page_faults,
            GrowthReserve(mode, PAGE_SIZE, 6),
            drafter=self._new_drafter(),
            order=self.order,
            num_window_slots=self.num_window_slots,
        )

    def _new_drafter(self) -> Drafter | None:
        return None

    def _found(self, pull: Pull) -> tuple[int, ...]:
        """Digests of the pages of a read of leading parts."""
        return ()

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
        event = PullEvent(pull, outcome, num_bytes, 0.1, "", corrupt, self._found(pull))
        self._on_effects(self.world.import_policy.on_pull_event(event, self.now))

    def _move_bytes(self, pull: Pull, corrupt: tuple[int, ...]) -> None:
        case = self.cases_by_pull[pull.id]
        for at, (index, local) in enumerate(zip(pull.remote_pages, pull.local_pages, strict=True)):
            data = page_bytes(case.request.tokens, index)
            wrong = at in corrupt or case.pins_lost
            self.world.memory.page(local)[: len(data)] = bytes(SLOT_BYTES * PAGE_SIZE)[: len(data)] if wrong else data

    def _on_effects(self, effects: list[DecodeEffect]) -> None:
        for effect in effects:
            match effect:
                case Pull():
                    self._on_pull(effect)
                case AskCommit(id):
                    assert not self.digests
                    self._check_complete(id)
                    self.commits_asked.append(id)
                case ConfirmCommit(id):
                    assert self.digests
                    self._check_complete(id)
                case ReportImported(id):
                    assert self.cases[id].importing
                    self.cases[id].imported = True
                case AbortHandoff(id):
                    assert self.cases[id].claimed
                case AskVerdict(id, _, suspects, message):
                    assert suspects
                    self.cases[id].ended = True
                    self._on_effects(self.world.import_policy.on_verdict(id, None, message))
                case EmitTokens():
                    self._on_tokens(effect)
                case Fail(id, error):
                    self._on_failure(id, error)

    def _on_pull(self, pull: Pull) -> None:
        import_id = self.world.imports.attempt_of_pull(pull.id)
        case = next(case for id, case in self.cases.items() if id == import_id)
        self.cases_by_pull[pull.id] = case
        self.pulls.append(pull)
        in_flight = [one for one in self.pulls if self.cases_by_pull[one.id] is case]
        assert len(in_flight) == 1 or sum(len(one.local_pages) for one in in_flight) <= 2

    def _check_complete(self, id: AttemptId) -> None:
        case = self.cases[id]
        assert case.sealed
        assert case.next_page == case.num_pages
        assert not any(self.cases_by_pull[pull.id] is case for pull in self.pulls), "committed before all was read"

    def _on_tokens(self, effect: EmitTokens) -> None:
        case, client = self.cases[effect.id], self.clients[effect.id.request_id]
        assert case.imported
        assert not case.ended
        expected = expected_output(case.request)
        for token in effect.tokens:
            assert token.index == len(client.received), "a gap or a duplicate"
            assert token.token == expected[token.index]
            client.received.append(token.token)
        assert (effect.finish is not None) == (len(client.received) == len(expected))
        case.ended = client.done = effect.finish is not None

    def _on_failure(self, id: AttemptId, error: BatonError) -> None:
        case = self.cases[id]
        if isinstance(error, Superseded):
            assert error.seen is not None
            assert error.seen.order > id.order
            assert case.ended, "an attempt was superseded without a newer one"
            return
        assert case.claimed or isinstance(error, WorkerLost | IntegrityFailure)
        assert not case.imported or isinstance(error, SentBack) or self.damaged
        assert case.corrupted or self.damaged or not isinstance(error, IntegrityFailure), (
            "reserved pages were not there"
        )
        case.ended = True
