"""An adversarial drafter changes neither tokens nor pages nor preemptions, under any sequence of calls."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import invariant, run_state_machine_as_test

from baton.domain.arithmetic import ceil_div
from baton.domain.ids import AttemptId
from baton.domain.request import EngineRequest, StopParams
from baton.engine.drafts.base import Drafter
from baton.kv.pages import Owner
from baton.services.decode.effects import DecodeEffect, EmitTokens
from baton.services.decode.rows.order import RowOrder
from tests.property.drafts.drafters import AdversarialDrafter, MadeDrafter, MadeTreeDrafter, OracleDrafter, TreeDrafter
from tests.property.machines.decode_machine import DecodeMachine
from tests.tiny_workers import (
    MAX_DRAFTS,
    PAGE_SIZE,
    REPEATABLE_SETTINGS,
    VOCAB_SIZE,
    TinyDecode,
    assert_idle,
    engine_request,
    expected_output,
    next_token,
    tiny_decode,
)
from tests.unit.decode.test_scheduler import board

ADVERSARIES = AdversarialDrafter, MadeDrafter, TreeDrafter, MadeTreeDrafter
NUM_BEHIND = 8
"""Tokens behind the end of an output that a drafter knows: it proposes them, too."""


def right_tokens(request: EngineRequest) -> list[int]:
    """Prompt and output, and what the model would say behind the end."""
    tokens = [*request.tokens[: request.num_prompt_tokens], *expected_output(request)]
    for _ in range(NUM_BEHIND):
        tokens.append(next_token(request, tokens)[0])
    return tokens


class DraftingMachine(DecodeMachine):
    """Decode's side with the adversary as its drafter."""

    adversary = AdversarialDrafter

    def _new_drafter(self) -> Drafter:
        self.drafter = self.adversary(lambda id: right_tokens(self.cases[id].request), VOCAB_SIZE)
        return self.drafter

    @invariant()
    def a_row_has_the_pages_of_its_tokens(self) -> None:
        for row in self.world.scheduler._running:
            is_new = row.num_output_tokens == row.request.num_emitted + 1  # a prompt has the page of its first token
            num_slots = len(row.tokens) if is_new else row.num_filled
            assert len(row.table.pages) == ceil_div(num_slots, PAGE_SIZE), "a draft's page stayed"
            assert row.num_filled == len(row.tokens) - 1

    @invariant()
    def nothing_is_kept_for_rows_that_ended(self) -> None:
        assert set(self.drafter.num_tokens) <= set(self.world.scheduler.ids())


class DraftingPriorityMachine(DraftingMachine):
    """Rows of low priority give way, in the middle of the batch."""

    order = RowOrder(by_priority=True)


class MadeDraftingMachine(DraftingMachine):
    """The runner makes the drafts, when pages and rows of the step are settled."""

    adversary = MadeDrafter


class TreeDraftingMachine(DraftingMachine):
    """Trees of drafts: what is left of each is one path, in adjacent slots."""

    adversary = TreeDrafter


class MadeTreeDraftingMachine(DraftingMachine):
    """Trees that the runner makes."""

    adversary = MadeTreeDrafter


@pytest.mark.parametrize(
    "machine",
    [DraftingMachine, DraftingPriorityMachine, MadeDraftingMachine, TreeDraftingMachine, MadeTreeDraftingMachine],
)
def test_decode_side_with_an_adversarial_drafter(machine: type[DraftingMachine]):
    run_state_machine_as_test(machine, settings=settings(REPEATABLE_SETTINGS, max_examples=60, stateful_step_count=50))


REQUESTS = st.lists(
    st.tuples(
        st.lists(st.integers(0, 1), min_size=1, max_size=5),  # prompt
        st.integers(1, 7),  # max_tokens
        st.booleans(),  # stops at token 1
        st.integers(0, 3),  # seed
        st.integers(0, 4),  # step of its arrival
    ),
    min_size=1,
    max_size=4,
)


def tiny_requests(drawn: Sequence[tuple[list[int], int, bool, int, int]]) -> list[tuple[EngineRequest, int]]:
    return [
        (
            engine_request(
                f"r{number}", prompt, seed=seed,
                stop=StopParams(max_tokens, seed % 2, frozenset({1}) if stops else frozenset()),
            ),
            arrival,
        )
        for number, (prompt, max_tokens, stops, seed, arrival) in enumerate(drawn)
        if len(prompt) + max_tokens <= 12
    ]  # fmt: skip


def world_of(
    requests: list[tuple[EngineRequest, int]],
    num_host_pages: int,
    kinds: Sequence[str] | None,
    adversary: type[AdversarialDrafter] = AdversarialDrafter,
) -> TinyDecode:
    by_id = {request.id: request for request, _ in requests}

    def right(id: AttemptId) -> list[int]:
        return right_tokens(by_id[id])

    drafter = None if kinds is None else adversary(right, VOCAB_SIZE, kinds=kinds)
    return tiny_decode(True, num_host_pages, drafter=drafter)


def joins(world: TinyDecode, request: EngineRequest) -> bool:
    """Boards a request that is not done with its first token, if there is room."""
    if next_token(request, list(request.tokens))[1] is not None or world.imports.num_reservable_pages < 6:
        return False
    board(world, request)
    return True


def step(world: TinyDecode) -> list[DecodeEffect]:
    batch = world.scheduler.schedule(0.0)
    effects = [] if batch is None else world.scheduler.commit(batch, world.runner.run(batch), 0.0)
    return effects + world.scheduler.take_pending_effects()


@settings(REPEATABLE_SETTINGS, max_examples=150)
@given(
    drawn=REQUESTS,
    num_host_pages=st.sampled_from([0, 3, 8]),
    kinds=st.sampled_from([["wrong"], ["nothing"]]),
    adversary=st.sampled_from(ADVERSARIES),
)
def test_rejected_drafts_leave_no_trace(
    drawn, num_host_pages: int, kinds: list[str], adversary: type[AdversarialDrafter]
):
    """Step by step all is as without a drafter: effects, owners of pages, preemptions, and the prefix cache."""
    requests = tiny_requests(drawn)
    plain, drafting = world_of(requests, num_host_pages, None), world_of(requests, num_host_pages, kinds, adversary)
    for now in range(60):
        for request, arrival in requests:
            if arrival == now:
                assert joins(plain, request) == joins(drafting, request)
        assert _without_times(step(plain)) == _without_times(step(drafting))
        assert plain.cache.pool.counts() == drafting.cache.pool.counts()
        assert set(plain.cache._nodes) == set(drafting.cache._nodes)
        assert plain.scheduler.num_preemptions == drafting.scheduler.num_preemptions
        assert plain.scheduler.num_send_backs == drafting.scheduler.num_send_backs
    assert plain.scheduler.num_rows == 0
    assert_idle(drafting.cache)
    policy = drafting.scheduler._drafts
    assert policy is not None
    assert isinstance(policy._drafter, AdversarialDrafter)
    assert not policy._drafter.num_tokens, "a row that ended is kept"


def _without_times(effects: list[DecodeEffect]) -> list[object]:
    return [(effect.id, effect.tokens, effect.finish) if isinstance(effect, EmitTokens) else type(effect)
            for effect in effects]  # fmt: skip


@settings(REPEATABLE_SETTINGS, max_examples=100)
@given(drawn=REQUESTS, num_host_pages=st.sampled_from([3, 8]), adversary=st.sampled_from(ADVERSARIES))
def test_right_drafts_save_steps_and_nothing_else(drawn, num_host_pages: int, adversary: type[AdversarialDrafter]):
    """No row is preempted that plain decoding would not preempt with the same rows, and none is evicted for drafts."""
    requests = tiny_requests(drawn)
    world = world_of(requests, num_host_pages, ["right", "too long"], adversary)
    emitted: dict[AttemptId, list[int]] = {}
    for now in range(60):
        for request, arrival in requests:
            if arrival == now and joins(world, request):
                emitted[request.id] = [next_token(request, list(request.tokens))[0]]
        for effect in step(world):
            if isinstance(effect, EmitTokens):
                emitted[effect.id] += [token.token for token in effect.tokens]
        assert world.cache.pool.num_owned(Owner.LIVE) <= sum(
            ceil_div(len(row.tokens), PAGE_SIZE) for row in world.scheduler._running
        )
    for request, _ in requests:
        expected = expected_output(request)
        got = emitted.get(request.id, expected)
        assert got == expected[: len(got)]
    assert_idle(world.cache)


@pytest.mark.parametrize("kinds", [["wrong"], ["right"], AdversarialDrafter.KINDS])
def test_a_row_that_was_preempted_goes_on_with_its_drafter(kinds: Sequence[str]):
    """Two rows of which each would fill the pool in the end."""
    stop = StopParams(max_tokens=9)
    requests = [engine_request(f"r{n}", [n, 1, 1, 0, 1, n, 1], stop=stop, seed=n) for n in range(2)]
    by_id = {request.id: right_tokens(request) for request in requests}
    drafter = AdversarialDrafter(by_id.__getitem__, VOCAB_SIZE, kinds=kinds)
    world = tiny_decode(True, 8, drafter=drafter)
    emitted: dict[AttemptId, list[int]] = {}
    for request in requests:
        board(world, request)
        emitted[request.id] = [next_token(request, list(request.tokens))[0]]
    while effects := step(world):
        for effect in effects:
            assert isinstance(effect, EmitTokens)
            emitted[effect.id] += [token.token for token in effect.tokens]
    assert world.scheduler.num_preemptions > 0
    assert emitted == {request.id: expected_output(request) for request in requests}
    assert not drafter.num_tokens
    assert_idle(world.cache)


@pytest.mark.parametrize(("acceptance", "num_steps"), [(0.0, 11), (1.0, 3)])
def test_an_oracle_saves_the_steps_that_it_promises(acceptance: float, num_steps: int):
    request = engine_request("r", [0, 1], stop=StopParams(max_tokens=12))
    drafter = OracleDrafter(lambda _: right_tokens(request), acceptance, VOCAB_SIZE)
    world = tiny_decode(True, 0, drafter=drafter)
    board(world, request)
    steps = [effects for _ in range(12) if (effects := step(world))]
    assert len(steps) == num_steps
    emitted = [effect for effects in steps for effect in effects if isinstance(effect, EmitTokens)]
    assert [token.token for effect in emitted for token in effect.tokens] == expected_output(request)[1:]
    policy = world.scheduler._drafts
    assert policy is not None
    assert policy.totals.num_accepted == 12 - 1 - num_steps
    assert policy.totals.num_drafts <= MAX_DRAFTS * num_steps
