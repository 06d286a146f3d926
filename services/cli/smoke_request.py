"""The smoke request of `baton up`: the router is ready, answers a completion, and page bytes moved for it.

Called by `baton.services.cli.up`, which bounds the time.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Iterable, Sequence

import httpx2
from prometheus_client.parser import text_string_to_metric_families

from baton.services.cli.errors import StartFailed

_POLL_INTERVAL_S = 0.05
_TRANSFER_BYTES = "baton_transfer_bytes_total"
# Longer than two usual pages, so that a split request moves whole ones and a part; unlike any user's prompt, so that
# no cache has it. Not longer: a start waits for its computation, of which more tokens prove nothing more.
_PROMPT = "A smoke request counts the pages of its prompt: 0 1 2 3 4 5 6 7 8 9 10 11"


async def wait_until_ready(
    client: httpx2.AsyncClient, router_url: str, metrics_urls: Sequence[str], stopped: asyncio.Event
) -> None:
    """Polls every worker's metrics, then /ready, until each has answered: the router is ready once all workers run.

    Raises `StartFailed` once `stopped` is set.
    """
    left = [*metrics_urls, f"{router_url}/ready"]
    while True:
        while left and await _answers_ok(client, left[0]):
            del left[0]
        if not left:
            return
        try:
            await asyncio.wait_for(stopped.wait(), _POLL_INTERVAL_S)
        except TimeoutError:
            continue
        raise StartFailed("stopped before it was ready")


async def model_served(client: httpx2.AsyncClient, router_url: str) -> str:
    """The id of the model behind the router."""
    answer = await _require_ok(client.get(f"{router_url}/v1/models"), "the list of models")
    return str(answer.json()["data"][0]["id"])


async def kernels_in_use(client: httpx2.AsyncClient, router_url: str) -> str:
    """What the router's readiness says of the workers' kernels; "" if nothing."""
    answer = await client.get(f"{router_url}/ready")
    if answer.status_code != httpx2.codes.OK:
        return ""
    _, _, told = str(answer.json().get("detail", "")).partition("; ")
    return told.removeprefix("kernels: ")


async def takes_chats(client: httpx2.AsyncClient, router_url: str, model: str) -> bool:
    """True if the router can render a chat for the model: it has a chat template."""
    body = {"model": model, "messages": [{"role": "user", "content": "Hello!"}]}
    try:
        answer = await client.post(f"{router_url}/v1/chat/completions/render", json=body)
    except httpx2.HTTPError:
        return False
    return answer.status_code == httpx2.codes.OK


async def transferred_bytes(client: httpx2.AsyncClient, metrics_urls: Iterable[str]) -> float:
    """Page bytes imported so far by all decode workers."""
    pages = [(await _require_ok(client.get(url), url)).text for url in metrics_urls]
    return sum(
        sample.value
        for page in pages
        for family in text_string_to_metric_families(page)
        for sample in family.samples
        if sample.name == _TRANSFER_BYTES
    )


async def send_smoke_request(
    client: httpx2.AsyncClient, router_url: str, model: str, metrics_urls: Iterable[str], must_move: bool
) -> int:
    """Sends one completion and returns how many page bytes moved for it. Raises `StartFailed` when none did that
    `must_move`."""
    urls = tuple(metrics_urls)
    before = await transferred_bytes(client, urls)
    # More than one token: decode pulls no pages for a request that ends with its first token.
    body = {"model": model, "prompt": _PROMPT, "max_tokens": 4, "temperature": 0, "ignore_eos": True}
    await _require_ok(client.post(f"{router_url}/v1/completions", json=body), "the first completion")
    moved = int(await transferred_bytes(client, urls) - before)
    if must_move and moved <= 0:
        raise StartFailed("the first completion was answered, but no page moved from prefill to decode for it")
    return moved


async def _answers_ok(client: httpx2.AsyncClient, url: str) -> bool:
    try:
        return (await client.get(url)).status_code == httpx2.codes.OK
    except httpx2.TransportError:
        return False


async def _require_ok(call: Awaitable[httpx2.Response], what: str) -> httpx2.Response:
    """The answer to `call`. Raises `StartFailed` with `what` if there is none or its status is not 200."""
    try:
        answer = await call
    except httpx2.TransportError as error:
        raise StartFailed(f"{what}: no answer ({type(error).__name__})") from error
    if answer.status_code != httpx2.codes.OK:
        raise StartFailed(f"{what}: HTTP {answer.status_code}: {answer.text[:300]}")
    return answer
