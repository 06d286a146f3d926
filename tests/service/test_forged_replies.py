"""A process between router and workers forges their replies: with a cluster secret no wrong token comes out."""

from __future__ import annotations

import secrets
from contextlib import AsyncExitStack
from functools import partial

import pytest

from baton.domain.errors import BatonError
from baton.domain.trust import OPEN_CLUSTER, ClusterTrust
from baton.rpc.channel_pool import ChannelPool
from baton.rpc.gen import prefill_pb2
from baton.rpc.tokens.token_check import set_check
from tests import mock_workers
from tests.mocks.auth import MockAuth
from tests.mocks.relay import relay
from tests.service.dispatch import dispatch_world
from tests.service.dispatch.dispatch_world import World, scripted, sequence, tokens, two_refreshes, world

CLUSTER = ClusterTrust(secrets.token_bytes(32))
NUM_TOKENS = 5
FORGED = 3
"""A token that no script has."""


class Forger:
    """Puts another first token, with its check number, into prefill's first seals."""

    def __init__(self, num_lies: int) -> None:
        self.num_lies = num_lies
        self.num_forged = 0

    def change(self, method: str, replies: list[bytes]) -> list[bytes]:
        return [self._forge(reply) for reply in replies] if method.endswith("/Prefill") else replies

    def _forge(self, reply: bytes) -> bytes:
        event = prefill_pb2.PrefillEvent.FromString(reply)
        if event.WhichOneof("event") != "sealed" or self.num_forged == self.num_lies:
            return reply
        self.num_forged += 1
        event.sealed.first_token.token = FORGED
        set_check(event.sealed)
        return event.SerializeToString()


async def put_relays(w: World, forger: Forger, stack: AsyncExitStack) -> None:
    streams = lambda method: method.rpartition("/")[2] in ("Prefill", "Generate")  # noqa: E731
    for worker in w.cluster.workers:
        worker.proxy_port = await stack.enter_async_context(relay(worker.port, streams, forger.change))
    await w.cluster.announce()
    await two_refreshes(w)


async def answer(trust: ClusterTrust, forger: Forger, patch: pytest.MonkeyPatch) -> list[tuple[int, int]]:
    patch.setattr(dispatch_world, "uses_sessions", False)
    patch.setattr(mock_workers, "MockAuth", partial(MockAuth, trust=trust))
    patch.setattr(dispatch_world, "ChannelPool", partial(ChannelPool, trust))
    async with AsyncExitStack() as stack, world() as w:
        w.workers.suspect = lambda *_: None  # type: ignore[method-assign]  # its only workers are tried again at once
        await put_relays(w, forger, stack)
        return tokens(await w.generate(sequence(max_tokens=NUM_TOKENS)))


async def test_a_forged_first_token_costs_an_attempt(monkeypatch: pytest.MonkeyPatch):
    forger = Forger(num_lies=1)
    assert await answer(CLUSTER, forger, monkeypatch) == scripted(NUM_TOKENS)
    assert forger.num_forged == 1


async def test_a_lasting_forger_makes_requests_fail(monkeypatch: pytest.MonkeyPatch):
    forger = Forger(num_lies=100)
    with pytest.raises(BatonError):
        await answer(CLUSTER, forger, monkeypatch)
    assert forger.num_forged >= 2


async def test_the_forgery_is_believed_where_nothing_is_signed(monkeypatch: pytest.MonkeyPatch):
    forger = Forger(num_lies=1)
    assert (await answer(OPEN_CLUSTER, forger, monkeypatch))[0] == (0, FORGED)
