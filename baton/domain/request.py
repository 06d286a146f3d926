"""The work of an engine and its results: requests, sampling, tokens. Token ids only, no text."""

from __future__ import annotations

import enum
from collections.abc import Sequence
from dataclasses import dataclass

from baton.domain.constraint import Constraint
from baton.domain.ids import AttemptId
from baton.domain.media.span import MediaSpan
from baton.domain.values.quick_init import quick_init


@quick_init
@dataclass(frozen=True, slots=True)
class SamplingParams:
    """Sampling of the next token. Defaults are neutral.

    `seed` is always set: the router draws one if the client gave none. Randomness is keyed by (seed, position), so it
    is the same in every attempt. `logprobs` None: none; k: those of the sampled token and of the k best.

    `allowed_token_ids`: the only ones that are sampled; () for all. `bad_words`: token sequences that the output never
    has. `logprob_token_ids`: with `logprobs`, those of these tokens instead of the k best; () for the best.
    """

    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    seed: int = 0
    logit_bias: tuple[tuple[int, float], ...] = ()
    logprobs: int | None = None
    allowed_token_ids: tuple[int, ...] = ()
    bad_words: tuple[tuple[int, ...], ...] = ()
    logprob_token_ids: tuple[int, ...] = ()

    @property
    def greedy(self) -> bool:
        return self.temperature == 0.0


@dataclass(frozen=True, slots=True)
class StopParams:
    """Stop conditions. Counts include tokens of earlier attempts. The router handles stop strings."""

    max_tokens: int
    min_tokens: int = 0
    stop_token_ids: frozenset[int] = frozenset()


@quick_init
@dataclass(frozen=True, slots=True)
class EngineRequest:
    """One sequence to extend: the prompt, then the tokens that earlier attempts emitted.

    `tokens[:num_prompt_tokens]` is the prompt. The next output index is `num_emitted`. `salt` separates prefix caches.
    `constraint`: of the output, what earlier attempts emitted included. `prompt_logprobs`: as many of the best tokens
    are scored at each position of the prompt, beside the prompt's own; None: nothing is scored.
    `priority`: the higher first, where workers heed it. `media`: spans of the prompt, in order.
    """

    id: AttemptId
    tokens: tuple[int, ...]
    num_prompt_tokens: int
    sampling: SamplingParams
    stop: StopParams
    salt: str = ""
    constraint: Constraint | None = None
    prompt_logprobs: int | None = None
    priority: int = 0
    media: tuple[MediaSpan, ...] = ()

    @property
    def num_emitted(self) -> int:
        return len(self.tokens) - self.num_prompt_tokens


class FinishReason(enum.Enum):
    """Reason of a regular end; aborts and failures have none."""

    STOP = "stop"
    LENGTH = "length"


@dataclass(frozen=True, slots=True)
class TokenLogprobs:
    """Natural-log probabilities under the model's own distribution (before temperature and filters)."""

    logprob: float
    top: tuple[tuple[int, float], ...] = ()


@dataclass(frozen=True, slots=True)
class SampledToken:
    """The sampler's result for one row."""

    token: int
    logprobs: TokenLogprobs | None = None


@dataclass(frozen=True, slots=True)
class OutputToken:
    """A token for the client. `index` counts from 0 over all attempts."""

    index: int
    token: int
    logprobs: TokenLogprobs | None = None


def finish_reason(stop: StopParams, token: int, num_output_tokens: int) -> FinishReason | None:
    """The reason to end with `token`, the `num_output_tokens`-th output over all attempts; None: continue."""
    if token in stop.stop_token_ids and num_output_tokens > stop.min_tokens:
        return FinishReason.STOP
    if num_output_tokens >= stop.max_tokens:
        return FinishReason.LENGTH
    return None


def banned_tokens(stop: StopParams, num_output_tokens: int) -> frozenset[int]:
    """Stop ids that `min_tokens` forbids after `num_output_tokens` outputs."""
    return stop.stop_token_ids if num_output_tokens < stop.min_tokens else frozenset()


def bad_word_ends(
    bad_words: Sequence[tuple[int, ...]], tokens: Sequence[int], num_prompt_tokens: int
) -> frozenset[int]:
    """Tokens that would complete one of `bad_words` after `tokens`. A word is not begun by the prompt, as in vLLM."""
    ends: set[int] = set()
    for word in bad_words:
        start = len(tokens) - len(word) + 1
        if start >= num_prompt_tokens and tuple(tokens[start:]) == word[:-1]:
            ends.add(word[-1])
    return frozenset(ends)
