"""A few cells of the matrix, chosen for what they prove, on one cluster of real processes; `make chaos` plays all."""

from __future__ import annotations

from collections.abc import AsyncIterator

import pytest
import pytest_asyncio

from chaos.client import Client
from chaos.cluster import Shape, running_cluster
from chaos.faults import Fault
from chaos.matrix import Cell, play, prepare
from chaos.oracle import Oracle
from chaos.phases import Phase
from chaos.stage import Stage
from tests.redis_server import require_redis

pytestmark = [pytest.mark.integration, pytest.mark.asyncio(loop_scope="module")]

HOLD_S = 8.0
BOOK_HOLD_S = 3.0
"""Longer than an announcement is believed."""

CELLS = (
    Cell(Phase.PROMISED, Fault.DUPLICATE),
    Cell(Phase.PREFILLING, Fault.HANG_UP),
    Cell(Phase.SEALED, Fault.FLIP_ONCE),
    Cell(Phase.SEALED, Fault.PART_WORKERS),
    Cell(Phase.DECODING, Fault.FULL_BOOK),
    Cell(Phase.QUEUED, Fault.RESTART_BOOK),
    Cell(Phase.DECODING, Fault.STOP_DECODE),
    Cell(Phase.DECODING, Fault.KILL_ROUTER),
    Cell(Phase.DECODING, Fault.KILL_DECODE),
)


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def stage(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Stage]:
    require_redis()
    shape = Shape()
    async with running_cluster(shape, tmp_path_factory.mktemp("chaos")) as cluster:
        stage = Stage(cluster, Client(cluster.http, shape.model), Oracle(), HOLD_S, BOOK_HOLD_S)
        await prepare(stage)
        yield stage


@pytest.mark.parametrize("cell", CELLS, ids=str)
async def test_a_fault_in_a_phase(stage: Stage, cell: Cell) -> None:
    """Every answer is complete and the undisturbed one; afterwards nothing is held and everybody is in service."""
    result = await play(cell, stage)
    assert result.problems == ()
