"""Converts log probabilities and token ids to OpenAI's two shapes."""

from __future__ import annotations

from collections.abc import Sequence

from msgspec import UNSET, UnsetType

from baton.domain.request import OutputToken, TokenLogprobs
from baton.domain.scores.prompt_scores import PromptScores, ScoredToken
from services.router.openai.schemas import (
    ChatLogprobs,
    CompletionLogprobs,
    PromptLogprob,
    PromptLogprobs,
    TokenLogprob,
    TopLogprob,
)
from services.router.text.text_model import TextModel

MIN_LOGPROB = -9999.0
"""Stands for minus infinity, which JSON cannot express."""


def chat_logprobs(text: TextModel, tokens: Sequence[OutputToken]) -> ChatLogprobs | None:
    """One entry for each token that has log probabilities; None if none has."""
    entries = [_chat_entry(text, token.token, token.logprobs) for token in tokens if token.logprobs is not None]
    return ChatLogprobs(entries) if entries else None


def completion_logprobs(text: TextModel, tokens: Sequence[OutputToken], offset: int) -> CompletionLogprobs | None:
    """The same as parallel lists. `offset`: characters of the text of the choice before the first token."""
    short_repr = [(text.token_text(token.token), token.logprobs) for token in tokens if token.logprobs is not None]
    if not short_repr:
        return None
    offsets = []
    for name, _ in short_repr:
        offsets.append(offset)
        offset += len(name)
    return CompletionLogprobs(
        tokens=[name for name, _ in short_repr],
        token_logprobs=[_finite(entry.logprob) for _, entry in short_repr],
        top_logprobs=[_top_by_text(text, name, entry) for name, entry in short_repr],
        text_offset=offsets,
    )


def echoed_logprobs(
    text: TextModel, prompt: Sequence[int], echo: str, scores: PromptScores, k: int
) -> CompletionLogprobs:
    """The parallel lists of a prompt whose text is `echo`."""
    detokenizer, offset, offsets = text.detokenizer(skip_special_tokens=True), 0, list[int]()
    for token in prompt:
        offsets.append(min(offset, len(echo)))
        offset += len(detokenizer.push(token))
    names = [text.token_text(token) for token in prompt]
    scored = scores.tokens(k)
    top = [
        _top_by_text(text, name, TokenLogprobs(each.logprob, each.top))
        for name, each in zip(names[1:], scored, strict=True)
    ]
    return CompletionLogprobs(
        tokens=names,
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


def _chat_entry(text: TextModel, token: int, entry: TokenLogprobs) -> TokenLogprob:
    top = [TopLogprob(text.token_text(t), _finite(p), list(text.token_bytes(t))) for t, p in entry.top]
    return TokenLogprob(text.token_text(token), _finite(entry.logprob), list(text.token_bytes(token)), top)


def _top_by_text(text: TextModel, chosen: str, entry: TokenLogprobs) -> dict[str, float]:
    """The top tokens and the sampled one. Of tokens with the same text, the most probable counts."""
    by_text: dict[str, float] = {}
    for token, logprob in sorted(entry.top, key=lambda pair: -pair[1]):
        by_text.setdefault(text.token_text(token), _finite(logprob))
    by_text.setdefault(chosen, _finite(entry.logprob))
    return by_text


def _finite(logprob: float) -> float:
    return max(logprob, MIN_LOGPROB)
