"""The HTTP surface: paths, and the way of a request from bytes to an answer. `app` builds it with `make_app`.

read the body -> `validation` -> admit (in `delivery.Answer`) -> answer. Errors raised on the way become responses in
one handler. Knows texts and the `Dispatcher`; not workers, placement or Redis.
"""

from __future__ import annotations

import asyncio
import secrets
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeVar

import msgspec
import structlog
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

import baton
from baton.domain.errors import BatonError, ModelNotFound
from baton.domain.ids import RequestId
from baton.telemetry import metrics
from services.router.api.body import parse_object, read_body
from services.router.api.calls import ValidChat, ValidCompletion
from services.router.api.chat import ChatShape
from services.router.api.completions import CompletionShape
from services.router.api.delivery import Answer, AnswerContext
from services.router.api.envelope import Envelope
from services.router.api.fields import shown
from services.router.api.http_errors import NotReady, is_bug, reply_to
from services.router.api.observer import NullObserver, Observer, ending
from services.router.api.schemas import Model, ModelList, Status, Version
from services.router.api.validation import Body, Validator
from services.router.generation import Dispatcher
from services.router.text.model import TextModel

INLINE_BODY_BYTES = 16 * 1024
"""Larger bodies are validated in a thread: tokenising them would hold up everybody's tokens."""

FINGERPRINT = f"baton-{baton.__version__}"

Readiness = Callable[[], tuple[bool, str]]
"""Whether requests can be served, and why or why not."""

_Call = TypeVar("_Call", ValidChat, ValidCompletion)

log = structlog.get_logger(__name__)


@dataclass(frozen=True, slots=True)
class ApiLimits:
    """The API's share of the router's settings. `max_model_len`: prompt and answer together."""

    model_name: str
    max_model_len: int
    max_body_bytes: int = 4 * 1024 * 1024
    request_deadline_s: float = 600.0
    ping_interval_s: float = 15.0


def make_app(
    text: TextModel,
    dispatcher: Dispatcher,
    readiness: Readiness,
    limits: ApiLimits,
    observer: Observer | None = None,
) -> Starlette:
    """The router's HTTP application."""
    api = _Api(text, dispatcher, readiness, limits, observer or NullObserver())
    app = Starlette(
        routes=[
            Route("/v1/chat/completions", api.chat, methods=["POST"]),
            Route("/v1/completions", api.completion, methods=["POST"]),
            Route("/v1/models", api.models),
            Route("/v1/models/{id:path}", api.model),
            Route("/health", api.health),
            Route("/ready", api.ready),
            Route("/metrics", api.metrics),
            Route("/version", api.version),
        ],
        middleware=[Middleware(Envelope)],
        exception_handlers={BatonError: _answer_error, HTTPException: _answer_error},
    )
    app.router.redirect_slashes = False
    return app


class _Api:
    """The endpoints."""

    def __init__(
        self, text: TextModel, dispatcher: Dispatcher, readiness: Readiness, limits: ApiLimits, observer: Observer
    ) -> None:
        self._text = text
        self._readiness = readiness
        self._limits = limits
        self._observer = observer
        self._context = AnswerContext(dispatcher, text, observer, limits.ping_interval_s)
        self._validator = Validator(text, limits.model_name, limits.max_model_len, limits.request_deadline_s)
        self._model = Model(id=limits.model_name, created=int(time.time()), max_model_len=limits.max_model_len)

    async def chat(self, request: Request) -> Response:
        """POST /v1/chat/completions."""
        arrived_s = time.monotonic()
        call = await self._validate(request, "chatcmpl", self._validator.chat)
        return Answer(self._context, call, ChatShape(call, self._text, FINGERPRINT), arrived_s)

    async def completion(self, request: Request) -> Response:
        """POST /v1/completions."""
        arrived_s = time.monotonic()
        call = await self._validate(request, "cmpl", self._validator.completion)
        return Answer(self._context, call, CompletionShape(call, self._text, FINGERPRINT), arrived_s)

    async def models(self, request: Request) -> Response:
        """GET /v1/models."""
        return _json(ModelList([self._model]))

    async def model(self, request: Request) -> Response:
        """GET /v1/models/{id}."""
        if request.path_params["id"] != self._model.id:
            raise ModelNotFound(f"the model {shown(request.path_params['id'])} does not exist here", param="model")
        return _json(self._model)

    async def health(self, request: Request) -> Response:
        """GET /health: this process is alive."""
        return _json(Status("ok"))

    async def ready(self, request: Request) -> Response:
        """GET /ready: requests can be served."""
        ready, detail = self._readiness()
        if not ready:
            raise NotReady(detail)
        return _json(Status("ready", detail))

    async def metrics(self, request: Request) -> Response:
        """GET /metrics, for Prometheus."""
        content, content_type = metrics.render()
        return Response(content, headers={"content-type": content_type})

    async def version(self, request: Request) -> Response:
        """GET /version."""
        return _json(Version(baton.__version__))

    async def _validate(
        self, request: Request, prefix: str, validate: Callable[[Body, RequestId, int], _Call]
    ) -> _Call:
        """The call in a request's body; a refusal is reported before it is raised."""
        request_id = RequestId(f"{prefix}-{secrets.token_hex(12)}")
        try:
            body = await read_body(request, self._limits.max_body_bytes)
            if len(body) <= INLINE_BODY_BYTES:
                return validate(parse_object(body), request_id, int(time.time()))
            return await asyncio.to_thread(lambda: validate(parse_object(body), request_id, int(time.time())))
        except BaseException as error:
            self._observer.on_finish(request_id, *ending(error))
            raise


def _json(struct: msgspec.Struct) -> Response:
    return Response(msgspec.json.encode(struct), media_type="application/json")


async def _answer_error(request: Request, error: Exception) -> Response:
    if is_bug(error):
        log.error("request_failed", path=request.url.path, exc_info=error)
    return reply_to(error).response()
