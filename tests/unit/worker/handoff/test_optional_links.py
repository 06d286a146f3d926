"""Links to workers whose cached pages may be read: all roles, but for those that are of no use."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from typing import Any, cast

import grpc
import pytest
from structlog.testing import capture_logs

from baton.domain.ids import Incarnation, WorkerId
from baton.domain.worker import WorkerRole
from baton.engine.mailbox import Mailbox
from baton.rpc.channel_pool import ChannelPool
from baton.services.decode.commands import DecodeCommand
from baton.transfer.nixl_mover import TCP_PATH
from baton.worker.handoff.links import PeerLinks
from baton.worker.handoff.session_or_call import PeerClients
from tests.unit.worker.handoff.test_replaced_source import Puller, Registry, make_links, prefill_record


class GivesNothing:
    """A channel to a worker without the Handoff service."""

    def get(self, address: str, incarnation: Incarnation) -> Any:
        class Channel:
            def unary_unary(self, *args: Any, **options: Any) -> Any:
                async def call(*args: Any, **options: Any) -> Any:
                    empty = grpc.aio.Metadata()
                    raise grpc.aio.AioRpcError(grpc.StatusCode.UNIMPLEMENTED, empty, empty)

                return call

            unary_stream = unary_unary

        return Channel()


def optional(links: PeerLinks) -> PeerLinks:
    links._identity = replace(links._identity, source_roles=frozenset(WorkerRole), optional=True)
    return links


async def look(links: PeerLinks, registry: Registry, *records: Any) -> list[str]:
    registry.present = list(records)
    with capture_logs() as logs:
        await links.run()
    return [entry["event"] for entry in logs]


@pytest.mark.parametrize("role", list(WorkerRole))
def test_a_source_over_tcp_by_nixl_is_left_alone(role: WorkerRole, monkeypatch: pytest.MonkeyPatch):
    async def scenario() -> None:
        registry, mailbox = Registry(), Mailbox[DecodeCommand](8)
        puller = Puller(mailbox)
        monkeypatch.setattr(puller, "path", lambda source: TCP_PATH)
        links = optional(make_links(registry, puller, mailbox, 60.0))
        record = replace(prefill_record(1), role=role)
        assert await look(links, registry, record) == ["link_skipped"]
        assert await look(links, registry, record) == [], "it is not probed again"
        assert not links.records()
        assert not links.broken()
        restarted = replace(prefill_record(2), role=role)
        assert await look(links, registry, restarted) == ["link_skipped"]

    asyncio.run(scenario())


def test_a_source_that_gives_no_pages_is_no_failure(monkeypatch: pytest.MonkeyPatch):
    async def scenario() -> None:
        registry, mailbox = Registry(), Mailbox[DecodeCommand](8)
        links = optional(make_links(registry, Puller(mailbox), mailbox, 60.0))
        monkeypatch.setattr(type(links), "_hello", PeerLinks._hello)
        monkeypatch.setattr(links, "_peers", PeerClients(cast(ChannelPool, GivesNothing()), None))
        assert await look(links, registry, prefill_record(1)) == ["link_skipped"]
        assert links.broken() == ()

    asyncio.run(scenario())


def test_a_worker_has_no_link_to_itself():
    async def scenario() -> None:
        registry, mailbox = Registry(), Mailbox[DecodeCommand](8)
        links = optional(make_links(registry, Puller(mailbox), mailbox, 60.0))
        own = replace(prefill_record(1), id=WorkerId("decode-0"))
        assert await look(links, registry, own) == []

    asyncio.run(scenario())
