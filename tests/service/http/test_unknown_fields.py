"""Fields that nobody here knows are named to the client, and refused only where new requests come in."""

from __future__ import annotations

from typing import Any

import pytest

from tests.service.http.http_server import error_of, router, says

STRANGE: dict[str, Any] = {"unheard_of": 1, "comma,": 2, "new\nline": 3, "é": 4, "x" * 100: 5}
NAMES = "unheard_of, comma?, new?line, ?, " + "x" * 64


@pytest.mark.parametrize("stream", [False, True])
async def test_unknown_fields_are_named_in_a_header(stream: bool):
    async with router(says("hello")) as world:
        reply = await world.chat(stream=stream, user="me", **STRANGE)
        assert (reply.status_code, reply.headers["x-baton-unknown-fields"]) == (200, NAMES)
        assert "x-baton-unknown-fields" not in (await world.chat(user="me")).headers
        others: dict[str, Any] = {f"f{number}": 1 for number in range(50)}
        many = await world.chat(**others)
        assert many.headers["x-baton-unknown-fields"].split(", ") == [f"f{number}" for number in range(10)]


async def test_strict_fields_refuse_unknown_names():
    async with router(says("hello"), strict_fields=True) as world:
        reply = await world.chat(unheard_of=1)
        assert reply.status_code == 400
        assert (error_of(reply)["param"], "unheard_of" in error_of(reply)["message"]) == ("unheard_of", True)
        assert world.dispatcher.admitted == []
        assert (await world.chat(user="me", tools=None)).status_code == 200
