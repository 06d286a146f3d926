"""Reads what a client posted: the same posting is the same call, today and on another router.

`routes` reads a fresh posting, `resume` and `carry` one out of the reception book. Knows which endpoint is parsed and
shaped how; nothing of HTTP.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from dataclasses import dataclass

from baton.domain.errors import InvalidRequest
from baton.state.base import CallRecord
from services.router.api.body import parse_object
from services.router.api.calls import ValidCall
from services.router.api.chat import ChatShape
from services.router.api.completions import CompletionShape
from services.router.api.custody import Posting
from services.router.api.shape import Shape
from services.router.api.validation import Origin, Validator
from services.router.text.model import TextModel

CHAT, COMPLETION = "/v1/chat/completions", "/v1/completions"
ID_PREFIXES: Mapping[str, str] = {CHAT: "chatcmpl", COMPLETION: "cmpl"}

INLINE_BODY_BYTES = 16 * 1024
"""Larger bodies are validated in a thread: tokenising them would hold up everybody's tokens."""


@dataclass(frozen=True, slots=True)
class Reading:
    """A call, and a fresh shape for its answer."""

    call: ValidCall
    shape: Shape


class CallReader:
    """One model's. `fingerprint` is said in every answer."""

    def __init__(self, validator: Validator, text: TextModel, fingerprint: str) -> None:
        self._validator = validator
        self._text = text
        self._fingerprint = fingerprint

    async def read(self, posting: Posting) -> Reading:
        """Raises `InvalidRequest`, `ContextOverflow` or `ModelNotFound`."""
        if len(posting.body) <= INLINE_BODY_BYTES:
            return self._read(posting)
        return await asyncio.to_thread(self._read, posting)

    def _read(self, posting: Posting) -> Reading:
        body = parse_object(posting.body)
        match posting.endpoint:
            case "/v1/chat/completions":
                chat = self._validator.chat(body, posting.origin)
                return Reading(chat, ChatShape(chat, self._text, self._fingerprint))
            case "/v1/completions":
                completion = self._validator.completion(body, posting.origin)
                return Reading(completion, CompletionShape(completion, self._text, self._fingerprint))
            case other:
                raise InvalidRequest(f"nothing is generated at {other}")


def posting_of(record: CallRecord) -> Posting:
    """What was posted, out of the book."""
    return Posting(record.endpoint, record.body, Origin(record.id, record.created_s, record.seed, record.tenant))
