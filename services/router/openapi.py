"""`GET /openapi.json`: OpenAPI 3.1, generated from the structs and bounds that requests are checked with.

`routes` builds it once. Tests compare its paths with the routes, and its schemas with `validation`.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import msgspec

import baton
from baton.services.router.cluster.snapshot import ClusterSnapshot, ListOrder, PendingTrace, RecentRequests
from baton.services.router.edge.auth_middleware import PUBLIC_PATHS
from baton.services.router.openai.field_table.field import FieldEndpoint, Schema
from baton.services.router.openai.request_schemas import body_schema, detokenize_schema, tokenize_schema
from baton.services.router.openai.schemas import (
    ChatCompletion,
    ChatCompletionChunk,
    Completion,
    DetokenizeResult,
    ErrorEnvelope,
    Model,
    ModelList,
    RenderResult,
    Status,
    TokenizeResult,
    TokenizerInfo,
    Version,
)
from baton.services.router.takeover.status import RequestStatus
from baton.telemetry.request_trace import Outcome, RequestTrace

_REF = "#/components/schemas/"
_CLUSTER_STRUCTS = (ClusterSnapshot, RecentRequests, RequestTrace)
_STRUCTS = (
    ChatCompletion,
    ChatCompletionChunk,
    Completion,
    DetokenizeResult,
    ErrorEnvelope,
    Model,
    ModelList,
    RenderResult,
    RequestStatus,
    Status,
    TokenizerInfo,
    TokenizeResult,
    Version,
)
_KEY = {"ApiKey": {"type": "http", "scheme": "bearer"}}

_PENDING = 202
_EMPTY = 204
_STATUS_DESCRIPTIONS = {
    _PENDING: "Another router has the request, and has not stored its trace yet.",
    _EMPTY: "The client already has the whole answer.",
    400: "The request is invalid; `param` names the field.",
    401: "The API key is missing or unknown.",
    404: "Not found.",
    408: "The request did not arrive in time.",
    413: "The body is too large.",
    415: "The body is not JSON.",
    429: "Overloaded; retry after `Retry-After` seconds.",
    500: "Internal error.",
    503: "No workers, or shutting down; retry after `Retry-After` seconds.",
    504: "The deadline was over before the first token.",
}
_TEXT_STATUSES = (400, 404, 408, 413, 415, 429, 500)
_POST_STATUSES = (_EMPTY, 400, 404, 408, 413, 415, 429, 500, 503, 504)


@dataclass(frozen=True, slots=True)
class _Operation:
    """An operation: media types and schemas of its 200 response, and its other statuses."""

    summary: str
    contents: tuple[tuple[str, Schema], ...]
    other_statuses: tuple[int, ...] = ()


def _struct(kind: type[msgspec.Struct]) -> Schema:
    return {"$ref": _REF + kind.__name__}


def _json(summary: str, kind: type[msgspec.Struct], *other_statuses: int) -> _Operation:
    return _Operation(summary, (("application/json", _struct(kind)),), other_statuses)


def _generated(summary: str, whole: type[msgspec.Struct], event: type[msgspec.Struct]) -> _Operation:
    stream: Schema = {
        "type": "string",
        "description": f"With `stream: true`: server-sent events, each {event.__name__} in JSON, the last one [DONE].",
    }
    return _Operation(summary, (("application/json", _struct(whole)), ("text/event-stream", stream)), _POST_STATUSES)


_ANY_JSON: Schema = {"type": "object"}
_EVENTS: Schema = {
    "type": "string",
    "description": "Server-sent events as the request has them, from after `Last-Event-ID` or from the beginning.",
}
_GETS = {
    "/v1/requests/{id}": _json("What is known of a request", RequestStatus, 404, 503),
    "/v1/requests/{id}/stream": _Operation(
        "The rest of an answer", (("text/event-stream", _EVENTS),), (_EMPTY, 400, 404, 429, 500, 503, 504)
    ),
    "/tokenizer_info": _json("The chat template and special tokens", TokenizerInfo),
    "/v1/models": _json("The models that are served", ModelList),
    "/v1/models/{id}": _json("One model", Model, 404),
    "/health": _json("Whether this process is alive", Status),
    "/ready": _json("Whether requests can be served", Status, 503),
    "/version": _json("The router's version", Version),
    "/openapi.json": _Operation("This document", (("application/json", _ANY_JSON),)),
}
_CLUSTER_EVENTS: Schema = {
    "type": "string",
    "description": "Server-sent events: `snapshot` (a ClusterSnapshot, first and every 15 s), `frame` (its changed "
    "parts), `event` (a ClusterEvent) and `request` (a RecentRequest).",
}
_CLUSTER_GETS = {
    "/v1/cluster": _json("Workers, links and requests, as this router sees them", ClusterSnapshot),
    "/v1/cluster/events": _Operation("The same, live", (("text/event-stream", _CLUSTER_EVENTS),), (429,)),
    "/v1/cluster/requests": _json("Requests that ended lately", RecentRequests, 400),
    "/v1/cluster/requests/{id}": _json("The trace of a running or recent request", RequestTrace, _PENDING, 404, 503),
}
_POSTS = {
    "/v1/chat/completions": (_generated("An answer to a chat", ChatCompletion, ChatCompletionChunk), "ChatRequest"),
    "/v1/chat/completions/render": (
        _Operation("The prompt of a chat", (("application/json", _struct(RenderResult)),), _TEXT_STATUSES),
        "ChatRequest",
    ),
    "/tokenize": (
        _Operation("The tokens of a text or a chat", (("application/json", _struct(TokenizeResult)),), _TEXT_STATUSES),
        "TokenizeRequest",
    ),
    "/detokenize": (
        _Operation("The text of tokens", (("application/json", _struct(DetokenizeResult)),), _TEXT_STATUSES),
        "DetokenizeRequest",
    ),
    "/v1/completions": (_generated("A text that goes on from a prompt", Completion, Completion), "CompletionRequest"),
}


_GENERATING = frozenset(endpoint.value for endpoint in FieldEndpoint)


def openapi_document(
    model_names: Sequence[str], vocab_size: int, *, requires_api_key: bool, shows_cluster: bool = False
) -> Schema:
    """The document of a router that serves this model. `shows_cluster`: it has `/v1/cluster`."""
    kinds = (*_STRUCTS, *_CLUSTER_STRUCTS) if shows_cluster else _STRUCTS
    _, structs = msgspec.json.schema_components(kinds, ref_template=_REF + "{name}")
    requests = {
        "ChatRequest": body_schema(FieldEndpoint.CHAT, model_names, vocab_size),
        "CompletionRequest": body_schema(FieldEndpoint.COMPLETION, model_names, vocab_size),
        "TokenizeRequest": tokenize_schema(model_names, vocab_size),
        "DetokenizeRequest": detokenize_schema(model_names, vocab_size),
    }
    components: dict[str, Any] = {"schemas": {**structs, **requests}}
    if requires_api_key:
        components["securitySchemes"] = _KEY
    return {
        "openapi": "3.1.0",
        "info": {"title": "Baton", "version": baton.__version__, "description": "LLM serving, OpenAI-compatible."},
        "paths": _paths(requires_api_key, shows_cluster),
        "components": components,
    }


def _paths(requires_api_key: bool, shows_cluster: bool) -> Schema:
    paths: Schema = {}
    for path, answered in {**_GETS, **(_CLUSTER_GETS if shows_cluster else {})}.items():
        paths[path] = {"get": _operation(path, answered, requires_api_key)}
    for path, (answered, request) in _POSTS.items():
        body = {"required": True, "content": {"application/json": {"schema": {"$ref": _REF + request}}}}
        paths[path] = {"post": {**_operation(path, answered, requires_api_key), "requestBody": body}}
    return paths


def _operation(path: str, answered: _Operation, requires_api_key: bool) -> Schema:
    asks = requires_api_key and path not in PUBLIC_PATHS
    contents = {media_type: {"schema": schema} for media_type, schema in answered.contents}
    statuses = sorted({*answered.other_statuses, *([401] if asks else [])})
    return {
        "summary": answered.summary,
        "parameters": list(_parameters(path, answered)),
        "responses": {"200": {"description": "OK", "content": contents}, **{str(s): _response(s) for s in statuses}},
        **({"security": [{"ApiKey": []}]} if asks else {}),
    }


def _response(status: int) -> Schema:
    schema = _struct(PendingTrace if status == _PENDING else ErrorEnvelope)
    content = {} if status == _EMPTY else {"content": {"application/json": {"schema": schema}}}
    return {"description": _STATUS_DESCRIPTIONS[status], **content}


def _parameters(path: str, answered: _Operation) -> Iterator[Schema]:
    string: Schema = {"type": "string"}
    if "{id}" in path:
        yield {"name": "id", "in": "path", "required": True, "schema": string}
    if _EMPTY in answered.other_statuses:
        description = "The id of the last event that the client has: it gets what follows."
        yield {"name": "Last-Event-ID", "in": "header", "schema": string, "description": description}
    if path in _GENERATING:
        description = "`none`: the state store gets nothing of the request; only the router that got it can resume it."
        yield {"name": "x-baton-store", "in": "header", "schema": {"enum": ["none"]}, "description": description}
    if path == "/v1/cluster/requests":
        yield {"name": "limit", "in": "query", "schema": {"type": "integer", "minimum": 0, "maximum": 200}}
        yield {"name": "slower_than_ms", "in": "query", "schema": {"type": "integer", "minimum": 0}}
        yield {"name": "outcome", "in": "query", "schema": {"enum": [outcome.value for outcome in Outcome]}}
        yield {"name": "notable", "in": "query", "schema": {"type": "boolean"}}
        yield {"name": "order", "in": "query", "schema": {"enum": [order.value for order in ListOrder]}}
    if path.endswith("/stream"):
        description = "The same, for clients that cannot set headers."
        yield {"name": "last_event_id", "in": "query", "schema": string, "description": description}
