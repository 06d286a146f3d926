"""A source that NIXL reaches over TCP only is read over the next transport: its reader's death could abort it."""

from __future__ import annotations

import asyncio
from typing import cast

import pytest
import structlog.testing

from baton.domain.errors import LinkBroken
from baton.domain.fingerprint import Fingerprint
from baton.domain.ids import Incarnation, WorkerId
from baton.domain.worker import WorkerRecord
from baton.engine.mailbox import Mailbox
from baton.rpc.channel_pool import ChannelPool
from baton.services.decode.commands import DecodeCommand
from baton.store.store import WorkerRegistry
from baton.telemetry import metrics
from baton.transfer.base import Pull, PullEvent, PullOutcome, SourceInfo
from baton.transfer.nixl_mover import TCP_PATH
from baton.transfer.puller import ThreadedPuller
from baton.transfer.puller_set import PullerSet
from baton.worker.handoff.links import LinkIdentity
from baton.worker.handoff.session_or_call import PeerClients
from tests.unit.worker.handoff.test_replaced_source import LinksWithoutPeers, Puller, Registry, prefill_record

P = WorkerId("prefill-0")


class NamedPuller(Puller):
    """A puller over one transport; `connected` while it has the source."""

    def __init__(self, mailbox: Mailbox[DecodeCommand], transport: str, path: str) -> None:
        super().__init__(mailbox)
        self.transport = transport
        self._path = path
        self.connected = False
        self.error: LinkBroken | None = None

    def connect(self, source: SourceInfo) -> None:
        if self.error is not None:
            raise self.error
        super().connect(source)
        self.connected = True

    def disconnect(self, source: WorkerId) -> None:
        super().disconnect(source)
        self.connected = False

    def path(self, source: WorkerId) -> str:
        return self._path


class World:
    """A reader with NIXL, whose path is `path`, and perhaps the stream."""

    def __init__(self, path: str, *, has_stream: bool = True) -> None:
        mailbox: Mailbox[DecodeCommand] = Mailbox(64)
        self.registry = Registry()
        self.nixl = NamedPuller(mailbox, "nixl", path)
        self.stream = NamedPuller(mailbox, "stream", "stream")
        pullers = [self.nixl, self.stream] if has_stream else [self.nixl]
        self.links = LinksWithoutPeers(
            LinkIdentity(WorkerId("decode-0"), Incarnation(9), "m", Fingerprint(()), 64, 60.0),
            cast(WorkerRegistry, self.registry), PeerClients(ChannelPool()),
            PullerSet([cast(ThreadedPuller, one) for one in pullers]), mailbox, lambda: None,
        )  # fmt: skip

    def look(self, *present: WorkerRecord) -> list[str]:
        self.registry.present = list(present)
        with structlog.testing.capture_logs() as logs:
            asyncio.run(self.links.run())
        return [entry["event"] for entry in logs]

    @property
    def transports(self) -> list[tuple[str, str]]:
        return [(record.transport, record.path) for record in self.links.records()]


def test_a_source_over_tcp_is_read_over_the_stream():
    world = World(TCP_PATH)
    assert world.look(prefill_record(1)) == ["link_avoids_tcp", "link_up"]
    assert world.transports == [("stream", "stream")]
    assert (world.nixl.connected, world.stream.connected) == (False, True), "NIXL holds no connection that could abort"
    assert world.links.transport(P) == "stream"
    labels = {"link": "prefill-0->decode-0", "transport": "stream"}
    before = metrics.REGISTRY.get_sample_value("baton_transfer_bytes_total", labels) or 0.0
    pull = Pull(1, P, (), (), None, 1.0)
    world.links.observe_pull(P, PullEvent(pull, PullOutcome.DONE, 64, 0.1))
    assert metrics.REGISTRY.get_sample_value("baton_transfer_bytes_total", labels) == before + 64


@pytest.mark.parametrize("path", ["nixl/ucx (cma)", "nixl/ucx (rc_mlx5)", "nixl/ucx"])
def test_other_paths_of_nixl_are_kept(path: str):
    world = World(path)
    assert world.look(prefill_record(1)) == ["link_up"]
    assert world.transports == [("nixl", path)]
    assert world.links.transport(P) == "nixl"


def test_a_source_without_another_transport_is_read_over_tcp():
    """The worker that allows NIXL alone was told to; the one whose source refuses the stream has no other way."""
    alone = World(TCP_PATH, has_stream=False)
    assert alone.look(prefill_record(1)) == ["link_up", "link_over_tcp"]
    refused = World(TCP_PATH)
    refused.stream.error = LinkBroken("transports: stream here, nixl there")
    assert refused.look(prefill_record(1)) == ["link_needs_tcp", "link_up", "link_over_tcp"]
    for world in (alone, refused):
        assert world.transports == [("nixl", TCP_PATH)]
        assert world.nixl.connected


def test_a_restarted_source_is_tried_over_nixl_again():
    """Its next process may run where NIXL has a better path."""
    world = World(TCP_PATH)
    world.look(prefill_record(1))
    world.nixl._path = "nixl/ucx (cma)"
    assert world.look(prefill_record(2))[-1] == "link_up"
    assert world.transports == [("nixl", "nixl/ucx (cma)")]
    assert not world.stream.connected
