"""Aborts that are calls: they end alone, also where their router ends first."""

from __future__ import annotations

import gc
from types import SimpleNamespace
from typing import Any, cast

from baton.domain.ids import AttemptId, RequestId
from baton.domain.worker import WorkerRole
from baton.services.router.dispatch.aborts import Aborts

ID = AttemptId(RequestId("r"), 1)
WORKER = cast(Any, SimpleNamespace(id="decode-0", role=WorkerRole.DECODE))


class Stub:
    """Of a decode worker; lists the aborts that it gets."""

    def __init__(self) -> None:
        self.reasons: list[str] = []

    async def Abort(self, request: Any, timeout: float, metadata: object) -> None:  # gRPC's name
        self.reasons.append(request.reason)


def aborts_over(stub: Stub) -> Aborts:
    return Aborts(cast(Any, SimpleNamespace(worker_sessions=None, decode_stub=lambda _: stub)))


async def test_without_sessions_an_abort_is_a_call():
    stub = Stub()
    aborts = aborts_over(stub)
    aborts.send(ID, WORKER, "cancelled")
    assert stub.reasons == [], "nothing waits for it"
    await aborts.close()
    assert stub.reasons == ["cancelled"]


async def test_an_abort_that_never_starts_leaves_nothing_behind():
    """A router that is killed cancels it first. Python warns about a coroutine that nothing has awaited."""
    stub = Stub()
    aborts = aborts_over(stub)
    aborts.send(ID, WORKER, "cancelled")
    for task in aborts._in_progress:
        task.cancel()
    await aborts.close()
    gc.collect()
    assert stub.reasons == []
