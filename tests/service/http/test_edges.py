"""The edges of HTTP: several model names, paths that do not exist, compressed bodies, trace headers."""

from __future__ import annotations

import gzip
import json
from pathlib import Path

import pytest

from baton.services.router.settings import RouterSettings
from tests.service.http.http_server import MODEL, error_of, router, says

TRACEPARENT = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"


async def test_every_name_of_the_model_is_served_and_returned():
    async with router(says("hello"), other_model_names=("tiny-latest",)) as world:
        listed = (await world.http.get("/v1/models")).json()["data"]
        assert [model["id"] for model in listed] == [MODEL, "tiny-latest"]
        assert (await world.http.get("/v1/models/tiny-latest")).json()["id"] == "tiny-latest"
        assert (await world.http.get("/v1/models/tiny-oldest")).status_code == 404
        for name in (MODEL, "tiny-latest"):
            assert (await world.chat(model=name)).json()["model"] == name


@pytest.mark.parametrize(
    ("path", "hint"),
    [
        ("/chat/completions", "/v1/chat/completions"),
        ("/v1/chat/completion", "/v1/chat/completions"),
        ("/completions/", "/v1/completions"),
        ("/v1/model", "/v1/models"),
        ("/", ""),
        ("/wp-admin", ""),
    ],
)
async def test_an_unknown_path_is_named_with_the_nearest(path: str, hint: str):
    async with router(says("x")) as world:
        reply = await world.http.post(path, json={})
        assert (reply.status_code, error_of(reply)["code"]) == (404, "not_found")
        message = error_of(reply)["message"]
        assert message == f"no such path: {path!r}" + (f"; did you mean {hint}?" if hint else "")
        long = await world.http.get("/" + "x" * 5000)
        assert long.status_code == 404
        assert len(error_of(long)["message"]) < 400


async def test_a_compressed_body_is_refused():
    async with router(says("x")) as world:
        body = gzip.compress(json.dumps({"model": MODEL, "prompt": "x"}).encode())
        headers = {"content-type": "application/json", "content-encoding": "gzip"}
        reply = await world.http.post("/v1/completions", content=body, headers=headers)
        assert (reply.status_code, error_of(reply)["code"]) == (415, "unsupported_content_type")
        assert "gzip" in error_of(reply)["message"]
        plain = await world.complete(headers={"content-encoding": "identity"})
        assert plain.status_code == 200


async def test_pages_of_allowed_origins_may_call():
    page, other = "https://page.example", "https://other.example"
    preflight = {"access-control-request-method": "POST", "access-control-request-headers": "authorization,x-mine"}
    async with router(says("x"), cors_origins=(page,)) as world:
        asked = await world.http.options("/v1/completions", headers={"origin": page, **preflight})
        assert (asked.status_code, asked.headers["access-control-allow-origin"]) == (200, page)
        assert "x-mine" in asked.headers["access-control-allow-headers"]
        answer = await world.complete(headers={"origin": page})
        assert answer.headers["access-control-allow-origin"] == page
        assert "x-baton-request-id" in answer.headers["access-control-expose-headers"]
        assert "access-control-allow-origin" not in (await world.complete(headers={"origin": other})).headers
    async with router(says("x")) as world:
        assert "access-control-allow-origin" not in (await world.complete(headers={"origin": page})).headers


def test_origins_are_open_only_without_keys(tmp_path: Path):
    assert RouterSettings().allowed_origins == ("*",)
    assert RouterSettings(api_keys_file=tmp_path / "keys").allowed_origins == ()
    assert RouterSettings(cors_origins="none").allowed_origins == ()
    assert RouterSettings(cors_origins="https://a, https://b").allowed_origins == ("https://a", "https://b")
    assert RouterSettings(cors_origins="*", api_keys_file=tmp_path / "keys").allowed_origins == ("*",)


async def test_a_trace_is_named_in_the_response():
    async with router(says("x")) as world:
        assert (await world.complete(headers={"traceparent": TRACEPARENT})).headers["traceparent"] == TRACEPARENT
        assert "traceparent" not in (await world.complete()).headers
        assert "traceparent" not in (await world.complete(headers={"traceparent": "00-bad"})).headers
