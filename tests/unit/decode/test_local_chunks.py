"""Chunks of local prompts beside rows: their sizes follow the step-time model, tokens and pages do not."""

from __future__ import annotations

from dataclasses import dataclass, field

from hypothesis import given
from hypothesis import strategies as st

from baton.domain.request import StopParams
from baton.domain.timing.step_time import StepShape
from baton.engine.chunking import ChunkBudget, ChunkPolicy
from baton.services.decode.effects import DecodeEffect, EmitTokens
from baton.services.decode.kv_import import Reserved
from tests.tiny_workers import (
    PAGE_SIZE,
    REPEATABLE_SETTINGS,
    TinyDecode,
    assert_idle,
    engine_request,
    expected_output,
    tiny_decode,
)

STOP = StopParams(max_tokens=3)
FIRST = engine_request("first", [0, 1, 1, 0, 1], stop=STOP)
SECOND = engine_request("second", [1, 0, 0, 1], stop=STOP)


@dataclass(frozen=True, slots=True)
class ScriptedBudget(ChunkBudget):
    """Answers with the sizes of a script, then with a page; notes what it was asked."""

    sizes: list[int] = field(default_factory=list)
    asked: list[tuple[StepShape, int]] = field(default_factory=list)

    def tokens(self, beside: StepShape, start: int) -> int:
        self.asked.append((beside, start))
        return self.sizes.pop(0) if self.sizes else self.page_size


def scripted(sizes: list[int]) -> ScriptedBudget:
    return ScriptedBudget(64, PAGE_SIZE, ChunkPolicy.EQUAL, sizes=sizes)


def take(world: TinyDecode, request) -> None:
    answer, _ = world.import_policy.reserve(request.id, len(request.tokens), [], 0.0, 5.0)
    assert isinstance(answer, Reserved)
    world.import_policy.claim(answer.id, request, None, 9.0)


def run(world: TinyDecode) -> tuple[list[list[int]], list[DecodeEffect]]:
    """Token counts of the rows of each step, and all effects."""
    steps, effects = [], []
    while (batch := world.scheduler.schedule(0.0)) is not None:
        steps.append([len(row.tokens) for row in batch.rows])
        effects += world.scheduler.commit(batch, world.runner.run(batch), 0.0)
    return steps, effects


def test_the_sizer_sees_the_rows_and_where_the_first_chunk_begins():
    sizer = scripted([4, 3])
    world = tiny_decode(True, 8, chunks=sizer)
    take(world, FIRST)
    take(world, SECOND)
    steps, _ = run(world)
    assert steps[:2] == [[4], [1, 2]]  # the end of the first prompt, and of what is left a page of the second
    assert sizer.asked[:2] == [(StepShape(0, 0.0, 0), 0), (StepShape(0, 0.0, 0), 4)]
    assert steps[2] == [1, 2]
    assert sizer.asked[2] == (StepShape(1, 0.0, 6), 2)
    assert len(sizer.asked) == 3  # not while no prompt is to be computed


@REPEATABLE_SETTINGS
@given(st.lists(st.integers(PAGE_SIZE, 9), max_size=12))
def test_any_sizes_give_the_same_tokens(sizes: list[int]):
    world = tiny_decode(True, 8, chunks=scripted(sizes))
    take(world, FIRST)
    take(world, SECOND)
    _, effects = run(world)
    for request in (FIRST, SECOND):
        emitted = [effect for effect in effects if isinstance(effect, EmitTokens) and effect.id == request.id]
        assert [token.token for effect in emitted for token in effect.tokens] == expected_output(request)
    assert_idle(world.cache)
