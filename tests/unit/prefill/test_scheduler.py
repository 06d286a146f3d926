"""The prefill scheduler: pages that decode has, newer attempts, deadlines, the pin budget and times."""

from __future__ import annotations

from baton.domain.errors import ConstraintFailed, DeadlineExceeded, LeaseEnded, Superseded
from baton.domain.handoff import PublishedChunk
from baton.domain.timing.attempt_times import PrefillTimes
from baton.engine.batch import StepOutput
from baton.engine.handoff.export_events import ExportExpired, Seal
from baton.engine.messages import Fail
from baton.kv.pages import Owner
from baton.services.prefill.scheduler import PrefillEffect
from tests.tiny_workers import NUM_PAGES, PAGE_SIZE, TinyPrefill, assert_idle, engine_request, tiny_prefill

LEASE_S = 3.0
PROMPT = [0, 1, 1, 0, 1, 0]  # 3 pages
LONG = [1, 1, 0, 0, 1, 1, 0, 1, 0, 1, 1, 1]  # 6 pages


def run(world: TinyPrefill, max_steps: int = 20) -> list[PrefillEffect]:
    effects: list[PrefillEffect] = []
    for _ in range(max_steps):
        batch = world.scheduler.schedule(0.0)
        if batch is None:
            break
        effects += world.scheduler.commit(batch, world.runner.run(batch), 0.0)
    return effects


def test_a_chunk_is_published_when_it_is_done():
    world = tiny_prefill(LEASE_S, token_budget=4)
    request = engine_request("r", [*PROMPT, 1])
    world.scheduler.add(request, 0, 9.0)
    chunks = [(e.first_page, len(e.pages)) for e in run(world) if isinstance(e, PublishedChunk)]
    assert chunks == [(0, 2), (2, 2)]


def test_pages_that_decode_has_are_pinned_but_not_published():
    """The eviction of an unheld first page would wait for ever for the held second one."""
    world = tiny_prefill(LEASE_S)
    world.scheduler.add(engine_request("r", PROMPT), 2 * PAGE_SIZE, 9.0)
    effects = run(world)
    assert [(e.first_page, len(e.pages)) for e in effects if isinstance(e, PublishedChunk)] == [(2, 1)]
    assert world.cache.pool.counts()[Owner.PINNED] == 3
    world.scheduler.add(engine_request("s", LONG), 0, 9.0)
    assert world.scheduler.schedule(0.0) is None, "there are five pages for six"
    assert world.exports.commit(engine_request("r", PROMPT).id)
    assert isinstance(run(world)[-1], Seal)


def test_the_last_page_is_always_published():
    world = tiny_prefill(LEASE_S)
    world.scheduler.add(engine_request("r", PROMPT), 100, 9.0)
    assert [e.first_page for e in run(world) if isinstance(e, PublishedChunk)] == [2]
    assert world.exports.next_deadline() == LEASE_S, "an export without a lease would never end"


def test_an_older_attempt_fails_as_superseded():
    world = tiny_prefill(LEASE_S)
    older = engine_request("r", PROMPT)
    world.scheduler.add(older, 0, 9.0)
    run(world)
    (failure,) = world.scheduler.add(engine_request("r", PROMPT, attempt=2), 0, 9.0)
    assert isinstance(failure, Fail)
    assert failure.id == older.id
    assert isinstance(failure.error, Superseded)
    assert world.cache.pool.num_cached == 3, "its pages serve the new attempt"
    seal = run(world)[-1]
    assert isinstance(seal, Seal)
    assert seal.times.cached_tokens == 4


def test_a_prompt_that_fits_waits_behind_one_that_does_not():
    world = tiny_prefill(LEASE_S, max_pinned_pages=NUM_PAGES)
    for name, prompt in (("a", PROMPT), ("b", LONG), ("c", [1])):
        world.scheduler.add(engine_request(name, prompt), 0, 9.0)
    run(world)
    assert world.scheduler.num_waiting == 2
    world.scheduler.abort(engine_request("a", PROMPT).id)
    assert [e.id.request_id for e in run(world) if isinstance(e, Seal)] == ["b", "c"]


def test_nothing_begins_beyond_the_pin_budget():
    world = tiny_prefill(LEASE_S, max_pinned_pages=3)
    world.scheduler.add(engine_request("a", PROMPT), 0, 9.0)
    run(world)
    world.scheduler.add(engine_request("b", [1]), 0, 9.0)
    assert world.scheduler.schedule(0.0) is None
    assert world.exports.commit(engine_request("a", PROMPT).id)
    assert isinstance(run(world)[-1], Seal)


def test_a_page_that_many_exports_pin_counts_once():
    world = tiny_prefill(LEASE_S, max_pinned_pages=4)
    for name in "abc":
        world.scheduler.add(engine_request(name, PROMPT), 0, 9.0)
        assert isinstance(run(world)[-1], Seal)
    assert world.cache.pool.counts()[Owner.PINNED] == 3


def test_a_deadline_ends_prompts_and_a_lease_ends_exports():
    world = tiny_prefill(LEASE_S, token_budget=2)
    sealed, begun, waiting = (engine_request(name, PROMPT) for name in ("sealed", "begun", "waiting"))
    world.scheduler.add(sealed, 0, 99.0)
    run(world)
    world.scheduler.add(begun, 2 * PAGE_SIZE, 99.0)
    world.scheduler.add(waiting, 0, 2.0)
    assert world.scheduler.next_wakeup() == 2.0
    (late,) = world.scheduler.expire(2.0)
    assert isinstance(late, Fail)
    assert isinstance(late.error, DeadlineExceeded)
    assert world.scheduler.expire(LEASE_S) == [ExportExpired(sealed.id)]
    assert world.scheduler.abort(begun.id)
    assert_idle(world.cache)


def test_a_prompt_in_progress_fails_with_its_lease():
    world = tiny_prefill(LEASE_S, token_budget=2)
    world.scheduler.add(engine_request("r", PROMPT), 0, 99.0)
    run(world, max_steps=1)
    (failure,) = world.scheduler.expire(LEASE_S)
    assert isinstance(failure, Fail)
    assert isinstance(failure.error, LeaseEnded)
    assert world.scheduler.num_chunking == 0
    assert_idle(world.cache)


def test_the_times_of_a_prompt_add_up():
    """Two chunks of a prompt that waited 1 s, each computed for 0.5 s, with a pause of 0.25 s between."""
    world = tiny_prefill(LEASE_S, token_budget=4)
    world.scheduler.add(engine_request("r", PROMPT), 0, 99.0, received_at=10.0)
    seals = []
    for start in (11.0, 11.75):
        batch = world.scheduler.schedule(start)
        assert batch is not None
        effects = world.scheduler.commit(batch, world.runner.run(batch), start + 0.5)
        seals += [effect for effect in effects if isinstance(effect, Seal)]
    (seal,) = seals
    assert seal.times == PrefillTimes(
        queue_us=1_000_000, compute_us=1_000_000, seal_us=2_250_000,
        chunks=((1_000_000, 4), (1_750_000, 2)), computed_tokens=6, cached_tokens=0,
    )  # fmt: skip


def test_a_prompt_whose_constraint_fails_ends_its_export():
    world = tiny_prefill(LEASE_S, token_budget=16)
    world.scheduler.add(engine_request("r", PROMPT), 0, 9.0)
    world.scheduler.add(engine_request("s", [1, 1]), 0, 9.0)
    batch = world.scheduler.schedule(0.0)
    assert batch is not None
    output = world.runner.run(batch)
    index = next(i for i, row in enumerate(batch.rows) if row.id == engine_request("r", PROMPT).id)
    sampled = tuple(() if i == index else one for i, one in enumerate(output.sampled))
    failed = StepOutput(sampled, {index: ConstraintFailed("nothing may follow")})
    effects = world.scheduler.commit(batch, failed, 0.0)
    assert [effect.id.request_id for effect in effects if isinstance(effect, Fail)] == ["r"]
    assert [effect.id.request_id for effect in effects if isinstance(effect, Seal)] == ["s"]
    assert world.exports.commit(engine_request("s", [1, 1]).id)
    assert_idle(world.cache)
