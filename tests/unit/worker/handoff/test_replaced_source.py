"""A restarted prefill worker: the engine learns of it before its pages can be read."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import cast

import pytest

from baton.domain.errors import LinkBroken
from baton.domain.fingerprint import Fingerprint
from baton.domain.ids import Incarnation, WorkerId
from baton.domain.worker import WorkerRecord, WorkerRole
from baton.engine.handoff.import_commands import SourceReplaced
from baton.engine.mailbox import Mailbox
from baton.rpc.channel_pool import ChannelPool
from baton.services.decode.commands import DecodeCommand
from baton.store.store import WorkerRegistry
from baton.transfer.base import SourceInfo
from baton.transfer.puller import ThreadedPuller
from baton.transfer.puller_set import PullerSet
from baton.worker.handoff.links import LinkIdentity, PeerLinks
from baton.worker.handoff.session_or_call import PeerClients

ID = WorkerId("prefill-0")


class Registry:
    """A registry that changes once per run."""

    def __init__(self) -> None:
        self.present: list[WorkerRecord] = []

    async def workers(self) -> list[WorkerRecord]:
        return self.present

    async def changes(self) -> AsyncIterator[None]:
        yield


class Puller:
    """Records the engine's commands at each connect."""

    transport = "stream"

    def __init__(self, mailbox: Mailbox[DecodeCommand]) -> None:
        self._mailbox = mailbox
        self.commands_before_connect: list[list[DecodeCommand]] = []
        self.num_disconnects = 0

    def connect(self, source: SourceInfo) -> None:
        self.commands_before_connect.append(self._mailbox.take_all(0.0))

    def disconnect(self, source: WorkerId) -> None:
        self.num_disconnects += 1

    def path(self, source: WorkerId) -> str:
        return self.transport


class LinksWithoutPeers(PeerLinks):
    """Links to every announced worker without moving bytes."""

    async def _hello(self, worker: WorkerRecord) -> SourceInfo:
        transport = self._puller.offered(worker.id, worker.incarnation)[0]
        return SourceInfo(worker.id, worker.incarnation, worker.address, transport, b"", 0, 8, 64)

    async def _probe(self, source: SourceInfo) -> tuple[int, float]:
        return 64, 0.1


def make_links(registry: Registry, puller: Puller, mailbox: Mailbox[DecodeCommand], grace_s: float) -> PeerLinks:
    return LinksWithoutPeers(
        LinkIdentity(WorkerId("decode-0"), Incarnation(9), "m", Fingerprint(()), 64, grace_s),
        cast(WorkerRegistry, registry),
        PeerClients(ChannelPool()), PullerSet([cast(ThreadedPuller, puller)]), mailbox, lambda: None,
    )  # fmt: skip


def prefill_record(incarnation: int) -> WorkerRecord:
    return WorkerRecord(ID, WorkerRole.PREFILL, Incarnation(incarnation), "a:1", "m", "f", 16, 512, 512)


@pytest.mark.parametrize("seen", [(1, 1), (1, 2), (1, 2, 2, 3)])
def test_the_engine_learns_of_a_restart_before_the_connect(seen: tuple[int, ...]):
    mailbox: Mailbox[DecodeCommand] = Mailbox(8)
    registry, puller = Registry(), Puller(mailbox)

    async def observe() -> None:
        links = make_links(registry, puller, mailbox, grace_s=0.0)
        for incarnation in seen:
            registry.present = [prefill_record(incarnation)]
            await links.run()
            assert links.get(ID, Incarnation(incarnation)).record.prefill_incarnation == incarnation
            registry.present = []
            await links.run()
            with pytest.raises(LinkBroken):
                links.get(ID, Incarnation(incarnation))

    asyncio.run(observe())
    changed = [before != after for before, after in zip((seen[0], *seen), seen, strict=False)]
    assert puller.commands_before_connect == [[SourceReplaced(ID)] if other else [] for other in changed]


def test_a_link_outlives_a_registry_that_lost_its_records():
    """The link survives a late announcement of the same process. Another incarnation ends it at once."""
    mailbox: Mailbox[DecodeCommand] = Mailbox(8)
    registry, puller = Registry(), Puller(mailbox)

    async def observe() -> None:
        links = make_links(registry, puller, mailbox, grace_s=60.0)
        for present in ([prefill_record(1)], [], [prefill_record(1)], []):
            registry.present = present
            await links.run()
            assert links.get(ID, Incarnation(1)).record.prefill_incarnation == 1
        assert (len(puller.commands_before_connect), puller.num_disconnects) == (1, 0), (
            "it was made once, and never broken"
        )
        registry.present = [prefill_record(2)]
        await links.run()
        with pytest.raises(LinkBroken):
            links.get(ID, Incarnation(1))

    asyncio.run(observe())
