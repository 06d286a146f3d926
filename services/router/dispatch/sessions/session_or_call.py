"""Decides how a router asks its workers: in the session of a worker that serves it there, else by a call.

Both ways end alike. A session that breaks resumes; when it is lost, what was asked in it fails as a call that broke.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import AsyncIterator, Awaitable, Callable
from functools import partial
from typing import Any, Protocol

import grpc

from baton.domain.errors import WorkerLost
from baton.domain.worker import WorkerRecord, WorkerRole
from baton.rpc.gen import common_pb2, decode_pb2, prefill_pb2
from baton.rpc.request_metadata import Metadata
from baton.services.router.dispatch.sessions.session_stream import SessionStream
from baton.services.router.dispatch.worker_errors import (
    AttemptFailure,
    FaultSource,
    classify_rpc_error,
    lost_worker,
)
from baton.services.router.dispatch.workers import WorkerSet

DECODE = WorkerRole.DECODE

GenerateCall = grpc.aio.UnaryStreamCall[decode_pb2.GenerateRequest, decode_pb2.GenerateEvent]


def open_generate(
    workers: WorkerSet,
    worker: WorkerRecord,
    request: decode_pb2.GenerateRequest,
    timeout_s: float,
    metadata: Metadata,
) -> GenerateCall | SessionStream:
    """Starts an attempt on a decode worker. `timeout_s`: of a call; in a session the caller has the deadline."""
    sessions = workers.worker_sessions
    if sessions is not None and sessions.serves(worker):
        return sessions.open(worker, request, metadata)
    call: GenerateCall = workers.decode_stub(worker).Generate(request, timeout=timeout_s, metadata=metadata)
    return call


async def send_reserve(
    workers: WorkerSet,
    worker: WorkerRecord,
    request: decode_pb2.ReserveRequest,
    timeout_s: float,
    metadata: Metadata,
    deadline: float = math.inf,
) -> decode_pb2.ReserveReply:
    """The reply of a decode worker. Raises `AttemptFailure`, or the worker's error that ends the request.

    Raises `TimeoutError` at `deadline`, on the loop's clock.
    """
    sessions = workers.worker_sessions
    if sessions is not None and sessions.takes_opens(worker):
        return await _read_reply(sessions.reserve(worker, request, metadata), timeout_s, deadline)
    async with asyncio.timeout_at(deadline if deadline < math.inf else None):
        return await _call_reserve(workers, worker, request, timeout_s, metadata)


async def _call_reserve(
    workers: WorkerSet, worker: WorkerRecord, request: decode_pb2.ReserveRequest, timeout_s: float, metadata: Metadata
) -> decode_pb2.ReserveReply:
    try:
        reply: decode_pb2.ReserveReply = await workers.decode_stub(worker).Reserve(
            request, timeout=timeout_s, metadata=metadata
        )
    except grpc.aio.AioRpcError as error:
        raise classify_rpc_error(error, DECODE) from None
    except asyncio.CancelledError:
        task = asyncio.current_task()
        if task is not None and task.cancelling():
            raise
        # Closing the channel of a lost worker cancelled the call.
        raise lost_worker(DECODE, "was lost before it replied") from None
    return reply


async def _read_reply(stream: SessionStream, timeout_s: float, deadline: float) -> decode_pb2.ReserveReply:
    """As `send_reserve`. A timer cancels the stream: it costs less than `asyncio.timeout`, and serves for both ends."""
    loop = asyncio.get_running_loop()
    gives_up_at = loop.time() + timeout_s
    timer = loop.call_at(min(gives_up_at, deadline), stream.cancel)
    try:
        reply: Any = await stream.read()  # the stream brings nothing but replies
    except asyncio.CancelledError:
        task = asyncio.current_task()
        if task is not None and task.cancelling():
            raise
        if deadline <= gives_up_at:
            raise TimeoutError from None
        raise lost_worker(DECODE, "did not reply in time") from None
    except WorkerLost as lost:
        raise AttemptFailure(lost, FaultSource.DECODE) from None
    finally:
        timer.cancel()
        stream.cancel()
    if reply is None:
        raise lost_worker(DECODE, "ended a reservation without a reply")
    answer: decode_pb2.ReserveReply = reply
    return answer


class PrefillCall(Protocol):
    """The events of a prompt, in order. Reading raises `AioRpcError` when its worker is lost."""

    def cancel(self) -> object:
        """Ends them here and at the worker. A reader gets `CancelledError`."""
        ...

    def __aiter__(self) -> AsyncIterator[prefill_pb2.PrefillEvent]: ...


def open_prefill(
    workers: WorkerSet,
    worker: WorkerRecord,
    request: prefill_pb2.PrefillRequest,
    timeout_s: float,
    metadata: Metadata,
) -> PrefillCall | SessionStream:
    """Starts a prompt on a prefill worker. `timeout_s`: of a call; in a session its attempt has the deadline."""
    sessions = workers.worker_sessions
    if sessions is not None and sessions.takes_opens(worker):
        return sessions.prefill(worker, request, metadata)
    call: PrefillCall = workers.prefill_stub(worker).Prefill(request, timeout=timeout_s, metadata=metadata)
    return call


def send_abort(
    workers: WorkerSet, worker: WorkerRecord, request: common_pb2.AbortRequest, timeout_s: float, metadata: Metadata
) -> Callable[[], Awaitable[None]] | None:
    """Sends an abort behind what was opened in the worker's session, and returns None.

    Where there is no session, or it has ended or leaves, returns the call, which the caller makes and awaits.
    """
    sessions = workers.worker_sessions
    if sessions is not None and sessions.abort(worker, request):
        return None
    return partial(_call_abort, workers, worker, request, timeout_s, metadata)


async def _call_abort(
    workers: WorkerSet, worker: WorkerRecord, request: common_pb2.AbortRequest, timeout_s: float, metadata: Metadata
) -> None:
    prefill = worker.role is WorkerRole.PREFILL
    stub = workers.prefill_stub(worker) if prefill else workers.decode_stub(worker)
    await stub.Abort(request, timeout=timeout_s, metadata=metadata)
