"""A few cells of the matrix on one cluster of real processes; `make chaos` runs all."""

from __future__ import annotations

from collections.abc import AsyncIterator

import pytest
import pytest_asyncio

from chaos.checks.oracle import Oracle
from chaos.clients.client import ChaosClient
from chaos.faults import ClusterFault
from chaos.harness import ChaosHarness
from chaos.matrix import Cell, prepare, run_cell
from chaos.phases import RequestPhase
from chaos.testbed.cluster import ClusterShape, running_cluster
from chaos.testbed.metrics import ProcessMetrics
from tests.redis_server import require_redis

pytestmark = [pytest.mark.integration, pytest.mark.asyncio(loop_scope="module")]

HOLD_S = 8.0
REDIS_HOLD_S = 3.0
"""Longer than the lifetime of a registration."""

CELLS = (
    Cell(RequestPhase.RESERVED, ClusterFault.DUPLICATE),
    Cell(RequestPhase.IMPORTING, ClusterFault.KILL_DECODE),
    Cell(RequestPhase.DECODING, ClusterFault.HANG_UP),
    Cell(RequestPhase.DECODING, ClusterFault.PARTITION_ROUTER_DECODE),
    Cell(RequestPhase.SEALED, ClusterFault.FLIP_ONCE),
    Cell(RequestPhase.SEALED, ClusterFault.PARTITION_WORKERS),
    Cell(RequestPhase.DECODING, ClusterFault.FULL_REDIS),
    Cell(RequestPhase.QUEUED, ClusterFault.RESTART_REDIS),
    Cell(RequestPhase.DECODING, ClusterFault.STOP_DECODE),
    Cell(RequestPhase.DECODING, ClusterFault.KILL_ROUTER),
    Cell(RequestPhase.DECODING, ClusterFault.KILL_DECODE),
    Cell(RequestPhase.SEALED, ClusterFault.CORRUPT_SOURCE),
    Cell(RequestPhase.DECODING, ClusterFault.SILENT_CLIENTS),
    Cell(RequestPhase.DECODING, ClusterFault.FLIP_MESSAGES),
    Cell(RequestPhase.PREFILLING, ClusterFault.FLIP_MESSAGES),
    Cell(RequestPhase.PREFILLING, ClusterFault.RESET_WORKERS),
    Cell(RequestPhase.QUEUED, ClusterFault.STRANGE_RECORDS),
    Cell(RequestPhase.STREAMING, ClusterFault.STOP_ROUTER, ClusterFault.EMPTY_REDIS),
)


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def harness(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[ChaosHarness]:
    require_redis()
    shape = ClusterShape(forks=True)  # `make chaos` starts services as operators do
    async with running_cluster(shape, tmp_path_factory.mktemp("chaos")) as cluster:
        harness = ChaosHarness(cluster, ChaosClient(cluster.http, shape.model), Oracle(), HOLD_S, REDIS_HOLD_S)
        await prepare(harness)
        yield harness


async def test_sessions_have_sockets_behind_proxies(harness: ChaosHarness) -> None:
    """Comes first: a fault of a link between two processes concerns what a session says there."""
    cluster = harness.cluster
    workers, routers = cluster.names("prefill", "decode"), cluster.names("router")
    links = {(w.id, link.prefill_id) for w in await cluster.store.workers() for link in w.links}
    assert links >= {(d, p) for d in cluster.names("decode") for p in cluster.names("prefill")}
    passed = cluster.network.session_messages()
    assert {pair for pair in passed if passed[pair]} == links | {(r, w) for r in routers for w in workers}
    for metrics in (await cluster.all_metrics("router")).values():
        assert carried(metrics) == {"socket": len(workers), "grpc": 0}
    for name, metrics in (await cluster.all_metrics("prefill", "decode")).items():
        num_links = sum(name in link for link in links)
        assert carried(metrics) == {"socket": len(routers) + num_links, "grpc": 0}, "of routers, readers and sources"


def carried(metrics: ProcessMetrics) -> dict[str, float]:
    """Connections of sessions by what they are."""
    return {wire: metrics.sum("baton_session_connections", wire=wire) for wire in ("socket", "grpc")}


@pytest.mark.parametrize("cell", CELLS, ids=str)
async def test_a_fault_in_a_phase(harness: ChaosHarness, cell: Cell) -> None:
    """Every answer is complete and undisturbed. Afterwards no page is held and every process is in service."""
    result = await run_cell(cell, harness)
    assert result.problems == ()
