"""Sends chats to a running system and times their tokens. Used by `bench.vision.images`."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import AsyncIterator
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, Self

import httpx2

from bench.vision.chats import Message

DATA = "data: "


@dataclass(frozen=True, slots=True)
class TimedAnswer:
    """One answer: seconds to its first token, all gaps behind it, and its usage."""

    first_s: float
    gaps_s: tuple[float, ...]
    num_prompt: int
    num_cached: int


class TimedChatClient:
    """Chats with one router. Raises `RuntimeError` for an answer that is no stream of tokens."""

    def __init__(self, url: str, timeout_s: float) -> None:
        self._http = httpx2.AsyncClient(base_url=url, timeout=timeout_s, trust_env=False)
        self._model = ""

    async def open(self) -> Self:
        """Asks for the name of the model."""
        self._model = (await self._http.get("/v1/models")).json()["data"][0]["id"]
        return self

    async def close(self) -> None:
        """Closes the connections."""
        await self._http.aclose()

    async def ask(self, messages: list[Message], num_tokens: int = 2) -> TimedAnswer:
        """Streams an answer of so many tokens."""
        body = {"model": self._model, "messages": messages, "max_tokens": num_tokens, "ignore_eos": True,
                "temperature": 0, "stream": True, "return_token_ids": True,
                "stream_options": {"include_usage": True}}  # fmt: skip
        times: list[float] = []
        usage: dict[str, Any] = {}
        began_s = time.perf_counter()
        async with self._http.stream("POST", "/v1/chat/completions", json=body) as response:
            if response.status_code != 200:
                raise RuntimeError(f"{response.status_code}: {(await response.aread())[:300]!r}")
            async for event in _events(response):
                usage = event.get("usage") or usage
                if any(choice.get("token_ids") for choice in event["choices"]):
                    times.append(time.perf_counter())
        return timed(began_s, times, usage)


def timed(began_s: float, times_s: list[float], usage: dict[str, Any]) -> TimedAnswer:
    """The figures of one answer. Raises `RuntimeError` for one without tokens or usage."""
    if not times_s or "prompt_tokens" not in usage:
        raise RuntimeError("an answer has no tokens or no usage")
    cached = (usage.get("prompt_tokens_details") or {}).get("cached_tokens") or 0
    gaps = tuple(after - before for before, after in pairwise(times_s))
    return TimedAnswer(times_s[0] - began_s, gaps, usage["prompt_tokens"], cached)


async def _events(response: httpx2.Response) -> AsyncIterator[dict[str, Any]]:
    async for line in response.aiter_lines():
        if line.startswith(DATA) and line != f"{DATA}[DONE]":
            event: dict[str, Any] = json.loads(line.removeprefix(DATA))
            yield event


async def stream_gaps(
    client: TimedChatClient, texts: list[list[Message]], images: list[list[Message]], num_tokens: int
) -> list[float]:
    """Gaps of text streams, all at once, while the chats of `images` are asked one after another."""

    async def ask_images() -> None:
        for chat in images:
            await client.ask(chat)

    beside = asyncio.create_task(ask_images())
    answers = await asyncio.gather(*(client.ask(chat, num_tokens) for chat in texts))
    await beside
    return [gap for answer in answers for gap in answer.gaps_s]
