"""Metrics of an engine's steps and pages."""

from __future__ import annotations

import itertools
from unittest.mock import Mock

import pytest

from baton.domain.errors import Broken
from baton.domain.ids import AttemptId, RequestId
from baton.domain.timing.step_time import StepShape
from baton.domain.worker import WorkerRole
from baton.engine.batch import Batch, HostCopy, Row, StepOutput
from baton.engine.step_metrics import StepMetrics
from baton.kv.pages import Hold, PagePool
from baton.telemetry import metrics


class Runner:
    def __init__(self) -> None:
        self.batches: list[Batch] = []

    def run(self, batch: Batch) -> StepOutput:
        if not batch.rows:
            raise Broken("a runner")
        self.batches.append(batch)
        return StepOutput(((),) * len(batch.rows))


def test_a_step_has_an_age_while_it_runs():
    step_metrics = StepMetrics(WorkerRole.PREFILL, PagePool(8))
    assert step_metrics.step_age_s() == 0.0
    with step_metrics.step():
        assert isinstance(step_metrics.step_started_at, float)
        assert step_metrics.step_age_s() >= 0.0
    assert step_metrics.step_age_s() == 0.0


def test_the_batch_is_run_and_its_rows_are_counted():
    step_metrics, runner = StepMetrics(WorkerRole.PREFILL, PagePool(8)), Runner()
    batch = Batch((Row(AttemptId(RequestId("r"), 1), (1, 0, 1), 0, (), None),))
    with step_metrics.step():
        assert step_metrics.run(runner, batch) == StepOutput(((),))
    assert runner.batches == [batch]
    assert metrics.BATCH_ROWS.labels("prefill")._value.get() == 1


def test_the_page_gauges_follow_the_pool():
    pool = PagePool(8)
    step_metrics = StepMetrics(WorkerRole.PREFILL, pool)
    step_metrics.update_gauges(num_waiting=0)
    pages = pool.allocate(3, Hold.LIVE)
    assert pages is not None
    step_metrics.update_gauges(num_waiting=2)
    assert metrics.KV_PAGES.labels("live")._value.get() == 3
    assert metrics.KV_PAGES.labels("free")._value.get() == 5
    assert metrics.WAITING_REQUESTS.labels("prefill")._value.get() == 2


def test_a_step_whose_runner_fails_is_timed_and_teaches_nothing(monkeypatch: pytest.MonkeyPatch):
    step_metrics = StepMetrics(WorkerRole.PREFILL, PagePool(8))
    batch = Batch((Row(AttemptId(RequestId("r"), 1), (1,), 0, (), None),))
    num_steps = sum(metrics.STEP_SECONDS.labels("prefill").counts)
    with pytest.raises(Broken), step_metrics.step():
        step_metrics.run(Runner(), Batch(()))
    assert step_metrics.step_age_s() == 0.0
    assert sum(metrics.STEP_SECONDS.labels("prefill").counts) == num_steps + 1
    assert (step_metrics.num_tokens, step_metrics.step_time.num_steps) == (0, 0)
    monkeypatch.setattr("baton.engine.step_metrics.monotonic_s", itertools.count(step=0.5).__next__)
    with step_metrics.step(), step_metrics.forward(batch):
        assert step_metrics.step_started_at is not None
    assert (step_metrics.num_tokens, step_metrics.step_time.num_steps) == (1, 1)


def test_the_hosts_part_of_a_step_is_what_its_forward_pass_leaves(monkeypatch: pytest.MonkeyPatch):
    now = itertools.count(step=0.5)
    monkeypatch.setattr("baton.engine.step_metrics.monotonic_s", lambda: next(now))
    step_metrics, before = StepMetrics(WorkerRole.PREFILL, PagePool(8)), host_seconds()
    for _ in range(2):  # the second one without a forward pass is the host's as a whole
        with step_metrics.step():
            pass
    assert host_seconds() - before == pytest.approx(1.0)
    with step_metrics.step():
        step_metrics.run(Runner(), Batch((Row(AttemptId(RequestId("r"), 1), (1,), 0, (), None),)))
    assert host_seconds() - before == pytest.approx(2.0)  # of 1.5 s, 0.5 were the runner's


def test_the_step_time_model_learns_from_steps_without_copies(monkeypatch: pytest.MonkeyPatch):
    now = itertools.count(step=0.5)
    monkeypatch.setattr("baton.engine.step_metrics.monotonic_s", lambda: next(now))
    step_metrics = StepMetrics(WorkerRole.DECODE, PagePool(8))
    row = Row(AttemptId(RequestId("r"), 1), (1, 0, 1), 4, (), None)
    for _ in range(9):
        step_metrics.run(Runner(), Batch((row,)))
    assert step_metrics.step_time.num_steps == 9
    assert step_metrics.step_time.predict(StepShape.of([(3, 4)])) == pytest.approx(0.5, rel=0.01)
    error = metrics.REGISTRY.get_sample_value("baton_step_time_error", {"role": "decode"})
    assert error == step_metrics.step_time.error < 0.3
    step_metrics.run(Runner(), Batch((row,), (HostCopy((), (), to_host=True),)))
    assert step_metrics.step_time.num_steps == 9


def host_seconds() -> float:
    return metrics.REGISTRY.get_sample_value("baton_step_host_seconds_sum", {"role": "prefill"}) or 0.0


def test_encoding_is_no_time_of_the_host_nor_of_tokens(monkeypatch: pytest.MonkeyPatch):
    now = itertools.count(step=0.5)
    monkeypatch.setattr("baton.engine.step_metrics.monotonic_s", lambda: next(now))
    step_metrics = StepMetrics(WorkerRole.PREFILL, PagePool(8))
    before, steps = host_seconds(), metrics.REGISTRY.get_sample_value("baton_encode_seconds_count") or 0.0
    with step_metrics.encode(10):
        pass
    assert step_metrics.step_age_s() == 0.0
    assert (step_metrics.last_encode_s, host_seconds()) == (0.5, before)
    assert metrics.REGISTRY.get_sample_value("baton_encode_seconds_count") == steps + 1
    assert step_metrics.step_time.num_steps == 0


def test_the_first_step_of_the_tower_is_no_measure():
    step_metrics = StepMetrics(WorkerRole.PREFILL, PagePool(8))
    step_metrics.step_time = Mock(reliable=True, seconds_of=lambda num, start, chunk: 1e-12 * num)
    with step_metrics.encode(1):
        pass
    assert step_metrics.tokens_to_encode(7) == 7
    with step_metrics.encode(1):
        pass
    assert step_metrics.tokens_to_encode(7) > 7


def test_rows_of_images_count_as_the_prompt_tokens_that_take_as_long(monkeypatch: pytest.MonkeyPatch):
    now = itertools.count(step=0.5)
    monkeypatch.setattr("baton.engine.step_metrics.monotonic_s", lambda: next(now))
    step_metrics = StepMetrics(WorkerRole.PREFILL, PagePool(8))
    step_metrics.step_time = Mock(reliable=False)
    assert step_metrics.tokens_to_encode(7) == 7, "nothing is measured yet"
    with step_metrics.encode(1):
        pass  # 0.5 s a row
    with step_metrics.encode(10):
        pass  # 0.05 s a row
    assert step_metrics.tokens_to_encode(7) == 7
    step_metrics.step_time = Mock(reliable=True, seconds_of=lambda num, start, chunk: 0.01 * num)
    assert (step_metrics.tokens_to_encode(7), step_metrics.tokens_to_encode(0)) == (35, 0)
    with step_metrics.encode(5):
        pass  # 0.1 s a row: a fifth of the difference counts
    assert step_metrics.tokens_to_encode(100) == 600
