"""Which workers are asked in a session, and when a session with one of them begins and ends."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import replace
from typing import Any

import pytest

from baton.domain.errors import LinkBroken, WorkerLost
from baton.domain.ids import Incarnation, WorkerId
from baton.domain.trust import OPEN_CLUSTER
from baton.domain.worker import SESSION_LINKS, WorkerRecord
from baton.engine.mailbox import Mailbox
from baton.rpc.channel_pool import ChannelPool
from baton.rpc.gen import handoff_pb2
from baton.services.decode.commands import DecodeCommand
from baton.session.wires.memory_wire import MemoryWire
from baton.session.wires.socket_server import SessionEndpoint, SocketServer
from baton.session.wires.wire import WireConnection
from baton.worker.handoff.link_session import LinkSession
from baton.worker.handoff.link_sessions import LinkSessions
from baton.worker.handoff.links import PeerLinks
from baton.worker.handoff.session_or_call import PeerClients
from tests.unit.worker.handoff.test_replaced_source import ID, Puller, Registry, make_links, prefill_record

WAIT_S = 10.0
ONE = Incarnation(1)
NEW, OLD = replace(prefill_record(1), capabilities=(SESSION_LINKS,)), prefill_record(1)

Check = Callable[[PeerLinks, Registry, LinkSessions], Awaitable[None]]


def with_links(check: Check) -> None:
    """Runs a check with a link to `NEW`, which does not answer."""

    async def scenario() -> None:
        mailbox: Mailbox[DecodeCommand] = Mailbox(8)
        registry, sessions = Registry(), LinkSessions(MemoryWire(), WorkerId("decode-0"), Incarnation(9))
        links = make_links(registry, Puller(mailbox), mailbox, 0.0)
        links._peers = PeerClients(ChannelPool(), sessions)
        registry.present = [NEW]
        await links.run()
        await check(links, registry, sessions)
        await sessions.close()

    asyncio.run(scenario())


def test_a_link_is_asked_in_one_session_while_it_is_up():
    async def check(links: PeerLinks, registry: Registry, sessions: LinkSessions) -> None:
        link = links.get(ID, ONE)
        session = links.stub(link)
        assert isinstance(session, LinkSession)
        assert links.stub(link) is session
        registry.present = []
        await links.run()
        assert not session.is_usable, "it ends with its link"
        with pytest.raises(LinkBroken):
            links.stub(link)
        assert not sessions._sessions, "and is not dialled again"

    with_links(check)


def test_a_restarted_worker_gets_another_session():
    async def check(links: PeerLinks, registry: Registry, sessions: LinkSessions) -> None:
        before = links.stub(links.get(ID, ONE))
        registry.present = [replace(NEW, incarnation=Incarnation(2))]
        await links.run()
        after = links.stub(links.get(ID, Incarnation(2)))
        assert isinstance(before, LinkSession)
        assert not before.is_usable
        assert after is not before

    with_links(check)


def test_a_session_that_was_lost_is_replaced_when_it_is_needed():
    async def check(links: PeerLinks, registry: Registry, sessions: LinkSessions) -> None:
        first = sessions.get("a:1", ONE)
        await first.task  # nobody listens there
        assert not first.is_usable
        assert sessions.get("a:1", ONE) is not first

    with_links(check)


def test_a_worker_of_the_version_before_is_asked_by_calls():
    async def check(links: PeerLinks, registry: Registry, sessions: LinkSessions) -> None:
        assert sessions.serves(NEW)
        assert not sessions.serves(OLD)
        registry.present = [replace(OLD, incarnation=Incarnation(3))]
        await links.run()
        assert not isinstance(links.stub(links.get(ID, Incarnation(3))), LinkSession)

    with_links(check)


def test_a_worker_of_another_protocol_version_is_asked_by_calls(monkeypatch: pytest.MonkeyPatch):
    async def check(links: PeerLinks, registry: Registry, sessions: LinkSessions) -> None:
        monkeypatch.setattr(LinkSession, "other_version", True)
        sessions.get("a:1", ONE)
        sessions.end(ONE, "it speaks another version")
        assert not sessions.serves(NEW)
        sessions.retain({Incarnation(2)})
        assert sessions.serves(NEW), "forgotten when it has left"

    with_links(check)


def test_a_hello_that_fails_leaves_no_session(monkeypatch: pytest.MonkeyPatch):
    async def check(links: PeerLinks, registry: Registry, sessions: LinkSessions) -> None:
        monkeypatch.setattr(type(links), "_hello", PeerLinks._hello)
        registry.present = [replace(NEW, incarnation=Incarnation(4))]
        await links.run()
        (broken,) = links.broken()
        assert "session" in broken.reason
        assert not sessions._sessions

    with_links(check)


async def asked(ask: Callable[[WorkerRecord], Awaitable[None]]) -> None:
    """Checks that `ask` dials the port that a worker announces."""
    come: asyncio.Queue[WireConnection] = asyncio.Queue()
    server = SocketServer(come.put, OPEN_CLUSTER, Incarnation(5), SessionEndpoint())
    await server.start()
    await ask(replace(NEW, incarnation=Incarnation(5), session_address=f"127.0.0.1:{server.port}"))
    async with asyncio.timeout(WAIT_S):
        await come.get()
    await server.close()


def test_a_worker_is_greeted_at_the_port_that_it_announces():
    async def check(links: PeerLinks, registry: Registry, sessions: LinkSessions) -> None:
        greeting: list[asyncio.Task[Any]] = []

        async def greet(worker: WorkerRecord) -> None:
            hello = links._peers.hello(worker, handoff_pb2.HelloRequest(), optional=False)
            greeting.append(asyncio.create_task(hello))

        await asked(greet)
        await sessions.close()
        with pytest.raises(WorkerLost):
            await greeting[0]

    with_links(check)


def test_a_link_is_asked_at_the_port_that_its_source_announces():
    async def check(links: PeerLinks, registry: Registry, sessions: LinkSessions) -> None:
        async def link(worker: WorkerRecord) -> None:
            registry.present = [worker]
            await links.run()
            links.stub(links.get(ID, worker.incarnation))

        await asked(link)

    with_links(check)


def test_requests_of_a_closed_session_end_at_once():
    async def check(links: PeerLinks, registry: Registry, sessions: LinkSessions) -> None:
        session: Any = links.stub(links.get(ID, ONE))
        asked = asyncio.create_task(session.Renew(handoff_pb2.RenewRequest(), timeout=10.0))
        await asyncio.sleep(0)
        await sessions.close()
        with pytest.raises(WorkerLost, match="session"):
            await asked

    with_links(check)
