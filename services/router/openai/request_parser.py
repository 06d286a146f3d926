"""Parses raw requests. The same raw request gives the same parsed request, at any time and on any router.

`routes` parses new requests, `resume` and `takeover` stored ones. Knows nothing of HTTP.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import ParamSpec, TypeVar

from baton.domain.errors import InvalidRequest
from baton.services.router.openai.chat import ChatResponseBuilder
from baton.services.router.openai.completions import CompletionResponseBuilder
from baton.services.router.openai.fields import parse_object
from baton.services.router.openai.images.parts import remote_urls
from baton.services.router.openai.response_builder import ResponseBuilder
from baton.services.router.openai.valid_request import ValidRequest
from baton.services.router.openai.validation import RequestMetadata, RequestValidator
from baton.services.router.text.text_model import TextModel
from baton.services.router.vision.remote.fetcher import Fetched, ImageFetcher

P = ParamSpec("P")
T = TypeVar("T")

CHAT, COMPLETION = "/v1/chat/completions", "/v1/completions"
ID_PREFIXES: Mapping[str, str] = {CHAT: "chatcmpl", COMPLETION: "cmpl"}

INLINE_BODY_BYTES = 16 * 1024
"""Larger bodies are parsed in a thread: tokenizing them would block the event loop."""


@dataclass(frozen=True, slots=True)
class RawRequest:
    """A request as the client posted it, and all that is needed to parse it again. `endpoint` is the path.

    `stored`: the body comes from the state store, and refers to its images.
    """

    endpoint: str
    body: bytes
    metadata: RequestMetadata
    stored: bool = False


@dataclass(frozen=True, slots=True)
class ParsedRequest:
    """A valid request, and a new builder for its response.

    `stored_body`: the body for the state store, where it must be another than the client's: without files of images.
    """

    request: ValidRequest
    response_builder: ResponseBuilder
    stored_body: bytes | None = None


async def run_parser(num_bytes: int, parse: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
    """Calls `parse`, in a thread for a body of many bytes."""
    if num_bytes <= INLINE_BODY_BYTES:
        return parse(*args, **kwargs)
    return await asyncio.to_thread(parse, *args, **kwargs)


class RequestParser:
    """Parses requests to one model. `fingerprint` is part of every response."""

    def __init__(
        self, validator: RequestValidator, text: TextModel, fingerprint: str, fetcher: ImageFetcher | None = None
    ) -> None:
        """`fetcher`: of images by URL; None: none are fetched."""
        self._fetcher = fetcher
        self._validator = validator
        self._text = text
        self._fingerprint = fingerprint

    async def parse(self, raw: RawRequest) -> ParsedRequest:
        """Raises `InvalidRequest`, `ContextOverflow` or `ModelNotFound`; `Overloaded` if images have no place now."""
        fetched = None if self._fetcher is None or raw.stored else await self._fetch(self._fetcher, raw)
        num_fetched = sum(len(file) for file in (fetched or {}).values() if isinstance(file, bytes))
        return await run_parser(len(raw.body) + num_fetched, self._parse, raw, fetched)

    async def _fetch(self, fetcher: ImageFetcher, raw: RawRequest) -> Fetched:
        """The files of a new chat's URLs. A stored call has references in their place: nothing is fetched twice."""
        if raw.endpoint != CHAT or b"image_url" not in raw.body:
            return {}
        urls = await run_parser(len(raw.body), lambda: remote_urls(parse_object(raw.body)))
        return await fetcher.fetch_all(urls, raw.metadata.tenant)

    def _parse(self, raw: RawRequest, fetched: Fetched | None = None) -> ParsedRequest:
        body = parse_object(raw.body)
        match raw.endpoint:
            case "/v1/chat/completions":
                images = self._validator.image_parts(stored=raw.stored, fetched=fetched)
                chat = self._validator.chat(body, raw.metadata, images)
                builder = ChatResponseBuilder(chat, self._text, self._fingerprint)
                return ParsedRequest(chat, builder, None if raw.stored else images.stored_body(body))
            case "/v1/completions":
                completion = self._validator.completion(body, raw.metadata)
                return ParsedRequest(completion, CompletionResponseBuilder(completion, self._text, self._fingerprint))
            case other:
                raise InvalidRequest(f"nothing is generated at {other}")
