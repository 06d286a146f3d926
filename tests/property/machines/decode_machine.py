"""State machine of decode's side: import policy, imports, scheduler and swap space. Prefill is scripted."""

from __future__ import annotations

from collections.abc import Callable

from hypothesis import strategies as st
from hypothesis.stateful import initialize, precondition, rule

from baton.domain.errors import ContextOverflow, Superseded, WorkerLost
from baton.domain.handoff import PublishedChunk
from baton.domain.ids import AttemptId, PageId, PageKey, RequestId, WorkerId
from baton.domain.request import EngineRequest, SampledToken, StopParams
from baton.kv.growth import GrowthPolicy
from baton.kv.keys import page_keys
from baton.kv.pages import Owner
from baton.services.decode.kv_import import Busy, Reserved, SealInfo
from baton.transfer.base import Pull, PullOutcome
from simulation.runtime.page_memory import SimMemory
from tests.property.machines.decode_checks import MAX_ROWS, Case, CheckedDecode, Client
from tests.tiny_workers import (
    NUM_PAGES,
    PAGE_BYTES,
    PAGE_SIZE,
    assert_idle,
    engine_request,
    next_token,
    page_bytes,
    true_digests,
)

SOURCE = WorkerId("prefill-0")
MAX_OUTPUT = 8
SHARED = [0, 1, 1, 0, 1, 0, 0, 1, 1, 1]
PROMPTS = st.builds(
    lambda num_shared, tail: SHARED[:num_shared] + tail,
    st.sampled_from([0, 2, 4, 7]),
    st.lists(st.integers(0, 1), min_size=1, max_size=4),
)


class DecodeMachine(CheckedDecode):
    """Rules are actions of routers, prefill, the transfer and the clock."""

    @initialize(digests=st.booleans(), num_host_pages=st.sampled_from([0, 3, 8]), mode=st.sampled_from(GrowthPolicy))
    def begin(self, digests: bool, num_host_pages: int, mode: GrowthPolicy) -> None:
        self.digests = digests
        self.world = self._new_world(digests, num_host_pages, mode)

    # -- the router

    @rule(prompt=PROMPTS, max_tokens=st.integers(1, MAX_OUTPUT), stops=st.booleans(), seed=st.integers(0, 3))
    def new_client(self, prompt: list[int], max_tokens: int, stops: bool, seed: int) -> None:
        name = RequestId(f"r{next(self.names)}")
        stop = StopParams(max_tokens, min_tokens=seed, stop_token_ids=frozenset({1}) if stops else frozenset())
        self.clients[name] = Client(prompt, stop, seed)
        self._reserve(name)

    @precondition(lambda self: self._unfinished())
    @rule(data=st.data())
    def new_attempt(self, data: st.DataObject) -> None:
        """Starts a new attempt while the older one is in any state. Received tokens become part of the prompt."""
        self._reserve(data.draw(st.sampled_from(self._unfinished())))

    @precondition(lambda self: self._stale())
    @rule(data=st.data())
    def stale_attempt(self, data: st.DataObject) -> None:
        id = data.draw(st.sampled_from(self._stale()))
        try:
            self.world.import_policy.reserve(id, 3, [], self.now, 5.0)
        except Superseded:
            return
        raise AssertionError(f"{id} was reserved room although a newer attempt was seen")

    @precondition(lambda self: self._ids(lambda case: not case.claimed))
    @rule(data=st.data())
    def claim(self, data: st.DataObject) -> None:
        self._claim(data.draw(st.sampled_from(self._ids(lambda case: not case.claimed))))

    def _claim(self, id: AttemptId) -> None:
        case = self.cases[id]
        case.claimed, case.deadline = True, self.now + 20
        self._on_effects(self.world.import_policy.claim(case.reservation_id, case.request, SOURCE, self.now + 20))
        fits = case.request.num_prompt_tokens + case.request.stop.max_tokens <= PAGE_SIZE * NUM_PAGES
        assert fits or case.ended

    @precondition(lambda self: self._ids(lambda case: not case.claimed))
    @rule(data=st.data())
    def claim_here(self, data: st.DataObject) -> None:
        """Claims a reservation for a local prompt."""
        id = data.draw(st.sampled_from(self._ids(lambda case: not case.claimed)))
        case = self.cases[id]
        case.claimed = case.sealed = True
        effects = self.world.import_policy.claim(case.reservation_id, case.request, None, self.now + 20)
        case.imported = not effects
        self._on_effects(effects)
        assert case.imported or case.ended

    @precondition(lambda self: self._ids(lambda case: not case.ended))
    @rule(data=st.data())
    def abort(self, data: st.DataObject) -> None:
        id = data.draw(st.sampled_from(self._ids(lambda case: not case.ended)))
        self._on_effects(self.world.import_policy.abort(id))
        self.cases[id].ended = True
        assert self.world.import_policy.abort(id) == []  # idempotent

    # -- prefill

    @precondition(lambda self: self._ids(lambda case: case.publishing))
    @rule(data=st.data(), count=st.integers(1, 8), again=st.integers(0, 2))
    def publish(self, data: st.DataObject, count: int, again: int) -> None:
        """Publishes the next pages. `again` earlier pages may be repeated; they are not read twice."""
        self._publish(data.draw(st.sampled_from(self._ids(lambda case: case.publishing))), count, again)

    def _publish(self, id: AttemptId, count: int, again: int) -> None:
        case = self.cases[id]
        end = min(case.next_page + count, case.num_pages)
        first = max(0, case.next_page - again)
        pages = tuple(PageId(i) for i in range(first, end))
        digests = self._true_digests(case.request.tokens, first, end) if self.digests else None
        effects = self.world.import_policy.on_chunk(PublishedChunk(id, first, pages, digests), self.now)
        read = [page for effect in effects if isinstance(effect, Pull) for page in effect.remote_pages]
        assert all(page >= case.next_page for page in read)
        case.next_page = end
        self._on_effects(effects)

    def _true_digests(self, tokens: tuple[int, ...], first: int, end: int) -> tuple[int, ...]:
        return true_digests(tokens, first, end)

    @precondition(lambda self: self._ids(lambda case: case.importing and case.publishing))
    @rule(data=st.data())
    def seal_too_early(self, data: st.DataObject) -> None:
        """Seals before the last page was published, which must fail the import."""
        id = data.draw(st.sampled_from(self._ids(lambda case: case.importing and case.publishing)))
        case = self.cases[id]
        token, _ = next_token(case.request, list(case.request.tokens))
        self._on_effects(self.world.import_policy.on_seal(id, SealInfo(SampledToken(token), None, 0), self.now))
        assert case.ended

    @precondition(lambda self: self._ids(lambda case: case.sealable))
    @rule(data=st.data())
    def seal(self, data: st.DataObject) -> None:
        self._seal(data.draw(st.sampled_from(self._ids(lambda case: case.sealable))))

    def _seal(self, id: AttemptId) -> None:
        case, client = self.cases[id], self.clients[id.request_id]
        case.sealed = True
        token, finish = next_token(case.request, list(case.request.tokens))
        if id.attempt == client.attempt and len(client.received) == case.request.num_emitted:
            client.received.append(token)
            client.done = finish is not None
        self._on_effects(
            self.world.import_policy.on_seal(id, SealInfo(SampledToken(token), finish, case.num_pages), self.now)
        )
        case.ended = case.ended or finish is not None

    @precondition(lambda self: not self.digests and self._ids(lambda case: case.importing))
    @rule(data=st.data())
    def drop_pins(self, data: st.DataObject) -> None:
        """Ends prefill's lease: later reads return anything, and the commit will be refused."""
        self.cases[data.draw(st.sampled_from(self._ids(lambda case: case.importing)))].pins_lost = True

    @precondition(lambda self: self.commits_asked)
    @rule(data=st.data())
    def reply_to_commit(self, data: st.DataObject) -> None:
        id = self.commits_asked.pop(data.draw(st.integers(0, len(self.commits_asked) - 1)))
        case = self.cases[id]
        self._on_effects(self.world.import_policy.on_commit_reply(id, not case.pins_lost, self.now))
        assert case.ended or not case.pins_lost

    @precondition(lambda self: self._ids(lambda case: case.importing))
    @rule(data=st.data())
    def lose_source(self, data: st.DataObject) -> None:
        id = data.draw(st.sampled_from(self._ids(lambda case: case.importing)))
        self._on_effects(self.world.import_policy.on_source_lost(id, WorkerLost("prefill is gone")))
        assert self.cases[id].ended or self.cases[id].sealed

    # -- transfer, clock, engine

    @rule(prompt=PROMPTS, max_tokens=st.integers(4, MAX_OUTPUT), seed=st.integers(0, 3))
    def import_without_faults(self, prompt: list[int], max_tokens: int, seed: int) -> None:
        """Imports one prompt without faults, so that there are rows to disturb."""
        name = RequestId(f"r{next(self.names)}")
        self.clients[name] = Client(prompt, StopParams(max_tokens), seed)
        self._reserve(name)
        id = AttemptId(name, 1)
        if id not in self.cases:
            return
        self._claim(id)
        self._publish(id, NUM_PAGES, 0)
        self._seal(id)
        while mine := [pull for pull in self.pulls if self.cases_by_pull[pull.id] is self.cases[id]]:
            self._end_pull(mine[0], PullOutcome.DONE)
        self._check_pages()
        if id in self.commits_asked:
            self.commits_asked.remove(id)
            self._on_effects(self.world.import_policy.on_commit_reply(id, True, self.now))

    @precondition(lambda self: self.pulls)
    @rule(data=st.data(), outcome=st.sampled_from([*[PullOutcome.DONE] * 4, *PullOutcome]))
    def end_pull(self, data: st.DataObject, outcome: PullOutcome) -> None:
        pull = data.draw(st.sampled_from(self.pulls))
        if outcome is PullOutcome.CORRUPT and not self.digests:
            outcome = PullOutcome.FAILED
        if outcome is PullOutcome.LATE and pull.id in self.late:
            outcome = PullOutcome.FAILED
        if pull.id in self.late and outcome is PullOutcome.DONE:
            outcome = (
                PullOutcome.FAILED
            )  # the contract: a late DONE is reported as FAILED, though its bytes have arrived
        self._end_pull(pull, outcome)

    @rule(dt=st.sampled_from([0.5, 2.0, 8.0]))
    def wait(self, dt: float) -> None:
        self.now += dt
        self._on_effects(self.world.import_policy.expire(self.now))
        for case in self.cases.values():
            assert case.imported or case.ended or case.deadline > self.now

    @precondition(lambda self: self.world.scheduler.num_rows)
    @rule(num_steps=st.integers(1, 4))
    def run(self, num_steps: int) -> None:
        for _ in range(num_steps):
            self._step(None)
            self.page_counts_agree()

    @precondition(lambda self: self.world.scheduler.num_rows)
    @rule(position=st.integers(0, MAX_ROWS))
    def abort_during_step(self, position: int) -> None:
        self._step(position)

    @rule()
    def check_pages(self) -> None:
        self._check_pages()

    @precondition(lambda self: self.digests and self._idle_pages())
    @rule(data=st.data(), at=st.integers(0, PAGE_BYTES - 1))
    def flip_an_idle_byte(self, data: st.DataObject, at: int) -> None:
        """Damages a cached page that nothing uses, a matched one before its check, or a copy in host memory.

        Each page once: the second time it would retire, and the pool become too small for a long row.
        """
        memory, page = data.draw(st.sampled_from(self._idle_pages()))
        memory.page(page)[at] ^= 0x10
        self.damaged = True
        if memory is self.world.memory:
            self.flipped.add(page)

    @precondition(lambda self: self.digests and self._shared_keys())
    @rule(data=st.data())
    def quarantine_at_the_source(self, data: st.DataObject) -> None:
        """The source takes out a page of some prompt, with all that was computed from it."""
        key = data.draw(st.sampled_from(self._shared_keys()))
        self.damaged = True
        self._on_effects(self.world.import_policy.on_keys_quarantined(SOURCE, [key]))
        assert not self.world.cache.num_matching([key])
        for row in [row for queue in self.world.scheduler._queues for row in queue]:
            assert key not in page_keys(row.tokens[: row.num_filled], PAGE_SIZE, row.request.salt)
        for id in self.world.imports.ids():
            request = self.cases[id].request
            assert not self.cases[id].claimed or key not in page_keys(request.tokens, PAGE_SIZE, request.salt)

    def _shared_keys(self) -> list[PageKey]:
        prompts = [case.request.tokens for case in self.cases.values() if not case.ended]
        return sorted({key for tokens in prompts for key in page_keys(tokens, PAGE_SIZE, "")})

    def _idle_pages(self) -> list[tuple[SimMemory, int]]:
        """Pages whose damage a check can find before their use. The bytes under a running row are ECC's."""
        world, scheduler = self.world, self.world.scheduler
        imports = [one for id in world.imports.ids() if (one := world.imports.get(id)) is not None]
        checked = {page for one in imports for page in one.table.pages if page not in one.unchecked}
        idle = {page for page in map(PageId, range(NUM_PAGES)) if world.cache.pool.owner(page) is Owner.CACHED}
        idle |= {page for one in imports for page in one.unchecked}
        rows = {page for queue in scheduler._queues for row in queue for page in row.table.pages}
        slots = [slot for row in scheduler._preempted for slot in row.host_slots]
        free_to_flip = sorted(idle - checked - rows - self.flipped)
        pages: list[tuple[SimMemory, int]] = [(world.memory, page) for page in free_to_flip]
        return pages + [(world.host_memory, slot) for slot in slots]

    def _check_pages(self) -> None:
        self._on_effects(self.world.import_policy.check_pages(self.now))
        self._on_effects(self.world.import_policy.on_wrong_pages(self.world.cache.take_wrong(), self.now))

    def _step(self, disturbed: int | None) -> None:
        num_rows = self.world.scheduler.num_rows
        batch = self.world.scheduler.schedule(self.now)
        if batch is not None:
            assert self.world.scheduler.num_recomputed_tokens(batch) == 0
            assert batch.num_tokens <= max(self.budgets.prefill_tokens, len(batch.rows) + PAGE_SIZE)
            output = self.world.runner.run(batch)
            if disturbed is not None and batch.rows:
                id = batch.rows[disturbed % len(batch.rows)].id
                self._on_effects(self.world.import_policy.abort(id))
                self.cases[id].ended = True
            self._on_effects(self.world.scheduler.commit(batch, output, self.now))
        self._on_effects(self.world.scheduler.take_pending_effects())
        waits_for_pages = len(self.world.imports) + self.world.imports.num_draining > 0
        assert batch is not None or num_rows == 0 or waits_for_pages, "rows stand still without any other work"

    def teardown(self) -> None:
        """Aborts the imports and runs the rows: all of them end, and every page is freed."""
        for id in self.world.imports.ids():
            self._on_effects(self.world.import_policy.abort(id))
            self.cases[id].ended = True
        while self.pulls:
            self._end_pull(self.pulls[0], PullOutcome.FAILED)
        for _ in range(MAX_ROWS * (MAX_OUTPUT + NUM_PAGES)):
            self._step(None)
        assert all(case.ended for case in self.cases.values()), "a row never finished"
        assert self.world.imports.num_draining == 0
        assert self.world.host.num_free == self.world.host.num_slots
        assert_idle(self.world.cache)

    # -- helpers

    def _unfinished(self) -> list[RequestId]:
        return [name for name, client in self.clients.items() if not client.done]

    def _stale(self) -> list[AttemptId]:
        return [id for id in self.cases if id.attempt < self.clients[id.request_id].attempt]

    def _ids(self, wanted: Callable[[Case], bool]) -> list[AttemptId]:
        return [id for id, case in self.cases.items() if wanted(case)]

    def _reserve(self, name: RequestId) -> None:
        client = self.clients[name]
        client.attempt += 1
        request = engine_request(
            name, client.prompt, attempt=client.attempt, emitted=client.received, stop=client.stop, seed=client.seed,
            priority=client.seed - 1,
        )  # fmt: skip
        for id, case in self.cases.items():
            if id.request_id == name:
                case.ended = True
        keys = page_keys(request.tokens, PAGE_SIZE, request.salt)
        try:
            answer, effects = self.world.import_policy.reserve(
                request.id, len(request.tokens), keys, self.now, 5.0, client.stop.max_tokens - len(client.received)
            )
        except ContextOverflow:
            assert len(request.tokens) >= PAGE_SIZE * NUM_PAGES
            return
        self._on_effects(effects)
        if isinstance(answer, Busy):
            return
        self.cases[request.id] = Case(request, answer.id, self.now + 5.0, answer.prefix_len // PAGE_SIZE)
        self._check_reservation(request, keys, answer)

    def _check_reservation(self, request: EngineRequest, keys: list, answer: Reserved) -> None:
        assert answer.prefix_len < len(request.tokens)
        kv_import = self.world.imports.get(request.id)
        assert kv_import is not None
        for index, page in enumerate(kv_import.table.pages if not self.damaged else ()):
            assert bytes(self.world.memory.page(page)) == page_bytes(request.tokens, index)
        assert self.world.import_policy.reserve(request.id, len(request.tokens), keys, self.now, 9.0) in (
            (answer, []), (Busy(self.world.imports.num_reserved_pages), []),
        )  # fmt: skip
