"""The Worker service: drains this worker, changes its budgets and returns recent attempts for operators.

Streams cache events to routers.

Runs in the asyncio loop of both kinds of workers, which give it the number of requests left.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncGenerator, Callable

import grpc

from baton.domain.errors import BatonError, WorkerLost
from baton.domain.ids import Incarnation, RequestId
from baton.domain.timing.attempt_times import DecodeTimes, ImportTimes, PrefillTimes, to_us
from baton.domain.worker import WorkerBudgets
from baton.kv.events.codec import join_keys, split_delta
from baton.kv.events.event import CacheDelta
from baton.rpc import codec
from baton.rpc.gen import worker_pb2, worker_pb2_grpc
from baton.rpc.times_codec import encode_decode_times, encode_import_times, encode_prefill_times
from baton.telemetry.logs import get_logger
from baton.worker.budget_control import BudgetChange, BudgetControl
from baton.worker.event_log import SharedEventLog
from baton.worker.lifecycle import WorkerLifecycle
from baton.worker.recent_attempts import RecentAttempt, RecentAttempts, monotonic_s

log = get_logger()

REPORT_INTERVAL_S = 0.5


class WorkerServicer(worker_pb2_grpc.WorkerServicer):
    """Serves operators and routers. Any number of `Drain` streams may report the same drain."""

    def __init__(
        self,
        incarnation: Incarnation,
        lifecycle: WorkerLifecycle,
        num_requests: Callable[[], int],
        recent: RecentAttempts,
        events: SharedEventLog,
        budgets: BudgetControl,
    ) -> None:
        self._incarnation = incarnation
        self._lifecycle = lifecycle
        self._num_requests = num_requests
        self._recent = recent
        self._events = events
        self._budgets = budgets

    async def Drain(
        self, request: worker_pb2.DrainRequest, context: grpc.aio.ServicerContext[object, object]
    ) -> AsyncGenerator[worker_pb2.DrainProgress, None]:
        """See worker.proto."""
        if request.incarnation != self._incarnation:
            await codec.abort(context, WorkerLost("the process that is meant has restarted"))
        log.info("drain_requested", peer=context.peer())
        self._lifecycle.stop()
        drained = self._lifecycle.drained
        while not drained.is_set():
            yield worker_pb2.DrainProgress(num_requests=self._num_requests())
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(REPORT_INTERVAL_S):
                    await drained.wait()
        yield worker_pb2.DrainProgress(num_requests=self._num_requests(), ended=True)

    async def SetBudgets(
        self, request: worker_pb2.SetBudgetsRequest, context: grpc.aio.ServicerContext[object, object]
    ) -> worker_pb2.Budgets:
        """See worker.proto."""
        if request.incarnation != self._incarnation:
            await codec.abort(context, WorkerLost("the process that is meant has restarted"))
        try:
            return encode_budgets(await self._budgets.change(_decode_change(request)))
        except BatonError as error:
            await codec.abort(context, error)

    async def RecentAttempts(
        self, request: worker_pb2.RecentAttemptsRequest, context: grpc.aio.ServicerContext[object, object]
    ) -> worker_pb2.RecentAttemptsReply:
        """See worker.proto."""
        found = self._recent.find(RequestId(request.request_id) if request.request_id else None)
        now = monotonic_s()
        return worker_pb2.RecentAttemptsReply(attempts=[_encode(parts, now) for parts in found.values()])

    async def CacheEvents(
        self, request: worker_pb2.CacheEventsRequest, context: grpc.aio.ServicerContext[object, object]
    ) -> AsyncGenerator[worker_pb2.CacheDelta, None]:
        """See worker.proto."""
        if request.incarnation != self._incarnation:
            await codec.abort(context, WorkerLost("the process that is meant has restarted"))
        await context.send_initial_metadata(())  # the reader is connected, even if there is no event for long
        async with contextlib.aclosing(self._events.follow(request.from_seq, self._lifecycle.drained)) as deltas:
            async for delta in deltas:
                for part, more in split_delta(delta):
                    yield encode_delta(part, more)


def encode_budgets(budgets: WorkerBudgets) -> worker_pb2.Budgets:
    """The message of a worker's budgets."""
    return worker_pb2.Budgets(
        prefill_tokens=budgets.prefill_tokens, rows=budgets.rows, reservations=budgets.reservations
    )


def _decode_change(request: worker_pb2.SetBudgetsRequest) -> BudgetChange:
    return BudgetChange(
        request.prefill_tokens if request.HasField("prefill_tokens") else None,
        request.rows if request.HasField("rows") else None,
        request.reservations if request.HasField("reservations") else None,
    )


def encode_delta(delta: CacheDelta, more: bool) -> worker_pb2.CacheDelta:
    """The message of a delta, or of a part that the next message continues."""
    return worker_pb2.CacheDelta(
        after_seq=delta.after_seq,
        seq=delta.seq,
        reset=delta.reset,
        stored=join_keys(delta.stored),
        removed=join_keys(delta.removed),
        more=more,
    )


def _encode(parts: list[RecentAttempt], now: float) -> worker_pb2.AttemptTimes:
    message = worker_pb2.AttemptTimes(id=codec.encode_id(parts[0].id), ended_us_ago=to_us(now - parts[-1].at))
    for part in parts:
        message.end_code = part.end_code or message.end_code
        match part.times:
            case PrefillTimes():
                message.prefill.CopyFrom(encode_prefill_times(part.times))
            case ImportTimes():
                message.imported.CopyFrom(encode_import_times(part.times))
            case DecodeTimes():
                message.decode.CopyFrom(encode_decode_times(part.times))
    return message
