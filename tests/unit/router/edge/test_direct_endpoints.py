"""A request that generates takes a short way past Starlette's layers, and is answered as on the long one."""

from __future__ import annotations

import json
import re
from functools import partial
from typing import Any

import httpx2
import pytest
from starlette.applications import Starlette
from starlette.types import ASGIApp, Receive, Scope, Send

from baton.services.router.edge.api_keys import ApiKeys, make_entry, new_key
from baton.services.router.edge.direct_endpoints import DirectEndpoints, RouterApp
from baton.services.router.frontend import ApiLimits
from baton.services.router.routes import make_app
from baton.store.memory_store import MemoryStore
from baton.store.write_behind.writer import StoreWriter
from baton.telemetry.metrics import REGISTRY
from tests.fake_dispatcher import FakeDispatcher, one_token_chunks
from tests.unit.router.memory_frontend import memory_frontend

MODEL, KEY = "tiny", new_key()
BODY: dict[str, Any] = {"model": MODEL, "prompt": [5, 6, 7], "max_tokens": 2, "ignore_eos": True}
PATH = "/v1/completions"
VARYING = {"openai-processing-ms", "x-baton-request-id"}
ID = re.compile(rb'"(id|created)":("[^"]*"|\d+)')


def app_of(writer: StoreWriter, *, keys: bool = False, origins: tuple[str, ...] = ("*",)) -> RouterApp:
    limits = ApiLimits(MODEL, max_model_len=64, max_body_bytes=4096, cors_origins=origins)
    frontend = memory_frontend(FakeDispatcher(lambda s: one_token_chunks([5, 6])), limits, writer=writer)
    ring = ApiKeys((make_entry("red", KEY),)) if keys else None
    app = make_app(frontend, lambda: (True, ""), ring)
    assert isinstance(app, RouterApp)
    return app


async def exchange(app: ASGIApp, content: bytes, headers: dict[str, str]) -> tuple[int, dict[str, str], bytes]:
    """Status, headers and body, but for what differs from one request to the next."""
    async with httpx2.AsyncClient(transport=httpx2.ASGITransport(app), base_url="http://x") as client:
        answer = await client.post(PATH, content=content, headers={"x-request-id": "a", **headers})
    kept = {name: value for name, value in answer.headers.items() if name not in VARYING}
    return answer.status_code, kept, ID.sub(b"", answer.content)


def num_responses(status: int, route: str = PATH) -> float:
    return REGISTRY.get_sample_value("baton_http_responses_total", {"route": route, "status": str(status)}) or 0.0


TRACED = {"traceparent": f"00-{'ab' * 16}-{'cd' * 8}-01"}
JSON = json.dumps(BODY).encode()


@pytest.mark.parametrize(
    ("content", "headers", "status", "keys"),
    [
        (JSON, {}, 200, False),
        (JSON, TRACED, 200, False),
        (json.dumps({**BODY, "stream": True}).encode(), {}, 200, False),
        (b"{", {}, 400, False),
        (JSON, {"x-baton-store": "sometimes"}, 400, False),
        (JSON, {"last-event-id": "not an id"}, 400, False),
        (JSON, {"content-type": "text/plain"}, 415, False),
        (b" " * 5000, {}, 413, False),
        (json.dumps({**BODY, "model": "other"}).encode(), {}, 404, False),
        (JSON, {}, 401, True),
        (JSON, {"authorization": "Bearer x"}, 401, True),
        (JSON, {"authorization": f"Bearer {KEY}"}, 200, True),
    ],
)
async def test_both_ways_give_the_same_answer(content: bytes, headers: dict[str, str], status: int, keys: bool) -> None:
    route = "none" if status == 401 else PATH
    for origins in ((), ("*",), ("https://a.example",)):
        async with StoreWriter(MemoryStore()) as writer:
            app = app_of(writer, keys=keys, origins=origins)
            before = num_responses(status, route)
            short = await exchange(app, content, headers)
            assert num_responses(status, route) == before + 1
            long = await exchange(partial(Starlette.__call__, app), content, headers)
            assert num_responses(status, route) == before + 2
        assert short == long
        assert short[0] == status


@pytest.mark.parametrize(
    ("method", "path", "headers", "takes"),
    [
        ("POST", PATH, [], True),
        ("POST", "/v1/chat/completions", [(b"host", b"x")], True),
        ("POST", PATH, [(b"origin", b"https://a.example")], False),
        ("GET", PATH, [], False),
        ("OPTIONS", PATH, [], False),
        ("POST", "/tokenize", [], False),
    ],
)
async def test_only_posts_that_generate_and_have_no_origin_are_taken(
    method: str, path: str, headers: list[tuple[bytes, bytes]], takes: bool
) -> None:
    async with StoreWriter(MemoryStore()) as writer:
        direct = app_of(writer)._direct
    assert direct.takes({"type": "http", "method": method, "path": path, "headers": headers}) is takes
    assert not direct.takes({"type": "lifespan"})


async def test_an_error_that_is_no_answer_is_an_internal_one(monkeypatch: pytest.MonkeyPatch) -> None:
    async def broken(self: DirectEndpoints, scope: Scope, receive: Receive, send: Send) -> None:
        raise ValueError("a secret")

    monkeypatch.setattr(DirectEndpoints, "__call__", broken)
    async with StoreWriter(MemoryStore()) as writer:
        status, _, content = await exchange(app_of(writer), JSON, {})
    assert status == 500
    assert b"secret" not in content
