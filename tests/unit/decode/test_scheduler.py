"""Rows that run out of pages: which are preempted, and in which order they resume."""

from __future__ import annotations

from typing import Any

from baton.domain.arithmetic import ceil_div
from baton.domain.errors import ConstraintFailed, SentBack
from baton.domain.handoff import PublishedChunk
from baton.domain.ids import AttemptId, PageId, RequestId, WorkerId
from baton.domain.request import SampledToken, StopParams
from baton.engine.batch import StepOutput
from baton.engine.messages import Fail
from baton.services.decode.effects import DecodeEffect, EmitTokens
from baton.services.decode.kv_import import Busy, DecodeRow, Reserved, SealInfo
from baton.services.decode.rows.send_back import SendBackReason
from baton.transfer.base import Pull, PullEvent, PullOutcome
from tests.tiny_workers import (
    TinyDecode,
    assert_idle,
    engine_request,
    expected_output,
    next_token,
    page_bytes,
    tiny_decode,
    true_digests,
)

SOURCE = WorkerId("prefill-0")
STOP = StopParams(max_tokens=9)
OLD = engine_request("old", [0, 1, 1, 0, 1, 0, 1], stop=STOP)
NEW = engine_request("new", [1, 1, 0, 1, 1, 0, 1], stop=STOP)


def board(world: TinyDecode, request) -> None:
    answer, _ = world.import_policy.reserve(request.id, len(request.tokens), [], 0.0, 5.0)
    assert isinstance(answer, Reserved)
    world.import_policy.claim(answer.id, request, SOURCE, 9.0)
    pages = tuple(PageId(i) for i in range(ceil_div(len(request.tokens), 2)))
    digests = true_digests(request.tokens, 0, len(pages))
    effects = world.import_policy.on_chunk(PublishedChunk(request.id, 0, pages, digests), 0.0)
    token, _ = next_token(request, list(request.tokens))
    world.import_policy.on_seal(request.id, SealInfo(SampledToken(token), None, len(pages)), 0.0)
    while effects:
        start = effects.pop()
        if isinstance(start, Pull):
            for index, page in zip(start.remote_pages, start.local_pages, strict=True):
                data = page_bytes(request.tokens, index)
                world.memory.page(page)[: len(data)] = data
            effects += world.import_policy.on_pull_event(PullEvent(start, PullOutcome.DONE, 64, 0.1), 0.0)


def run_to_the_end(world: TinyDecode) -> list[DecodeEffect]:
    effects: list[DecodeEffect] = []
    while (batch := world.scheduler.schedule(0.0)) is not None:
        effects += world.scheduler.commit(batch, world.runner.run(batch), 0.0)
    return effects + world.scheduler.take_pending_effects()


def tokens_of(effects: list[DecodeEffect], request) -> list[int]:
    heard = [effect for effect in effects if isinstance(effect, EmitTokens) and effect.id == request.id]
    tokens = [token for effect in heard for token in effect.tokens]
    assert [token.index for token in tokens] == list(range(1, len(tokens) + 1))
    return [token.token for token in tokens]


def two_rows(num_host_pages: int) -> TinyDecode:
    """Each row has four of the eight pages and needs eight in the end."""
    world = tiny_decode(digests=True, num_host_pages=num_host_pages)
    board(world, OLD)
    board(world, NEW)
    return world


def test_the_newest_row_is_preempted_to_host_memory():
    world = two_rows(num_host_pages=8)
    effects = run_to_the_end(world)
    assert world.scheduler.num_preemptions > 0
    (times,) = [e.times for e in effects if isinstance(e, EmitTokens) and e.id == NEW.id and e.times is not None]
    assert times.num_preemptions > 0
    for request in (OLD, NEW):
        assert tokens_of(effects, request) == expected_output(request)[1:]
    assert world.host.num_free == 8
    assert not any(world.scheduler.num_send_backs.values())  # never while host memory has room
    assert_idle(world.cache)


def test_rows_are_equal_only_to_themselves():
    """Each step looks for every row in its queue: by their fields that would be n * n / 2 comparisons of records."""
    part: Any = object()
    one, other = (DecodeRow(0, OLD, part, [1], 1, part) for _ in range(2))
    assert one == one
    assert one != other
    assert [other, one].index(one) == 1


def test_without_host_memory_the_newest_row_is_sent_back():
    world = two_rows(num_host_pages=2)
    effects = run_to_the_end(world)
    (failure,) = [effect for effect in effects if isinstance(effect, Fail)]
    assert failure.id == NEW.id
    assert isinstance(failure.error, SentBack)
    assert world.scheduler.num_send_backs == {SendBackReason.NO_MEMORY: 1, SendBackReason.DAMAGED_COPY: 0}
    assert tokens_of(effects, OLD) == expected_output(OLD)[1:]
    assert_idle(world.cache)


def test_preempted_rows_come_before_new_reservations():
    world = two_rows(num_host_pages=8)
    while not world.scheduler.num_preempted:
        batch = world.scheduler.schedule(0.0)
        assert batch is not None
        world.scheduler.commit(batch, world.runner.run(batch), 0.0)
    answer, _ = world.import_policy.reserve(AttemptId(RequestId("third"), 1), 1, [], 0.0, 5.0)
    assert isinstance(answer, Busy)


def test_an_abort_frees_host_memory():
    world = two_rows(num_host_pages=8)
    while not world.scheduler.num_preempted:
        batch = world.scheduler.schedule(0.0)
        assert batch is not None
        world.scheduler.commit(batch, world.runner.run(batch), 0.0)
    assert world.host.num_free < 8
    assert world.scheduler.abort(NEW.id)
    assert not world.scheduler.abort(NEW.id)
    assert world.host.num_free == 8
    run_to_the_end(world)
    assert_idle(world.cache)


def test_a_row_whose_constraint_fails_ends_and_others_go_on():
    world = tiny_decode(digests=True, num_host_pages=8)
    for request in (OLD, NEW):
        board(world, request)
    batch = world.scheduler.schedule(0.0)
    assert batch is not None
    output = world.runner.run(batch)
    failed = StepOutput(((), *output.sampled[1:]), {0: ConstraintFailed("nothing may follow")})
    effects = world.scheduler.commit(batch, failed, 0.0)
    [fail] = [effect for effect in effects if isinstance(effect, Fail)]
    assert (fail.id, fail.error.code) == (batch.rows[0].id, "constraint_failed")
    assert fail.times is not None
    assert [effect.id for effect in effects if isinstance(effect, EmitTokens)] == [row.id for row in batch.rows[1:]]
    run_to_the_end(world)
    assert_idle(world.cache)
