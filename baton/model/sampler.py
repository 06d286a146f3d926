"""Chooses the next token of every row from the model's logits. Called by the runner, on the engine thread.

Randomness is keyed by (seed, position), where position is the number of tokens so far: a request gives the same
tokens in every attempt, batch and process. Knows rows and logits, no scheduler. A batch in which everyone is greedy
and nobody wants more than the token costs one argmax.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import torch

from baton.domain.request import SampledToken, SamplingParams, TokenLogprobs
from baton.model.distribution import Filters, changes_logits, draw, edit_logits, filtered, uniform


class SampledRow(Protocol):
    """What the sampler reads of a row; `baton.engine.batch.SampleSpec` is one."""

    @property
    def sampling(self) -> SamplingParams: ...

    @property
    def history(self) -> Sequence[int]: ...

    @property
    def num_prompt_tokens(self) -> int: ...

    @property
    def banned(self) -> frozenset[int]: ...


def sample(logits: torch.Tensor, rows: Sequence[SampledRow]) -> tuple[SampledToken, ...]:
    """One token for each row of `logits` [rows, vocab_size]. Ties of greedy rows go to the lowest id."""
    if not rows:
        return ()
    tokens = _choose(logits, rows)
    logprobs = _logprobs(logits, tokens, rows)
    return tuple(SampledToken(token, logprobs.get(index)) for index, token in enumerate(tokens))


def _choose(logits: torch.Tensor, rows: Sequence[SampledRow]) -> list[int]:
    edited = [index for index, row in enumerate(rows) if changes_logits(row.sampling, row.banned)]
    drawn = [index for index, row in enumerate(rows) if not row.sampling.greedy]
    if edited:
        logits = logits.to("cpu", torch.float32, copy=True)
        for index in edited:
            _edit(logits[index], rows[index])
    tokens: list[int] = logits.argmax(-1).tolist() if len(drawn) < len(rows) else [0] * len(rows)
    if drawn:
        filters = Filters.of([rows[index].sampling for index in drawn], logits.shape[-1])
        weights = filtered(logits[drawn].cpu(), filters)
        numbers = [uniform(rows[index].sampling.seed, len(rows[index].history)) for index in drawn]
        for index, token in zip(drawn, draw(weights, numbers).tolist(), strict=True):
            tokens[index] = token
    return tokens


def _edit(logits: torch.Tensor, row: SampledRow) -> None:
    prompt, output = row.history[: row.num_prompt_tokens], row.history[row.num_prompt_tokens :]
    edit_logits(logits, row.sampling, prompt, output, row.banned)


def _logprobs(logits: torch.Tensor, tokens: Sequence[int], rows: Sequence[SampledRow]) -> dict[int, TokenLogprobs]:
    """For the rows that asked: log-probabilities under the raw logits, of the chosen token and of the k best."""
    asking = {index: row.sampling.logprobs for index, row in enumerate(rows) if row.sampling.logprobs is not None}
    if not asking:
        return {}
    table = logits[list(asking)].to("cpu", torch.float32).log_softmax(-1)
    best = table.topk(min(max(asking.values()), table.shape[-1]), dim=-1)
    return {
        index: TokenLogprobs(
            table[place, tokens[index]].item(),
            tuple(zip(best.indices[place, :count].tolist(), best.values[place, :count].tolist(), strict=True)),
        )
        for place, (index, count) in enumerate(asking.items())
    }
