"""Images by URL in chats: the file goes the way of a `data:` URL's, once, and a stored call asks nobody again."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from baton.domain.errors import InvalidRequest, Overloaded
from baton.services.router.edge.http_errors import error_response
from baton.services.router.openai.images.parts import remote_urls
from baton.services.router.openai.request_parser import CHAT, RawRequest, RequestParser
from baton.services.router.vision.remote.allowed_hosts import AllowedHosts
from baton.services.router.vision.remote.fetch_places import MAX_OF_TENANT
from baton.services.router.vision.remote.fetcher import ImageFetcher
from tests.certificates import CertificateAuthority
from tests.unit.router.openai.images.test_parts import METADATA, PARAM, RED, Router, image, text
from tests.unit.router.vision.remote.image_server import HOST, ImageServer, whole

URL = f"https://{HOST}/red.png"


@pytest.fixture
async def server(tmp_path: Path) -> AsyncIterator[ImageServer]:
    certificate = CertificateAuthority.make(tmp_path).issue("images")
    answers = {"/red.png": whole(RED), "/no.png": whole(b"GIF89a", kind="image/png")}
    async with ImageServer(certificate, answers).running() as running:
        yield running


@pytest.fixture
def router(tmp_path: Path, server: ImageServer) -> Router:
    made = Router(tmp_path)
    fetcher = ImageFetcher(AllowedHosts((HOST,)), made.images.limits, server.network())
    made.parser = RequestParser(made.validator, made.text, "baton", fetcher)
    return made


def chat_body(url: str) -> bytes:
    return json.dumps({"model": "m", "messages": [{"role": "user", "content": [text("see"), remote(url)]}]}).encode()


def remote(url: str = URL) -> dict[str, Any]:
    return {"type": "image_url", "image_url": {"url": url}}


async def test_a_fetched_image_is_that_of_a_data_url(router: Router, server: ImageServer) -> None:
    fetched, sent = await router.chat(text("see"), remote()), await router.chat(text("see"), image(RED))
    [one], [other] = fetched.request.sequences, sent.request.sequences
    assert (one.media, one.files) == (other.media, other.files)
    assert fetched.request.prompts == sent.request.prompts
    assert fetched.stored_body == sent.stored_body
    assert len(server.requests) == 1


async def test_a_stored_call_has_the_bytes_of_its_first_time(router: Router, server: ImageServer) -> None:
    """Another router, or a replay, reads a reference. What the host has by then does not count."""
    parsed = await router.chat(text("see"), remote(), remote())
    body = parsed.stored_body
    assert body is not None
    assert b"https" not in body
    server.answers.clear()
    again = await router.parser.parse(RawRequest(CHAT, body, METADATA, stored=True))
    assert [one.media for one in again.request.sequences] == [one.media for one in parsed.request.sequences]
    assert len(server.requests) == 1


@pytest.mark.parametrize(
    ("url", "part"),
    [
        ("https://evil.example/red.png", "is not on a host that this server may fetch from"),
        (f"https://me@{HOST}/red.png", "user name"),
        ("http://169.254.169.254/latest", "must be a data: or https: URL"),
        (f"https://{HOST}/no.png", "PNG, JPEG or WebP"),
    ],
)
async def test_errors_name_the_part(router: Router, server: ImageServer, url: str, part: str) -> None:
    message, param = await router.refusal(text("see"), image(RED), remote(url))
    assert part in message
    assert param == PARAM.format(2)


async def test_a_chat_without_a_place_gets_429_and_a_tenant_keeps_to_its_share(
    router: Router, server: ImageServer
) -> None:
    begun, may_end = asyncio.Semaphore(0), asyncio.Event()

    async def hang(writer: asyncio.StreamWriter) -> None:
        begun.release()
        await may_end.wait()
        await whole(RED)(writer)

    server.answers["/hangs.png"] = hang
    fetcher = router.parser._fetcher
    assert fetcher is not None
    greedy = replace(METADATA, tenant="greedy")
    slow, quick = (chat_body(f"https://{HOST}/{name}.png") for name in ("hangs", "red"))
    chats = [asyncio.create_task(router.parser.parse(RawRequest(CHAT, slow, greedy))) for _ in range(MAX_OF_TENANT)]
    for _ in chats:
        await begun.acquire()
    fetcher._places.timeout_s = 0.01
    with pytest.raises(Overloaded) as told:
        await router.parser.parse(RawRequest(CHAT, quick, greedy))
    answer = error_response(told.value)
    assert (answer.status, answer.headers["retry-after"]) == (429, "1")
    [one] = (await router.parser.parse(RawRequest(CHAT, quick, METADATA))).request.sequences
    assert one.files[0].data == RED
    may_end.set()
    await asyncio.gather(*chats)


async def test_nothing_is_fetched_by_default(tmp_path: Path) -> None:
    message, param = await Router(tmp_path).refusal(remote())
    assert "fetches nothing" in message
    assert param == PARAM.format(0)


async def test_only_chats_fetch(router: Router, server: ImageServer) -> None:
    messages = [{"role": "user", "content": [remote()]}]
    body = json.dumps({"model": "m", "prompt": "image_url", "messages": messages}).encode()
    with pytest.raises(InvalidRequest, match="messages: is not a field of /v1/completions"):
        await router.parser.parse(RawRequest("/v1/completions", body, METADATA))
    with pytest.raises(InvalidRequest):
        await router.parser.parse(RawRequest(CHAT, body.replace(b"localhost", b"elsewhere"), METADATA))
    assert server.requests == []


def test_urls_of_a_body_that_is_none() -> None:
    good = {"role": "tool", "content": [remote()]}
    odd: list[object] = [None, 1, [], {}, {"role": "user"}, {"role": "user", "content": "https://a.example"}]
    odd += [{"role": "user", "content": [None, 1, {}, {"type": "image_url", "image_url": URL}]}]
    odd += [{"role": "system", "content": [remote()]}, {"role": "user", "content": [remote("http://a.example/")]}]
    assert remote_urls({"messages": [*odd, good]}) == [URL]
    assert remote_urls({"messages": {"role": "user"}}) == remote_urls({}) == []
