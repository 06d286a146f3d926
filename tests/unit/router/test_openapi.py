"""The router's OpenAPI document: valid, complete, and as strict as validation."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import httpx2
import jsonschema_rs
import msgspec
import pytest
from schemathesis.specs.openapi.definitions import OPENAPI_31
from starlette.applications import Starlette
from starlette.routing import Route

from baton.domain.errors import InvalidRequest
from baton.domain.ids import RequestId
from baton.services.router.edge.api_keys import ApiKeys, make_entry, new_key
from baton.services.router.edge.auth_middleware import PUBLIC_PATHS
from baton.services.router.frontend import ApiLimits
from baton.services.router.openai import bounds
from baton.services.router.openai.field_table.field import FieldEndpoint
from baton.services.router.openai.field_table.table import SCALARS
from baton.services.router.openai.validation import RequestMetadata, RequestValidator
from baton.services.router.openapi import openapi_document
from baton.services.router.routes import make_app
from tests.fake_dispatcher import FakeDispatcher, one_token_chunks
from tests.unit.router.memory_frontend import memory_frontend
from tests.unit.router.text.text_models import bundled

MODEL = "tiny"
ENDPOINTS = {"ChatRequest": FieldEndpoint.CHAT, "CompletionRequest": FieldEndpoint.COMPLETION}
KEY = new_key()
RING = ApiKeys((make_entry("red", KEY),))
VALIDATOR = RequestValidator(bundled(), MODEL, max_model_len=2**40, deadline_s=1.0)
ORIGIN = RequestMetadata(RequestId("call"), created_s=1, seed=1)


def app(keys: ApiKeys | None) -> Starlette:
    limits = ApiLimits(model_name=MODEL, max_model_len=256)
    dispatcher = FakeDispatcher(lambda sequence: one_token_chunks([2]))
    return make_app(memory_frontend(dispatcher, limits), lambda: (True, ""), keys)


def described(*, keys: bool = False) -> dict[str, Any]:
    return openapi_document([MODEL], bundled().vocab_size, requires_api_key=keys)


@pytest.mark.parametrize("keys", [None, RING])
async def test_the_document_is_served(keys: ApiKeys | None):
    transport = httpx2.ASGITransport(app(keys))
    async with httpx2.AsyncClient(transport=transport, base_url="http://x") as client:
        answer = await client.get("/openapi.json", headers={"authorization": f"Bearer {KEY}"})
    assert answer.status_code == 200
    assert answer.json() == msgspec.json.decode(msgspec.json.encode(described(keys=keys is not None)))


@pytest.mark.parametrize("keys", [False, True])
def test_the_document_is_valid_openapi(keys: bool):
    validator = jsonschema_rs.validator_for(OPENAPI_31)
    validator.validate(described(keys=keys))
    assert not validator.is_valid({**described(keys=keys), "paths": {"no slash": 5}})


def test_the_document_describes_every_route():
    routes = {
        (route.path.replace(":path", ""), method.lower())
        for route in app(None).routes
        if isinstance(route, Route)
        for method in (route.methods or set()) - {"HEAD"}
    }
    assert {(path, method) for path, methods in described()["paths"].items() for method in methods} == routes


def test_keys_are_documented_where_they_are_required():
    operations = [(path, op) for path, methods in described(keys=True)["paths"].items() for op in methods.values()]
    asking = {path for path, operation in operations if "security" in operation}
    assert asking == set(described()["paths"]) - PUBLIC_PATHS
    assert "security" not in str(described())


def test_every_reference_resolves():
    whole = described(keys=True)
    references = {value for value in strings(whole) if value.startswith("#/")}
    assert references
    schemas = {f"#/components/schemas/{name}" for name in whole["components"]["schemas"]}
    assert references <= schemas


def strings(value: Any) -> Iterator[str]:
    if isinstance(value, str):
        yield value
    elif isinstance(value, dict | list):
        for inner in value.values() if isinstance(value, dict) else value:
            yield from strings(inner)


def ranges(schema: str) -> Iterator[tuple[str, dict[str, Any]]]:
    """The number fields of a request, and their documented ranges."""
    for name, field in described()["components"]["schemas"][schema]["properties"].items():
        kind = field.get("anyOf", [field])[0]
        if kind.get("type") in ("number", "integer") and "maximum" in kind:
            yield name, kind


@pytest.mark.parametrize("schema", ["ChatRequest", "CompletionRequest"])
def test_documented_ranges_are_those_of_validation(schema: str):
    found = dict(ranges(schema))
    numbers = {name for name, scalar in SCALARS[ENDPOINTS[schema]].items() if {int, float} & set(scalar.types)}
    assert found.keys() >= numbers >= {"temperature", "n", "max_tokens", "top_k"}
    for name, kind in found.items():
        step = 1 if kind["type"] == "integer" else 1e-6
        low = kind["minimum"] if "minimum" in kind else kind["exclusiveMinimum"] + step
        for value in (low, kind["maximum"]):
            reason = refused(schema, name, value)
            assert reason is None or "is not supported by this model" in reason, (name, value)
        for value in (kind.get("exclusiveMinimum", low - step), kind["maximum"] + step):
            assert name in (refused(schema, name, value) or ""), (name, value)


def refused(schema: str, name: str, value: float) -> str | None:
    """The error of validation for a body with this field and the fields it requires; None if accepted."""
    needed: dict[str, dict[str, float]] = {"best_of": {"n": value}, "min_tokens": {"max_tokens": bounds.INT32_MAX}}
    needed["min_new_tokens"] = needed["min_tokens"]
    chat: dict[str, Any] = {"messages": [{"role": "user", "content": "x"}], "logprobs": name == "top_logprobs"}
    completion: dict[str, Any] = {"prompt": "x", "echo": name in ("max_tokens", "max_completion_tokens")}
    is_chat = schema == "ChatRequest"
    body = {"model": MODEL, **(chat if is_chat else completion), **needed.get(name, {}), name: value}
    try:
        if is_chat:
            VALIDATOR.chat(body, ORIGIN)
        else:
            VALIDATOR.completion(body, ORIGIN)
    except InvalidRequest as error:
        return str(error)
    return None
