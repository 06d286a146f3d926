"""The HTTP surface: paths, and the way of a request from bytes to an answer. `app` builds it with `make_app`.

read the body -> `reader` -> admit (in `delivery.Answer`) -> answer; or, for an earlier request: `resume` -> answer.
Errors raised on the way become responses in one handler. Knows texts and the `Dispatcher`; not workers, placement or
Redis.
"""

from __future__ import annotations

import secrets
import time
from collections.abc import Callable
from functools import partial

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
from services.router.api.body import read_body
from services.router.api.budget import BodyBudget
from services.router.api.cursor import Cursor
from services.router.api.custody import Posting
from services.router.api.delivery import Answer
from services.router.api.envelope import MAX_LOGGED_CHARS, Envelope
from services.router.api.fields import shown
from services.router.api.front import ApiLimits, Front, Memory, build_front
from services.router.api.guard import Guard, tenant_of
from services.router.api.http_errors import NotReady, is_bug, reply_to
from services.router.api.keys import KeyRing
from services.router.api.observer import NullObserver, Observer, ending
from services.router.api.openapi import document
from services.router.api.reader import CHAT, COMPLETION, ID_PREFIXES, Reading
from services.router.api.schemas import Model, ModelList, Status, Version
from services.router.api.validation import Origin
from services.router.generation import Dispatcher
from services.router.text.model import TextModel

Readiness = Callable[[], tuple[bool, str]]
"""Whether requests can be served, and why or why not."""

LAST_EVENT_ID = "last-event-id"

MAX_BODIES = 16
"""So many bodies of the largest size may be read and made into calls at once, or as many more as are smaller."""

log = structlog.get_logger(__name__)


def make_app(
    text: TextModel,
    dispatcher: Dispatcher,
    readiness: Readiness,
    limits: ApiLimits,
    observer: Observer | None = None,
    keys: KeyRing | None = None,
    front: Front | None = None,
) -> Starlette:
    """The router's HTTP application; with `keys` only for those who have one. Without `front`, one without a book."""
    description = document(limits.model_name, text.vocab_size, asks_for_keys=keys is not None)
    observer = observer or NullObserver()
    front = front or build_front(text, dispatcher, limits, observer, Memory())
    api = _Api(front, readiness, limits, observer)
    app = Starlette(
        routes=[
            Route(CHAT, api.generate, methods=["POST"]),
            Route(COMPLETION, api.generate, methods=["POST"]),
            Route("/v1/requests/{id}", api.request),
            Route("/v1/requests/{id}/stream", api.stream),
            Route("/v1/models", api.models),
            Route("/v1/models/{id:path}", api.model),
            Route("/health", api.health),
            Route("/ready", api.ready),
            Route("/metrics", api.metrics),
            Route("/version", api.version),
            Route("/openapi.json", partial(_send_json, msgspec.json.encode(description))),
        ],
        middleware=[Middleware(Envelope), *([Middleware(Guard, ring=keys)] if keys is not None else [])],
        exception_handlers={BatonError: _answer_error, HTTPException: _answer_error},
    )
    app.router.redirect_slashes = False
    return app


class _Api:
    """The endpoints."""

    def __init__(self, front: Front, readiness: Readiness, limits: ApiLimits, observer: Observer) -> None:
        self._front = front
        self._readiness = readiness
        self._limits = limits
        self._bodies = BodyBudget(MAX_BODIES * limits.max_body_bytes)
        self._observer = observer
        self._model = Model(id=limits.model_name, created=int(time.time()), max_model_len=limits.max_model_len)

    async def generate(self, request: Request) -> Response:
        """POST /v1/chat/completions, POST /v1/completions; with a `Last-Event-ID`, the rest of an earlier answer."""
        arrived_s, endpoint = time.monotonic(), request.url.path
        last_event_id = request.headers.get(LAST_EVENT_ID)
        if last_event_id:
            await read_body(request, self._limits.max_body_bytes)
            id = Cursor.parse(last_event_id).call
            return await self._front.resumption.answer(id, last_event_id, tenant_of(request), endpoint)
        posting, reading = await self._read(request, endpoint)
        return Answer(self._front.answers, reading, posting, arrived_s)

    async def request(self, request: Request) -> Response:
        """GET /v1/requests/{id}: where a request is."""
        return _json(await self._front.resumption.status(RequestId(request.path_params["id"]), tenant_of(request)))

    async def stream(self, request: Request) -> Response:
        """GET /v1/requests/{id}/stream: its answer from the beginning, or after an event, live."""
        last_event_id = request.headers.get(LAST_EVENT_ID) or request.query_params.get("last_event_id", "")
        id = RequestId(request.path_params["id"])
        return await self._front.resumption.answer(id, last_event_id, tenant_of(request))

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

    async def _read(self, request: Request, endpoint: str) -> tuple[Posting, Reading]:
        """What was posted, and the call in it; a refusal is reported before it is raised."""
        request_id = RequestId(f"{ID_PREFIXES[endpoint]}-{secrets.token_hex(12)}")
        origin = Origin(request_id, int(time.time()), secrets.randbits(63), tenant_of(request))
        try:
            # Before the body: when nobody is taken, nothing is read, parsed or made into tokens.
            self._front.answers.dispatcher.refuse_if_full(self._limits.request_deadline_s)
            with self._bodies.account() as take:
                posting = Posting(endpoint, await read_body(request, self._limits.max_body_bytes, take), origin)
                return posting, await self._front.reader.read(posting)
        except BaseException as error:
            self._observer.on_finish(request_id, *ending(error))
            raise


async def _send_json(content: bytes, request: Request) -> Response:
    return Response(content, media_type="application/json")


def _json(struct: msgspec.Struct) -> Response:
    return Response(msgspec.json.encode(struct), media_type="application/json")


async def _answer_error(request: Request, error: Exception) -> Response:
    if is_bug(error):
        log.error("request_failed", path=request.scope["path"][:MAX_LOGGED_CHARS], exc_info=error)
    return reply_to(error).response()
