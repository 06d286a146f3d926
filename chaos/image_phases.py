"""Brings an image into a phase: its file on the way to an encode worker, or its embedding on the way from there.

What has passed the proxies, and the workers' metrics, show that it is there. Every request has a salt of its own, so
its image is encoded anew. Called by `phases`; `__main__` makes the cluster.
"""

from __future__ import annotations

from collections import Counter

from chaos.clients.pictures import LOOK
from chaos.harness import ChaosHarness, PhaseContext
from chaos.testbed.bit_flipper import FlipBudget
from chaos.testbed.cluster import ClusterShape, eventually
from chaos.testbed.proxy import LinkCondition

REACH_TIMEOUT_S = 40.0
FILE_LINK = LinkCondition(bytes_per_s=8_000.0)
"""The file of `LOOK` takes 3.5 s, in pieces of 16 KiB."""
FILE_BEGUN_BYTES = 8_000
"""More than the first messages of a connection: part of the file has passed."""
EMBEDDING_LINK = LinkCondition(bytes_per_s=2_000.0)
"""An embedding of 8 KiB takes 4 s."""

PULL_BEGUN_BYTES = 150
"""More than the pings of a connection in a few seconds: a pull has been asked for."""


def image_shape(transport: str, *, forks: bool = False) -> ClusterShape:
    """A cluster with the bundled model for images and two encode workers."""
    return ClusterShape(
        num_encode=2,
        transport=transport,
        model="bundled-vision",
        forks=forks,
        prefill_flags={"page-size": 8},
        decode_flags={"page-size": 8},
    )


async def reach_encoding(harness: ChaosHarness, context: PhaseContext) -> None:
    """Part of the file has passed to an encode worker, which does not hold it. Sets that worker."""
    cluster = harness.cluster
    network, encoders = cluster.network, cluster.names("encode")
    network.change([context.router], encoders, FILE_LINK)
    before, num_held = network.passed_bytes(), await _count(harness, "encode", "held")

    async def passes() -> bool:
        nonlocal before, num_held
        if _ask_if_answered(harness, context):  # again: the earlier one was not seen in time
            before, num_held = network.passed_bytes(), await _count(harness, "encode", "held")
            return False
        passed = _passed(harness, before, [context.router])
        if passed and passed[0][1] >= FILE_BEGUN_BYTES and await _count(harness, "encode", "held") == num_held:
            ((_, context.encode), _) = passed[0]
            return True
        return False

    await eventually(passes, REACH_TIMEOUT_S, "a file on its way to an encode worker")


async def reach_pulling(harness: ChaosHarness, context: PhaseContext) -> None:
    """An embedding is made and asked for, and the prefill worker does not have it. Sets both workers."""
    cluster = harness.cluster
    network, prefills = cluster.network, cluster.names("prefill")
    network.change(prefills, cluster.names("encode"), EMBEDDING_LINK)
    before, encoded = network.passed_bytes(), await _counts(harness, "encode", "encoded")
    num_pulled = await _count(harness, "prefill", "pulled")

    async def pulls() -> bool:
        nonlocal encoded, num_pulled, before
        if _ask_if_answered(harness, context):  # again: the earlier one was not seen in time
            before, encoded = network.passed_bytes(), await _counts(harness, "encode", "encoded")
            num_pulled = await _count(harness, "prefill", "pulled")
            return False
        now = await _counts(harness, "encode", "encoded")
        makers = {name for name, count in now.items() if count > encoded.get(name, 0)}
        passed = [entry for entry in _passed(harness, before, prefills) if entry[0][1] in makers]
        if not passed or passed[0][1] < PULL_BEGUN_BYTES:
            return False
        if await _count(harness, "prefill", "pulled") == num_pulled:
            ((context.prefill, context.encode), _) = passed[0]
            return True
        return False

    await eventually(pulls, REACH_TIMEOUT_S, "an embedding on its way to a prefill worker")


def flip_embeddings(harness: ChaosHarness, budget: FlipBudget) -> None:
    """Flips bits of what encode workers send: of the newcomer's image, if the middle of the first one has passed."""
    cluster = harness.cluster
    cluster.network.change(cluster.names("prefill"), cluster.names("encode"), LinkCondition(flips=budget))


def end_slow_links(harness: ChaosHarness) -> None:
    """Ends what held the phase."""
    for condition in (FILE_LINK, EMBEDDING_LINK):
        harness.cluster.network.end(condition)


def _ask_if_answered(harness: ChaosHarness, context: PhaseContext) -> bool:
    """Sends the request, again if the last one has its answer."""
    if not all(run.task.done() for run in context.runs):
        return False
    context.runs.append(harness.ask(harness.with_fresh_salt(LOOK), context.router, context.other_router))
    return True


def _passed(
    harness: ChaosHarness, before: Counter[tuple[str, str]], clients: list[str]
) -> list[tuple[tuple[str, str], int]]:
    """Pairs of one of `clients` and an encode worker with the bytes between them since `before`, most first."""
    encoders = harness.cluster.names("encode")
    passed = harness.cluster.network.passed_bytes() - before
    return [entry for entry in passed.most_common() if entry[0][0] in clients and entry[0][1] in encoders]


async def _count(harness: ChaosHarness, role: str, outcome: str) -> float:
    """Images with this outcome at the workers of a role that answer."""
    return sum((await _counts(harness, role, outcome)).values())


async def _counts(harness: ChaosHarness, role: str, outcome: str) -> dict[str, float]:
    """The same by worker."""
    metrics = await harness.cluster.all_metrics(role)
    return {name: each.sum("baton_media_total", outcome=outcome) for name, each in metrics.items()}
