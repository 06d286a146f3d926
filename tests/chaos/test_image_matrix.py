"""A few cells of the matrix whose requests have images, on one cluster with encode workers; `make chaos` runs all."""

from __future__ import annotations

from collections.abc import AsyncIterator

import pytest
import pytest_asyncio

from chaos.checks.oracle import Oracle
from chaos.clients.client import ChaosClient
from chaos.faults import ClusterFault
from chaos.harness import ChaosHarness
from chaos.image_phases import image_shape
from chaos.matrix import Cell, prepare, run_cell
from chaos.phases import RequestPhase
from chaos.testbed.cluster import running_cluster
from tests.redis_server import require_redis

pytestmark = [pytest.mark.integration, pytest.mark.asyncio(loop_scope="module")]

HOLD_S = 8.0
REDIS_HOLD_S = 3.0

CELLS = (
    Cell(RequestPhase.PULLING, ClusterFault.FLIP_ALWAYS),
    Cell(RequestPhase.PULLING, ClusterFault.PARTITION_ENCODE),
    Cell(RequestPhase.PULLING, ClusterFault.STOP_ENCODE),
    Cell(RequestPhase.ENCODING, ClusterFault.PARTITION_ROUTER_ENCODE),
)


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def harness(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[ChaosHarness]:
    require_redis()
    shape = image_shape("stream", forks=True)
    async with running_cluster(shape, tmp_path_factory.mktemp("chaos")) as cluster:
        harness = ChaosHarness(cluster, ChaosClient(cluster.http, shape.model), Oracle(), HOLD_S, REDIS_HOLD_S)
        await prepare(harness)
        yield harness


@pytest.mark.parametrize("cell", CELLS, ids=str)
async def test_a_fault_while_an_image_is_on_its_way(harness: ChaosHarness, cell: Cell) -> None:
    """Every answer is the undisturbed one: an image that is late, lost or changed costs a pause, and no more."""
    result = await run_cell(cell, harness)
    assert result.problems == ()
    assert result.num_answers >= 2
