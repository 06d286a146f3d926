"""The mixed load keeps every transcript for the check against the store."""

import asyncio
from collections.abc import Sequence
from random import Random
from typing import Any, cast

from chaos.checks.oracle import Oracle
from chaos.clients.client import ChaosClient, ClientRequest, StreamEnd, Transcript
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


class AnyAnswer(Oracle):
    """Accepts every answer."""

    def check(self, transcript: Transcript, codes: frozenset[str] = frozenset()) -> list[str]:
        return []


async def _no_bad_body(rng: Random, url: object) -> None:
    await asyncio.sleep(0)
