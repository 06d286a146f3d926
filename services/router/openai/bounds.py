"""Bounds of every number, flag and list of a request.

`field_table` names the fields that have them; `parameters` and `prompts` read lists by the constants.
"""

from __future__ import annotations

from dataclasses import dataclass

MAX_CHOICES = 128
DEFAULT_COMPLETION_TOKENS = 16
"""`max_tokens` of a completion that names none, as at OpenAI."""

MAX_REQUEST_CHOICES = 256
"""Over all prompts of a request."""

MAX_PROMPTS = 256
MAX_MESSAGES = 4096
MAX_CONTENT_PARTS = 4096
"""Of one message."""

MAX_TOOLS = 128
MAX_TOOL_CALLS = 128
"""Of one message."""

MAX_TEMPLATE_VARIABLES = 32
MAX_TEMPLATE_VARIABLE_BYTES = 8192
"""Of all variables together, as JSON."""

MAX_DOCUMENTS = 256
"""Of a chat, for its template."""

MAX_STOP_STRINGS = 16
MAX_STOP_CHARS = 256
MAX_STOP_TOKEN_IDS = 1024
MAX_LOGIT_BIASES = 1024
MAX_ALLOWED_TOKEN_IDS = 1024
MAX_BAD_WORDS = 128
MAX_LOGPROB_TOKEN_IDS = 128
MAX_BAD_WORD_CHARS = 256
MAX_LOGIT_BIAS = 100.0
MAX_TOP_LOGPROBS = 20
MAX_PROMPT_SCORES = 1 << 20
"""Of a request: tokens of all prompts, times the tokens that are scored at each place."""

INT32_MAX = 2**31 - 1
INT64_MIN, INT64_MAX = -(2**63), 2**63 - 1


@dataclass(frozen=True, slots=True)
class Scalar:
    """Accepted JSON values: `types`, and for numbers [low, high], or (low, high] with `exclusive_low`.

    `not_zero`: without 0 between them.

    Types are compared exactly: true is not an integer. A string must not be empty.
    """

    types: tuple[type, ...]
    low: float = 0
    high: float = 0
    exclusive_low: bool = False
    not_zero: bool = False

    def __contains__(self, value: object) -> bool:
        if type(value) not in self.types:
            return False
        if type(value) is int or type(value) is float:
            is_excluded = (self.exclusive_low and value == self.low) or (self.not_zero and value == 0)
            return self.low <= value <= self.high and not is_excluded
        return value != ""

    def __str__(self) -> str:
        if self.types in (FLAG.types, TEXT.types):
            return "a boolean" if self.types == FLAG.types else "a non-empty string"
        if self.types == (int,):
            return f"an integer in [{self.low}, {self.high}]{', not 0' if self.not_zero else ''}"
        return f"a number in {'(' if self.exclusive_low else '['}{self.low:g}, {self.high:g}]"


FLAG = Scalar((bool,))
TEXT = Scalar((str,))


def number(low: float, high: float, *, exclusive_low: bool = False) -> Scalar:
    """An integer or a fraction."""
    return Scalar((int, float), low, high, exclusive_low)


def integer(low: int, high: int) -> Scalar:
    """An integer, written without a fraction."""
    return Scalar((int,), low, high)


PRIORITY = integer(-INT32_MAX - 1, INT32_MAX)
"""vLLM's; admission clamps it (`TenantLimits.clamp`)."""

TOP_LOGPROBS = integer(0, MAX_TOP_LOGPROBS)
TRUNCATION = Scalar((int,), -1, INT32_MAX, not_zero=True)
MAX_TOKENS = integer(1, INT32_MAX)
LENGTHS = ("max_tokens", "max_completion_tokens")
MAX_TOKENS_WITH_ECHO = integer(0, INT32_MAX)
"""0: an echo without an answer."""

EFFORTS = ("none", "minimal", "low", "medium", "high", "xhigh", "max")
"""Values of `reasoning_effort`."""

VERBOSITIES = ("low", "medium", "high")
"""Values of `verbosity`; the middle one asks for nothing."""

REASONING_FORMATS = ("auto", "none", "deepseek")
"""Values of `reasoning_format`; `none` leaves the reasoning in the content."""

STREAM_FLAGS = ("include_usage", "continuous_usage_stats")
ROLES = ("system", "developer", "user", "assistant", "tool", "function")
