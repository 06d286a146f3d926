"""Within what every number and list of a request must lie: the one place for it.

`parameters` and `prompts` read requests by it, and `call_schemas` tells clients. Values only.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

MAX_CHOICES = 16
MAX_REQUEST_CHOICES = 256
"""Over all prompts of a call."""

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
class NumberRange:
    """NumberRange in [low, high], or (low, high] with `exclusive_low`."""

    low: float
    high: float
    exclusive_low: bool = False

    def __contains__(self, value: float) -> bool:
        return self.low <= value <= self.high and not (self.exclusive_low and value == self.low)

    def __str__(self) -> str:
        return f"a number in {'(' if self.exclusive_low else '['}{self.low:g}, {self.high:g}]"


@dataclass(frozen=True, slots=True)
class IntegerRange:
    """IntegerRange in [low, high]."""

    low: int
    high: int

    def __contains__(self, value: int) -> bool:
        return self.low <= value <= self.high

    def __str__(self) -> str:
        return f"an integer in [{self.low}, {self.high}]"


NUMBER_RANGES: Mapping[str, NumberRange] = {
    "temperature": NumberRange(0.0, 2.0),
    "top_p": NumberRange(0.0, 1.0, exclusive_low=True),
    "min_p": NumberRange(0.0, 1.0),
    "presence_penalty": NumberRange(-2.0, 2.0),
    "frequency_penalty": NumberRange(-2.0, 2.0),
    "repetition_penalty": NumberRange(0.0, 2.0, exclusive_low=True),
}

INTEGER_RANGES: Mapping[str, IntegerRange] = {
    "top_k": IntegerRange(-1, INT32_MAX),
    "seed": IntegerRange(INT64_MIN, INT64_MAX),
    "n": IntegerRange(1, MAX_CHOICES),
    "min_tokens": IntegerRange(0, INT32_MAX),
    "priority": IntegerRange(-INT32_MAX, INT32_MAX),
}

TOP_LOGPROBS = IntegerRange(0, MAX_TOP_LOGPROBS)
MAX_TOKENS = IntegerRange(1, INT32_MAX)
MAX_TOKENS_WITH_ECHO = IntegerRange(0, INT32_MAX)
"""An echo may be all that is wanted."""

FLAGS = ("stream", "ignore_eos", "skip_special_tokens", "return_token_ids")
STREAM_FLAGS = ("include_usage", "continuous_usage_stats")
ROLES = ("system", "developer", "user", "assistant", "tool", "function")
UNSUPPORTED_FIELDS = ("tools", "functions", "function_call", "structured_outputs", "prompt_logprobs")
"""Refused, since an answer that ignores them would be wrong."""
