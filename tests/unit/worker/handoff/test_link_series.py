"""Series of a link: 1 while its source is announced, 0 while it is silent, removed when it leaves."""

from __future__ import annotations

import asyncio
from dataclasses import replace

import pytest
import structlog.testing
from prometheus_client.metrics import MetricWrapperBase

from baton.domain.ids import Incarnation, PageId, WorkerId
from baton.domain.worker import WorkerRecord, WorkerRole, WorkerStatus
from baton.engine.mailbox import Mailbox
from baton.services.decode.commands import DecodeCommand
from baton.telemetry import metrics
from baton.transfer.base import Pull, PullEvent, PullOutcome
from baton.transfer.nixl_mover import TCP_PATH, UNKNOWN_PATH
from baton.worker.handoff.links import PeerLinks
from tests.unit.worker.handoff.test_replaced_source import Puller, Registry, make_links, prefill_record

HERE = WorkerRecord(WorkerId("decode-0"), WorkerRole.DECODE, Incarnation(9), "a:2", "m", "f", 16, 512, 512)
LABELS = {"source": "prefill-0", "destination": "decode-0"}
PULL = Pull(1, WorkerId("prefill-0"), (PageId(0),), (PageId(0),), None, 1.0)


def link_state() -> float | None:
    return metrics.REGISTRY.get_sample_value("baton_link_state", LABELS)


LINK_METRICS = [metric for metric in metrics.declared() if {"link", "source"} & set(metric._labelnames)]


@pytest.fixture(autouse=True)
def _no_series_of_other_tests() -> None:
    for metric in LINK_METRICS:
        assert isinstance(metric, MetricWrapperBase)
        metric.clear()


def num_series() -> int:
    return sum(len(family.samples) for metric in LINK_METRICS for family in metric.collect())


async def look(links: PeerLinks, registry: Registry, *present: WorkerRecord) -> None:
    registry.present = [HERE, *present]
    await links.run()


def links_and_registry(grace_s: float) -> tuple[PeerLinks, Registry]:
    mailbox: Mailbox[DecodeCommand] = Mailbox(8)
    registry = Registry()
    return make_links(registry, Puller(mailbox), mailbox, grace_s), registry


def test_a_drained_source_leaves_no_series():
    async def observe() -> None:
        links, registry = links_and_registry(grace_s=3600.0)
        await look(links, registry, prefill_record(1))
        links.observe_pull(WorkerId("prefill-0"), PullEvent(PULL, PullOutcome.DONE, 64, 0.1))
        assert link_state() == 1
        await look(links, registry, replace(prefill_record(1), status=WorkerStatus.DRAINING))
        assert link_state() == 1
        await look(links, registry)

    asyncio.run(observe())
    assert num_series() == 0


def test_a_killed_source_is_at_0_until_its_grace_ends():
    async def observe() -> None:
        links, registry = links_and_registry(grace_s=3600.0)
        await look(links, registry, prefill_record(1))
        await look(links, registry)
        assert link_state() == 0
        links._liveness._grace_s = 0.0
        await look(links, registry)

    asyncio.run(observe())
    assert num_series() == 0


def test_a_source_that_was_never_linked_leaves_no_series(monkeypatch: pytest.MonkeyPatch):
    async def observe() -> None:
        links, registry = links_and_registry(grace_s=3600.0)
        monkeypatch.setattr(type(links), "_hello", PeerLinks._hello)  # the address leads nowhere
        await look(links, registry, prefill_record(1))
        assert link_state() == 0
        await look(links, registry)

    asyncio.run(observe())
    assert num_series() == 0


def test_a_late_pull_event_creates_no_series():
    links, _ = asyncio.run(_made())
    links.observe_pull(WorkerId("prefill-0"), PullEvent(PULL, PullOutcome.DONE, 64, 0.1))
    assert num_series() == 0


async def _made() -> tuple[PeerLinks, Registry]:
    return links_and_registry(grace_s=0.0)


@pytest.mark.parametrize(("path", "warned"), [(TCP_PATH, True), ("nixl/ucx (cma)", False), ("stream", False)])
def test_a_link_of_nixl_over_tcp_is_logged_as_a_danger(path: str, warned: bool, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(Puller, "transport", path)
    links, registry = links_and_registry(grace_s=3600.0)
    with structlog.testing.capture_logs() as logs:
        asyncio.run(look(links, registry, prefill_record(1)))
    assert ("link_over_tcp" in [entry["event"] for entry in logs]) == warned


def transport_labels() -> set[str]:
    samples = [sample for family in metrics.LINK_TRANSPORT_INFO.collect() for sample in family.samples]
    return {sample.labels["transport"] for sample in samples if sample.value == 1}


def test_the_label_of_a_link_follows_its_path(monkeypatch: pytest.MonkeyPatch):
    """A reader of the stream that falls back to calls, and returns: never two labels, never an old one."""

    async def observe() -> None:
        links, registry = links_and_registry(grace_s=3600.0)
        for path in ("stream/tcp", "stream/grpc", "stream/tcp"):
            monkeypatch.setattr(Puller, "path", lambda puller, source, path=path: path)
            if not links.up():
                await look(links, registry, prefill_record(1))
            links.observe_pull(WorkerId("prefill-0"), PullEvent(PULL, PullOutcome.DONE, 64, 0.1))
            assert transport_labels() == {path}
            assert [record.path for record in links.records()] == [link.path for link in links.up()] == [path]
        await look(links, registry, replace(prefill_record(1), status=WorkerStatus.DRAINING))
        await look(links, registry)

    asyncio.run(observe())
    assert num_series() == 0


@pytest.mark.parametrize(
    ("outcome", "num_bytes", "follows"),
    [(PullOutcome.DONE, 64, True), (PullOutcome.FAILED, 0, False), (PullOutcome.FAILED, 64, False)],
)
def test_a_pull_that_failed_tells_no_path(
    outcome: PullOutcome, num_bytes: int, follows: bool, monkeypatch: pytest.MonkeyPatch
):
    """NIXL forgets the path of a link that it has lost, and the event of its last pull comes after that."""
    links, registry = links_and_registry(grace_s=3600.0)
    monkeypatch.setattr(Puller, "path", lambda puller, source: "nixl/ucx (cma)")
    asyncio.run(look(links, registry, prefill_record(1)))
    monkeypatch.setattr(Puller, "path", lambda puller, source: UNKNOWN_PATH)
    links.observe_pull(WorkerId("prefill-0"), PullEvent(PULL, outcome, num_bytes, 0.1))
    path = UNKNOWN_PATH if follows else "nixl/ucx (cma)"
    assert transport_labels() == {path}
    assert [record.path for record in links.records()] == [path]
