"""JSON Schemas of the request bodies, made of the `bounds` that validation uses.

`openapi` publishes them. Descriptions say what a schema cannot: fields that depend on each other.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from services.router.openai import bounds
from services.router.openai.bounds import INTEGERS, NUMBERS, Scalar, integer

Schema = dict[str, Any]
"""A JSON Schema 2020-12, as in OpenAPI 3.1."""

_GENERAL = "Unknown fields are ignored; null is the same as absent; integers are written without a fraction."
_STRING: Schema = {"type": "string"}
_OBJECT: Schema = {"type": "object"}


def chat_schema(model_name: str, vocab_size: int) -> Schema:
    """The body of POST /v1/chat/completions."""
    messages = {"type": "array", "minItems": 1, "maxItems": bounds.MAX_MESSAGES, "items": _message()}
    fields = {
        "messages": messages,
        "logprobs": _or_null({"type": "boolean"}),
        "top_logprobs": _or_null(_integer(bounds.TOP_LOGPROBS), "Needs logprobs: true."),
        **_shared(vocab_size, bounds.MAX_TOKENS),
    }
    return _body(model_name, fields, "messages")


def completion_schema(model_name: str, vocab_size: int) -> Schema:
    """The body of POST /v1/completions."""
    fields = {
        "prompt": _prompt(vocab_size),
        "echo": _or_null({"type": "boolean"}),
        "logprobs": _or_null(_integer(bounds.TOP_LOGPROBS), "Not together with echo."),
        **_shared(vocab_size, bounds.MAX_TOKENS_WITH_ECHO, "0 only with echo."),
    }
    return _body(model_name, fields, "prompt")


def _body(model_name: str, fields: Mapping[str, Schema], required: str) -> Schema:
    return {
        "type": "object",
        "required": ["model", required],
        "properties": {"model": {"type": "string", "enum": [model_name]}, **fields},
        "description": _GENERAL,
    }


def _shared(vocab_size: int, max_tokens: Scalar, about_length: str = "") -> dict[str, Schema]:
    integers = {name: _or_null(_integer(allowed)) for name, allowed in INTEGERS.items()}
    lengths = {name: _or_null(_integer(max_tokens), about_length) for name in bounds.LENGTHS}
    return {
        **{name: _or_null(_number(allowed)) for name, allowed in NUMBERS.items()},
        **integers,
        **lengths,
        **{name: _or_null({"type": "boolean"}) for name in bounds.FLAGS},
        **{name: _or_null({"type": "string", "minLength": 1}) for name in bounds.TEXTS},
        **{
            name: {"type": "null", "description": "Not supported."}
            for name in (*bounds.UNSUPPORTED_FIELDS, "tool_choice")
        },
        "min_tokens": _or_null(_integer(INTEGERS["min_tokens"]), "Not over max_tokens."),
        "n": _or_null(_integer(INTEGERS["n"]), f"Over all prompts at most {bounds.MAX_REQUEST_CHOICES} choices."),
        "best_of": _or_null(_integer(INTEGERS["n"]), "Must equal n."),
        "stop": _stop(),
        "stop_token_ids": _or_null(_list(_token(vocab_size), 0, bounds.MAX_STOP_TOKEN_IDS)),
        "logit_bias": _or_null(_logit_bias(), f"Token id, under {vocab_size}, to bias; clamped."),
        "stream_options": _or_null(_stream_options(), "Needs stream: true."),
        "response_format": _or_null({**_OBJECT, "required": ["type"], "properties": {"type": {"const": "text"}}}),
    }


def _message() -> Schema:
    """A message with content, or an assistant message that only calls tools."""
    part = {**_OBJECT, "required": ["type", "text"], "properties": {"type": {"const": "text"}, "text": _STRING}}
    content = {"anyOf": [_STRING, _list(part, 0, bounds.MAX_CONTENT_PARTS)]}
    calls = _list(_tool_call(), 0, bounds.MAX_TOOL_CALLS)
    with_content = {
        "required": ["role", "content"],
        "properties": {"role": {"enum": list(bounds.ROLES)}, "content": content, "tool_calls": _or_null(calls)},
    }
    only_tool_calls = {
        "required": ["role", "tool_calls"],
        "properties": {"role": {"const": "assistant"}, "content": _or_null(content), "tool_calls": calls},
    }
    return {
        **_OBJECT,
        "anyOf": [with_content, only_tool_calls],
        "description": "The model's own template may ask for more.",
    }


def _tool_call() -> Schema:
    arguments = {"anyOf": [_STRING, _OBJECT]}
    function = {**_OBJECT, "required": ["name", "arguments"], "properties": {"name": _STRING, "arguments": arguments}}
    return {**_OBJECT, "required": ["function"], "properties": {"function": function}}


def _prompt(vocab_size: int) -> Schema:
    tokens = {"type": "array", "minItems": 1, "items": _token(vocab_size)}
    return {
        "anyOf": [_STRING, tokens, _list(_STRING, 1, bounds.MAX_PROMPTS), _list(tokens, 1, bounds.MAX_PROMPTS)],
        "description": "One prompt or several, as text or as token ids. A text must have a token.",
    }


def _stop() -> Schema:
    text = {"type": "string", "minLength": 1, "maxLength": bounds.MAX_STOP_CHARS}
    return _or_null({"anyOf": [text, _list(text, 0, bounds.MAX_STOP_STRINGS)]})


def _logit_bias() -> Schema:
    return {
        **_OBJECT,
        "maxProperties": bounds.MAX_LOGIT_BIASES,
        "propertyNames": {"pattern": "^[0-9]{1,9}$"},
        "additionalProperties": {"type": "number"},
    }


def _stream_options() -> Schema:
    return {**_OBJECT, "properties": {name: _or_null({"type": "boolean"}) for name in bounds.STREAM_FLAGS}}


def _token(vocab_size: int) -> Schema:
    return _integer(integer(0, vocab_size - 1))


def _list(items: Schema, least: int, most: int) -> Schema:
    return {"type": "array", "minItems": least, "maxItems": most, "items": items}


def _number(allowed: Scalar) -> Schema:
    return {
        "type": "number",
        "exclusiveMinimum" if allowed.exclusive_low else "minimum": allowed.low,
        "maximum": allowed.high,
    }


def _integer(allowed: Scalar) -> Schema:
    return {"type": "integer", "minimum": allowed.low, "maximum": allowed.high}


def _or_null(schema: Schema, description: str = "") -> Schema:
    described = {"description": description} if description else {}
    return {"anyOf": [schema, {"type": "null"}], **described}
