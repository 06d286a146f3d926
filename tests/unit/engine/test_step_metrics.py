"""Metrics of an engine's steps and pages."""

from __future__ import annotations

from baton.domain.ids import AttemptId, RequestId
from baton.domain.worker import WorkerRole
from baton.engine.batch import Batch, Row, StepOutput
from baton.engine.step_metrics import StepMetrics
from baton.kv.pages import Hold, PagePool
from baton.telemetry import metrics


class Runner:
    def __init__(self) -> None:
        self.batches: list[Batch] = []

    def run(self, batch: Batch) -> StepOutput:
        self.batches.append(batch)
        return StepOutput((None,) * len(batch.rows))


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
        assert step_metrics.run(runner, batch) == StepOutput((None,))
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
