"""OpenAI response objects as msgspec structs (an SSE chunk is encoded in under a microsecond).

A field that is `UNSET` is left out of the JSON; one that is None is null. `request_schemas` describes requests.
"""

from __future__ import annotations

from typing import Literal

from msgspec import UNSET, Struct, UnsetType

FinishReasonName = Literal["stop", "length", "tool_calls", "function_call"]

StopReason = int | str | None
"""The stop string, or the client's stop token, that ended a choice; None for another end. In vLLM's responses too."""


class PromptTokensDetails(Struct, frozen=True):
    """`cached_tokens`: prompt tokens found in a prefix cache, of prefill or decode."""

    cached_tokens: int


class CompletionTokensDetails(Struct, frozen=True):
    """`reasoning_tokens`: output tokens of the reasoning, its end included."""

    reasoning_tokens: int


class Usage(Struct, frozen=True):
    """Tokens of a request, over all choices. `completion_tokens_details` only of models whose reasoning is read."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptTokensDetails
    completion_tokens_details: CompletionTokensDetails | UnsetType = UNSET


class PromptLogprob(Struct, frozen=True):
    """A token at a place of the prompt. `rank`: the number of tokens there that are at least as probable."""

    logprob: float
    rank: int
    decoded_token: str


PromptLogprobs = list[dict[str, PromptLogprob] | None]
"""One entry a prompt token, None for the first: by token id, the prompt's own and the best. In vLLM's responses too."""


# --- chat ---
class TopLogprob(Struct, frozen=True):
    """One of the most probable tokens at a position."""

    token: str
    logprob: float
    bytes: list[int]


class TokenLogprob(Struct, frozen=True):
    """The sampled token at a position, and the most probable ones."""

    token: str
    logprob: float
    bytes: list[int]
    top_logprobs: list[TopLogprob]


class ChatLogprobs(Struct, frozen=True):
    """One entry a token."""

    content: list[TokenLogprob]
    refusal: None = None


class FunctionCall(Struct, frozen=True, kw_only=True):
    """The function that a model calls. `arguments`: JSON, as the model wrote it. A further part has no name."""

    name: str | UnsetType = UNSET
    arguments: str


class ChatToolCall(Struct, frozen=True, kw_only=True):
    """One call of a choice. `index` in chunks only, where further parts of its arguments have no id and no type."""

    id: str | UnsetType = UNSET
    type: Literal["function"] | UnsetType = "function"
    function: FunctionCall
    index: int | UnsetType = UNSET


class ChatMessage(Struct, frozen=True):
    """The whole text of a choice, None if there are only calls or reasoning. `reasoning`: vLLM's name for it.

    `function_call`: the call, if the request has `functions` instead of `tools`.
    """

    content: str | None
    role: Literal["assistant"] = "assistant"
    refusal: None = None
    tool_calls: list[ChatToolCall] | UnsetType = UNSET
    reasoning_content: str | UnsetType = UNSET
    reasoning: str | UnsetType = UNSET
    function_call: FunctionCall | UnsetType = UNSET


class ChatChoice(Struct, frozen=True):
    """One choice of a whole response."""

    index: int
    message: ChatMessage
    logprobs: ChatLogprobs | None
    finish_reason: FinishReasonName
    token_ids: list[int] | UnsetType = UNSET
    stop_reason: StopReason = None


class ChatCompletion(Struct, frozen=True, kw_only=True):
    """A whole response of /v1/chat/completions."""

    id: str
    object: Literal["chat.completion"] = "chat.completion"
    created: int
    model: str
    system_fingerprint: str
    choices: list[ChatChoice]
    usage: Usage
    prompt_token_ids: list[int] | UnsetType = UNSET
    prompt_logprobs: PromptLogprobs | UnsetType = UNSET


class ChatDelta(Struct, frozen=True):
    """The text that a chunk adds; the first chunk of a choice names the role. One of reasoning may have no content."""

    content: str | UnsetType
    role: Literal["assistant"] | UnsetType = UNSET
    tool_calls: list[ChatToolCall] | UnsetType = UNSET
    reasoning_content: str | UnsetType = UNSET
    reasoning: str | UnsetType = UNSET
    function_call: FunctionCall | UnsetType = UNSET


class ChatChunkChoice(Struct, frozen=True):
    """The part of one choice in a chunk."""

    index: int
    delta: ChatDelta
    logprobs: ChatLogprobs | None
    finish_reason: FinishReasonName | None
    token_ids: list[int] | UnsetType = UNSET
    stop_reason: StopReason | UnsetType = UNSET


class ChatCompletionChunk(Struct, frozen=True, kw_only=True):
    """One event of a streamed chat."""

    id: str
    object: Literal["chat.completion.chunk"] = "chat.completion.chunk"
    created: int
    model: str
    system_fingerprint: str
    choices: list[ChatChunkChoice]
    usage: Usage | UnsetType | None = UNSET
    prompt_token_ids: list[int] | UnsetType = UNSET
    prompt_logprobs: PromptLogprobs | UnsetType = UNSET


# --- completions ---
class CompletionLogprobs(Struct, frozen=True):
    """Parallel lists, one entry a token; `text_offset` in characters of the choice's text.

    The first token of an echoed prompt has no log probability: None.
    """

    tokens: list[str]
    token_logprobs: list[float | None]
    top_logprobs: list[dict[str, float] | None]
    text_offset: list[int]


class CompletionChoice(Struct, frozen=True):
    """One choice of a completion, whole or a part of it; the last part has a `finish_reason`."""

    index: int
    text: str
    logprobs: CompletionLogprobs | None
    finish_reason: FinishReasonName | None
    token_ids: list[int] | UnsetType = UNSET
    stop_reason: StopReason | UnsetType = UNSET
    prompt_token_ids: list[int] | UnsetType = UNSET
    prompt_logprobs: PromptLogprobs | UnsetType = UNSET


class Completion(Struct, frozen=True, kw_only=True):
    """A response of /v1/completions, or one event of a streamed one."""

    id: str
    object: Literal["text_completion"] = "text_completion"
    created: int
    model: str
    system_fingerprint: str
    choices: list[CompletionChoice]
    usage: Usage | UnsetType | None = UNSET


# --- models, errors ---
class Model(Struct, frozen=True, kw_only=True):
    """A served model. `modalities`: what messages may have: text, image."""

    id: str
    object: Literal["model"] = "model"
    created: int
    owned_by: Literal["baton"] = "baton"
    max_model_len: int
    modalities: list[str]


class ModelList(Struct, frozen=True):
    """All served models."""

    data: list[Model]
    object: Literal["list"] = "list"


class TokenizeResult(Struct, frozen=True):
    """The response of /tokenize. `token_strs` only if requested."""

    count: int
    max_model_len: int
    tokens: list[int]
    token_strs: list[str] | UnsetType = UNSET


class TokenizerInfo(Struct, frozen=True):
    """The response of /tokenizer_info: what a client needs to count and render as the router does."""

    chat_template: str | None
    bos_token: str | None
    eos_token: str | None
    pad_token: str | None
    unk_token: str | None


class DetokenizeResult(Struct, frozen=True):
    """The response of /detokenize."""

    prompt: str


class RenderResult(Struct, frozen=True):
    """The response of /v1/chat/completions/render: the prompt as text and as tokens."""

    prompt: str
    token_ids: list[int]


class ErrorBody(Struct, frozen=True):
    """An error. All four fields are always present."""

    message: str
    type: str
    param: str | None
    code: str | None


class ErrorEnvelope(Struct, frozen=True):
    """The shape of every error, as a response and as an event."""

    error: ErrorBody


class Status(Struct, frozen=True):
    """The response of /health and /ready."""

    status: Literal["ok", "ready"]
    detail: str | UnsetType = UNSET


class Version(Struct, frozen=True):
    """The response of /version."""

    version: str
