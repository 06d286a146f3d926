"""Samples the next token of every row from the model's logits. Called by the runner on the engine thread.

Randomness is keyed by (seed, position, token id), where position is the number of tokens so far: a request gets the
same tokens in every attempt, batch and process. A batch of greedy rows without logprobs costs one argmax. Everything is
computed on the logits' device. On a GPU nothing waits until the result is read; then only tokens and requested logprobs
are copied to the host. Knows rows and logits, no scheduler.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch

from baton.domain.errors import Broken
from baton.domain.request import SampledToken, SamplingParams, TokenLogprobs
from baton.grammar.matcher import MaskRow
from baton.model.sampling.distribution import (
    TOP_P_CANDIDATES,
    Filters,
    changes_logits,
    filter_weights,
    mask_logits,
    process_logits,
)
from baton.model.sampling.gumbel import draw_key, sample_by_gumbel
from baton.model.to_device import int64_tensor


class SamplingRow(Protocol):
    """The fields of a row that the sampler reads; implemented by `baton.engine.batch.SampleSpec`."""

    @property
    def sampling(self) -> SamplingParams: ...

    @property
    def history(self) -> Sequence[int]: ...

    @property
    def num_prompt_tokens(self) -> int: ...

    @property
    def banned(self) -> frozenset[int]: ...

    @property
    def mask(self) -> object | None: ...


@dataclass(frozen=True, slots=True)
class Logprobs:
    """Logprobs under the raw logits for the rows in `counts` (row -> number of listed tokens), in that order.

    `chosen` [asking rows] is the sampled token's. `listed` and `listed_tokens` are [asking rows, largest count]: of the
    tokens that the row names, else of the best ones.
    """

    counts: dict[int, int]
    chosen: torch.Tensor
    listed: torch.Tensor
    listed_tokens: torch.Tensor

    def read(self) -> dict[int, TokenLogprobs]:
        """Logprobs by row."""
        columns = (self.chosen.tolist(), self.listed_tokens.tolist(), self.listed.tolist())
        return {
            row: TokenLogprobs(chosen, tuple(zip(tokens[:count], values[:count], strict=True)))
            for (row, count), chosen, tokens, values in zip(self.counts.items(), *columns, strict=True)
        }


@dataclass(frozen=True, slots=True)
class SampleResult:
    """Sampled `tokens` [rows] and logprobs, still on their device."""

    tokens: torch.Tensor
    logprobs: Logprobs | None

    def read(self) -> tuple[SampledToken, ...]:
        """Copies the result to the host; waits for the device."""
        tokens: list[int] = self.tokens.tolist()
        logprobs = {} if self.logprobs is None else self.logprobs.read()
        return tuple(SampledToken(token, logprobs.get(row)) for row, token in enumerate(tokens))


@dataclass(frozen=True, slots=True)
class ReadSamples:
    """Sampled tokens without logprobs that are on the host already: a `SampleResult` for fewer calls into torch."""

    ids: Sequence[int]

    @property
    def tokens(self) -> torch.Tensor:
        """[rows], int64, on the CPU."""
        return int64_tensor(self.ids)

    @property
    def logprobs(self) -> None:
        """None: there are none."""
        return None

    def read(self) -> tuple[SampledToken, ...]:
        """See `SampleResult.read`."""
        return tuple([SampledToken(token) for token in self.ids])


Samples = SampleResult | ReadSamples
Masks = Mapping[int, MaskRow | None]


class SamplerBackend(Protocol):
    """Samples tokens [rows], int64, from logits [rows, vocab_size] on their device. Only `mask` changes the logits."""

    def argmax(self, logits: torch.Tensor) -> torch.Tensor:
        """Argmax of each row; ties go to the lowest token id."""
        ...

    def read_argmax(self, logits: torch.Tensor) -> Sequence[int] | None:
        """`argmax`, read by the host; None where that would wait for a device or is not cheaper."""
        ...

    def mask(self, logits: torch.Tensor, masks: Mapping[int, MaskRow]) -> None:
        """Sets the logits of tokens without a bit to minus infinity, in place, for the rows that `masks` names."""
        ...

    def sample(self, logits: torch.Tensor, rows: Sequence[SamplingParams], keys: Sequence[int]) -> torch.Tensor:
        """One token a row, by its filters and its `draw_key`."""
        ...


class TorchSampler:
    """A `SamplerBackend` in plain torch on any device."""

    def argmax(self, logits: torch.Tensor) -> torch.Tensor:
        return logits.argmax(-1)

    def read_argmax(self, logits: torch.Tensor) -> Sequence[int] | None:
        return None

    def mask(self, logits: torch.Tensor, masks: Mapping[int, MaskRow]) -> None:
        mask_logits(logits, masks)

    def sample(self, logits: torch.Tensor, rows: Sequence[SamplingParams], keys: Sequence[int]) -> torch.Tensor:
        on_host = logits.device.type == "cpu"
        filters = Filters.of(rows, logits.shape[-1], logits.device)
        return sample_by_gumbel(filter_weights(logits, filters, TOP_P_CANDIDATES if on_host else ()), keys)


_TORCH = TorchSampler()


def sample_tokens(
    logits: torch.Tensor,
    rows: Sequence[SamplingRow],
    sampler: SamplerBackend = _TORCH,
    masks: Masks | None = None,
) -> Samples:
    """Samples one token for each row of `logits` [rows, vocab_size] without waiting for their device.

    Ties of greedy rows go to the lowest token id. `masks`: by row, bits of 32-bit words, one for each token that may
    follow; None: all may. They only remove tokens: order, random number and logprobs stay. Raises `Broken` if a row
    with a `mask` has none here.
    """
    masks = masks or {}
    if any(row.mask is not None and index not in masks for index, row in enumerate(rows)):
        raise Broken("a constrained row has no mask")
    if not rows:
        return SampleResult(logits.new_empty(0, dtype=torch.int64), None)
    if not masks and all([_takes_best(row) for row in rows]):
        best = sampler.read_argmax(logits)
        if best is not None:
            return ReadSamples(best)
    tokens = _tokens(logits, rows, sampler, masks)
    return SampleResult(tokens, _logprobs(logits, tokens, rows))


def _takes_best(row: SamplingRow) -> bool:
    """True if an unmasked row's token is the argmax of its raw logits and nothing else is asked for."""
    sampling = row.sampling
    return sampling.greedy and sampling.logprobs is None and not changes_logits(sampling, row.banned)


def _tokens(logits: torch.Tensor, rows: Sequence[SamplingRow], sampler: SamplerBackend, masks: Masks) -> torch.Tensor:
    edited = [index for index, row in enumerate(rows) if changes_logits(row.sampling, row.banned)]
    sampled = [index for index, row in enumerate(rows) if not row.sampling.greedy]
    masked = {index: bits for index, bits in masks.items() if bits is not None}
    if edited:
        logits = logits.to(torch.float32, copy=True)
        for index in edited:
            _process(logits[index], rows[index])
    elif masked:
        logits = logits.clone()
    if masked:
        sampler.mask(logits, masked)
    if not sampled:
        return sampler.argmax(logits)
    if len(sampled) == len(rows):
        return _sample(logits, rows, sampler)
    places = int64_tensor(sampled, logits.device)
    tokens = _sample(logits[places], [rows[index] for index in sampled], sampler)
    return sampler.argmax(logits).index_copy_(0, places, tokens)


def _sample(logits: torch.Tensor, rows: Sequence[SamplingRow], sampler: SamplerBackend) -> torch.Tensor:
    """Tokens [rows], each by its row's own key."""
    keys = [draw_key(row.sampling.seed, len(row.history)) for row in rows]
    return sampler.sample(logits, [row.sampling for row in rows], keys)


def _process(logits: torch.Tensor, row: SamplingRow) -> None:
    prompt, output = row.history[: row.num_prompt_tokens], row.history[row.num_prompt_tokens :]
    process_logits(logits, row.sampling, prompt, output, row.banned)


def _logprobs(logits: torch.Tensor, tokens: torch.Tensor, rows: Sequence[SamplingRow]) -> Logprobs | None:
    counts = {
        index: len(row.sampling.logprob_token_ids) or row.sampling.logprobs
        for index, row in enumerate(rows)
        if row.sampling.logprobs is not None
    }
    if not counts:
        return None
    asking = int64_tensor(list(counts), logits.device)
    table = logits[asking].float().log_softmax(-1)
    listed_tokens = _most_probable(table, min(max(counts.values()), table.shape[-1]))
    listed = table.gather(-1, listed_tokens)
    for place, row in enumerate(counts):
        if named := rows[row].sampling.logprob_token_ids:
            ids = int64_tensor(named, logits.device)
            listed_tokens[place, : len(named)] = ids
            listed[place, : len(named)] = table[place, ids]
    return Logprobs(counts, table.gather(-1, tokens[asking][:, None])[:, 0], listed, listed_tokens)


def _most_probable(table: torch.Tensor, count: int) -> torch.Tensor:
    """Ids [rows, count] of the largest log probabilities, in falling order. Equal ones by id, in every batch.

    Floats of one sign are ordered like their bits, so bits and id together are one number, and no two are equal. On the
    host such numbers are made only if some are equal: a search among them takes several times as long.
    """
    if table.is_cpu:
        best = table.topk(min(count + 1, table.shape[-1]), dim=-1)
        if not bool((best.values[:, 1:] == best.values[:, :-1]).any()):
            return best.indices[:, :count]
    below_zero = table.view(torch.int32).bitwise_and(0x7FFFFFFF).long()
    ids = torch.arange(table.shape[-1], device=table.device)
    return (below_zero << 32).add_(ids).topk(count, dim=-1, largest=False).indices
