"""What a worker is asked to do and what it gives back. Text is unknown here: only token ids."""

from __future__ import annotations

import enum
from dataclasses import dataclass

from baton.domain.ids import AttemptId


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """How the next token is chosen. Neutral values switch a step off.

    `seed` is always set (the router draws one where the client gave none), so that randomness, keyed by
    (seed, position), is the same in every attempt. `logprobs` None: none wanted; k: the chosen token's and the k best.
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

    @property
    def greedy(self) -> bool:
        return self.temperature == 0.0


@dataclass(frozen=True, slots=True)
class StopParams:
    """When to stop. Counts include tokens that earlier attempts emitted. Stop strings are the router's business."""

    max_tokens: int
    min_tokens: int = 0
    stop_token_ids: frozenset[int] = frozenset()


@dataclass(frozen=True, slots=True)
class EngineRequest:
    """One sequence to extend: the prompt followed by what earlier attempts have already emitted.

    `tokens[:num_prompt_tokens]` is the prompt; the rest was emitted before, so the next output index is `num_emitted`.
    `salt` separates prefix caches.
    """

    id: AttemptId
    tokens: tuple[int, ...]
    num_prompt_tokens: int
    sampling: SamplingParams
    stop: StopParams
    salt: str = ""

    @property
    def num_emitted(self) -> int:
        return len(self.tokens) - self.num_prompt_tokens


class FinishReason(enum.Enum):
    """Why a sequence ended by itself (an abort or a failure is not an end of this kind)."""

    STOP = "stop"
    LENGTH = "length"


@dataclass(frozen=True, slots=True)
class TokenLogprobs:
    """Natural-log probabilities under the model's own distribution (before temperature and filters)."""

    logprob: float
    top: tuple[tuple[int, float], ...] = ()


@dataclass(frozen=True, slots=True)
class SampledToken:
    """What the sampler chose for one row."""

    token: int
    logprobs: TokenLogprobs | None = None


@dataclass(frozen=True, slots=True)
class OutputToken:
    """A token on its way to the client; `index` is absolute over all attempts, starting at 0."""

    index: int
    token: int
    logprobs: TokenLogprobs | None = None


def finish_reason(stop: StopParams, token: int, num_output_tokens: int) -> FinishReason | None:
    """Whether a sequence ends with `token`, the `num_output_tokens`-th output (counted from 1, over all attempts)."""
    if token in stop.stop_token_ids and num_output_tokens > stop.min_tokens:
        return FinishReason.STOP
    if num_output_tokens >= stop.max_tokens:
        return FinishReason.LENGTH
    return None


def banned_tokens(stop: StopParams, num_output_tokens: int) -> frozenset[int]:
    """Stop ids that may not be sampled yet, after `num_output_tokens` outputs, because of `min_tokens`."""
    return stop.stop_token_ids if num_output_tokens < stop.min_tokens else frozenset()
