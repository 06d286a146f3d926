"""The workers that take requests are found anew after each change, and while time alone may end a presence."""

from __future__ import annotations

from dataclasses import replace

from baton.domain.ids import Incarnation
from baton.domain.liveness import Liveness
from baton.domain.worker import WorkerRecord, WorkerStatus
from baton.services.router.dispatch.placement.eligible import EligibleWorkers
from baton.services.router.dispatch.placement.worker_filter import WorkerFilter
from tests.unit.router.dispatch.test_placement import decode, prefill

GRACE_S = 2.0


class Rig:
    """Records as `WorkerSet` keeps them. `read` is a reading of the registry."""

    def __init__(self, *announced: WorkerRecord) -> None:
        self.records: dict[Incarnation, WorkerRecord] = {}
        self.liveness = Liveness(GRACE_S)
        model = announced[0].model
        self.eligible = EligibleWorkers(self.records, self.liveness, WorkerFilter(model), max_step_age_s=1.0)
        self.read(0.0, *announced)

    def read(self, now: float, *announced: WorkerRecord) -> None:
        self.liveness.observe([record.incarnation for record in announced], now)
        self.records.update({record.incarnation: record for record in announced})
        self.eligible.changed()


def test_ready_workers_of_the_model_are_found_until_a_change() -> None:
    worker, other = prefill(0), replace(decode(0), model="another")
    stuck = replace(decode(1), load=replace(decode(1).load, step_age_s=1.5))
    rig = Rig(worker, other, stuck, replace(decode(2), status=WorkerStatus.DRAINING))
    first = rig.eligible.all(0.0)
    assert first == [worker]
    assert rig.eligible.all(99.0) is first, "an announced worker stays until the next reading"
    rig.read(1.0, worker, decode(1))
    assert rig.eligible.all(1.0) == [worker, decode(1)]


def test_a_worker_in_its_grace_period_is_asked_for_each_time() -> None:
    rig = Rig(prefill(0), decode(0))
    rig.liveness.observe_outage(1.0)
    rig.read(1.0, prefill(0))
    assert rig.eligible.all(1.1) == [prefill(0), decode(0)], "after an outage all have a new grace"
    assert rig.eligible.all(1.0 + GRACE_S) == [prefill(0)]


def test_a_lost_worker_is_gone_with_its_change() -> None:
    rig = Rig(prefill(0), decode(0))
    assert len(rig.eligible.all(0.0)) == 2
    del rig.records[decode(0).incarnation]
    rig.liveness.forget(decode(0).incarnation)
    rig.eligible.changed()
    assert rig.eligible.all(0.0) == [prefill(0)]
