"""`baton role WORKER_ID`: shows a worker's budgets, or changes them while it runs.

Budgets are what a role is: prompt tokens a step, rows, reservations. Nothing is dropped and the prefix cache stays.
"""

from __future__ import annotations

import asyncio
from typing import Annotated

import grpc
from cyclopts import Parameter

from baton.domain.errors import WorkerLost
from baton.domain.ids import WorkerId
from baton.rpc import codec
from baton.rpc.gen import worker_pb2
from baton.services.cli.settings import COMMANDS, RoleSettings
from baton.services.cli.workers.lookup import FoundWorker, found_worker
from baton.settings.base import refuse_unknown_variables

TIMEOUT_S = 60.0
"""Longer than the worker waits for its engine and for the state store."""


def role(
    worker_id: Annotated[str, Parameter(help="The worker's name, as it was given with --worker-id.")],
    /,
    *,
    settings: Annotated[RoleSettings | None, Parameter(name="*")] = None,
) -> int:
    """Show what a worker may take at once, or change it while the worker runs; nothing is dropped."""
    refuse_unknown_variables(COMMANDS.values())
    print(asyncio.run(_role(WorkerId(worker_id), settings or RoleSettings())))
    return 0


async def _role(id: WorkerId, settings: RoleSettings) -> str:
    async with found_worker(id, settings) as worker:
        budgets = await _set_budgets(worker, settings)
    reservations = budgets.reservations if budgets.HasField("reservations") else budgets.rows
    return f"{id}: prefill tokens {budgets.prefill_tokens}, rows {budgets.rows}, reservations {reservations}"


async def _set_budgets(worker: FoundWorker, settings: RoleSettings) -> worker_pb2.Budgets:
    """Raises the worker's refusal, which names the budget, or `WorkerLost`."""
    request = worker_pb2.SetBudgetsRequest(
        incarnation=worker.record.incarnation,
        prefill_tokens=settings.prefill_tokens,
        rows=settings.rows,
        reservations=settings.reservations,
    )
    try:
        budgets: worker_pb2.Budgets = await worker.stub.SetBudgets(request, timeout=TIMEOUT_S)
        return budgets
    except grpc.aio.AioRpcError as error:
        reported = codec.error_from_rpc(error)
        if isinstance(reported, WorkerLost):
            record = worker.record
            raise WorkerLost(f"{record.id} cannot be reached at {record.address}: {reported.log_text}") from None
        raise reported from None
