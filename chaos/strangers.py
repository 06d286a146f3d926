"""Faults of strangers: who calls without a token, writes into Redis, takes a worker's id, or joins with other weights.

Each returns once what it did was refused, and raises `WaitTimeout` or `StrangerError` if it was not: the cell's other
checks then show whether it did harm. Called by `faults`; `end_intruders` undoes all of them.
"""

from __future__ import annotations

import asyncio
import itertools
import secrets
import shutil
from functools import partial
from pathlib import Path
from typing import Any, cast

import grpc
from redis.asyncio import Redis

from baton.domain.ids import OwnerId, RequestId, WorkerId
from baton.rpc.call_token import TOKEN_BYTES
from baton.session.wires.socket_connection import LENGTH, MAGIC, REFUSED
from baton.settings.model_source import resolve_model
from baton.store.options import StoreOptions
from baton.store.redis.keys import RedisKeys
from baton.store.store import CallStatus
from baton.worker.lifecycle import EXIT_ID_TAKEN
from chaos.harness import ChaosHarness, PhaseContext
from chaos.testbed.cluster import ChaosCluster, eventually
from chaos.testbed.process import ChildProcess

NUM_CALLS = 24
BODY_BYTES = 15 * 1024 * 1024
SESSION_BYTES = 1024 * 1024
METHODS = {"prefill": "/baton.v1.Prefill/Prefill", "decode": "/baton.v1.Decode/Generate"}
CALL_TIMEOUT_S = 30.0
REFUSED_TIMEOUT_S = 40.0
STRANGER = "stranger"
INTRUDER = "intruder"
BLACK_HOLES = itertools.count(1)
"""Numbers of addresses where nobody listens: a router tells a reason once, so each play has its own."""


class StrangerError(Exception):
    """A stranger was not refused."""


async def send_bodies(harness: ChaosHarness, context: PhaseContext) -> None:
    """Sends the largest bodies without a call token to the pair of the request, all at once.

    Then forged tokens with a body to its ports of sessions: what comes back is a refusal, or nothing.
    """
    body = b"\x0a" + bytes(BODY_BYTES)
    pair = [harness.cluster.processes[name] for name in (context.prefill, context.decode) if name]
    workers = pair or [harness.cluster.processes[name] for name in harness.cluster.names("prefill", "decode")]
    codes = await asyncio.gather(*(_flood(worker, body) for worker in workers))
    others = {code for each in codes for code in each} - {grpc.StatusCode.UNAUTHENTICATED}
    if others:
        raise StrangerError(f"calls without a call token ended with {others}")
    addresses = {record.session_address for record in await harness.cluster.store.workers()} - {""}
    answers = {answer for each in await asyncio.gather(*map(_flood_sessions, addresses)) for answer in each}
    if answers - {b"", LENGTH.pack(REFUSED)}:
        raise StrangerError(f"connections of sessions with forged tokens were answered with {answers}")


async def _flood(worker: ChildProcess, body: bytes) -> list[grpc.StatusCode]:
    async def call(channel: grpc.aio.Channel) -> grpc.StatusCode:
        method: Any = channel.unary_stream(METHODS[worker.role])
        try:
            async for _ in method(body, timeout=CALL_TIMEOUT_S):
                pass
        except grpc.aio.AioRpcError as error:
            return error.code()
        return grpc.StatusCode.OK

    async with grpc.aio.insecure_channel("{}:{}".format(*worker.address)) as channel:
        return list(await asyncio.gather(*(call(channel) for _ in range(NUM_CALLS))))


async def _flood_sessions(address: str) -> list[bytes]:
    """How each connection was answered: the first bytes, or none."""
    host, _, port = address.rpartition(":")

    async def connect() -> bytes:
        try:
            reader, writer = await asyncio.open_connection(host, int(port))
        except OSError:
            return b""
        try:
            writer.write(MAGIC + secrets.token_bytes(TOKEN_BYTES) + LENGTH.pack(SESSION_BYTES) + bytes(SESSION_BYTES))
            async with asyncio.timeout(CALL_TIMEOUT_S):
                return await reader.readexactly(LENGTH.size)
        except (OSError, asyncio.IncompleteReadError):  # a reset may come before the refusal was read
            return b""
        finally:
            writer.transport.abort()

    return list(await asyncio.gather(*(connect() for _ in range(NUM_CALLS))))


async def write_into_redis(harness: ChaosHarness, context: PhaseContext) -> None:
    """Adds a worker at another address to each record of one, and an orphaned call to each one.

    A router that believed the first would send prompts there, and the cell's answers would miss them. One that
    believed the second would do the work: refused calls are counted. Each router that reads the store names the worker.
    Before there is a record to copy it waits: those of workers that were late to announce themselves have expired.
    """
    cluster = harness.cluster
    num_before, address = await _num_unsealed(cluster), f"127.0.66.{next(BLACK_HOLES) % 255}:9"
    logs = [cluster.processes[name].log for name in cluster.names("router")]

    async def refused() -> bool:
        await _forge_calls(redis)  # again: what was there at first may have ended before a router looked for it
        return await _num_unsealed(cluster) > num_before

    def told() -> bool:
        return all(_is_told(log, address) for log in logs)

    async with _redis(cluster) as redis:
        await eventually(partial(_forge_workers, redis, address), REFUSED_TIMEOUT_S, "a worker has a record")
        await eventually(partial(_forge_calls, redis), REFUSED_TIMEOUT_S, "the store has a call")
        await eventually(refused, REFUSED_TIMEOUT_S, "a router has refused a call that a stranger wrote")
        await eventually(told, REFUSED_TIMEOUT_S, "each router has told of a worker that a stranger wrote")


async def _forge_workers(redis: Redis, address: str) -> int:
    """Copies each worker's record with another address; returns how many there are. Adds a worker that is no record."""
    keys, num_forged = RedisKeys(StoreOptions().prefix), 0
    await redis.set(keys.worker(WorkerId(f"{STRANGER}-text")), "no hash")
    await redis.zadd(keys.workers, {f"{STRANGER}-text".encode(): 1e15, STRANGER.encode() + b"\xff": 1e15})
    for key in [key async for key in redis.scan_iter(match=keys.worker(WorkerId("*")), _type="hash")]:
        forged = f"{STRANGER}-{key.decode().rsplit(':', 1)[1]}"
        target = keys.worker(WorkerId(forged))
        await redis.copy(key, target, replace=True)
        record = cast("bytes | None", await redis.hget(target, "record"))
        if record is not None:  # else it has expired meanwhile
            name = key.decode().rsplit(":", 1)[1]
            record = record.replace(b'"id":"%s"' % name.encode(), b'"id":"%s"' % forged.encode(), 1)
            await redis.hset(target, "record", _moved(record, address))
            await redis.persist(target)
            await redis.zadd(keys.workers, {forged: 1e15})
            num_forged += 1
    return num_forged


async def _forge_calls(redis: Redis) -> int:
    """Copies calls as open ones of an owner that has no lease, each second one without its time; returns how many."""
    keys = RedisKeys(StoreOptions().prefix)
    found = [key async for key in redis.scan_iter(match=keys.call(RequestId("*")), _type="hash")]
    calls = [key for key in found if STRANGER.encode() not in key][:NUM_CALLS]
    for number, key in enumerate(calls):
        forged = f"{STRANGER}-{key.decode().rsplit(':', 1)[1]}"
        target = keys.call(RequestId(forged))
        await redis.copy(key, target, replace=True)
        orphan = {"id": forged, "owner": STRANGER, "status": CallStatus.OPEN.value}
        await redis.hset(target, mapping=cast("dict[Any, Any]", orphan))
        if number % 2:
            await redis.hdel(target, "opened")
        await redis.persist(target)  # an ended call expires, and so would its copy
        await redis.zadd(keys.calls_of(OwnerId(STRANGER)), {forged: 1.0})
        await redis.sadd(keys.owners, STRANGER)
    return len(calls)


async def take_an_id(harness: ChaosHarness, context: PhaseContext) -> None:
    """Starts a second process under the id of the request's prefill worker; it has to end by itself."""
    id = context.prefill or harness.cluster.names("prefill")[0]
    process = _start(harness, id, harness.cluster.shape.model)
    await eventually(lambda: not process.running, REFUSED_TIMEOUT_S, "the second process of an id has ended")
    if process.popen.returncode != EXIT_ID_TAKEN:
        raise StrangerError(f"the second process of {id} left with {process.popen.returncode}:\n{process.tail()}")


async def join_with_other_weights(harness: ChaosHarness, context: PhaseContext) -> None:
    """Starts a prefill worker with a copy of the model of which one bit in the middle differs. Nobody links with it."""
    process = await asyncio.to_thread(_start_changed, harness)

    def refused() -> bool:
        if not process.running:
            raise StrangerError(f"the worker with other weights has ended:\n{process.tail()}")
        lines = process.log.read_text(errors="replace").splitlines()
        return any("link_refused" in line and "weights: " in line for line in lines)

    await eventually(refused, REFUSED_TIMEOUT_S, "decode's link to the worker with other weights is refused")


def _start_changed(harness: ChaosHarness) -> ChildProcess:
    model = harness.cluster.shape.model
    copy = harness.cluster.folder / INTRUDER / model
    if not copy.exists():
        shutil.copytree(resolve_model(model), copy)
        weights = max(copy.glob("*.safetensors"), key=lambda path: path.stat().st_size)
        content = bytearray(weights.read_bytes())
        content[len(content) // 2] ^= 1
        weights.write_bytes(content)
    return _start(harness, INTRUDER, str(copy))


def _start(harness: ChaosHarness, id: str, model: str) -> ChildProcess:
    process = harness.cluster.start_intruder(INTRUDER, id, model)
    harness.intruders.append(process)
    return process


async def end_intruders(harness: ChaosHarness) -> None:
    """Ends the processes of strangers, and deletes what they wrote. Idempotent."""
    intruders, harness.intruders = harness.intruders, []
    for process in intruders:
        await asyncio.to_thread(process.kill)
    keys = RedisKeys(StoreOptions().prefix)
    async with _redis(harness.cluster) as redis:
        async for key in redis.scan_iter(match=f"{keys.prefix}*{STRANGER}*"):
            await redis.delete(key)
        ids = cast("list[bytes]", await redis.zrange(keys.workers, 0, -1))
        for forged in [id for id in ids if id.startswith(STRANGER.encode())]:
            await redis.zrem(keys.workers, forged)
        await redis.srem(keys.owners, STRANGER)


async def _num_unsealed(cluster: ChaosCluster) -> float:
    """Calls and what belongs to them that the routers did not open."""
    metrics = await cluster.all_metrics("router")
    return sum(each.sum("baton_store_unsealed_total") for each in metrics.values())


def _is_told(log: Path, address: str) -> bool:
    """True if a router has told of a worker at this address that it does not trust."""
    lines = log.read_text(errors="replace").splitlines()
    return any("worker_untrusted" in line and f"{address} is not trusted" in line for line in lines)


def _moved(record: bytes, address: str) -> bytes:
    """The record with another address."""
    head, name, rest = record.partition(b'"address":')
    if not name:
        return record
    first, quote, _ = rest.partition(b'"')
    return head + name + first + quote + address.encode() + rest[rest.index(b'"', len(first) + 1) :]


def _redis(cluster: ChaosCluster) -> Redis:
    assert cluster.redis.tcp_url is not None
    return Redis.from_url(cluster.redis.tcp_url)
