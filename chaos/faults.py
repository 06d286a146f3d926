"""The faults: actions on the cluster, or of a client, once a phase is reached.

Every fault is a function of the harness and the context that returns once it is injected; `ChaosCluster.recover` and
`restore_redis_memory` undo all of them. `matrix` is the caller.
"""

from __future__ import annotations

import asyncio
import enum
from collections.abc import Awaitable, Callable, Sequence

from chaos import store_faults, strangers
from chaos.clients.silent import SilentClient
from chaos.harness import ChaosHarness, PhaseContext
from chaos.image_phases import flip_embeddings
from chaos.phases import RequestPhase
from chaos.testbed.bit_flipper import FlipBudget
from chaos.testbed.cluster import REDIS
from chaos.testbed.pool_corruptor import corrupt_pages, find_pool
from chaos.testbed.proxy import LinkCondition

SLOW = LinkCondition(delay_s=0.15, bytes_per_s=2_000_000.0)
SLOW_REDIS = LinkCondition(delay_s=0.2)
ROLL_BACK_AGE_S = 1.0
REST_TIMEOUT_S = 60.0
CLOCK_JUMP_S = 30.0
NUM_SILENT_CLIENTS = 4
SILENT_CHOICES = 4


class CorruptionError(Exception):
    """No byte of a pool was changed."""


class ClusterFault(enum.Enum):
    """Kinds of faults."""

    KILL_PREFILL = "kill -9 prefill"
    KILL_DECODE = "kill -9 decode"
    KILL_ENCODE = "kill -9 encode"
    KILL_ROUTER = "kill -9 router"
    STOP_PREFILL = "SIGSTOP prefill"
    STOP_DECODE = "SIGSTOP decode"
    STOP_ENCODE = "SIGSTOP encode"
    STOP_ROUTER = "SIGSTOP router"
    PARTITION_WORKERS = "decode | prefill"
    PARTITION_ROUTER_PREFILL = "router | prefill"
    PARTITION_ROUTER_DECODE = "router | decode"
    PARTITION_ENCODE = "prefill | encode"
    PARTITION_ROUTER_ENCODE = "router | encode"
    RESET_WORKERS = "decode - prefill reset"
    SLOW_LINK = "slow decode - prefill"
    SLOW_ENCODE = "slow prefill - encode"
    FLIP_ONCE = "a bit flips"
    FLIP_ALWAYS = "a worker's bits flip"
    DUPLICATE = "asked twice"
    HANG_UP = "client hangs up"
    KILL_REDIS = "kill -9 Redis"
    RESTART_REDIS = "Redis restarts"
    FULL_REDIS = "Redis full"
    SLOW_REDIS = "Redis slow"
    PARTITION_REDIS = "all | Redis"
    EMPTY_REDIS = "Redis emptied"
    ROLL_BACK_REDIS = "Redis rolled back"
    FILL_DISK = "Redis cannot save"
    CORRUPT_SOURCE = "a prefill pool rots"
    CORRUPT_CACHES = "idle pools rot"
    SILENT_CLIENTS = "clients that do not read"
    JUMP_FORWARD = "clocks jump ahead"
    JUMP_BACK = "clocks jump back"
    FLIP_MESSAGES = "messages' bits flip"
    STRANGE_CALLS = "strangers call"
    STRANGE_RECORDS = "a stranger writes Redis"
    SECOND_OF_ID = "a worker's id twice"
    OTHER_WEIGHTS = "other weights join"

    @property
    def is_redis_fault(self) -> bool:
        """True if it concerns Redis alone, so no request may be refused."""
        return self in (
            ClusterFault.KILL_REDIS,
            ClusterFault.RESTART_REDIS,
            ClusterFault.FULL_REDIS,
            ClusterFault.SLOW_REDIS,
            ClusterFault.PARTITION_REDIS,
            ClusterFault.EMPTY_REDIS,
            ClusterFault.ROLL_BACK_REDIS,
            ClusterFault.FILL_DISK,
        )

    @property
    def loses_store(self) -> bool:
        """True if Redis loses data, all or the newest."""
        return self in (
            ClusterFault.KILL_REDIS,
            ClusterFault.RESTART_REDIS,
            ClusterFault.EMPTY_REDIS,
            ClusterFault.ROLL_BACK_REDIS,
        )

    @property
    def is_transient(self) -> bool:
        """True if it lasts for a limited time and ends without a restart."""
        return self in _TRANSIENT


_TRANSIENT = frozenset(
    {
        ClusterFault.STOP_PREFILL, ClusterFault.STOP_DECODE, ClusterFault.STOP_ENCODE, ClusterFault.STOP_ROUTER,
        ClusterFault.PARTITION_WORKERS,
        ClusterFault.PARTITION_ROUTER_PREFILL, ClusterFault.PARTITION_ROUTER_DECODE, ClusterFault.SLOW_LINK,
        ClusterFault.PARTITION_ENCODE, ClusterFault.PARTITION_ROUTER_ENCODE, ClusterFault.SLOW_ENCODE,
        ClusterFault.FLIP_ALWAYS, ClusterFault.FULL_REDIS, ClusterFault.SLOW_REDIS, ClusterFault.PARTITION_REDIS,
        ClusterFault.FILL_DISK, ClusterFault.JUMP_FORWARD, ClusterFault.JUMP_BACK,
    }
)  # fmt: skip
STRANGERS = frozenset(
    {
        ClusterFault.STRANGE_CALLS, ClusterFault.STRANGE_RECORDS, ClusterFault.SECOND_OF_ID, ClusterFault.OTHER_WEIGHTS,
    }
)  # fmt: skip
_OF_MESSAGES = STRANGERS | {ClusterFault.FLIP_MESSAGES}
_WITH_MESSAGES = frozenset({RequestPhase.QUEUED, RequestPhase.RESERVED, RequestPhase.PREFILLING, RequestPhase.DECODING})
RESET_S = 0.05
"""Shorter than the pause between two refused dials of a session."""
NUM_FLIPPED_MESSAGES = 4
"""Below `max-attempts`: damaged messages alone cannot fail a request."""
_NEEDS_PENDING_PAGES = frozenset({ClusterFault.FLIP_ONCE, ClusterFault.FLIP_ALWAYS})
_SETTLED_AT_SOURCE = frozenset(
    {RequestPhase.QUEUED, RequestPhase.SEALED, RequestPhase.DECODING, RequestPhase.LAST_TOKEN}
)
"""Phases in which no prefill worker computes: its pages are settled, and only they are protected."""
_BEFORE_PAGES = frozenset({RequestPhase.QUEUED, RequestPhase.RESERVED, RequestPhase.PREFILLING, RequestPhase.SEALED})
_WHILE_IMPORTING = frozenset(
    {
        ClusterFault.KILL_PREFILL, ClusterFault.KILL_DECODE, ClusterFault.KILL_ROUTER, ClusterFault.STOP_DECODE,
        ClusterFault.PARTITION_WORKERS, ClusterFault.RESET_WORKERS, ClusterFault.HANG_UP,
    }
)  # fmt: skip
"""Faults of an import's source, its reader, what is between them, and its client."""

_WHILE_SHARING = frozenset(
    {ClusterFault.KILL_PREFILL, ClusterFault.STOP_PREFILL, ClusterFault.KILL_ROUTER, ClusterFault.HANG_UP}
)
"""Those of a source that is a prefill worker: both workers have one role, so no link between roles is theirs."""

_OF_ENCODE = frozenset(
    {
        ClusterFault.KILL_ENCODE, ClusterFault.STOP_ENCODE, ClusterFault.PARTITION_ENCODE,
        ClusterFault.PARTITION_ROUTER_ENCODE, ClusterFault.SLOW_ENCODE,
    }
)  # fmt: skip
_WHILE_ENCODING = frozenset(
    {
        ClusterFault.KILL_ENCODE, ClusterFault.STOP_ENCODE, ClusterFault.PARTITION_ROUTER_ENCODE,
        ClusterFault.KILL_ROUTER, ClusterFault.HANG_UP,
    }
)  # fmt: skip
"""Of an image that is on its way to its encode worker: which prefill worker will pull it is not known yet."""
_WHILE_PULLING = (_WHILE_ENCODING | _OF_ENCODE | _NEEDS_PENDING_PAGES) | {
    ClusterFault.KILL_PREFILL,
    ClusterFault.STOP_PREFILL,
}
"""Embeddings come by the stream there, whatever the transport of pages: bits flip where a proxy sees them."""


def is_applicable(phase: RequestPhase, fault: ClusterFault, transport: str) -> bool:
    """True if the fault can hit the phase: bits flip, and links throttle, only while pages pass a proxy."""
    if phase.has_image:
        return fault in (_WHILE_ENCODING if phase is RequestPhase.ENCODING else _WHILE_PULLING)
    if fault in _OF_ENCODE:
        return False
    if fault is ClusterFault.CORRUPT_SOURCE and phase not in _SETTLED_AT_SOURCE:
        return False
    if fault is ClusterFault.CORRUPT_CACHES and phase not in (RequestPhase.SEALED, RequestPhase.DECODING):
        return False
    if fault is ClusterFault.SILENT_CLIENTS and phase not in (RequestPhase.QUEUED, RequestPhase.DECODING):
        return False
    if fault in _OF_MESSAGES and phase not in _WITH_MESSAGES:
        return False
    if phase is RequestPhase.IMPORTING and (fault not in _WHILE_IMPORTING or transport != "stream"):
        return False
    if phase is RequestPhase.SHARING and (fault not in _WHILE_SHARING or transport != "stream"):
        return False
    if transport != "stream" and (fault in _NEEDS_PENDING_PAGES or phase is RequestPhase.SEALED):
        return False
    return fault not in _NEEDS_PENDING_PAGES or phase in _BEFORE_PAGES


async def inject_fault(fault: ClusterFault, harness: ChaosHarness, context: PhaseContext) -> FlipBudget | None:
    """Injects the fault. Returns a counter of flipped frames for faults that flip."""
    if fault in _NEEDS_PENDING_PAGES:
        budget = FlipBudget(1 if fault is ClusterFault.FLIP_ONCE else None)
        cluster = harness.cluster
        if context.encode:
            flip_embeddings(harness, budget)
            return budget
        sources = cluster.names("prefill") if fault is ClusterFault.FLIP_ONCE else [context.prefill]
        cluster.network.change(cluster.names("decode"), sources, LinkCondition(flips=budget))
        return budget
    if fault is ClusterFault.FLIP_MESSAGES:
        budget = FlipBudget(NUM_FLIPPED_MESSAGES, messages=True)
        cluster, workers = harness.cluster, harness.cluster.names("prefill", "decode")
        cluster.network.change(cluster.names("router", "decode"), workers, LinkCondition(flips=budget))
        return budget
    await _INJECTORS[fault](harness, context)
    return None


async def restore_redis_memory(harness: ChaosHarness) -> None:
    """Undoes `FULL_REDIS` and `FILL_DISK`."""
    await store_faults.restore_space(harness.cluster)


async def _kill(harness: ChaosHarness, name: str) -> None:
    await harness.cluster.kill(name)


async def _stop(harness: ChaosHarness, name: str) -> None:
    harness.cluster.processes[name].stop()


async def _partition(harness: ChaosHarness, one: str, other: str) -> None:
    harness.cluster.network.partition([one], [other])


async def _reset(harness: ChaosHarness, one: str, other: str) -> None:
    """Resets the connections between two processes, and new ones for `RESET_S`: a proxy restarts."""
    reset = LinkCondition(reset=True)
    harness.cluster.network.partition([one], [other], reset)
    await asyncio.sleep(RESET_S)  # the fault
    harness.cluster.network.end(reset)


async def _slow_link(harness: ChaosHarness, context: PhaseContext) -> None:
    harness.cluster.network.change(harness.cluster.names("decode"), harness.cluster.names("prefill"), SLOW)


async def _slow_encode(harness: ChaosHarness, context: PhaseContext) -> None:
    harness.cluster.network.change(harness.cluster.names("prefill"), harness.cluster.names("encode"), SLOW)


async def _ask_again(harness: ChaosHarness, context: PhaseContext) -> None:
    """Sends the same bytes again to both routers, like a client that believes its request lost."""
    for run in list(context.runs):
        for router in (context.router, context.other_router):
            context.runs.append(harness.ask(run.transcript.request, router))


async def _hang_up(harness: ChaosHarness, context: PhaseContext) -> None:
    await asyncio.gather(*(run.hang_up() for run in context.runs))


async def _restart_redis(harness: ChaosHarness, context: PhaseContext) -> None:
    await harness.cluster.kill(REDIS)
    await harness.cluster.start_redis()


async def _disturb_redis(harness: ChaosHarness, condition: LinkCondition) -> None:
    harness.cluster.network.change(harness.cluster.names(), [REDIS], condition)


async def _roll_back_redis(harness: ChaosHarness, context: PhaseContext) -> None:
    """Returns the store to a moment before the fault; without a snapshot in the context, to `ROLL_BACK_AGE_S` ago."""
    if context.snapshot is None:
        context.snapshot = await store_faults.take_snapshot(harness.cluster)
        await asyncio.sleep(ROLL_BACK_AGE_S)  # the fault: what is written meanwhile is lost
    await store_faults.roll_back(harness.cluster, context.snapshot)


async def _corrupt(harness: ChaosHarness, names: Sequence[str]) -> None:
    """Changes pages of these workers, which may leave as unfit and are restarted.

    Raises `PoolLocationError` or `CorruptionError`: such a cell would prove nothing."""
    processes = [harness.cluster.processes[name] for name in names]
    for process in processes:
        process.may_leave()
    num_pages = sum(corrupt_pages(process.pid, find_pool(process.log)) for process in processes)
    if not num_pages:
        raise CorruptionError(f"no page of {', '.join(names)} has content")


async def _corrupt_caches(harness: ChaosHarness, context: PhaseContext) -> None:
    """Corrupts the idle pools of the pair that answered, then asks again for all that is cached there.

    The other pair stays intact: workers whose memory rots leave, and someone has to answer.
    """
    await asyncio.gather(*(run.task for run in context.runs))
    await harness.cluster.wait_idle(REST_TIMEOUT_S)
    await _corrupt(harness, [context.prefill, context.decode])
    for run in list(context.runs):
        context.runs.append(harness.ask(run.transcript.request, context.router, context.other_router))


async def _jump(harness: ChaosHarness, seconds: float) -> None:
    """Moves the wall clocks of every other process, Redis included: hosts disagree. Needs a C++ compiler."""
    for name in [*harness.cluster.names()[::2], REDIS]:
        harness.cluster.clocks.jump(name, seconds)


async def _silent_clients(harness: ChaosHarness, context: PhaseContext) -> None:
    for _ in range(NUM_SILENT_CLIENTS):
        url = harness.cluster.processes[context.other_router].url
        harness.silent.append(await SilentClient.connect(url, harness.cluster.shape.model, SILENT_CHOICES))


_INJECTORS: dict[ClusterFault, Callable[[ChaosHarness, PhaseContext], Awaitable[None]]] = {
    ClusterFault.KILL_PREFILL: lambda harness, context: _kill(harness, context.prefill),
    ClusterFault.KILL_DECODE: lambda harness, context: _kill(harness, context.decode),
    ClusterFault.KILL_ENCODE: lambda harness, context: _kill(harness, context.encode),
    ClusterFault.KILL_ROUTER: lambda harness, context: _kill(harness, context.router),
    ClusterFault.STOP_PREFILL: lambda harness, context: _stop(harness, context.prefill),
    ClusterFault.STOP_DECODE: lambda harness, context: _stop(harness, context.decode),
    ClusterFault.STOP_ENCODE: lambda harness, context: _stop(harness, context.encode),
    ClusterFault.STOP_ROUTER: lambda harness, context: _stop(harness, context.router),
    ClusterFault.PARTITION_WORKERS: lambda harness, context: _partition(harness, context.decode, context.prefill),
    ClusterFault.PARTITION_ROUTER_PREFILL: lambda harness, context: _partition(
        harness, context.router, context.prefill
    ),
    ClusterFault.PARTITION_ROUTER_DECODE: lambda harness, context: _partition(harness, context.router, context.decode),
    ClusterFault.PARTITION_ENCODE: lambda harness, context: _partition(harness, context.prefill, context.encode),
    ClusterFault.PARTITION_ROUTER_ENCODE: lambda harness, context: _partition(harness, context.router, context.encode),
    ClusterFault.RESET_WORKERS: lambda harness, context: _reset(harness, context.decode, context.prefill),
    ClusterFault.SLOW_LINK: _slow_link,
    ClusterFault.SLOW_ENCODE: _slow_encode,
    ClusterFault.DUPLICATE: _ask_again,
    ClusterFault.HANG_UP: _hang_up,
    ClusterFault.KILL_REDIS: lambda harness, context: _kill(harness, REDIS),
    ClusterFault.RESTART_REDIS: _restart_redis,
    ClusterFault.FULL_REDIS: lambda harness, context: store_faults.fill(harness.cluster),
    ClusterFault.FILL_DISK: lambda harness, context: store_faults.fill_disk(harness.cluster),
    ClusterFault.EMPTY_REDIS: lambda harness, context: store_faults.empty(harness.cluster),
    ClusterFault.ROLL_BACK_REDIS: _roll_back_redis,
    ClusterFault.CORRUPT_SOURCE: lambda harness, context: _corrupt(harness, [context.prefill]),
    ClusterFault.CORRUPT_CACHES: _corrupt_caches,
    ClusterFault.SILENT_CLIENTS: _silent_clients,
    ClusterFault.JUMP_FORWARD: lambda harness, context: _jump(harness, CLOCK_JUMP_S),
    ClusterFault.JUMP_BACK: lambda harness, context: _jump(harness, -CLOCK_JUMP_S),
    ClusterFault.STRANGE_CALLS: strangers.send_bodies,
    ClusterFault.STRANGE_RECORDS: strangers.write_into_redis,
    ClusterFault.SECOND_OF_ID: strangers.take_an_id,
    ClusterFault.OTHER_WEIGHTS: strangers.join_with_other_weights,
    ClusterFault.SLOW_REDIS: lambda harness, context: _disturb_redis(harness, SLOW_REDIS),
    ClusterFault.PARTITION_REDIS: lambda harness, context: _disturb_redis(harness, LinkCondition(partitioned=True)),
}
