"""Reads the bodies of /tokenize, /detokenize and /v1/chat/completions/render, and answers them. Knows no HTTP.

`routes` calls it, in a thread for large bodies. The fields are vLLM's. Nothing is admitted: no worker is asked. Each
answer comes with the names of the fields that nobody here knows.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from msgspec import UNSET, Struct

from baton.services.router.openai.bounds import FLAG, TEXT
from baton.services.router.openai.field_table.field import FieldEndpoint
from baton.services.router.openai.field_table.table import CheckedFields, check_fields
from baton.services.router.openai.fields import FieldErrors, Fields, parse_object
from baton.services.router.openai.prompts import read_chat, read_tokens
from baton.services.router.openai.schemas import DetokenizeResult, RenderResult, TokenizeResult, TokenizerInfo
from baton.services.router.openai.tools.functions import with_functions
from baton.services.router.openai.tools.reader import read_tools
from baton.services.router.openai.truncation.reader import CUTS
from baton.services.router.openai.validation import RequestMetadata, RequestValidator
from baton.services.router.text.text_model import TextModel

Answer = tuple[Struct, tuple[str, ...]]
"""A response, and the unknown fields of its request."""

OWN_FLAGS = ("add_special_tokens", "return_token_strs")
"""Of /tokenize alone; both endpoints that generate have other rules for the first one."""

CHAT_FLAGS = ("add_generation_prompt", "continue_final_message", "enable_thinking")


class TokenizationParser:
    """Answers requests about the text of one model. Thread-safe."""

    def __init__(self, validator: RequestValidator, text: TextModel) -> None:
        self._validator = validator
        self._text = text

    def render(self, body: bytes, metadata: RequestMetadata) -> Answer:
        """The prompt of a chat that would be accepted. Raises as `RequestValidator.chat`."""
        request, prompt = self._validator.render(parse_object(body), metadata)
        return RenderResult(prompt, list(request.prompts[0])), request.unknown_fields

    def info(self) -> TokenizerInfo:
        """The chat template and the special tokens."""
        names = self._text.special_tokens
        tokens = (names.get(f"{name}_token") for name in ("bos", "eos", "pad", "unk"))
        return TokenizerInfo(self._text.chat_template, *tokens)

    def tokenize(self, body: bytes, metadata: RequestMetadata, max_model_len: int) -> Answer:
        """The tokens of a text, or of a chat. Raises `InvalidRequest` or `ModelNotFound`."""
        given = parse_object(body)
        is_chat = "messages" in given
        checked = self._open(given, FieldEndpoint.CHAT if is_chat else FieldEndpoint.COMPLETION)
        fields = checked.fields
        own = Fields(given, fields.errors).read(dict.fromkeys(OWN_FLAGS, FLAG))
        if is_chat:
            tokens, unread = self._of_chat(fields, own, metadata.created_s)
        else:
            tokens, unread = self._of_text(fields, own), ()
        strings = [self._text.token_text(token) for token in tokens] if own.get("return_token_strs") else UNSET
        return TokenizeResult(len(tokens), max_model_len, list(tokens), strings), checked.unknown + unread

    def detokenize(self, body: bytes) -> Answer:
        """The text of tokens, special tokens included. Raises `InvalidRequest` or `ModelNotFound`."""
        given = parse_object(body)
        fields = Fields(given, FieldErrors())
        self._check_model(fields)
        value = fields.values.get("tokens")
        tokens: tuple[int, ...] = ()
        if isinstance(value, list):
            tokens = read_tokens(fields, value, self._text.vocab_size, "tokens")
        else:
            fields.add_mismatch("tokens", "a list of token ids")
        fields.errors.raise_if_any()
        unknown = tuple(name for name in given if name not in ("model", "tokens"))
        return DetokenizeResult(self._text.decode(tokens, skip_special_tokens=False)), unknown

    def _open(self, body: dict[str, object], endpoint: FieldEndpoint) -> CheckedFields:
        """The fields of the endpoint whose prompt is asked for; a model may be named. Raises `ModelNotFound`."""
        errors = FieldErrors()
        checked = check_fields({name: body[name] for name in body if name not in OWN_FLAGS}, endpoint, errors)
        self._check_model(checked.fields)
        for name in CUTS:  # of endpoints that generate: the context leaves room for an answer there
            if body.get(name) is not None:
                checked.fields.add_error(name, "is not supported here")
        return checked

    def _check_model(self, fields: Fields) -> None:
        model = fields.read({"model": TEXT}).get("model")
        if model is not None:
            self._validator.check_model(model)

    def _of_text(self, fields: Fields, own: Mapping[str, Any]) -> tuple[int, ...]:
        text = fields.values.get("prompt")
        if not isinstance(text, str):
            fields.add_mismatch("prompt", "a string; or send messages")
        fields.errors.raise_if_any()
        return self._text.encode(str(text), add_special_tokens=own.get("add_special_tokens", True))

    def _of_chat(
        self, fields: Fields, own: Mapping[str, Any], created_s: int
    ) -> tuple[tuple[int, ...], tuple[str, ...]]:
        """The tokens of a chat with its tools and images, and the fields that the template does not read."""
        if fields.values.get("prompt") is not None:
            fields.add_error("prompt", "cannot be combined with messages")
        images = self._validator.image_parts()
        chat = read_chat(fields, fields.read(dict.fromkeys(CHAT_FLAGS, FLAG)), self._text, created_s, images)
        tools = read_tools(with_functions(fields) or fields, self._text)
        fields.errors.raise_if_any()
        prompt = self._text.render_chat(chat.messages, chat.with_tools(tools.definitions if tools else ()).options)
        tokens = self._text.encode(images.mark(prompt), add_special_tokens=own.get("add_special_tokens", False))
        tokens, _ = images.place(tokens, "messages")
        return tokens, chat.unread
