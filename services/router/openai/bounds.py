"""Bounds of every number, flag and list of a request.

`fields` reads scalars by these tables, `parameters` and `prompts` read lists by the constants, `request_schemas`
publishes both.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

MAX_CHOICES = 16
MAX_REQUEST_CHOICES = 256
"""Over all prompts of a request."""

MAX_PROMPTS = 256
MAX_MESSAGES = 4096
MAX_CONTENT_PARTS = 4096
"""Of one message."""

MAX_TOOL_CALLS = 128
"""Of one message."""

MAX_STOP_STRINGS = 16
MAX_STOP_CHARS = 256
MAX_STOP_TOKEN_IDS = 1024
MAX_LOGIT_BIASES = 1024
MAX_LOGIT_BIAS = 100.0
MAX_TOP_LOGPROBS = 20
INT32_MAX = 2**31 - 1
INT64_MIN, INT64_MAX = -(2**63), 2**63 - 1


@dataclass(frozen=True, slots=True)
class Scalar:
    """Accepted JSON values: `types`, and for numbers [low, high], or (low, high] with `exclusive_low`.

    Types are compared exactly: true is not an integer. A string must not be empty.
    """

    types: tuple[type, ...]
    low: float = 0
    high: float = 0
    exclusive_low: bool = False

    def __contains__(self, value: object) -> bool:
        if type(value) not in self.types:
            return False
        if isinstance(value, int | float) and not isinstance(value, bool):
            return self.low <= value <= self.high and not (self.exclusive_low and value == self.low)
        return value != ""

    def __str__(self) -> str:
        if self.types in (FLAG.types, TEXT.types):
            return "a boolean" if self.types == FLAG.types else "a non-empty string"
        if self.types == (int,):
            return f"an integer in [{self.low}, {self.high}]"
        return f"a number in {'(' if self.exclusive_low else '['}{self.low:g}, {self.high:g}]"


FLAG = Scalar((bool,))
TEXT = Scalar((str,))


def number(low: float, high: float, *, exclusive_low: bool = False) -> Scalar:
    """An integer or a fraction."""
    return Scalar((int, float), low, high, exclusive_low)


def integer(low: int, high: int) -> Scalar:
    """An integer, written without a fraction."""
    return Scalar((int,), low, high)


NUMBERS: Mapping[str, Scalar] = {
    "temperature": number(0.0, 2.0),
    "top_p": number(0.0, 1.0, exclusive_low=True),
    "min_p": number(0.0, 1.0),
    "presence_penalty": number(-2.0, 2.0),
    "frequency_penalty": number(-2.0, 2.0),
    "repetition_penalty": number(0.0, 2.0, exclusive_low=True),
}
INTEGERS: Mapping[str, Scalar] = {
    "top_k": integer(-1, INT32_MAX),
    "seed": integer(INT64_MIN, INT64_MAX),
    "n": integer(1, MAX_CHOICES),
    "min_tokens": integer(0, INT32_MAX),
    "priority": integer(-INT32_MAX, INT32_MAX),
}
FLAGS = ("stream", "ignore_eos", "skip_special_tokens", "return_token_ids")
TEXTS = ("prompt_cache_key", "cache_salt")
LENGTHS = ("max_tokens", "max_completion_tokens")

TOP_LOGPROBS = integer(0, MAX_TOP_LOGPROBS)
MAX_TOKENS = integer(1, INT32_MAX)
MAX_TOKENS_WITH_ECHO = integer(0, INT32_MAX)
"""0: an echo without an answer."""

_COMMON = {
    **INTEGERS,
    **NUMBERS,
    **dict.fromkeys(FLAGS, FLAG),
    **dict.fromkeys(TEXTS, TEXT),
    **dict.fromkeys(LENGTHS, MAX_TOKENS),
}
CHAT_SCALARS: Mapping[str, Scalar] = {"logprobs": FLAG, "top_logprobs": TOP_LOGPROBS, **_COMMON}
COMPLETION_SCALARS: Mapping[str, Scalar] = {"echo": FLAG, "logprobs": TOP_LOGPROBS, **_COMMON}
ECHO_SCALARS: Mapping[str, Scalar] = {**COMPLETION_SCALARS, **dict.fromkeys(LENGTHS, MAX_TOKENS_WITH_ECHO)}
"""For a completion with `echo: true`."""

STREAM_FLAGS = ("include_usage", "continuous_usage_stats")
ROLES = ("system", "developer", "user", "assistant", "tool", "function")
UNSUPPORTED_FIELDS = ("tools", "functions", "function_call", "structured_outputs", "prompt_logprobs")
"""Refused: a response that ignores them would be wrong."""
