"""Validates messages before they reach an engine. Called by both workers' servicers. Pure.

The router validates client input; this protects against a broken, hostile or newer peer. An engine trusts its input:
a token id outside the vocabulary or a deadline that is not a number would end it and every request in it.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from baton.domain.constraint import Constraint, FreePhase
from baton.domain.errors import ContextOverflow, InvalidRequest
from baton.domain.ids import AttemptId
from baton.domain.media.span import MediaRules
from baton.domain.request import EngineRequest, SamplingParams, StopParams
from baton.rpc import codec
from baton.rpc.gen import common_pb2

MAX_NAME_CHARS = 256
MAX_STOP_TOKENS = 4096
MAX_NAMED_TOKENS = 1 << 17
"""Of all bad words, and those that are allowed: what a router accepts has fewer."""

MAX_PHASES = 64
MAX_DURATION_S = 86400.0


@dataclass(frozen=True, slots=True)
class EngineRequestValidator:
    """`vocab_size` of the model; `max_model_len`: most tokens of one sequence, prompt and output together.

    `media`: what the model asks of media spans; None: it is served without images.
    """

    vocab_size: int
    max_model_len: int
    media: MediaRules | None = None

    def validate_prompt(self, message: common_pb2.EngineRequest) -> EngineRequest:
        """The request, whose tokens can be prefilled. Raises `InvalidRequest` or `ContextOverflow`."""
        request = codec.decode_request(message)
        validate_id(message.id)
        _require(len(request.salt) <= MAX_NAME_CHARS, "salt", f"is longer than {MAX_NAME_CHARS} characters")
        _require(bool(request.tokens), "tokens", "are missing: an empty prompt has nothing to compute")
        _require(self._are_tokens(request.tokens), "tokens", f"are not all below {self.vocab_size}")
        num_prompt = request.num_prompt_tokens
        _require(0 < num_prompt <= len(request.tokens), "num_prompt_tokens", f"is {num_prompt}, not among the tokens")
        self._check_media(request)
        self._check_stop(request.stop)
        self._check_sampling(request.sampling)
        if request.constraint is not None:
            self._check_constraint(request.constraint)
        _require((request.prompt_logprobs or 0) <= self.vocab_size, "prompt_logprobs", f"are over {self.vocab_size}")
        self._check_length(len(request.tokens))
        return request

    def validate_sequence(self, message: common_pb2.EngineRequest) -> EngineRequest:
        """As `validate_prompt`; in addition, `max_tokens` fits after the prompt."""
        request = self.validate_prompt(message)
        self._check_length(request.num_prompt_tokens + request.stop.max_tokens)
        return request

    def is_token(self, token: int) -> bool:
        """True if the model has this token id."""
        return 0 <= token < self.vocab_size

    def _are_tokens(self, tokens: tuple[int, ...]) -> bool:
        return not tokens or max(tokens) < self.vocab_size  # the wire has no negative ones

    def _check_length(self, num_tokens: int) -> None:
        if num_tokens > self.max_model_len:
            raise ContextOverflow(f"{num_tokens} tokens are more than the {self.max_model_len} that fit this worker")

    def _check_media(self, request: EngineRequest) -> None:
        if self.media is None:
            _require(not request.media, "media", "is not served by this worker, only text is")
            return
        fault = self.media.find_fault(request.tokens[: request.num_prompt_tokens], request.media)
        _require(fault is None, "media", fault or "")

    def _check_stop(self, stop: StopParams) -> None:
        _require(stop.max_tokens > 0, "max_tokens", "is 0")
        _require(len(stop.stop_token_ids) <= MAX_STOP_TOKENS, "stop_token_ids", f"are more than {MAX_STOP_TOKENS}")
        _require(self._are_tokens(tuple(stop.stop_token_ids)), "stop_token_ids", f"are not below {self.vocab_size}")

    def _check_constraint(self, constraint: Constraint) -> None:
        _require(len(constraint.phases) <= MAX_PHASES, "constraint", f"has more than {MAX_PHASES} phases")
        free = [token for phase in constraint.phases if isinstance(phase, FreePhase) for token in _free_tokens(phase)]
        tokens = (*constraint.eos, *free)
        _require(len(tokens) <= MAX_STOP_TOKENS, "constraint", f"names more than {MAX_STOP_TOKENS} tokens")
        _require(self._are_tokens(tokens), "constraint", f"names tokens that are not below {self.vocab_size}")

    def _check_sampling(self, sampling: SamplingParams) -> None:
        _require(_within(sampling.temperature, 0.0), "temperature", "is negative or no number")
        _require(sampling.top_k >= 0, "top_k", "is negative")
        _require(_within(sampling.top_p, 0.0, 1.0), "top_p", "is not in [0, 1]")
        _require(_within(sampling.min_p, 0.0, 1.0), "min_p", "is not in [0, 1]")
        _require(math.isfinite(sampling.presence_penalty), "presence_penalty", "is no number")
        _require(math.isfinite(sampling.frequency_penalty), "frequency_penalty", "is no number")
        penalty = sampling.repetition_penalty
        _require(_within(penalty, 0.0) and penalty > 0, "repetition_penalty", "is not positive")
        tokens = tuple(token for token, _ in sampling.logit_bias)
        _require(self._are_tokens(tokens), "logit_bias", f"names tokens that are not below {self.vocab_size}")
        _require(all(math.isfinite(bias) for _, bias in sampling.logit_bias), "logit_bias", "is no number")
        names = (*sampling.allowed_token_ids, *(token for word in sampling.bad_words for token in word))
        _require(len(names) <= MAX_NAMED_TOKENS, "bad_words", f"name more than {MAX_NAMED_TOKENS} tokens")
        _require(self._are_tokens(names), "allowed_token_ids", f"name tokens that are not below {self.vocab_size}")
        _require(all(sampling.bad_words), "bad_words", "have one without a token")
        _require((sampling.logprobs or 0) <= self.vocab_size, "logprobs", f"are more than {self.vocab_size}")
        asked = sampling.logprob_token_ids
        _require(len(asked) <= MAX_NAMED_TOKENS, "logprob_token_ids", f"are more than {MAX_NAMED_TOKENS}")
        _require(self._are_tokens(asked), "logprob_token_ids", f"name tokens that are not below {self.vocab_size}")


def _free_tokens(phase: FreePhase) -> tuple[int, ...]:
    return (*(token for end in phase.ends for token in end), *phase.on_budget, *phase.banned)


def validate_id(message: common_pb2.AttemptId) -> AttemptId:
    """The attempt's id. Raises `InvalidRequest` for an empty or too long request id, or attempt 0."""
    id = codec.decode_id(message)
    _require(0 < len(id.request_id) <= MAX_NAME_CHARS, "request_id", f"has not 1 to {MAX_NAME_CHARS} characters")
    _require(id.attempt > 0, "attempt", "is 0, the first is 1")
    return id


def clamp_duration(seconds: float, name: str) -> float:
    """Clamps seconds to [0, one day]. Raises `InvalidRequest` for NaN."""
    _require(not math.isnan(seconds), name, "is no number")
    return min(max(seconds, 0.0), MAX_DURATION_S)


def _within(value: float, low: float, high: float = math.inf) -> bool:
    return low <= value <= high and math.isfinite(value)  # a NaN compares false


def _require(condition: bool, name: str, problem: str) -> None:
    if not condition:
        raise InvalidRequest(f"{name} {problem}", param=name)
