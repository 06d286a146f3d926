"""A worker's record that somebody else changed is refused and told, also beside the worker's own."""

from __future__ import annotations

from dataclasses import replace

from structlog.testing import capture_logs

from baton.domain.trust import ClusterTrust
from baton.domain.worker import WorkerRecord
from tests.unit.router.dispatch.test_workers import D0, P0, watched


async def test_a_forged_record_beside_the_worker_s_own_is_told_once():
    trust = ClusterTrust(b"o" * 32)
    signed = [replace(record, signature=trust.sign(record)) for record in (P0, D0)]
    forged = replace(signed[1], address="10.6.6.6:1")
    async with watched(trust) as w:
        with capture_logs() as lines:
            await w.look(*signed, forged, at=0.0)
            await w.look(forged, *signed, at=0.1)
        assert {record.address for record in w.workers.records} == {P0.address, D0.address}
        assert w.ready()
    assert [line["worker"] for line in lines if line["event"] == "worker_untrusted"] == [D0.id]


async def test_a_replayed_record_is_told_once_while_the_worker_announces_itself():
    trust = ClusterTrust(b"o" * 32)

    def announced(number: int) -> WorkerRecord:
        record = replace(D0, announcement=number)
        return replace(record, signature=trust.sign(record))

    async with watched(trust) as w:
        await w.look(announced(1), at=0.0)
        with capture_logs() as lines:
            for number in range(2, 5):
                await w.look(announced(number), announced(1), at=0.1 * number)
    assert len([line for line in lines if line["event"] == "worker_untrusted"]) == 1


async def test_each_of_two_forged_records_of_one_worker_is_told():
    trust = ClusterTrust(b"o" * 32)
    forged = [replace(D0, address=f"10.6.6.{n}:1", signature="00") for n in range(2)]
    async with watched(trust) as w:
        with capture_logs() as lines:
            await w.look(*forged, at=0.0)
            await w.look(*reversed(forged), at=0.1)
        _, why = w.workers.readiness()
    told = [line["why"] for line in lines if line["event"] == "worker_untrusted"]
    assert len(told) == 2
    assert all(record.address in why and any(record.address in one for one in told) for record in forged)
