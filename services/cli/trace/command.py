"""`baton trace ID`: the waterfall of one request over all processes; `--last N`, `--slowest N`: a list of requests.

Registered by `baton.services.cli.main`. Any router answers by HTTP: from its own records, or from the state store.
`--workers` adds what the workers measured, which also shows a request whose router has ended before it could record it.
"""

from __future__ import annotations

import asyncio
import contextlib
import sys
from collections.abc import Iterable, Sequence
from typing import Annotated

import grpc
import httpx2
import msgspec
from cyclopts import Parameter
from cyclopts.validators import Number

from baton.domain.errors import BatonError
from baton.domain.worker import WorkerRecord, WorkerRole
from baton.rpc.channel_pool import ChannelPool
from baton.rpc.gen import worker_pb2, worker_pb2_grpc
from baton.rpc.times_codec import decode_decode_times, decode_import_times, decode_prefill_times
from baton.services.cli.errors import EXIT_REFUSED
from baton.services.cli.settings import COMMANDS, TraceSettings
from baton.services.cli.trace.listing import MAX_LISTED, listing_lines, read_listing
from baton.services.router.cluster.snapshot import ListOrder
from baton.settings.base import refuse_unknown_variables
from baton.settings.trust import read_trust
from baton.store.connect import connect
from baton.telemetry.request_trace import AttemptTrace, RequestTrace, trace_json
from baton.telemetry.waterfall import waterfall, worker_lines

TIMEOUT_S = 10.0
_MAX_SHOWN_CHARS = 300

WorkerAttempts = Sequence[tuple[WorkerRecord, worker_pb2.AttemptTimes]]


class TraceNotFound(BatonError):
    """No record of the request was found."""

    code = "trace_not_found"


class _Answer(msgspec.Struct):
    """The part of `GET /v1/requests/{id}` that is shown."""

    status: str
    trace: RequestTrace | None = None


_Count = Number(gte=1, lte=MAX_LISTED)


def trace(
    id: Annotated[str, Parameter(help="The request's id, from `x-baton-request-id` or the answer's `id`.")] = "",
    /,
    *,
    last: Annotated[int | None, Parameter(validator=_Count, help="List so many requests that ended last.")] = None,
    slowest: Annotated[int | None, Parameter(validator=_Count, help="List so many of the slowest requests.")] = None,
    json: Annotated[bool, Parameter(negative=(), help="Print JSON: the record of a request, or the list.")] = False,
    settings: Annotated[TraceSettings | None, Parameter(name="*")] = None,
) -> int:
    """Show the waterfall of one request: stages, workers, attempts and transfer; or list the last or slowest ones."""
    refuse_unknown_variables(COMMANDS.values())
    chosen = settings or TraceSettings()
    counts = {ListOrder.NEWEST: last, ListOrder.SLOWEST: slowest}
    wanted = [(order, count) for order, count in counts.items() if count is not None]
    if len(wanted) + bool(id) != 1:
        print("baton: give one of ID, --last N and --slowest N, such as: baton trace --last 10", file=sys.stderr)
        return EXIT_REFUSED
    lines = _listing(*wanted[0], chosen, as_json=json) if wanted else _trace(id, chosen, as_json=json)
    for line in asyncio.run(lines):
        print(line)
    return 0


async def _listing(order: ListOrder, count: int, settings: TraceSettings, *, as_json: bool) -> list[str]:
    async with _client(settings) as client:
        return listing_lines(await read_listing(client, settings.router, order, count), as_json=as_json)


async def _trace(id: str, settings: TraceSettings, *, as_json: bool) -> list[str]:
    found = await _worker_attempts(id, settings) if settings.workers else []
    try:
        answer = await _ask_router(id, settings)
    except TraceNotFound:
        if not found or as_json:
            raise
        return [f"{id}: no router has a record; the workers measured:", *_attempt_lines(found)]
    if as_json:
        if answer.trace is None:
            raise TraceNotFound(f"{id}: {answer.status}; no router has recorded its times")
        return [trace_json(answer.trace).decode()]
    if answer.trace is not None:
        return [*waterfall(answer.trace), *(_attempt_lines(found) if found else [])]
    return [f"{id}: {answer.status}; no router has recorded its times", *_attempt_lines(found)]


def _client(settings: TraceSettings) -> httpx2.AsyncClient:
    key = settings.api_key
    headers = {} if key is None else {"authorization": f"Bearer {key.get_secret_value()}"}
    return httpx2.AsyncClient(timeout=TIMEOUT_S, trust_env=False, headers=headers)


async def _ask_router(id: str, settings: TraceSettings) -> _Answer:
    """The router's answer. Raises `TraceNotFound`, also if the router is not reachable."""
    async with _client(settings) as client:
        try:
            answer = await client.get(f"{settings.router.rstrip('/')}/v1/requests/{id}")
        except httpx2.TransportError as error:
            raise TraceNotFound(f"{settings.router} does not answer ({type(error).__name__}). Use --router.") from None
    if answer.status_code == httpx2.codes.OK:
        return msgspec.json.decode(answer.content, type=_Answer)
    raise TraceNotFound(f"{settings.router}: HTTP {answer.status_code}: {answer.text[:_MAX_SHOWN_CHARS]}")


async def _worker_attempts(id: str, settings: TraceSettings) -> WorkerAttempts:
    """The attempts of all sequences of the request, from the rings of all workers that answer."""
    trust = read_trust(settings)
    async with contextlib.AsyncExitStack() as stack:
        store = await connect(settings.redis_url)
        stack.push_async_callback(store.close)
        channels = ChannelPool(trust)
        stack.push_async_callback(channels.close)
        workers = [worker for worker in await store.workers() if trust.verify(worker)]
        replies = await asyncio.gather(*(_recent_attempts(channels, worker) for worker in workers))
    return [
        (worker, attempt)
        for worker, attempts in zip(workers, replies, strict=True)
        for attempt in attempts
        if attempt.id.request_id == id or attempt.id.request_id.startswith(f"{id}-")
    ]


async def _recent_attempts(channels: ChannelPool, worker: WorkerRecord) -> Iterable[worker_pb2.AttemptTimes]:
    stub = worker_pb2_grpc.WorkerStub(channels.get(worker.address, worker.incarnation))
    try:
        reply: worker_pb2.RecentAttemptsReply = await stub.RecentAttempts(
            worker_pb2.RecentAttemptsRequest(), timeout=TIMEOUT_S
        )
    except grpc.aio.AioRpcError:
        return ()  # a worker that is gone has nothing to show; the others have
    return tuple(reply.attempts)


def _attempt_lines(found: WorkerAttempts) -> list[str]:
    """Prefill's and decode's view of each attempt, joined."""
    joined: dict[tuple[str, int], AttemptTrace] = {}
    for worker, times in found:
        key = (times.id.request_id, times.id.attempt)
        before = joined.get(key, AttemptTrace(times.id.attempt, 0, 0))
        joined[key] = _merge(before, worker, times)
    return [line for attempt in joined.values() for line in worker_lines(attempt)]


def _merge(before: AttemptTrace, worker: WorkerRecord, times: worker_pb2.AttemptTimes) -> AttemptTrace:
    changes: dict[str, object] = {"prefill" if worker.role is WorkerRole.PREFILL else "decode": worker.id}
    if times.HasField("prefill"):
        changes["prefill_times"] = decode_prefill_times(times.prefill)
    if times.HasField("imported"):
        changes["import_times"] = decode_import_times(times.imported)
    if times.HasField("decode"):
        changes["decode_times"] = decode_decode_times(times.decode)
    if times.end_code:
        changes["end_code"] = times.end_code
    return msgspec.structs.replace(before, **changes)
