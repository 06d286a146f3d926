"""The parameters that chats and completions share: sampling, stopping, streaming.

`validation` calls it with the fields of a body. Types and ranges are the contract's; errors are noted, not raised.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass

from baton.domain.request import SamplingParams
from services.router.openai.bounds import (
    INT64_MIN,
    INTEGER_RANGES,
    MAX_LOGIT_BIAS,
    MAX_LOGIT_BIASES,
    MAX_STOP_CHARS,
    MAX_STOP_STRINGS,
    MAX_STOP_TOKEN_IDS,
    NUMBER_RANGES,
    STREAM_FLAGS,
    UNSUPPORTED_FIELDS,
    IntegerRange,
)
from services.router.openai.fields import Fields, is_integer, is_number, short_repr
from services.router.openai.valid_request import StreamOptions
from services.router.text.sampling_defaults import SamplingDefaults


@dataclass(frozen=True, slots=True)
class OutputLength:
    """How long an answer may and must be; `max_tokens` None: to the end of the context."""

    max_tokens: int | None
    min_tokens: int


def read_sampling(fields: Fields, vocab_size: int, logprobs: int | None, defaults: SamplingDefaults) -> SamplingParams:
    """Everything but the seed, which differs between choices; what the client leaves out is the model's default."""
    top_k = fields.integer("top_k", INTEGER_RANGES["top_k"])

    def number(name: str, default: float) -> float:
        return fields.number(name, default, NUMBER_RANGES[name])

    return SamplingParams(
        temperature=number("temperature", defaults.temperature),
        top_k=min(max(defaults.top_k if top_k is None else top_k, 0), vocab_size),
        top_p=number("top_p", defaults.top_p),
        min_p=number("min_p", defaults.min_p),
        presence_penalty=number("presence_penalty", 0.0),
        frequency_penalty=number("frequency_penalty", 0.0),
        repetition_penalty=number("repetition_penalty", defaults.repetition_penalty),
        logit_bias=_read_logit_bias(fields, vocab_size),
        logprobs=logprobs,
    )


def read_seed(fields: Fields) -> int | None:
    """The client's seed, an int64."""
    return fields.integer("seed", INTEGER_RANGES["seed"])


def choice_seed(seed: int, choice: int) -> int:
    """Choices count up from the seed; past the largest int64 they go on from the smallest."""
    return (seed + choice - INT64_MIN) % 2**64 + INT64_MIN


def read_num_choices(fields: Fields) -> int:
    """`n`; `best_of` may only repeat it."""
    num_choices = fields.integer("n", INTEGER_RANGES["n"]) or 1
    if fields.has("best_of") and fields.raw("best_of") != num_choices:
        fields.add_error("best_of", f"must equal n ({num_choices}), not {short_repr(fields.raw('best_of'))}")
    return num_choices


def read_length(fields: Fields, allowed: IntegerRange) -> OutputLength:
    """`max_completion_tokens`, or the older `max_tokens`; and `min_tokens`."""
    older = fields.integer("max_tokens", allowed)
    newer = fields.integer("max_completion_tokens", allowed)
    max_tokens = older if newer is None else newer
    min_tokens = fields.integer("min_tokens", INTEGER_RANGES["min_tokens"]) or 0
    if max_tokens is not None and min_tokens > max_tokens:
        fields.add_error("min_tokens", f"must not be over max_tokens ({max_tokens}), not {min_tokens}")
    return OutputLength(max_tokens, min_tokens)


def read_stop_strings(fields: Fields) -> tuple[str, ...]:
    """A string or a list of them."""
    value = fields.raw("stop")
    stops = [value] if isinstance(value, str) else value
    if stops is None:
        return ()
    if not isinstance(stops, list) or len(stops) > MAX_STOP_STRINGS:
        fields.add_mismatch("stop", f"a string or a list of at most {MAX_STOP_STRINGS} strings")
        return ()
    valid = [stop for stop in stops if isinstance(stop, str) and 0 < len(stop) <= MAX_STOP_CHARS]
    if len(valid) < len(stops):
        fields.add_mismatch("stop", f"made of strings of 1 to {MAX_STOP_CHARS} characters")
    return tuple(valid)


def read_stop_token_ids(fields: Fields, vocab_size: int) -> frozenset[int]:
    """Token ids that end the sequence, besides the model's own."""
    value = fields.raw("stop_token_ids")
    if value is None:
        return frozenset()
    if (
        not isinstance(value, list)
        or len(value) > MAX_STOP_TOKEN_IDS
        or not all(is_integer(token) and 0 <= token < vocab_size for token in value)
    ):
        fields.add_mismatch("stop_token_ids", f"a list of at most {MAX_STOP_TOKEN_IDS} token ids in [0, {vocab_size})")
        return frozenset()
    return frozenset(value)


def read_stream_options(fields: Fields) -> StreamOptions | None:
    """`stream` and `stream_options`."""
    stream = fields.flag("stream", False)
    options = fields.mapping("stream_options")
    if options is None:
        return StreamOptions() if stream else None
    if not stream:
        fields.add_error("stream_options", "needs stream: true")
    include_usage, continuous_usage = (options.flag(name, False) for name in STREAM_FLAGS)
    return StreamOptions(include_usage, continuous_usage) if stream else None


def read_salt(fields: Fields, tenant: str) -> str:
    """Requests with different salts share no cached page.

    The client's `cache_salt` divides its tenant's requests; a digest over both keeps tenants apart whatever a client
    sends. Without keys (tenant "") and `cache_salt` all share one cache.
    """
    wanted = fields.string("cache_salt") or ""
    if not tenant and not wanted:
        return ""
    parts = (str(len(tenant)).encode(), tenant.encode(), wanted.encode())
    return hashlib.sha256(b"\0".join(parts)).hexdigest()


def check_unsupported(fields: Fields) -> None:
    """What is checked although nothing depends on it yet, and what is refused because an answer would be wrong."""
    fields.integer("priority", INTEGER_RANGES["priority"])
    fields.string("prompt_cache_key")
    _refuse_tools(fields)
    response_format = fields.mapping("response_format")
    if response_format is not None and response_format.raw("type") != "text":
        kind = response_format.raw("type")
        if kind in ("json_object", "json_schema"):
            response_format.add_error("type", f"{kind} is not supported yet; only text is")
        else:
            response_format.add_mismatch("type", "text, json_object or json_schema")


def _refuse_tools(fields: Fields) -> None:
    if fields.raw("tools") == []:
        fields.add_error("tools", "must not be an empty list")
        return
    for name in UNSUPPORTED_FIELDS:
        if fields.has(name):
            fields.add_error(name, "is not supported yet")
    if fields.has("tool_choice") and not fields.has("tools"):
        fields.add_error("tool_choice", "needs tools")


def _read_logit_bias(fields: Fields, vocab_size: int) -> tuple[tuple[int, float], ...]:
    """Token id (a JSON key, so a string) -> bias, clamped."""
    value = fields.raw("logit_bias")
    if value is None:
        return ()
    if not isinstance(value, dict) or len(value) > MAX_LOGIT_BIASES:
        fields.add_mismatch("logit_bias", f"an object of at most {MAX_LOGIT_BIASES} entries")
        return ()
    biases: dict[int, float] = {}
    for key, bias in value.items():
        if not (key.isascii() and key.isdigit() and len(key) < 10 and int(key) < vocab_size and is_number(bias)):
            fields.add_error(
                "logit_bias", f"must map token ids in [0, {vocab_size}) to numbers, not {short_repr({key: bias})}"
            )
            return ()
        biases[int(key)] = float(
            min(max(bias, -MAX_LOGIT_BIAS), MAX_LOGIT_BIAS)
        )  # an integer may be too large for a float
    return tuple(sorted(biases.items()))
