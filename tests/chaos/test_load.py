"""The mixed load keeps every transcript for the check against the store."""

import asyncio
from collections.abc import Sequence
from random import Random
from typing import Any, cast

from chaos.checks.oracle import Oracle
from chaos.clients.client import ChaosClient, ClientRequest, StreamEnd, Transcript
from chaos.clients.tenants import LoadTenant, make_tenants
from chaos.load import MixedLoad


class ScriptedClient:
    """Refuses all requests, and says when it has seen enough."""

    def __init__(self, enough: asyncio.Event) -> None:
        self.http: Any = None
        self.transcripts: list[Transcript] = []
        self._enough = enough

    async def ask(
        self, request: ClientRequest, urls: Sequence[object], transcript: Transcript | None = None
    ) -> Transcript:
        transcript = transcript or Transcript(request, call_id=f"call-{len(self.transcripts)}")
        transcript.finish(StreamEnd.REFUSED, "overloaded")
        self.transcripts.append(transcript)
        if len(self.transcripts) >= 10:
            self._enough.set()
        await asyncio.sleep(0)
        return transcript

    async def ask_and_hang_up(self, request: ClientRequest, url: str, num_tokens: int, transcript: Transcript) -> None:
        await self.ask(request, [url], transcript)


async def test_every_transcript_is_handed_over_once() -> None:
    enough = asyncio.Event()
    client = ScriptedClient(enough)
    load = MixedLoad(cast(ChaosClient, client), AnyAnswer(), lambda: ["http://router"], num_clients=2)
    load._send_bad_body = _no_bad_body  # type: ignore[method-assign]
    load.start(seed=1)
    await enough.wait()
    await load.pause(5.0)
    assert load.take_transcripts() == client.transcripts
    assert load.take_transcripts() == []
    await load.end()


class TellingClient(ScriptedClient):
    """Answers all requests, and gives calls to whoever asks."""

    def __init__(self, enough: asyncio.Event) -> None:
        super().__init__(enough)
        self.readers: list[tuple[str, str]] = []

    async def ask(
        self, request: ClientRequest, urls: Sequence[object], transcript: Transcript | None = None
    ) -> Transcript:
        transcript = await super().ask(request, urls, transcript)
        transcript.finish(StreamEnd.DONE)
        return transcript

    async def read_as(self, tenant: LoadTenant, call_id: str, url: object) -> int | None:
        asked = next(one.request.tenant for one in self.transcripts if one.call_id == call_id)
        assert asked is not None
        self.readers.append((asked.name, tenant.name))
        if len(self.readers) >= 3:
            self._enough.set()
        return 200


async def test_all_tenants_ask_and_none_may_read_the_calls_of_another() -> None:
    enough, tenants = asyncio.Event(), make_tenants()
    client = TellingClient(enough)
    load = MixedLoad(cast(ChaosClient, client), AnyAnswer(), lambda: ["http://router"], 3, tenants)
    load._send_bad_body = _no_bad_body  # type: ignore[method-assign]
    load.start(seed=1)
    enough.clear()
    while len(client.readers) < 3:
        await asyncio.wait_for(enough.wait(), 10.0)
        enough.clear()
    await load.pause(5.0)
    await load.end()
    assert {one.name for one in tenants} == {name for name, counts in load.report.shares.counts.items() if counts}
    assert all(asked != reader for asked, reader in client.readers)
    assert load.report.num_problems == len(client.readers)


class AnyAnswer(Oracle):
    """Accepts every answer."""

    def check(self, transcript: Transcript, codes: frozenset[str] = frozenset()) -> list[str]:
        return []


async def _no_bad_body(rng: Random, url: object, tenant: LoadTenant | None) -> None:
    await asyncio.sleep(0)
