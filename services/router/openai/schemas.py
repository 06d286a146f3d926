"""The OpenAI objects that go out, field by field, as msgspec structs (an SSE chunk is encoded in under a microsecond).

`chat`, `completions`, `routes` and `http_errors` fill them. A field that is `UNSET` is left out of the JSON, one that
is None is null. What comes in is read by `validation`.
"""

from __future__ import annotations

from typing import Literal

from msgspec import UNSET, Struct, UnsetType

FinishReasonName = Literal["stop", "length"]


class PromptTokensDetails(Struct, frozen=True):
    """`cached_tokens` came out of a prefix cache, on either side."""

    cached_tokens: int


class Usage(Struct, frozen=True):
    """Tokens of a call, over all choices."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptTokensDetails


# --- chat ---
class TopLogprob(Struct, frozen=True):
    """One of the likeliest tokens at a position."""

    token: str
    logprob: float
    bytes: list[int]


class TokenLogprob(Struct, frozen=True):
    """The token chosen at a position, and the likeliest ones there."""

    token: str
    logprob: float
    bytes: list[int]
    top_logprobs: list[TopLogprob]


class ChatLogprobs(Struct, frozen=True):
    """One entry a token."""

    content: list[TokenLogprob]
    refusal: None = None


class ChatMessage(Struct, frozen=True):
    """The whole answer of a choice."""

    content: str
    role: Literal["assistant"] = "assistant"
    refusal: None = None


class ChatChoice(Struct, frozen=True):
    """One choice of a whole answer."""

    index: int
    message: ChatMessage
    logprobs: ChatLogprobs | None
    finish_reason: FinishReasonName
    token_ids: list[int] | UnsetType = UNSET


class ChatCompletion(Struct, frozen=True, kw_only=True):
    """A whole answer of /v1/chat/completions."""

    id: str
    object: Literal["chat.completion"] = "chat.completion"
    created: int
    model: str
    system_fingerprint: str
    choices: list[ChatChoice]
    usage: Usage


class ChatDelta(Struct, frozen=True):
    """What a chunk adds; the first one of a choice names the role."""

    content: str
    role: Literal["assistant"] | UnsetType = UNSET


class ChatChunkChoice(Struct, frozen=True):
    """One choice's part of a chunk."""

    index: int
    delta: ChatDelta
    logprobs: ChatLogprobs | None
    finish_reason: FinishReasonName | None
    token_ids: list[int] | UnsetType = UNSET


class ChatCompletionChunk(Struct, frozen=True, kw_only=True):
    """One event of a streamed chat."""

    id: str
    object: Literal["chat.completion.chunk"] = "chat.completion.chunk"
    created: int
    model: str
    system_fingerprint: str
    choices: list[ChatChunkChoice]
    usage: Usage | UnsetType | None = UNSET


# --- completions ---
class CompletionLogprobs(Struct, frozen=True):
    """Parallel lists, one entry a token; `text_offset` in characters of the choice's text."""

    tokens: list[str]
    token_logprobs: list[float]
    top_logprobs: list[dict[str, float]]
    text_offset: list[int]


class CompletionChoice(Struct, frozen=True):
    """One choice of a completion, whole or in part: the last part has a `finish_reason`."""

    index: int
    text: str
    logprobs: CompletionLogprobs | None
    finish_reason: FinishReasonName | None
    token_ids: list[int] | UnsetType = UNSET


class Completion(Struct, frozen=True, kw_only=True):
    """An answer of /v1/completions, or one event of a streamed one."""

    id: str
    object: Literal["text_completion"] = "text_completion"
    created: int
    model: str
    system_fingerprint: str
    choices: list[CompletionChoice]
    usage: Usage | UnsetType | None = UNSET


# --- models, errors ---
class Model(Struct, frozen=True, kw_only=True):
    """A model that is served."""

    id: str
    object: Literal["model"] = "model"
    created: int
    owned_by: Literal["baton"] = "baton"
    max_model_len: int


class ModelList(Struct, frozen=True):
    """The models that are served."""

    data: list[Model]
    object: Literal["list"] = "list"


class ErrorBody(Struct, frozen=True):
    """What went wrong; all four fields are always there."""

    message: str
    type: str
    param: str | None
    code: str | None


class ErrorEnvelope(Struct, frozen=True):
    """The only shape of an error, as a response and as an event."""

    error: ErrorBody


class Status(Struct, frozen=True):
    """The answer of /health and /ready."""

    status: Literal["ok", "ready"]
    detail: str | UnsetType = UNSET


class Version(Struct, frozen=True):
    """The answer of /version."""

    version: str
