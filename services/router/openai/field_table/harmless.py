"""The fields that change no answer: checked for their type, and without effect."""

from __future__ import annotations

from baton.services.router.openai.bounds import FLAG, Scalar
from baton.services.router.openai.field_table import shapes
from baton.services.router.openai.field_table.field import (
    BOTH,
    CHAT,
    FieldEndpoint,
    FieldKind,
    FieldOrigin,
    RequestField,
    Shape,
)

_OPENAI, _VLLM, _SGLANG, _LLAMA = (
    FieldOrigin.OPENAI,
    FieldOrigin.VLLM,
    FieldOrigin.SGLANG,
    FieldOrigin.LLAMA_SERVER,
)


def _row(
    name: str, endpoints: frozenset[FieldEndpoint], origin: FieldOrigin, shape: Scalar | Shape, meaning: str
) -> RequestField:
    return RequestField(name, endpoints, FieldKind.HARMLESS, origin, meaning, shape, default_note="none")


_OPENAI_ROWS = (
    _row("user", BOTH, _OPENAI, shapes.STRING, "Tenants come from API keys."),
    _row("safety_identifier", CHAT, _OPENAI, shapes.STRING, "Nothing is moderated."),
    _row("metadata", CHAT, _OPENAI, shapes.OBJECT, "Nothing is kept of it."),
    _row("store", CHAT, _OPENAI, FLAG, "No answer is kept to be listed. For privacy: x-baton-store: none."),
    _row("service_tier", CHAT, _OPENAI, shapes.STRING, "There is one tier; see priority."),
    _row("prediction", CHAT, _OPENAI, shapes.OBJECT, "A hint that could only make an answer faster."),
    _row("prompt_cache_retention", CHAT, _OPENAI, shapes.STRING, "Pages stay cached while there is room."),
    _row("prompt_cache_options", CHAT, _OPENAI, shapes.OBJECT, "Pages stay cached while there is room."),
)  # fmt: skip

_SERVER_ROWS = (
    _row("request_id", BOTH, _VLLM, shapes.STRING, "Ids are the server's; send the header x-request-id."),
    _row("session_id", BOTH, _VLLM, shapes.STRING, "Prefixes are found without it."),
    _row("guided_decoding_backend", BOTH, _VLLM, shapes.STRING, "Names a library, not an answer."),
    _row("rid", BOTH, _SGLANG, shapes.STRING, "Ids are the server's; send the header x-request-id."),
    _row("custom_labels", BOTH, _SGLANG, shapes.OBJECT, "Metrics have no labels of clients."),
    _row("timings_per_token", BOTH, _LLAMA, FLAG, "GET /v1/requests/{id} has the timing."),
    _row("return_progress", BOTH, _LLAMA, FLAG, "Streams have no progress events."),
    _row("verbose", BOTH, _LLAMA, FLAG, "GET /v1/requests/{id} has the details."),
    _row("n_keep", BOTH, _LLAMA, shapes.NUMBER, "The context is never shifted."),
    _row("n_discard", BOTH, _LLAMA, shapes.NUMBER, "The context is never shifted."),
    _row("n_cache_reuse", BOTH, _LLAMA, shapes.NUMBER, "Cached pages are reused only where they are exact."),
    _row("sse_ping_interval", BOTH, _LLAMA, shapes.NUMBER, "A silent stream has a comment every 15 s."),
    _row("response_fields", BOTH, _LLAMA, shapes.STRINGS, "A response has all its fields."),
    _row("backend_sampling", BOTH, _LLAMA, FLAG, "Names an implementation, not an answer."),
)

HARMLESS = _OPENAI_ROWS + _SERVER_ROWS
