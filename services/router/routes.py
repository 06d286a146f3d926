"""HTTP endpoints, and the path of a request from bytes to a response. `app` builds them with `make_app`.

    new request: read the body -> `request_parser` -> admit (in `respond.GenerationResponse`) -> respond
    earlier request: `resume` -> respond

One handler turns errors into responses. Knows texts and the `Dispatcher`; not workers, placement or Redis.
"""

from __future__ import annotations

import difflib
import os
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from http import HTTPStatus

import msgspec
import structlog
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

import baton
from baton.domain.errors import BatonError, Cancelled, InvalidRequest, ModelNotFound
from baton.domain.ids import RequestId
from baton.services.router.cluster.demo import DemoClient
from baton.services.router.cluster.endpoints import ClusterEndpoints
from baton.services.router.cluster.feed import ClusterFeed
from baton.services.router.edge.api_keys import ApiKeys
from baton.services.router.edge.auth_middleware import ApiKeyMiddleware, tenant_of
from baton.services.router.edge.body import read_body
from baton.services.router.edge.body_budget import BodyBudget
from baton.services.router.edge.direct_endpoints import DirectEndpoints, RouterApp
from baton.services.router.edge.headers import MAX_NAME_CHARS, MAX_NAMES, header, unknown_fields_header
from baton.services.router.edge.http_errors import (
    BodyTooLarge,
    NotReady,
    PathNotFound,
    error_response,
    is_internal_error,
)
from baton.services.router.edge.middleware import MAX_LOGGED_CHARS, RequestMiddleware, trace_context_of
from baton.services.router.frontend import Frontend
from baton.services.router.openai.fields import short_repr
from baton.services.router.openai.request_parser import (
    CHAT,
    COMPLETION,
    ID_PREFIXES,
    ParsedRequest,
    RawRequest,
    run_parser,
)
from baton.services.router.openai.schemas import Model, ModelList, Status, Version
from baton.services.router.openai.tokenization import Answer
from baton.services.router.openai.validation import RequestMetadata
from baton.services.router.openapi import openapi_document
from baton.services.router.respond import GenerationResponse
from baton.services.router.streaming.cursor import Cursor
from baton.services.router.ui.bundle import PageBundle
from baton.telemetry import metrics
from baton.telemetry.request_timer import RequestOrigin, RequestTimer
from baton.telemetry.request_trace import Stage

ReadinessCheck = Callable[[], tuple[bool, str]]
"""Returns whether requests can be served, and the reason."""

LAST_EVENT_ID = b"last-event-id"
STORE = "x-baton-store"
"""Request header; `none`: the call is private."""

EXPOSED_HEADERS = (
    "x-request-id", "x-baton-request-id", "x-baton-durable", "x-baton-unknown-fields", "openai-processing-ms",
    "retry-after", "x-ratelimit-limit-requests", "x-ratelimit-limit-tokens",
)  # fmt: skip
"""Headers that a page of another origin may read."""

ID_BYTES, SEED_BYTES = 12, 8
"""Random bytes of a request's id, and of its seed."""

MAX_BODIES = 16
"""Bodies of the largest size that may be read and parsed at once; more if they are smaller."""

MAX_LARGE_BODIES = 4
"""The same for a model with images, whose bodies are larger."""

log = structlog.get_logger(__name__)


def make_app(
    frontend: Frontend,
    readiness: ReadinessCheck,
    keys: ApiKeys | None = None,
    feed: ClusterFeed | None = None,
    page: PageBundle | None = None,
    demo: DemoClient | None = None,
) -> Starlette:
    """The HTTP application. With `keys`, every request needs one of them; with `feed`, it shows the cluster.

    `page`: the files of the page at `/`. `demo`: the page may kill and drain workers.
    """
    description = openapi_document(
        (frontend.limits.model_name, *frontend.limits.other_model_names),
        frontend.text.vocab_size,
        requires_api_key=keys is not None,
        shows_cluster=feed is not None,
    )
    api = _Endpoints(frontend, readiness)
    generating = {path: Route(path, api.generate, methods=["POST"]) for path in (CHAT, COMPLETION)}
    cors = _cors(frontend.limits.cors_origins)
    app = RouterApp(
        DirectEndpoints(generating, keys, _error_handler),
        frontend.rate_headers,
        {"vary": "Origin"} if cors else {},
        routes=[
            *generating.values(),
            Route(f"{CHAT}/render", api.render, methods=["POST"]),
            Route("/tokenize", api.tokenize, methods=["POST"]),
            Route("/detokenize", api.detokenize, methods=["POST"]),
            Route("/tokenizer_info", api.tokenizer_info),
            Route("/v1/requests/{id}", api.request),
            Route("/v1/requests/{id}/stream", api.stream),
            Route("/v1/models", api.models),
            Route("/v1/models/{id:path}", api.model),
            Route("/health", api.health),
            Route("/ready", api.ready),
            Route("/version", api.version),
            Route("/openapi.json", partial(_send_json, msgspec.json.encode(description))),
            *(ClusterEndpoints(feed, frontend.resumer.stored_trace, demo).routes() if feed is not None else []),
            *(page.routes() if page is not None else []),
        ],
        middleware=[
            Middleware(RequestMiddleware, rate_headers=frontend.rate_headers),
            *cors,
            *([Middleware(ApiKeyMiddleware, keys=keys)] if keys is not None else []),
        ],
        exception_handlers={BatonError: _error_handler, HTTPException: _error_handler},
    )
    app.router.redirect_slashes = False
    return app


def _cors(origins: Sequence[str]) -> list[Middleware]:
    """Lets pages of these origins call. Preflights carry no key, so it comes before `ApiKeyMiddleware`."""
    if not origins:
        return []
    return [
        Middleware(
            CORSMiddleware,
            allow_origins=list(origins),
            allow_methods=["GET", "POST"],
            allow_headers=["*"],
            expose_headers=list(EXPOSED_HEADERS),
        )
    ]


class _Endpoints:
    """The endpoints."""

    def __init__(self, frontend: Frontend, readiness: ReadinessCheck) -> None:
        self._frontend = frontend
        self._readiness = readiness
        limits = self._limits = frontend.limits
        largest = frontend.max_body_bytes
        self._larger_bodies = {CHAT: largest}  # by endpoint: only chats have images
        self._bodies = BodyBudget(max(MAX_BODIES * limits.max_body_bytes, MAX_LARGE_BODIES * largest))
        self._started_s = int(time.time())

    async def generate(self, request: Request) -> Response:
        """POST /v1/chat/completions, POST /v1/completions. With a `Last-Event-ID`: the rest of an earlier response."""
        arrived_s, endpoint = time.monotonic(), request.scope["path"]
        last_event_id = header(request.scope, LAST_EVENT_ID)
        if last_event_id:
            with self._bodies.track() as count_bytes:
                await read_body(request, self._larger_bodies.get(endpoint, self._limits.max_body_bytes), count_bytes)
            id = Cursor.parse(last_event_id).request_id
            return await self._frontend.resumer.respond(id, last_event_id, tenant_of(request), endpoint)
        timer = self._frontend.traces.start(
            RequestOrigin(endpoint, tenant_of(request), trace_context_of(request)), arrived_s
        )
        raw, parsed = await self._read(request, timer)
        return GenerationResponse(self._frontend.response_context, parsed, raw, timer)

    async def render(self, request: Request) -> Response:
        """POST /v1/chat/completions/render: the prompt of a chat."""
        parse, metadata = self._frontend.tokenization.render, self._metadata(request)
        return await self._answer_text(request, lambda body: parse(body, metadata))

    async def tokenize(self, request: Request) -> Response:
        """POST /tokenize."""
        parse, metadata = self._frontend.tokenization.tokenize, self._metadata(request)
        return await self._answer_text(request, lambda body: parse(body, metadata, self._frontend.max_model_len()))

    async def detokenize(self, request: Request) -> Response:
        """POST /detokenize."""
        return await self._answer_text(request, self._frontend.tokenization.detokenize)

    async def tokenizer_info(self, request: Request) -> Response:
        """GET /tokenizer_info."""
        return _json(self._frontend.tokenization.info())

    def _metadata(self, request: Request) -> RequestMetadata:
        """For a request that nothing is generated for."""
        return RequestMetadata(RequestId("none"), int(time.time()), 0, tenant_of(request))

    async def _answer_text(self, request: Request, parse: Callable[[bytes], Answer]) -> Response:
        with self._bodies.track() as count_bytes:
            body = await read_body(request, self._limits.max_body_bytes, count_bytes)
            struct, unknown = await run_parser(len(body), parse, body)
        if unknown:
            self._check_unknown(unknown)
        return _json(struct, unknown_fields_header(unknown))

    async def request(self, request: Request) -> Response:
        """GET /v1/requests/{id}: the state and the trace of a request."""
        return _json(await self._frontend.resumer.status(RequestId(request.path_params["id"]), tenant_of(request)))

    async def stream(self, request: Request) -> Response:
        """GET /v1/requests/{id}/stream: its response from the beginning, or after an event, live."""
        last_event_id = header(request.scope, LAST_EVENT_ID) or request.query_params.get("last_event_id", "")
        id = RequestId(request.path_params["id"])
        return await self._frontend.resumer.respond(id, last_event_id, tenant_of(request))

    def _models(self) -> list[Model]:
        """The model under each of its names, with the length that the workers hold now."""
        length, names = self._frontend.max_model_len(), (self._limits.model_name, *self._limits.other_model_names)
        modalities = self._frontend.modalities()
        return [Model(id=name, created=self._started_s, max_model_len=length, modalities=modalities) for name in names]

    async def models(self, request: Request) -> Response:
        """GET /v1/models."""
        return _json(ModelList(self._models()))

    async def model(self, request: Request) -> Response:
        """GET /v1/models/{id}."""
        for model in self._models():
            if model.id == request.path_params["id"]:
                return _json(model)
        raise ModelNotFound(f"the model {short_repr(request.path_params['id'])} does not exist here", param="model")

    async def health(self, request: Request) -> Response:
        """GET /health: the process runs."""
        return _json(Status("ok"))

    async def ready(self, request: Request) -> Response:
        """GET /ready: requests can be served."""
        ready, detail = self._readiness()
        if not ready:
            raise NotReady(detail)
        return _json(Status("ready", detail))

    async def version(self, request: Request) -> Response:
        """GET /version."""
        return _json(Version(baton.__version__))

    async def _read(self, request: Request, timer: RequestTimer) -> tuple[RawRequest, ParsedRequest]:
        """Reads and parses the body. Ends the timer if the request is refused."""
        origin = timer.origin
        drawn = os.urandom(ID_BYTES + SEED_BYTES)
        id = RequestId(f"{ID_PREFIXES[origin.endpoint]}-{drawn[:ID_BYTES].hex()}")
        timer.id = id
        try:
            private = not self._limits.store_prompts or _wants_no_store(request)
            seed = int.from_bytes(drawn[ID_BYTES:], "little") >> 1  # 63 bits
            metadata = RequestMetadata(id, int(time.time()), seed, origin.tenant, private)
            timer.private = private
            # Before the body: while the queue is full, nothing is read, parsed or tokenized.
            self._frontend.response_context.dispatcher.refuse_if_full(self._limits.request_deadline_s, origin.tenant)
            with self._bodies.track() as count_bytes:
                max_bytes = self._larger_bodies.get(origin.endpoint, self._limits.max_body_bytes)
                body = await read_body(request, max_bytes, count_bytes)
                timer.stamp(Stage.READ)
                raw = RawRequest(origin.endpoint, body, metadata)
                parsed = await self._frontend.parser.parse(raw)
            if min(len(body), len(parsed.stored_body or body)) > self._limits.max_body_bytes:
                raise BodyTooLarge(f"the body may have {self._limits.max_body_bytes} bytes beside files of images")
            if parsed.stored_body is not None:
                raw = replace(raw, body=parsed.stored_body, stored=True)
            if parsed.request.unknown_fields:
                self._check_unknown(parsed.request.unknown_fields)
            if parsed.request.constraint is not None:
                await self._frontend.constraints.check(parsed.request.constraint)
            dispatcher = self._frontend.response_context.dispatcher
            await dispatcher.reserve_rates(origin.tenant, parsed.request.sequences)
        except BaseException as error:
            timer.fail(error, error_response(error).status, client_gone=isinstance(error, Cancelled))
            raise
        valid = parsed.request
        timer.begin(id, len(valid.sequences), valid.num_prompt_tokens, stream=valid.stream_options is not None)
        self._frontend.traces.begin(timer)
        return raw, parsed

    def _check_unknown(self, names: Sequence[str]) -> None:
        """Counts and logs unknown fields. Raises `InvalidRequest` with `strict_fields`.

        Only here: a call that one router has accepted must be readable for all that take it over.
        """
        metrics.UNKNOWN_FIELDS_TOTAL.inc(len(names))
        shown = [short_repr(name) for name in names[:MAX_NAMES]]
        log.debug("unknown_fields", names=shown)
        if self._limits.strict_fields:
            raise InvalidRequest(f"unknown fields: {', '.join(shown)}", param=names[0][:MAX_NAME_CHARS])


def _wants_no_store(request: Request) -> bool:
    """True for `x-baton-store: none`. Raises `InvalidRequest` for any other value, which no one would notice."""
    if STORE.encode() not in dict(request.scope["headers"]):
        return False
    value = header(request.scope, STORE.encode())
    if value != "none":
        raise InvalidRequest(f"{STORE} can only be `none`, not {short_repr(value)}", param=STORE)
    return True


async def _send_json(content: bytes, request: Request) -> Response:
    return Response(content, media_type="application/json")


def _json(struct: msgspec.Struct, headers: Mapping[str, str] | None = None) -> Response:
    return Response(msgspec.json.encode(struct), media_type="application/json", headers=headers)


async def _error_handler(request: Request, error: Exception) -> Response:
    if is_internal_error(error):
        log.error("request_failed", path=request.scope["path"][:MAX_LOGGED_CHARS], exc_info=error)
    if isinstance(error, HTTPException) and error.status_code == HTTPStatus.NOT_FOUND:
        error = _no_such_path(request)
    return error_response(error).response()


def _no_such_path(request: Request) -> PathNotFound:
    """Names the path, and the nearest one that exists, such as one without its `/v1`."""
    path = request.scope["path"][:MAX_LOGGED_CHARS]
    known = [route.path for route in request.app.routes if isinstance(route, Route) and "{" not in route.path]
    ends = [other for other in known if path.strip("/") and other.endswith("/" + path.strip("/"))]
    nearest = sorted(ends, key=len) or difflib.get_close_matches(path, known, n=1)
    hint = f"; did you mean {nearest[0]}?" if nearest else ""
    return PathNotFound(f"no such path: {short_repr(path)}{hint}")
