"""Sends requests with a cached prefix or without one and returns their TTFT.

Used by `bench.system.prefix_cache`.
"""

from __future__ import annotations

import itertools
import uuid
from collections.abc import Callable
from dataclasses import dataclass

import httpx2
import msgspec

from baton.services.cli.bench.client.bench_client import BenchClient, RequestTemplate
from baton.services.cli.bench.options import ApiEndpoint
from baton.services.cli.bench.results.records import PlannedRequest
from baton.services.cli.bench.workload.prompts import Vocabulary

NUM_TOKENS = 2
"""One token would need no handoff; more only take time."""


@dataclass(frozen=True, slots=True)
class SaltedTemplate(RequestTemplate):
    """A template whose requests share no cached page with those of another salt."""

    salt: str

    def body(self, request: PlannedRequest) -> bytes:
        """The JSON of one request."""
        return msgspec.json.encode(
            {**msgspec.json.decode(RequestTemplate.body(self, request)), "cache_salt": self.salt}
        )


class PrefixClient:
    """Sends one request at a time to one server. Raises `RuntimeError` for a failed request or an unexpected hit count.

    Prompts are drawn by number under this client's random name, so no prefix is shared by accident.
    """

    def __init__(
        self, url: str, vocabulary: Vocabulary, *, api_key: str | None, timeout_s: float, clock: Callable[[], float]
    ) -> None:
        self._url = url
        self._headers = {} if api_key is None else {"authorization": f"Bearer {api_key}"}
        self._timeout_s = timeout_s
        self._vocabulary = vocabulary
        self._client = BenchClient(url, api_key=api_key, timeout_s=timeout_s, clock=clock)
        self._run = uuid.uuid4().hex  # keeps a second run on the same system from hitting the first one's prompts
        self._numbers = itertools.count()
        self._template: RequestTemplate | None = None

    async def close(self) -> None:
        """Closes the connections."""
        await self._client.__aexit__()

    async def fresh(self, num_tokens: int, num_requests: int) -> list[float]:
        """TTFT of prompts without a shared prefix."""
        template = await self._get_template()
        return [await self._first_token_s(template, self._draw(num_tokens)) for _ in range(num_requests)]

    async def with_prefix(self, num_cached: int, num_own: int, num_requests: int) -> list[float]:
        """TTFT of prompts of `num_cached` cached tokens and `num_own` fresh ones."""
        template, prefix = await self._get_template(), self._draw(num_cached)
        await self._first_token_s(template, prefix + self._draw(num_own))
        await self._check_hit(template, prefix + self._draw(num_own), num_cached)
        return [await self._first_token_s(template, prefix + self._draw(num_own)) for _ in range(num_requests)]

    async def salted(self, num_tokens: int, num_requests: int) -> list[float]:
        """TTFT of one prompt repeated under a new salt each time, so nothing is hit."""
        template, prompt = await self._get_template(), self._draw(num_tokens)
        fields = (
            template.model,
            template.endpoint,
            template.temperature,
            template.ignore_eos,
            template.continuous_usage,
        )
        salts = (f"{self._run}-{next(self._numbers)}" for _ in range(num_requests))
        return [await self._first_token_s(SaltedTemplate(*fields, salt), prompt) for salt in salts]

    async def _get_template(self) -> RequestTemplate:
        if self._template is None:
            model = await self._client.first_model()
            self._template = RequestTemplate(
                model, ApiEndpoint.COMPLETIONS, temperature=0.0, ignore_eos=True, continuous_usage=False
            )
        return self._template

    def _draw(self, num_tokens: int) -> tuple[int, ...]:
        return self._vocabulary.draw(num_tokens, self._run, next(self._numbers))

    async def _first_token_s(self, template: RequestTemplate, prompt: tuple[int, ...]) -> float:
        answer = await self._client.measure(template, PlannedRequest(0, 0.0, prompt, NUM_TOKENS), lambda _: None)
        if answer.failure is not None:
            raise RuntimeError(f"a request of {len(prompt)} tokens failed: {answer.failure}")
        return answer.deliveries[0].at_s

    async def _check_hit(self, template: RequestTemplate, prompt: tuple[int, ...], num_cached: int) -> None:
        """Requests an answer that is not streamed and checks the cached tokens in its usage."""
        body = {
            "model": template.model,
            "prompt": prompt,
            "max_tokens": NUM_TOKENS,
            "ignore_eos": True,
            "temperature": 0,
        }
        async with httpx2.AsyncClient(timeout=self._timeout_s, trust_env=False, headers=self._headers) as client:
            answer = await client.post(f"{self._url}/v1/completions", json=body)
        answer.raise_for_status()
        found = (answer.json()["usage"].get("prompt_tokens_details") or {}).get("cached_tokens", 0)
        if found != num_cached:
            raise RuntimeError(f"{found} tokens were found in the cache where {num_cached} are shared")
