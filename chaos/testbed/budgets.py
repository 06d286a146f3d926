"""Changes a worker's budgets while it runs, as `baton role` does. Used by phases that choose the worker of a prompt."""

from __future__ import annotations

from baton.domain.trust import ClusterTrust
from baton.rpc.channel_pool import ChannelPool
from baton.rpc.gen import worker_pb2, worker_pb2_grpc
from baton.store.store import WorkerRegistry

TIMEOUT_S = 10.0


async def set_prefill_tokens(registry: WorkerRegistry, trust: ClusterTrust, name: str, num_tokens: int) -> None:
    """Sets the prompt tokens a step of the worker `name`; 0: it takes no new prompt, and still gives its pages.

    Returns when the worker has announced it. Raises `grpc.aio.AioRpcError` without an answer, `KeyError` if it is not
    registered.
    """
    record = {worker.id.partition(".")[0]: worker for worker in await registry.workers()}[name]
    channels = ChannelPool(trust)
    try:
        stub = worker_pb2_grpc.WorkerStub(channels.get(record.address, record.incarnation))
        request = worker_pb2.SetBudgetsRequest(incarnation=record.incarnation, prefill_tokens=num_tokens)
        await stub.SetBudgets(request, timeout=TIMEOUT_S)
    finally:
        await channels.close()
