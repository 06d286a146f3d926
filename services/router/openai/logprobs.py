"""Converts log probabilities and token ids to OpenAI's two shapes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from msgspec import UNSET, UnsetType

from baton.domain.request import OutputToken, TokenLogprobs
from baton.domain.scores.prompt_scores import PromptScores, ScoredToken
from baton.services.router.openai.schemas import (
    ChatLogprobs,
    CompletionLogprobs,
    PromptLogprob,
    PromptLogprobs,
    TokenLogprob,
    TopLogprob,
)
from baton.services.router.openai.valid_request import ValidRequest
from baton.services.router.text.text_model import TextModel

MIN_LOGPROB = -9999.0
"""Stands for minus infinity, which JSON cannot express."""


@dataclass(frozen=True, slots=True)
class TokenNamer:
    """Names tokens in log probabilities: by their text, or by `token_id:N`."""

    text: TextModel
    as_ids: bool = False

    @classmethod
    def of(cls, text: TextModel, request: ValidRequest) -> TokenNamer:
        """As the request asks."""
        return cls(text, request.tokens_as_ids)

    def name(self, token: int) -> str:
        return f"token_id:{token}" if self.as_ids else self.text.token_text(token)


def chat_logprobs(namer: TokenNamer, tokens: Sequence[OutputToken]) -> ChatLogprobs | None:
    """One entry for each token that has log probabilities; None if none has."""
    entries = [_chat_entry(namer, token.token, token.logprobs) for token in tokens if token.logprobs is not None]
    return ChatLogprobs(entries) if entries else None


def completion_logprobs(namer: TokenNamer, tokens: Sequence[OutputToken], offset: int) -> CompletionLogprobs | None:
    """The same as parallel lists. `offset`: characters of the text of the choice before the first token."""
    given = [(token.token, token.logprobs) for token in tokens if token.logprobs is not None]
    if not given:
        return None
    offsets = []
    for token, _ in given:
        offsets.append(offset)
        offset += len(namer.text.token_text(token))
    return CompletionLogprobs(
        tokens=[namer.name(token) for token, _ in given],
        token_logprobs=[_finite(entry.logprob) for _, entry in given],
        top_logprobs=[_top_by_name(namer, token, entry) for token, entry in given],
        text_offset=offsets,
    )


def echoed_logprobs(
    namer: TokenNamer, prompt: Sequence[int], echo: str, scores: PromptScores, k: int
) -> CompletionLogprobs:
    """The parallel lists of a prompt whose text is `echo`."""
    detokenizer, offset, offsets = namer.text.detokenizer(skip_special_tokens=True), 0, list[int]()
    for token in prompt:
        offsets.append(min(offset, len(echo)))
        offset += len(detokenizer.push(token))
    scored = scores.tokens(k)
    top = [
        _top_by_name(namer, token, TokenLogprobs(each.logprob, each.top))
        for token, each in zip(prompt[1:], scored, strict=True)
    ]
    return CompletionLogprobs(
        tokens=[namer.name(token) for token in prompt],
        token_logprobs=[None, *(_finite(each.logprob) for each in scored)],
        top_logprobs=[None, *top],
        text_offset=offsets,
    )


def join_logprobs(echoed: CompletionLogprobs | None, answer: CompletionLogprobs | None) -> CompletionLogprobs | None:
    """The entries of a prompt, then those of its answer."""
    if echoed is None or answer is None:
        return echoed or answer
    return CompletionLogprobs(
        tokens=echoed.tokens + answer.tokens,
        token_logprobs=echoed.token_logprobs + answer.token_logprobs,
        top_logprobs=echoed.top_logprobs + answer.top_logprobs,
        text_offset=echoed.text_offset + answer.text_offset,
    )


def prompt_logprobs(text: TextModel, prompt: Sequence[int], scores: PromptScores, k: int) -> PromptLogprobs:
    """One entry a token: the prompt's own first, then the `k` best."""
    entries = zip(prompt[1:], scores.tokens(k), strict=True)
    return [None, *(_prompt_entry(text, token, scored) for token, scored in entries)]


def _prompt_entry(text: TextModel, token: int, scored: ScoredToken) -> dict[str, PromptLogprob]:
    entry = {str(token): PromptLogprob(_finite(scored.logprob), scored.rank, text.token_text(token))}
    for rank, (best, logprob) in enumerate(scored.top, start=1):
        entry.setdefault(str(best), PromptLogprob(_finite(logprob), rank, text.token_text(best)))
    return entry


def token_ids(wanted: bool, tokens: Sequence[OutputToken]) -> list[int] | UnsetType:
    """Token ids, for the field that exists only on request (as in vLLM)."""
    return [token.token for token in tokens] if wanted else UNSET


def _chat_entry(namer: TokenNamer, token: int, entry: TokenLogprobs) -> TokenLogprob:
    bytes_of = namer.text.token_bytes
    top = [TopLogprob(namer.name(other), _finite(logprob), list(bytes_of(other))) for other, logprob in entry.top]
    return TokenLogprob(namer.name(token), _finite(entry.logprob), list(bytes_of(token)), top)


def _top_by_name(namer: TokenNamer, chosen: int, entry: TokenLogprobs) -> dict[str, float]:
    """The top tokens and the sampled one. Of tokens with the same name, the most probable counts."""
    by_name: dict[str, float] = {}
    for token, logprob in sorted(entry.top, key=lambda pair: -pair[1]):
        by_name.setdefault(namer.name(token), _finite(logprob))
    by_name.setdefault(namer.name(chosen), _finite(entry.logprob))
    return by_name


def _finite(logprob: float) -> float:
    return max(logprob, MIN_LOGPROB)
