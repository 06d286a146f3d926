"""Causes of slow gaps: each is taken up to the excess, in order, and arrangements are taken back."""

import os
import subprocess
import sys

import pytest

from bench.harness.rotations import Block
from bench.harness.task_times import TaskTimes
from bench.system.arrangements import BATCH, LOOPS_AWAY, OTHERS_AWAY, STARTED, SystemThreads, arranged
from bench.system.disturbance import ALONE, PROMPTS, StepSampler, findings_of, parse
from bench.system.gap_causes import (
    CAUSES,
    AloneTimes,
    GapRecord,
    bunches,
    causes_of,
    records_of,
    slow_gaps,
    tail_gaps,
)

MEDIANS = AloneTimes(gap_s=5.0, run_s=4.0, wait_s=0.5, way_wait_s=0.1)


def gap(
    gap_s: float, *, run_s: float = 4.0, wait_s: float = 0.5, way_wait_s: float = 0.1, steal_s: float = 0.0
) -> GapRecord:
    return GapRecord(gap_s, run_s, wait_s, way_wait_s, steal_s, 0.0, 0.0)


@pytest.mark.parametrize(
    ("record", "expected"),
    [
        (gap(8.0, wait_s=3.5), [0.0, 3.0, 0.0, 0.0, 0.0]),
        (gap(8.0, run_s=6.0, wait_s=1.0), [0.0, 0.5, 2.0, 0.0, 0.5]),
        (gap(8.0, steal_s=10.0, wait_s=3.5), [3.0, 0.0, 0.0, 0.0, 0.0]),
        (gap(8.0, way_wait_s=1.1), [0.0, 0.0, 0.0, 1.0, 2.0]),
        (gap(4.0, run_s=9.0), [0.0] * 5),
        (gap(6.0, run_s=1.0), [0.0, 0.0, 0.0, 0.0, 1.0]),
    ],
)
def test_an_excess_is_ascribed_once(record, expected):
    found = causes_of(record, MEDIANS)
    assert found == pytest.approx(expected)
    assert sum(found) == pytest.approx(max(0.0, record.gap_s - MEDIANS.gap_s))
    assert len(found) == len(CAUSES)


def test_tokens_that_come_at_once_were_late_on_their_way():
    """Three steps of 5 s, two of whose tokens came with the third: no step was longer."""
    records = [gap(5.0), gap(15.0, run_s=12.0, wait_s=1.5), gap(0.1, run_s=0.0), gap(0.0, run_s=0.0), gap(5.0)]
    found = bunches(records, MEDIANS)
    assert [(record.gap_s, steps) for record, steps in found] == [(5.0, 1), (15.0, 3), (5.0, 1)]
    assert causes_of(found[1][0], MEDIANS, found[1][1]) == pytest.approx([0.0, 0.0, 0.0, 10.0, 0.0])


def test_slow_and_tail_gaps():
    records = [gap(5.0)] * 98 + [gap(5.7), gap(9.0)]
    assert [record.gap_s for record, _ in slow_gaps(records, MEDIANS)] == [9.0]  # 5.75 is the bound
    assert min(record.gap_s for record, _ in tail_gaps(records, MEDIANS)) > 5.0


def block(what: str, records: list[GapRecord]) -> Block:
    return Block(0, f"own: {STARTED}: {what}", 1.0, 1.0, tuple(value for record in records for value in record))


def test_records_survive_their_block():
    records = [gap(5.0), gap(6.0, run_s=5.0)]
    assert records_of(block(ALONE, records)) == records


def test_findings_are_shares_of_the_excess_over_the_median_alone():
    alone = [gap(5.0)] * 100
    beside = [gap(5.0)] * 50 + [gap(8.0, wait_s=3.5)] * 40 + [gap(9.0, run_s=8.0)] * 10
    found = {each.name: each.overall.median for each in findings_of([block(ALONE, alone), block(PROMPTS, beside)])}
    own = f"own: {STARTED}: {PROMPTS}"
    assert found[f"{own}: p99 gap / alone"] == pytest.approx(9.0 / 5.0)
    shares = [found[f"{own}: share of slow gaps' excess: {cause}"] for cause in CAUSES]
    assert shares == pytest.approx([0.0, 120 / 160, 40 / 160, 0.0, 0.0])
    assert found[f"{own}: a gap of the slowest 1 %: longer steps"] == pytest.approx(4000.0)


def test_a_block_without_its_base_has_no_findings():
    assert findings_of([block(PROMPTS, [gap(5.0)])]) == []


class Tasks:
    def __init__(self, *times: TaskTimes) -> None:
        self._times = list(times)

    def read(self) -> TaskTimes:
        return self._times.pop(0)


def test_the_sampler_keeps_differences(monkeypatch):
    stolen, now = [1.0, 1.25], [10.0, 10.5]
    monkeypatch.setattr("bench.system.disturbance.steal_s", lambda: stolen.pop(0))
    engine = Tasks(TaskTimes(1.0, 2.0), TaskTimes(1.25, 2.125))
    way = Tasks(TaskTimes(5.0, 1.0), TaskTimes(5.0625, 1.5))
    prefill = Tasks(TaskTimes(7.0, 0.0), TaskTimes(7.5, 0.0))
    sampler = StepSampler(lambda: now.pop(0), engine, way, prefill)
    sampler()
    assert sampler.records == []
    sampler()
    assert sampler.records == [GapRecord(0.5, 0.25, 0.125, 0.5, 0.25, 0.5, 0.0625)]


@pytest.fixture
def sleeper():
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as process:
        assert process.stdin is not None
        yield process.pid
        process.stdin.close()


def tasks_of(pid: int) -> SystemThreads:
    return SystemThreads(engine=(pid, 1 << 30), prefill=[(pid, pid)], loops=[(pid, pid)], others=[(pid, 1 << 30)])


def test_an_arrangement_is_taken_back(sleeper):
    core = min(os.sched_getaffinity(0))
    before = os.sched_getaffinity(sleeper)
    with arranged(tasks_of(sleeper), OTHERS_AWAY):
        assert os.sched_getaffinity(sleeper) == before  # its thread is none of these, and a missing one is left out
    if core == 0:
        with arranged(tasks_of(sleeper), LOOPS_AWAY):
            assert os.sched_getaffinity(sleeper) == {0}
    assert os.sched_getaffinity(sleeper) == before
    with arranged(tasks_of(sleeper), BATCH):
        assert os.sched_getscheduler(sleeper) == os.SCHED_BATCH
    assert os.sched_getscheduler(sleeper) == os.SCHED_OTHER


def test_flags():
    assert parse(["--systems", "own", "--arrangements", STARTED]).systems == ("own",)
