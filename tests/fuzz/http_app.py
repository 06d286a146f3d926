"""The router's API without sockets: one exchange after another on one event loop, with a deadline."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

import jsonschema_rs

from baton.services.router.frontend import ApiLimits
from baton.services.router.openapi import openapi_document
from baton.services.router.routes import make_app
from baton.services.router.text.text_model import TextModel
from baton.services.router.vision.image_model import ImageModel
from baton.store.memory_store import MemoryStore
from baton.store.write_behind.writer import StoreWriter
from tests.fake_dispatcher import FakeDispatcher, one_token_chunks
from tests.unit.router.memory_frontend import memory_frontend
from tests.unit.router.text.text_models import bundled

MODEL = "tiny"
MAX_MODEL_LEN = 256
MAX_BODY_BYTES = 1 << 20
MAX_ERROR_BYTES = 8 * 1024
TIMEOUT_S = 20.0
VOCAB_SIZE = bundled().vocab_size
JSON_TYPE = (b"content-type", b"application/json")

Headers = Sequence[tuple[bytes, bytes]]


@dataclass(frozen=True)
class Reply:
    """Response of a client. Status 0: none, since it had disconnected."""

    status: int
    headers: dict[str, str]
    body: bytes

    @property
    def error(self) -> dict[str, Any]:
        return json.loads(self.body)["error"]


class FuzzedApp:
    """The application, and checks of every answer."""

    def __init__(
        self, text: TextModel | None = None, max_model_len: int = MAX_MODEL_LEN, images: ImageModel | None = None
    ) -> None:
        """`text`: default the bundled model's. `images`: of that model."""
        self.dispatcher = FakeDispatcher(lambda sequence: one_token_chunks([5, 6, 2]))
        self._runner = asyncio.Runner()
        self._writer, self._own_tasks = self._runner.run(_started_writer())
        limits = ApiLimits(model_name=MODEL, max_model_len=max_model_len, max_body_bytes=MAX_BODY_BYTES)
        frontend = memory_frontend(self.dispatcher, limits, writer=self._writer, text=text, images=images)
        self.app = make_app(frontend, lambda: (True, "1 pair"))

    def close(self) -> None:
        self._runner.run(self._writer.close())
        self._runner.close()

    def send(
        self,
        method: str,
        path: str,
        parts: Sequence[bytes] = (b"",),
        headers: Headers = (JSON_TYPE,),
        *,
        query: bytes = b"",
        disconnects: bool = False,
    ) -> Reply:
        """Runs one exchange; `parts` are the pieces of the body. Raises `TimeoutError` without an end."""
        self.dispatcher.admitted.clear()
        self.dispatcher.finished.clear()
        reply = self._runner.run(self._exchange(method, path, parts, headers, query, disconnects))
        assert not self.dispatcher.outstanding, "a request was never released"
        self.check(reply, disconnects=disconnects)
        return reply

    def post(self, path: str, body: object) -> Reply:
        return self.send("POST", path, [json.dumps(body).encode()])

    def check(self, reply: Reply, *, disconnects: bool) -> None:
        assert reply.status < 500 or (disconnects and reply.status == 0), reply
        if reply.status == 0:
            return
        assert len(reply.headers["x-request-id"]) <= 128
        if reply.status >= 400 and reply.headers.get("content-length") != "0":
            assert reply.headers["content-type"] == "application/json"
            assert len(reply.body) < MAX_ERROR_BYTES
            error = json.loads(reply.body)
            assert set(error) == {"error"}
            assert set(error["error"]) == {"message", "type", "param", "code"}
            assert error["error"]["message"]
            assert error["error"]["code"]
        elif reply.headers["content-type"].startswith("text/event-stream"):
            assert reply.body.endswith(b"data: [DONE]\n\n")

    async def _exchange(
        self, method: str, path: str, parts: Sequence[bytes], headers: Headers, query: bytes, disconnects: bool
    ) -> Reply:
        coming = [{"type": "http.request", "body": part, "more_body": True} for part in parts]
        if not disconnects:
            coming[-1]["more_body"] = False
        status, sent, body, gone = 0, {}, bytearray(), asyncio.Event()

        async def receive() -> Any:
            if coming:
                return coming.pop(0)
            if not disconnects:
                await gone.wait()
            return {"type": "http.disconnect"}

        async def send(message: Any) -> None:
            nonlocal status, sent
            if message["type"] == "http.response.start":
                assert status == 0, "answered twice"
                status = message["status"]
                sent = {name.decode(): value.decode("latin-1") for name, value in message["headers"]}
            else:
                body.extend(message.get("body", b""))

        scope = {
            "type": "http",
            "asgi": {"version": "3.0"},
            "http_version": "1.1",
            "method": method,
            "scheme": "http",
            "path": path,
            "raw_path": path.encode("utf-8", "replace"),
            "root_path": "",
            "query_string": query,
            "headers": [(name.lower(), value) for name, value in headers],
            "client": ("127.0.0.1", 1),
            "server": ("127.0.0.1", 80),
        }
        async with asyncio.timeout(TIMEOUT_S):
            await self.app(scope, receive, send)
        left = [task for task in asyncio.all_tasks() - self._own_tasks if task is not asyncio.current_task()]
        assert not left, f"tasks outlive their request: {left}"
        return Reply(status, sent, bytes(body))


async def _started_writer() -> tuple[StoreWriter, set[asyncio.Task[Any]]]:
    """A writer and its tasks."""
    writer = StoreWriter(MemoryStore())
    writer.start()
    tasks = asyncio.all_tasks()
    tasks.discard(asyncio.current_task())
    return writer, tasks


@cache
def openapi() -> dict[str, Any]:
    """The OpenAPI document of the application."""
    return openapi_document([MODEL], VOCAB_SIZE, requires_api_key=False)


@cache
def validator(schema: str) -> Any:
    """A schema of the document."""
    components = openapi()["components"]
    whole = {"$schema": "https://json-schema.org/draft/2020-12/schema", "$ref": f"#/components/schemas/{schema}"}
    return jsonschema_rs.validator_for({**whole, "components": components})
