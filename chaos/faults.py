"""The faults: what is done to the cluster, or by a client, once a phase is reached.

Every fault is a function of the stage and the scene that returns when it has been done; `Cluster.revive` and
`calm_book` undo all of them. `matrix` is the caller.
"""

from __future__ import annotations

import asyncio
import enum
from collections.abc import Awaitable, Callable

from redis.asyncio import Redis

from chaos.cluster import REDIS
from chaos.flipper import FlipBudget
from chaos.phases import Phase
from chaos.proxy import Condition
from chaos.stage import Scene, Stage

SLOW = Condition(delay_s=0.15, bytes_per_s=2_000_000.0)
SLOW_BOOK = Condition(delay_s=0.2)
TINY_BYTES = 1


class Fault(enum.Enum):
    """What happens."""

    KILL_PREFILL = "kill -9 prefill"
    KILL_DECODE = "kill -9 decode"
    KILL_ROUTER = "kill -9 router"
    STOP_PREFILL = "SIGSTOP prefill"
    STOP_DECODE = "SIGSTOP decode"
    STOP_ROUTER = "SIGSTOP router"
    PART_WORKERS = "decode | prefill"
    PART_ROUTER_PREFILL = "router | prefill"
    PART_ROUTER_DECODE = "router | decode"
    SLOW_LINK = "slow decode - prefill"
    FLIP_ONCE = "a bit flips"
    FLIP_ALWAYS = "a worker's bits flip"
    DUPLICATE = "asked twice"
    HANG_UP = "client hangs up"
    KILL_BOOK = "kill -9 Redis"
    RESTART_BOOK = "Redis restarts"
    FULL_BOOK = "Redis full"
    SLOW_BOOK = "Redis slow"
    PART_BOOK = "all | Redis"

    @property
    def of_the_book(self) -> bool:
        """Whether it concerns Redis alone, so that nobody may be refused anything."""
        return self in (Fault.KILL_BOOK, Fault.RESTART_BOOK, Fault.FULL_BOOK, Fault.SLOW_BOOK, Fault.PART_BOOK)

    @property
    def loses_the_book(self) -> bool:
        """Whether Redis forgets everything."""
        return self in (Fault.KILL_BOOK, Fault.RESTART_BOOK)

    @property
    def ends(self) -> bool:
        """Whether it lasts for a while and is then over by itself, without a restart."""
        return self in _LASTING


_LASTING = frozenset(
    {
        Fault.STOP_PREFILL, Fault.STOP_DECODE, Fault.STOP_ROUTER, Fault.PART_WORKERS, Fault.PART_ROUTER_PREFILL,
        Fault.PART_ROUTER_DECODE, Fault.SLOW_LINK, Fault.FLIP_ALWAYS, Fault.FULL_BOOK, Fault.SLOW_BOOK, Fault.PART_BOOK,
    }
)  # fmt: skip
_NEEDS_PAGES_TO_COME = frozenset({Fault.FLIP_ONCE, Fault.FLIP_ALWAYS})
_BEFORE_PAGES = frozenset({Phase.QUEUED, Phase.PROMISED, Phase.PREFILLING, Phase.SEALED})


def makes_sense(phase: Phase, fault: Fault, transport: str) -> bool:
    """Pages can flip only while there are some to come, and only where a proxy carries them; likewise narrow ways."""
    if transport != "stream" and (fault in _NEEDS_PAGES_TO_COME or phase is Phase.SEALED):
        return False
    return fault not in _NEEDS_PAGES_TO_COME or phase in _BEFORE_PAGES


async def strike(fault: Fault, stage: Stage, scene: Scene) -> FlipBudget | None:
    """Does it. Returns what counts flipped frames, for faults that flip."""
    if fault in _NEEDS_PAGES_TO_COME:
        budget = FlipBudget(1 if fault is Fault.FLIP_ONCE else None)
        cluster = stage.cluster
        sources = cluster.names("prefill") if fault is Fault.FLIP_ONCE else [scene.prefill]
        cluster.network.change(cluster.names("decode"), sources, Condition(flips=budget))
        return budget
    await _STRIKES[fault](stage, scene)
    return None


async def calm_book(stage: Stage) -> None:
    """Undoes `FULL_BOOK`."""
    await _configure_book(stage, "0")


async def _kill(stage: Stage, name: str) -> None:
    await stage.cluster.kill(name)


async def _stop(stage: Stage, name: str) -> None:
    stage.cluster.processes[name].stop()


async def _part(stage: Stage, one: str, other: str) -> None:
    stage.cluster.network.part([one], [other])


async def _slow_link(stage: Stage, scene: Scene) -> None:
    stage.cluster.network.change(stage.cluster.names("decode"), stage.cluster.names("prefill"), SLOW)


async def _ask_again(stage: Stage, scene: Scene) -> None:
    """What a client does that thinks its request was lost: the same bytes again, to both routers."""
    for run in list(scene.runs):
        for router in (scene.router, scene.bystander):
            scene.runs.append(stage.ask(run.transcript.question, router))


async def _hang_up(stage: Stage, scene: Scene) -> None:
    await asyncio.gather(*(run.hang_up() for run in scene.runs))


async def _restart_book(stage: Stage, scene: Scene) -> None:
    await stage.cluster.kill(REDIS)
    await stage.cluster.start_redis()


async def _fill_book(stage: Stage, scene: Scene) -> None:
    await _configure_book(stage, str(TINY_BYTES))


async def _disturb_book(stage: Stage, condition: Condition) -> None:
    stage.cluster.network.change(stage.cluster.names(), [REDIS], condition)


async def _configure_book(stage: Stage, max_bytes: str) -> None:
    assert stage.cluster.redis.tcp_url is not None
    async with Redis.from_url(stage.cluster.redis.tcp_url) as client:
        await client.config_set("maxmemory-policy", "noeviction")
        await client.config_set("maxmemory", max_bytes)


_STRIKES: dict[Fault, Callable[[Stage, Scene], Awaitable[None]]] = {
    Fault.KILL_PREFILL: lambda stage, scene: _kill(stage, scene.prefill),
    Fault.KILL_DECODE: lambda stage, scene: _kill(stage, scene.decode),
    Fault.KILL_ROUTER: lambda stage, scene: _kill(stage, scene.router),
    Fault.STOP_PREFILL: lambda stage, scene: _stop(stage, scene.prefill),
    Fault.STOP_DECODE: lambda stage, scene: _stop(stage, scene.decode),
    Fault.STOP_ROUTER: lambda stage, scene: _stop(stage, scene.router),
    Fault.PART_WORKERS: lambda stage, scene: _part(stage, scene.decode, scene.prefill),
    Fault.PART_ROUTER_PREFILL: lambda stage, scene: _part(stage, scene.router, scene.prefill),
    Fault.PART_ROUTER_DECODE: lambda stage, scene: _part(stage, scene.router, scene.decode),
    Fault.SLOW_LINK: _slow_link,
    Fault.DUPLICATE: _ask_again,
    Fault.HANG_UP: _hang_up,
    Fault.KILL_BOOK: lambda stage, scene: _kill(stage, REDIS),
    Fault.RESTART_BOOK: _restart_book,
    Fault.FULL_BOOK: _fill_book,
    Fault.SLOW_BOOK: lambda stage, scene: _disturb_book(stage, SLOW_BOOK),
    Fault.PART_BOOK: lambda stage, scene: _disturb_book(stage, Condition(held=True)),
}
