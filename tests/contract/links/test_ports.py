"""A link's session has a socket at its exporter's port, and gRPC where that is not reached; faults lose nothing."""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace

import pytest
from structlog.testing import capture_logs

from baton.domain.handoff import PublishedChunk
from baton.domain.trust import TlsIdentity
from baton.engine.handoff.export_commands import CommitExport, RenewLeases
from baton.engine.handoff.import_commands import CommitReplied, LeasesRenewed
from baton.services.decode.commands import SealArrived, SourceLost
from baton.session.wires.memory_wire import MemoryWire
from baton.session.wires.worker_wires import WorkerWires
from baton.telemetry.series.session_series import SESSION_CONNECTIONS
from tests.contract.links.link_rig import INCARNATION, LIMITS, ONE, TRUST, LinkRig, chunk, link_rig, seal
from tests.contract.links.test_handoffs import watched
from tests.mocks.resetting_proxy import ResettingProxy
from tests.service.dispatch.frame_flipper import SESSION, FlippingProxy, FlipPlan, session_frames

NUM_SEEDS = 25


@pytest.fixture
async def rig() -> AsyncIterator[LinkRig]:
    async with link_rig("session-socket") as made:
        yield made


@asynccontextmanager
async def proxied(rig: LinkRig) -> AsyncIterator[ResettingProxy]:
    """The port is reached through a proxy."""
    assert rig.socket is not None
    port = rig.socket.port
    proxy = ResettingProxy(lambda: port)
    rig.link = replace(rig.link, session_address=str(await proxy.start()))
    yield proxy
    await proxy.stop()


def num_connections() -> dict[str, float]:
    """As the metric tells it: both ends of a link are in this process."""
    return {wire: SESSION_CONNECTIONS.labels(wire)._value.get() for wire in ("socket", "grpc")}


async def finish_import(rig: LinkRig) -> None:
    """All that an import asks for, once it is watched: the rest of its pages, a lease, and its commit."""
    rig.publish(ONE, chunk(ONE, 2), seal(ONE))
    await rig.inbox.until(SealArrived)
    rig.client._start_renewals()
    await rig.inbox.until(LeasesRenewed)
    rig.client.commit(ONE, wants_reply=True)
    await rig.inbox.until(CommitReplied)


def check_import(rig: LinkRig, why: str = "") -> None:
    """Nothing came twice, otherwise, or not at all."""
    assert rig.inbox.of(PublishedChunk) == [chunk(ONE, 0), chunk(ONE, 2)], why
    assert [sealed.seal.first_token.token for sealed in rig.inbox.of(SealArrived)] == [7], why
    assert rig.inbox.of(CommitReplied) == [CommitReplied(ONE, True)], why
    assert len(rig.engine.of(CommitExport)) == len(rig.engine.of(RenewLeases)) == 1, why
    assert rig.inbox.of(SourceLost) == [], why


async def test_a_link_has_a_socket_and_the_metric_tells_it(rig: LinkRig):
    before = num_connections()
    await watched(rig)
    assert rig.wires == ["socket"]
    assert num_connections() == {"socket": before["socket"] + 2, "grpc": before["grpc"]}, "at both ends"
    await finish_import(rig)
    check_import(rig)


async def test_a_link_has_a_call_where_no_port_is_announced(rig: LinkRig):
    rig.link = replace(rig.link, session_address="")
    before = num_connections()
    await watched(rig)
    assert rig.wires == ["grpc"]
    assert num_connections() == {"socket": before["socket"], "grpc": before["grpc"] + 2}, "at both ends"


async def test_a_port_that_refuses_leaves_the_link_to_grpc(rig: LinkRig):
    rig.link = replace(rig.link, session_address="127.0.0.1:1")
    with capture_logs() as logs:
        await watched(rig)
        await finish_import(rig)
    assert rig.wires == ["grpc"]
    check_import(rig)
    told = [line for line in logs if line["event"] == "session_port_not_reached"]
    assert [line["worker"] for line in told] == [rig.link.address]


async def test_a_port_that_says_nothing_leaves_the_link_to_grpc(rig: LinkRig):
    """Connections open and stall: two sessions wait in vain, the third has gRPC."""
    server = await asyncio.get_running_loop().create_server(asyncio.Protocol, "127.0.0.1", 0)
    assert rig.sessions is not None
    rig.sessions._limits = replace(LIMITS, dial_s=0.5)
    rig.link = replace(rig.link, session_address=str(server.sockets[0].getsockname()[1]))
    for num_lost in (1, 2):
        rig.watch(ONE)
        await rig.inbox.until(SourceLost, num_lost)
    await watched(rig)
    assert set(rig.wires) == {"grpc"}
    assert rig.inbox.of(PublishedChunk) == [chunk(ONE, 0)]
    server.close()


async def test_a_port_that_is_cut_off_hands_the_session_to_grpc(rig: LinkRig):
    """The same session, so the watch goes on; what was asked meanwhile is answered once."""
    async with proxied(rig) as proxy:
        await watched(rig)
        session = rig.stub(rig.link)
        proxy.refuses = True
        proxy.reset()
        await finish_import(rig)
        check_import(rig)
        assert (rig.wires[0], rig.wires[-1]) == ("socket", "grpc")
        assert rig.stub(rig.link) is session


async def test_a_cut_within_a_commit_makes_it_once(rig: LinkRig):
    async with proxied(rig) as proxy:
        await watched(rig)
        rig.engine.holds_commits = True
        rig.client.commit(ONE, wants_reply=True)
        (commit,) = await rig.engine.until(CommitExport)
        proxy.reset()
        commit.reply.send(True)
        assert await rig.inbox.until(CommitReplied) == [CommitReplied(ONE, True)]
        assert len(rig.engine.of(CommitExport)) == 1
        assert set(rig.wires) == {"socket"}, "one reset says nothing of a port"


async def import_with_one_flip(seed: int) -> bool:
    """An import behind a proxy that flips a bit of a message, or of its length; True if it did."""
    rng = random.Random(seed)
    plan = FlipPlan(rng, skip=rng.randrange(12), kind=SESSION)
    async with link_rig("session-socket") as rig:
        assert rig.socket is not None
        port = rig.socket.port
        proxy = FlippingProxy(lambda: port, plan, session_frames)
        rig.link = replace(rig.link, session_address=str(await proxy.start()))
        await watched(rig)
        await finish_import(rig)
        check_import(rig, f"seed {seed}")
        await proxy.stop()
    return plan.flipped


@pytest.mark.timeout(120)
async def test_a_flipped_bit_in_a_links_session_changes_nothing():
    flipped = [await import_with_one_flip(seed) for seed in range(NUM_SEEDS)]
    assert sum(flipped) > NUM_SEEDS // 2


async def test_with_certificates_no_link_has_a_socket():
    wire, certificates = MemoryWire(), TlsIdentity(b"certificate", b"key", b"authorities")
    encrypted = WorkerWires(wire, replace(TRUST, tls=certificates))
    assert encrypted.get("a:1", INCARNATION, "a:2") is wire
    assert WorkerWires(wire, TRUST).get("a:1", INCARNATION, "a:2") is not wire


async def test_what_was_learnt_of_a_port_outlives_its_session(rig: LinkRig):
    """A port that was not reached is told of, and tried again, after two minutes: not with each session."""
    rig.link = replace(rig.link, session_address="127.0.0.1:1")
    with capture_logs() as logs:
        await watched(rig)
        rig.stubs.end(INCARNATION, "a test")
        await rig.inbox.until(SourceLost)
        await watched(rig)
        assert len([line for line in logs if line["event"] == "session_port_not_reached"]) == 1
        rig.stubs.retain({INCARNATION})
        rig.stubs.end(INCARNATION, "a test")
        await rig.inbox.until(SourceLost, 2)
        await watched(rig)
        assert len([line for line in logs if line["event"] == "session_port_not_reached"]) == 1
        rig.stubs.retain(())
        rig.stubs.end(INCARNATION, "a test")
        await rig.inbox.until(SourceLost, 3)
        await watched(rig)
        assert len([line for line in logs if line["event"] == "session_port_not_reached"]) == 2, (
            "forgotten with its worker"
        )
