"""How a request is brought into a phase; that it is there is known from tokens heard and from gauges, never from time.

    queued        the router's door is full of streams; one more waits in front of it
    promised      decode has promised room; prefill workers compute other long prompts, this one waits there
    prefilling    chunks of a long prompt are computed, announced and pulled: pages pass, and no token was heard
    sealed        the first token was heard, and the ways between workers are so narrow that the pages are not all there
    decoding      tokens come, of a greedy, a seeded (n=2), a chat and a stop-string call at once
    last token    all tokens but one were heard

`reach` is called by `matrix`.
"""

from __future__ import annotations

import asyncio
import enum
from collections import Counter
from collections.abc import Awaitable, Callable

from chaos.client import Question
from chaos.cluster import eventually
from chaos.gauges import Gauges
from chaos.proxy import Condition
from chaos.questions import FILLER, LONG, LONGISH, SEEDED_PAIR, SEVERAL_PAGES, SHORT, STEADY, STOPPED, TALK
from chaos.stage import Run, Scene, Stage

REACH_TIMEOUT_S = 40.0
NARROW = Condition(bytes_per_s=100_000.0)
"""A page of the bundled model takes half a second."""


class Phase(enum.Enum):
    """Where a request is when the fault comes."""

    QUEUED = "queued"
    PROMISED = "promised"
    PREFILLING = "prefilling"
    SEALED = "sealed"
    DECODING = "decoding"
    LAST_TOKEN = "last token"


async def reach(phase: Phase, stage: Stage) -> Scene:
    """Asks what is needed and returns when the phase is there. Raises `NotInTime`."""
    routers = stage.cluster.names("router")
    scene = Scene([], routers[0], routers[-1])
    async with asyncio.timeout(REACH_TIMEOUT_S + 5.0):
        match phase:
            case Phase.QUEUED:
                await _queue(stage, scene)
            case Phase.PROMISED:
                await _promise(stage, scene)
            case Phase.PREFILLING:
                await _prefill(stage, scene)
            case Phase.SEALED:
                await _seal(stage, scene)
            case Phase.DECODING:
                await _decode(stage, scene)
            case Phase.LAST_TOKEN:
                run = _ask(stage, scene, SHORT)
                await run.transcript.until_tokens(int(SHORT.parameters["max_tokens"]) - 1)
    await _find_hands(stage, scene)
    return scene


def _ask(stage: Stage, scene: Scene, *questions: Question) -> Run:
    """Asks the scene's router, and the bystander when that one is lost; returns the last run."""
    for question in questions:
        scene.runs.append(stage.ask(stage.fresh(question), scene.router, scene.bystander))
    return scene.runs[-1]


async def _queue(stage: Stage, scene: Scene) -> None:
    room = int(str(stage.cluster.shape.router_flags["max-running-requests"]))

    async def waits() -> bool:
        gauges = await _look(stage, scene, "router")
        return scene.router in gauges and gauges[scene.router].sum("baton_queued_requests") > 0

    await _until(waits, stage, scene, *[FILLER] * room, SHORT)


async def _promise(stage: Stage, scene: Scene) -> None:
    """A prefill worker computes one prompt at a time, and there is one prompt more than workers."""

    async def waits() -> bool:
        gauges = await _look(stage, scene, "prefill")
        return any(g.sum("baton_waiting_requests") > 0 and g.busy_pages > 0 for g in gauges.values())

    await _until(waits, stage, scene, *[LONGISH] * stage.cluster.shape.num_prefill, SEVERAL_PAGES)


async def _prefill(stage: Stage, scene: Scene) -> None:
    """Where a proxy sees pages pass, it is asked: a worker that computes may take seconds to answer a scrape."""
    before = stage.cluster.network.page_frames()

    async def lands() -> bool:
        if stage.cluster.shape.transport == "stream":
            return _see_pages(stage, scene, before)
        gauges = await _look(stage, scene, "prefill", "decode")
        landing = any(g.sum("baton_kv_pages", owner="promised") > 0 for g in gauges.values())
        return landing and any(g.sum("baton_kv_pages", owner="pinned") > 0 for g in gauges.values())

    await _until(lands, stage, scene, LONG)


def _see_pages(stage: Stage, scene: Scene, before: Counter[tuple[str, str]]) -> bool:
    """Whether pages have passed since `before`; names the pair between which most did."""
    passed = stage.cluster.network.page_frames() - before
    if passed:
        [((scene.decode, scene.prefill), _)] = passed.most_common(1)
    return bool(passed)


async def _until(condition: Callable[[], Awaitable[bool]], stage: Stage, scene: Scene, *questions: Question) -> None:
    """Asks, and looks until the condition holds; asks again when all were answered before it was seen to hold."""

    async def asked_and_seen() -> bool:
        if all(run.task.done() for run in scene.runs):
            _ask(stage, scene, *questions)
        return await condition()

    await eventually(asked_and_seen, REACH_TIMEOUT_S, "the phase")


async def _seal(stage: Stage, scene: Scene) -> None:
    cluster = stage.cluster
    before = cluster.network.page_frames()
    cluster.network.change(cluster.names("decode"), cluster.names("prefill"), NARROW)
    run = _ask(stage, scene, SEVERAL_PAGES)
    await run.transcript.until_tokens(1)
    _see_pages(stage, scene, before)


async def _decode(stage: Stage, scene: Scene) -> None:
    _ask(stage, scene, STEADY, SEEDED_PAIR, TALK, STOPPED)
    await _hear_first_tokens(scene)
    await scene.runs[0].transcript.until_tokens(8)


async def _hear_first_tokens(scene: Scene) -> None:
    await asyncio.gather(*(run.transcript.until_tokens(1) for run in scene.runs))


async def _look(stage: Stage, scene: Scene, *roles: str) -> dict[str, Gauges]:
    """Reads gauges, and names the workers that hold most pages: they have the request, or most of them, in hand."""
    gauges = await stage.cluster.all_gauges(*roles)
    for role in ("prefill", "decode"):
        held = {name: gauges[name].busy_pages for name in stage.cluster.names(role) if name in gauges}
        if any(held.values()):
            setattr(scene, role, max(held, key=lambda name: held[name]))
    return gauges


async def _find_hands(stage: Stage, scene: Scene) -> None:
    """Names a worker of each role, if the phase has not: by what they hold now, else the first."""
    if not (scene.prefill and scene.decode):
        await _look(stage, scene, "prefill", "decode")
    scene.prefill = scene.prefill or stage.cluster.names("prefill")[0]
    scene.decode = scene.decode or stage.cluster.names("decode")[0]
