"""JSON Schemas of the request bodies, printed from the table of fields.

`openapi` publishes them. Descriptions say what a schema cannot: fields that depend on each other.
"""

from __future__ import annotations

from collections.abc import Sequence

from baton.services.router.openai.bounds import LENGTHS, MAX_TOKENS_WITH_ECHO, Scalar
from baton.services.router.openai.field_table.field import FieldEndpoint, FieldKind, RequestField, Schema
from baton.services.router.openai.field_table.shapes import or_null, scalar_schema
from baton.services.router.openai.field_table.table import FIELDS

_GENERAL = (
    "A value that would change the answer is honoured or refused. Names without a row are listed in the header "
    "x-baton-unknown-fields. Null is the same as absent; integers are written without a fraction."
)


def body_schema(endpoint: FieldEndpoint, model_names: Sequence[str], vocab_size: int) -> Schema:
    """The body of a POST to `endpoint`."""
    table = FIELDS[endpoint]
    properties = {name: _field(field, endpoint, vocab_size) for name, field in table.items()}
    properties["model"]["enum"] = list(model_names)
    return {
        "type": "object",
        "required": [name for name, field in table.items() if field.required],
        "properties": properties,
        "description": _GENERAL,
    }


def _field(field: RequestField, endpoint: FieldEndpoint, vocab_size: int) -> Schema:
    described: Schema = {"description": f"{field.kind.value.capitalize()} ({field.origin.value}). {_meaning(field)}"}
    if field.default is not None:
        described["default"] = field.default
    if field.kind is FieldKind.REFUSED:
        return {"enum": [None, *field.neutral], **described}
    shape = field.shape
    if endpoint is FieldEndpoint.COMPLETION and field.name in LENGTHS:
        shape = MAX_TOKENS_WITH_ECHO
    schema = scalar_schema(shape) if isinstance(shape, Scalar) else shape.schema(vocab_size) if shape else {}
    if field.required:
        return {**schema, **described}
    neutral = [{"enum": list(field.neutral)}] if field.neutral else []
    return {"anyOf": [*or_null(schema)["anyOf"], *neutral], **described}


def _meaning(field: RequestField) -> str:
    text = field.meaning
    return f"A value {text}." if field.kind is FieldKind.REFUSED else text


def tokenize_schema(model_names: Sequence[str], vocab_size: int) -> Schema:
    """The body of POST /tokenize: a text, or a chat with the fields of its template."""
    chat = FIELDS[FieldEndpoint.CHAT]
    names = (
        "add_generation_prompt", "continue_final_message", "chat_template_kwargs", "documents", "enable_thinking",
        "reasoning_effort", "reasoning", "tools", "tool_choice", "functions",
        "function_call", "verbosity",
    )  # fmt: skip
    flags: Schema = {name: or_null({"type": "boolean"}) for name in ("add_special_tokens", "return_token_strs")}
    return {
        "type": "object",
        "properties": {
            "model": or_null({"enum": list(model_names)}),
            "prompt": {"type": "string", "description": "Without messages."},
            "messages": _field(chat["messages"], FieldEndpoint.CHAT, vocab_size),
            **{name: _field(chat[name], FieldEndpoint.CHAT, vocab_size) for name in names},
            **flags,
        },
        "anyOf": [{"required": ["messages"]}, {"required": ["prompt"]}],
        "description": "add_special_tokens: true for a text, false for a chat, whose template writes them.",
    }


def detokenize_schema(model_names: Sequence[str], vocab_size: int) -> Schema:
    """The body of POST /detokenize."""
    token = {"type": "integer", "minimum": 0, "maximum": vocab_size - 1}
    model = or_null({"enum": list(model_names)})
    return {
        "type": "object",
        "required": ["tokens"],
        "properties": {"model": model, "tokens": {"type": "array", "items": token}},
    }
