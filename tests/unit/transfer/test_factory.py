"""Choice of the transport."""

import pytest

from baton.domain.errors import LinkBroken
from baton.domain.ids import Incarnation, WorkerId
from baton.kv.memory import PageMemory
from baton.transfer import factory
from baton.transfer.stream.mover import StreamPuller
from baton.transfer.stream.source import StreamSource
from tests.unit.transfer.rigs import EventLog


def test_auto_prefers_nixl_and_keeps_the_stream_for_peers_without(monkeypatch):
    monkeypatch.setattr(factory, "nixl_available", lambda: None)
    assert factory.usable_transports("auto") == ("nixl", "stream")
    assert factory.usable_transports("nixl") == ("nixl",)
    assert factory.usable_transports("stream") == ("stream",)


def test_without_nixl_auto_is_the_stream_and_nixl_an_error(monkeypatch):
    monkeypatch.setattr(factory, "nixl_available", lambda: "no such module")
    assert factory.usable_transports("auto") == ("stream",)
    with pytest.raises(LinkBroken, match="no such module"):
        factory.usable_transports("nixl")


def test_our_first_preference_that_they_share_wins():
    assert factory.choose_transport(("nixl", "stream"), ("stream", "nixl")) == "nixl"
    assert factory.choose_transport(("nixl", "stream"), ("stream",)) == "stream"
    with pytest.raises(LinkBroken, match="nixl here, stream there"):
        factory.choose_transport(("nixl",), ("stream",))


def test_both_sides_of_the_stream_are_made():
    memory = PageMemory(2, 64)
    source = factory.make_source("stream", WorkerId("p"), Incarnation(1), memory)
    assert isinstance(source, StreamSource)
    assert source.transport == "stream"
    assert int(source.metadata())
    puller = factory.make_puller("stream", WorkerId("d"), Incarnation(2), memory, EventLog())
    try:
        assert isinstance(puller, StreamPuller)
        assert puller.transport == "stream"
    finally:
        puller.close()


@pytest.mark.parametrize("make", [factory.usable_transports, lambda name: factory.choose_transport((name,), ())])
def test_an_unknown_transport_is_an_error(make):
    with pytest.raises((ValueError, LinkBroken), match="pigeon"):
        make("pigeon")
