"""Brings a request into a phase; received tokens and metrics show that it is there, never time.

    queued        the router's running slots are full of streams; one more waits in the admission queue
    reserved      decode has reserved pages; prefill workers compute other long prompts, this one waits there
    importing     a second turn: prefill reads the pages of the first answer from decode, over links so slow that most
                  are missing
    sharing       a prompt again, at another prefill worker: it reads the pages of the one that computed it first, over
                  such links
    prefilling    chunks of a long prompt are computed, announced and pulled: pages pass, and the client has no token
    sealed        the client has the first token, and links between workers are so slow that pages are missing
    decoding      tokens come, of a greedy, a seeded (n=2), a chat and a stop-string call at once
    last token    the client has all tokens but one
    streaming     a stream has begun that outlasts the first of two faults
    encoding      the file of an image is on its way to an encode worker, over a slow link
    pulling       its embedding is on its way from there to a prefill worker, over a slow link

`reach_phase` is called by `matrix`.
"""

from __future__ import annotations

import asyncio
import enum
from collections import Counter
from collections.abc import Awaitable, Callable
from dataclasses import replace

from chaos.clients.client import ClientRequest
from chaos.clients.requests import (
    FILLER,
    FIRST_TURN,
    LONG,
    LONGISH,
    MARATHON,
    SEEDED_PAIR,
    SEVERAL_PAGES,
    SHORT,
    STEADY,
    STOPPED,
    TALK,
    second_turn,
)
from chaos.harness import ChaosHarness, ClientRun, PhaseContext
from chaos.image_phases import reach_encoding, reach_pulling
from chaos.testbed.cluster import eventually
from chaos.testbed.metrics import ProcessMetrics
from chaos.testbed.proxy import LinkCondition

REACH_TIMEOUT_S = 40.0
THROTTLED = LinkCondition(bytes_per_s=100_000.0)
"""A page of the bundled model takes half a second."""


class RequestPhase(enum.Enum):
    """Phase of a request when the fault is injected."""

    QUEUED = "queued"
    RESERVED = "reserved"
    IMPORTING = "importing"
    SHARING = "sharing"
    PREFILLING = "prefilling"
    SEALED = "sealed"
    DECODING = "decoding"
    LAST_TOKEN = "last token"
    STREAMING = "streaming"
    ENCODING = "encoding"
    PULLING = "pulling"

    @property
    def has_image(self) -> bool:
        """True if it needs a model for images and encode workers: another cluster than that of the other phases."""
        return self in (RequestPhase.ENCODING, RequestPhase.PULLING)


async def reach_phase(phase: RequestPhase, harness: ChaosHarness) -> PhaseContext:
    """Sends the requests of the phase and returns when it is reached. Raises `WaitTimeout`."""
    routers = harness.cluster.names("router")
    context = PhaseContext([], routers[0], routers[-1])
    async with asyncio.timeout(REACH_TIMEOUT_S + 5.0):
        match phase:
            case RequestPhase.QUEUED:
                await _queue(harness, context)
            case RequestPhase.RESERVED:
                await _reserve(harness, context)
            case RequestPhase.IMPORTING:
                await _import(harness, context)
            case RequestPhase.SHARING:
                await _share(harness, context)
            case RequestPhase.PREFILLING:
                await _prefill(harness, context)
            case RequestPhase.SEALED:
                await _seal(harness, context)
            case RequestPhase.DECODING:
                await _decode(harness, context)
            case RequestPhase.STREAMING:
                await _ask(harness, context, MARATHON).transcript.wait_tokens(8)
            case RequestPhase.ENCODING:
                await reach_encoding(harness, context)
            case RequestPhase.PULLING:
                await reach_pulling(harness, context)
            case RequestPhase.LAST_TOKEN:
                run = _ask(harness, context, SHORT)
                await run.transcript.wait_tokens(int(SHORT.parameters["max_tokens"]) - 1)
    await _pick_workers(harness, context)
    return context


def _ask(harness: ChaosHarness, context: PhaseContext, *requests: ClientRequest) -> ClientRun:
    """Sends requests to the context's router, with `other_router` as fallback; returns the last run."""
    for request in requests:
        context.runs.append(harness.ask(harness.with_fresh_salt(request), context.router, context.other_router))
    return context.runs[-1]


async def _queue(harness: ChaosHarness, context: PhaseContext) -> None:
    num_slots = int(str(harness.cluster.shape.router_flags["max-running-requests"]))

    async def waits() -> bool:
        metrics = await _read_metrics(harness, context, "router")
        return context.router in metrics and metrics[context.router].sum("baton_queued_requests") > 0

    await _ask_until(waits, harness, context, *[FILLER] * num_slots, SHORT)


async def _reserve(harness: ChaosHarness, context: PhaseContext) -> None:
    """Occupies all prefill workers: each computes one prompt at a time, and there is one prompt more than workers."""

    async def waits() -> bool:
        metrics = await _read_metrics(harness, context, "prefill")
        return any(g.sum("baton_waiting_requests") > 0 and g.busy_pages > 0 for g in metrics.values())

    await _ask_until(waits, harness, context, *[LONGISH] * harness.cluster.shape.num_prefill, SEVERAL_PAGES)


async def _prefill(harness: ChaosHarness, context: PhaseContext) -> None:
    """Watches the proxies for passing pages, since a computing worker may take seconds to answer a scrape."""
    before = harness.cluster.network.page_frames()

    async def imports_pages() -> bool:
        if harness.cluster.shape.transport == "stream":
            return _see_pages(harness, context, before)
        metrics = await _read_metrics(harness, context, "prefill", "decode")
        is_importing = any(g.sum("baton_kv_pages", owner="reserved") > 0 for g in metrics.values())
        return is_importing and any(g.sum("baton_kv_pages", owner="pinned") > 0 for g in metrics.values())

    await _ask_until(imports_pages, harness, context, LONG)


async def _import(harness: ChaosHarness, context: PhaseContext) -> None:
    """Holds conversations until pages pass from a decode worker to a prefill worker; sets that pair."""
    cluster = harness.cluster
    cluster.network.change(cluster.names("prefill"), cluster.names("decode"), THROTTLED)
    before = cluster.network.page_frames()

    async def imports() -> bool:
        if all(run.task.done() for run in context.runs):
            first = _ask(harness, context, FIRST_TURN)
            await first.task
            (answer,) = harness.oracle.answer(FIRST_TURN).choices
            second = second_turn(answer.tokens).with_salt(first.transcript.request.salt)
            context.runs.append(harness.ask(second, context.router, context.other_router))
        passed = cluster.network.page_frames() - before
        pairs = [pair for pair in passed if pair[0] in cluster.names("prefill")]
        if pairs:
            context.prefill, context.decode = pairs[0]
        return bool(pairs)

    await eventually(imports, REACH_TIMEOUT_S, "an import of cached pages")


async def _share(harness: ChaosHarness, context: PhaseContext) -> None:
    """Asks for a first token, which moves no page, then for all of them, while that prefill worker takes no prompt.

    Sets `context.prefill` to the pages' source.
    """
    cluster = harness.cluster
    source, *readers = cluster.names("prefill")
    usual = int(str(cluster.shape.prefill_flags["token-budget"]))
    cluster.network.change(readers, [source], THROTTLED)
    before = cluster.network.page_frames()

    async def shares() -> bool:
        if all(run.task.done() for run in context.runs):
            request = harness.with_fresh_salt(SEVERAL_PAGES)
            await cluster.set_prefill_tokens(source, usual)
            await harness.ask(replace(request, parameters={**request.parameters, "max_tokens": 1}), context.router).task
            await cluster.set_prefill_tokens(source, 0)
            context.runs.append(harness.ask(request, context.router, context.other_router))
        return any(pair in cluster.network.page_frames() - before for pair in ((reader, source) for reader in readers))

    try:
        await eventually(shares, REACH_TIMEOUT_S, "an import of another prefill worker's pages")
    finally:
        await cluster.set_prefill_tokens(source, usual)
    context.prefill = source


def _see_pages(harness: ChaosHarness, context: PhaseContext, before: Counter[tuple[str, str]]) -> bool:
    """True if pages have passed since `before`; sets the pair with the most pages."""
    passed = harness.cluster.network.page_frames() - before
    if passed:
        [((context.decode, context.prefill), _)] = passed.most_common(1)
    return bool(passed)


async def _ask_until(
    condition: Callable[[], Awaitable[bool]], harness: ChaosHarness, context: PhaseContext, *requests: ClientRequest
) -> None:
    """Sends requests and polls until the condition holds; sends again if all are answered before."""

    async def ask_and_check() -> bool:
        if all(run.task.done() for run in context.runs):
            _ask(harness, context, *requests)
        return await condition()

    await eventually(ask_and_check, REACH_TIMEOUT_S, "the phase")


async def _seal(harness: ChaosHarness, context: PhaseContext) -> None:
    cluster = harness.cluster
    before = cluster.network.page_frames()
    cluster.network.change(cluster.names("decode"), cluster.names("prefill"), THROTTLED)
    run = _ask(harness, context, SEVERAL_PAGES)
    await run.transcript.wait_tokens(1)
    _see_pages(harness, context, before)


async def _decode(harness: ChaosHarness, context: PhaseContext) -> None:
    _ask(harness, context, STEADY, SEEDED_PAIR, TALK, STOPPED)
    await _wait_first_tokens(context)
    await context.runs[0].transcript.wait_tokens(8)


async def _wait_first_tokens(context: PhaseContext) -> None:
    await asyncio.gather(*(run.transcript.wait_tokens(1) for run in context.runs))


async def _read_metrics(harness: ChaosHarness, context: PhaseContext, *roles: str) -> dict[str, ProcessMetrics]:
    """Sets the workers that hold most pages by their metrics: they hold the request."""
    metrics = await harness.cluster.all_metrics(*roles)
    for role in ("prefill", "decode"):
        held = {name: metrics[name].busy_pages for name in harness.cluster.names(role) if name in metrics}
        if any(held.values()):
            setattr(context, role, max(held, key=lambda name: held[name]))
    return metrics


async def follow_request(harness: ChaosHarness, context: PhaseContext) -> None:
    """Sets the workers that hold the request now, after a fault has moved it."""
    await _read_metrics(harness, context, "prefill", "decode")


async def _pick_workers(harness: ChaosHarness, context: PhaseContext) -> None:
    """Sets a worker of each role if the phase has not: the one with most pages, else the first."""
    if not (context.prefill and context.decode):
        await _read_metrics(harness, context, "prefill", "decode")
    context.prefill = context.prefill or harness.cluster.names("prefill")[0]
    context.decode = context.decode or harness.cluster.names("decode")[0]
