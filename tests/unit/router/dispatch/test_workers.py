"""The set of workers as announcements come, stop and change."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace

from baton.domain.errors import LinkBroken, WorkerLost
from baton.domain.ids import AttemptId, Incarnation, RequestId, WorkerId
from baton.domain.trust import OPEN_CLUSTER, ClusterTrust
from baton.domain.worker import NO_KERNELS, WorkerRecord, WorkerStatus
from baton.rpc.channel_pool import ChannelPool
from baton.services.router.dispatch.placement.pair import Pair
from baton.services.router.dispatch.placement.worker_filter import WorkerFilter
from baton.services.router.dispatch.workers import WorkerLimits, WorkerSet
from baton.store.store import StoreUnavailable
from baton.telemetry.metrics import REGISTRY
from tests.unit.router.dispatch.test_placement import QUERY, decode, link, prefill

P0 = replace(prefill(0), address="127.0.0.1:1")
D0 = replace(decode(0), address="127.0.0.1:2", links=(link(P0),))


@dataclass(slots=True)
class Announcements:
    """A registry that a test writes. Each item of `looks` is one read."""

    records: list[WorkerRecord] | StoreUnavailable = field(default_factory=list)
    looks: asyncio.Queue[None] = field(default_factory=asyncio.Queue)

    async def announce(self, record: WorkerRecord) -> bool:
        raise NotImplementedError

    async def withdraw(self, id: WorkerId, incarnation: Incarnation) -> None:
        raise NotImplementedError

    async def workers(self) -> list[WorkerRecord]:
        if isinstance(self.records, StoreUnavailable):
            raise self.records
        return self.records

    async def changes(self) -> AsyncIterator[None]:
        while True:
            await self.looks.get()
            yield


@dataclass(slots=True)
class Watched:
    """A set of workers on a clock that the test moves."""

    workers: WorkerSet
    registry: Announcements
    degraded: list[bool]
    now: float = 0.0

    async def look(self, *records: WorkerRecord, at: float) -> None:
        self.registry.records = list(records)
        await self._look(at)

    async def fail_to_look(self, at: float) -> None:
        self.registry.records = StoreUnavailable("away")
        await self._look(at)

    async def _look(self, at: float) -> None:
        self.now = at
        changed = asyncio.ensure_future(self.workers.wait_for_change())
        await asyncio.wait([changed], timeout=0)
        self.registry.looks.put_nowait(None)
        async with asyncio.timeout(5):
            await changed

    def ready(self) -> bool:
        return self.workers.readiness()[0]


@asynccontextmanager
async def watched(trust: ClusterTrust = OPEN_CLUSTER, text_digest: str = "") -> AsyncIterator[Watched]:
    registry, channels, degraded = Announcements(), ChannelPool(), list[bool]()
    limits = WorkerLimits(worker_ttl_s=2.0, heartbeat_interval_s=0.5, max_step_age_s=30.0)
    used = WorkerFilter("m", trust, text_digest)
    workers = WorkerSet(registry, channels, used, limits, degraded.append, clock=lambda: seen.now)
    seen = Watched(workers, registry, degraded)
    workers.start()
    try:
        yield seen
    finally:
        await workers.close()
        await channels.close()


async def test_a_linked_pair_is_ready_and_a_missing_half_is_named():
    async with watched() as w:
        await w.look(P0, at=0.0)
        assert w.workers.readiness() == (False, "no linked prefill/decode pair (1 prefill, 0 decode ready)")
        assert w.workers.max_request_tokens() is None
        await w.look(D0, P0, at=0.5)
        assert w.workers.readiness() == (True, "1 linked prefill/decode pairs")
        assert w.workers.max_request_tokens() == 200
        assert w.workers.records == (D0, P0)


async def test_readiness_names_kernels_and_workers_without_any():
    async with watched() as w:
        await w.look(replace(D0, kernels="avx2"), replace(P0, kernels="avx2"), at=0.0)
        assert w.workers.readiness() == (True, "1 linked prefill/decode pairs; kernels: avx2")
        await w.look(replace(D0, kernels=NO_KERNELS), replace(P0, kernels="avx2"), at=0.5)
        _, detail = w.workers.readiness()
    assert detail.startswith(f"1 linked prefill/decode pairs; kernels: avx2; no native kernels on {D0.id}: torch")


async def test_workers_of_another_model_are_not_used_but_named():
    async with watched() as w:
        await w.look(replace(P0, model="x"), replace(D0, model="x"), at=0.0)
        ready, detail = w.workers.readiness()
        assert not ready
        assert detail.endswith("workers announced x instead of m)")


async def test_workers_with_another_secret_are_not_used_but_named():
    ours, theirs = ClusterTrust(b"o" * 32), ClusterTrust(b"t" * 32)
    async with watched(ours) as w:
        await w.look(*(replace(record, signature=theirs.sign(record)) for record in (P0, D0)), at=0.0)
        ready, detail = w.workers.readiness()
        assert not ready
        assert detail.count("is not trusted: a cluster secret here, another one there") == 2
        await w.look(replace(P0, signature=ours.sign(P0)), D0, at=0.5)
        ready, detail = w.workers.readiness()
        assert not ready
        assert f"; {D0.id} at {D0.address} is not trusted: a cluster secret here, none there" in detail
        await w.look(*(replace(record, signature=ours.sign(record)) for record in (P0, D0)), at=1.0)
        assert w.ready()


async def test_workers_with_another_tokenizer_are_not_used_but_named():
    async with watched(text_digest="ours") as w:
        await w.look(replace(P0, text_digest="ours"), replace(D0, text_digest="theirs"), at=0.0)
        ready, detail = w.workers.readiness()
        assert not ready
        assert f"{D0.id} have another tokenizer or chat template than this router" in detail
        assert w.workers.max_request_tokens() is None
        await w.look(replace(P0, text_digest="ours"), replace(D0, text_digest="ours"), at=0.5)
        assert w.ready()


async def test_a_forged_record_neither_replaces_a_worker_nor_keeps_it_alive():
    trust = ClusterTrust(b"o" * 32)
    signed = [replace(record, signature=trust.sign(record)) for record in (P0, D0)]
    async with watched(trust) as w:
        await w.look(*signed, at=0.0)
        lost: list[str] = []
        w.workers.watch(D0.incarnation, lambda: lost.append("decode"))
        forged = replace(signed[1], incarnation=Incarnation(666), address="10.6.6.6:1")
        await w.look(signed[0], forged, at=0.5)
        assert lost == []
        assert {record.address for record in w.workers.records} == {P0.address, D0.address}
        for at in (1.5, 2.5):
            await w.look(signed[0], replace(signed[1], address="10.6.6.6:1"), at=at)
        assert lost == ["decode"]


async def test_an_older_record_of_a_worker_is_not_used_again():
    async with watched() as w:
        now = [replace(record, announcement=2) for record in (P0, D0)]
        await w.look(*now, at=0.0)
        await w.look(now[0], replace(D0, announcement=1, address="10.6.6.6:1"), at=0.1)
        assert {record.address for record in w.workers.records} == {P0.address, D0.address}
        assert w.ready(), "a store that was rolled back refuses no request"
        for at in (1.0, 2.0, 2.1):
            await w.look(now[0], replace(D0, announcement=1), at=at)
        assert "its record is older" in w.workers.readiness()[1]
        await w.look(now[0], replace(D0, announcement=3), at=2.2)
        assert w.ready()


async def test_a_store_that_is_emptied_while_a_router_sleeps_loses_no_worker():
    """One worker is back when the router wakes."""
    async with watched() as w:
        lost: list[str] = []
        await w.look(P0, D0, at=0.0)
        w.workers.watch(D0.incarnation, lambda: lost.append("decode"))
        await w.look(P0, at=3.0)
        assert w.ready()
        assert lost == []
        await w.look(P0, D0, at=3.5)
        assert w.ready()
        assert lost == []


async def test_a_store_that_is_emptied_between_two_readings_refuses_no_request():
    async with watched() as w:
        for number in range(3):
            await w.look(*(replace(record, announcement=number) for record in (P0, D0)), at=number / 2)
        await w.look(replace(P0, announcement=3), at=1.5)
        assert w.ready()


async def test_records_stay_in_use_during_a_store_outage_and_for_a_ttl_after():
    async with watched() as w:
        await w.look(P0, D0, at=0.0)
        lost: list[str] = []
        w.workers.watch(D0.incarnation, lambda: lost.append("decode"))
        await w.fail_to_look(at=100.0)
        assert w.ready()
        await w.look(at=101.0)  # the store came back empty
        assert w.ready(), "an empty store refuses no request"
        await w.look(P0, at=102.0)  # not everybody is equally quick
        assert w.ready()
        assert lost == []
        await w.look(P0, at=103.0)
        assert not w.ready()
        assert lost == ["decode"]
        assert w.degraded == [False, True, False, False, False]


async def test_an_unannounced_worker_is_lost_after_a_second_ttl():
    async with watched() as w:
        lost: list[str] = []
        await w.look(P0, D0, at=0.0)
        w.workers.watch(P0.incarnation, lambda: lost.append("prefill"))
        w.workers.watch(D0.incarnation, lambda: lost.append("decode"))
        await w.look(P0, D0, at=1.0)
        await w.look(D0, at=1.6)
        assert not w.ready()
        await w.look(D0, at=2.9)
        assert lost == []
        await w.look(D0, at=3.0)
        assert lost == ["prefill"]
        assert w.workers.records == (D0,)


async def test_a_new_incarnation_ends_the_old_one_at_once():
    async with watched() as w:
        lost: list[str] = []
        await w.look(P0, D0, at=0.0)
        w.workers.watch(D0.incarnation, lambda: lost.append("watched"))
        unwatch = w.workers.watch(D0.incarnation, lambda: lost.append("unwatched"))
        unwatch()
        newer = replace(D0, incarnation=Incarnation(999))
        await w.look(P0, newer, at=0.1)
        assert lost == ["watched"]
        assert w.workers.records == (newer, P0)
        unwatch()


async def test_a_draining_worker_gets_no_requests_but_is_not_lost():
    async with watched() as w:
        lost: list[str] = []
        await w.look(P0, D0, at=0.0)
        w.workers.watch(D0.incarnation, lambda: lost.append("decode"))
        for at in (1.0, 5.0):
            await w.look(P0, replace(D0, status=WorkerStatus.DRAINING), at=at)
        assert not w.ready()
        assert lost == []


async def test_a_stuck_worker_is_lost_until_its_step_ends():
    async with watched() as w:
        lost: list[str] = []
        await w.look(P0, D0, at=0.0)
        w.workers.watch(D0.incarnation, lambda: lost.append("decode"))
        stuck = replace(D0, load=replace(D0.load, step_age_s=31.0))
        await w.look(P0, stuck, at=31.0)
        assert lost == ["decode"]
        assert not w.ready()
        await w.look(P0, D0, at=32.0)
        assert w.ready()


async def test_a_worker_attracts_prompts_only_while_it_has_their_pages():
    """Its cache events say that they were evicted; what was once routed to it does not count any more."""
    p1 = replace(prefill(1), address="127.0.0.1:3")
    d0 = replace(D0, links=(link(P0), link(p1)))
    keys = QUERY.keys[P0.page_size]
    async with watched() as w:
        await w.look(P0, p1, d0, at=0.0)
        w.workers.add_cached_pages(p1, keys)
        assert {w.workers.choose(QUERY) for _ in range(4)} == {Pair(p1, d0)}
        w.workers.cache_index.clear(p1.incarnation)
        w.workers.cache_index.update(p1.incarnation, keys, ())
        assert {w.workers.choose(QUERY) for _ in range(4)} == {Pair(p1, d0)}
        w.workers.cache_index.update(p1.incarnation, (), keys)
        assert {w.workers.choose(QUERY) for _ in range(4)} == {Pair(P0, d0), Pair(p1, d0)}


async def test_a_placed_prompt_is_no_load_as_far_as_it_is_cached():
    p1 = replace(prefill(1), address="127.0.0.1:3")
    d0 = replace(D0, links=(link(P0), link(p1)))
    async with watched() as w:
        await w.look(P0, p1, d0, at=0.0)
        w.workers.add_cached_pages(p1, QUERY.keys[P0.page_size])
        for number in range(3):
            pair = w.workers.choose(QUERY)
            assert pair is not None
            assert pair.prefill.id == p1.id, "its users do not drive each other away"
            w.workers.on_placed(AttemptId(RequestId(f"r{number}"), 1), pair, QUERY)


async def test_a_suspected_worker_is_not_chosen_for_one_ttl():
    async with watched() as w:
        await w.look(P0, D0, at=0.0)
        assert w.workers.choose(QUERY) is not None
        w.workers.suspect(D0, WorkerLost("connection refused"), AttemptId(RequestId("r"), 1))
        assert w.ready()
        await w.look(P0, D0, at=1.9)
        assert w.workers.choose(QUERY) is None
        await w.look(P0, D0, at=2.0)
        assert w.workers.choose(QUERY) is not None


async def test_a_failed_link_is_not_used_but_its_workers_are():
    id, other = AttemptId(RequestId("r"), 1), replace(prefill(1), address="127.0.0.1:3")
    both = replace(D0, links=(link(P0), link(other)))
    async with watched() as w:
        await w.look(P0, other, both, at=0.0)
        pair = w.workers.choose(QUERY)
        assert pair is not None
        assert w.workers.on_link_failure(id, pair, LinkBroken("cut"))
        left = {chosen.prefill.id for _ in range(4) if (chosen := w.workers.choose(QUERY)) is not None}
        assert left == {P0.id, other.id} - {pair.prefill.id}
        await w.look(P0, other, both, at=0.5)
        used = {chosen.prefill.id for _ in range(4) if (chosen := w.workers.choose(QUERY)) is not None}
        assert used == {P0.id, other.id}


async def test_the_only_link_is_probed_by_one_uncounted_attempt():
    probe = AttemptId(RequestId("probe"), 2)
    async with watched() as w:
        await w.look(P0, D0, at=0.0)
        pair = w.workers.choose(QUERY)
        assert pair is not None
        assert w.workers.on_link_failure(AttemptId(RequestId("r"), 1), pair, LinkBroken("cut"))
        assert w.workers.choose(QUERY) is None
        assert w.ready()
        await w.look(P0, D0, at=0.5)
        w.workers.on_placed(probe, pair, QUERY)
        assert w.workers.choose(QUERY) is None, "one is at it"
        assert not w.workers.on_link_failure(probe, pair, LinkBroken("cut"))
        await w.look(P0, D0, at=1.5)
        w.workers.on_placed(probe, pair, QUERY)
        w.workers.on_imported(probe, pair)
        assert w.workers.choose(QUERY) == w.workers.choose(QUERY) is not None


async def test_listeners_run_after_each_refresh():
    rows: list[int | None] = []
    async with watched() as w:
        w.workers.add_listener(lambda: rows.append(w.workers.max_rows()))
        unlinked = replace(decode(1), address="127.0.0.1:3")
        await w.look(D0, unlinked, at=0.0)
        await w.look(P0, D0, unlinked, at=0.1)
        await w.fail_to_look(at=0.2)
        assert rows == [None, D0.budgets.rows, D0.budgets.rows]


def shown(name: str, **labels: str) -> float | None:
    return REGISTRY.get_sample_value(name, {"model": "m", **labels})


async def test_metrics_tell_a_drained_worker_from_a_lost_one():
    async with watched() as w:
        lost = shown("baton_workers_lost_total", role="decode")
        assert lost is not None, "the counter starts before the first loss"
        other = replace(D0, id=WorkerId("d9"), incarnation=Incarnation(99), address="127.0.0.1:9")
        await w.look(P0, D0, other, at=0.0)
        assert shown("baton_ready_pairs") == 2.0
        await w.look(P0, D0, replace(other, status=WorkerStatus.DRAINING, announcement=2), at=0.5)
        assert shown("baton_workers", role="decode", status="draining") == 1.0
        assert shown("baton_ready_pairs") == 1.0
        await w.look(P0, D0, at=0.6)
        for at in (1.6, 2.6, 3.6, 4.6, 5.0):
            await w.look(P0, D0, at=at)
        assert shown("baton_workers_lost_total", role="decode") == lost, "it drained"
        await w.look(P0, at=5.1)
        assert shown("baton_workers", role="decode", status="absent") == 1.0
        for at in (6.0, 7.0, 7.1):
            await w.look(P0, at=at)
        assert shown("baton_workers_lost_total", role="decode") == lost + 1
        assert shown("baton_workers", role="decode", status="absent") == 0.0
        assert shown("baton_ready_pairs") == 0.0


async def test_a_bug_in_the_registry_ends_the_task():
    class Broken(Announcements):
        async def workers(self) -> list[WorkerRecord]:
            raise ValueError("a bug")

    registry, channels = Broken(), ChannelPool()
    workers = WorkerSet(registry, channels, WorkerFilter("m"), WorkerLimits(2.0, 0.5, 30.0))
    following = workers.start()
    registry.looks.put_nowait(None)
    await asyncio.wait([following], timeout=5)
    assert isinstance(following.exception(), ValueError)
    await workers.close()
    await channels.close()
