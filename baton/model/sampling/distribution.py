"""From logits to weights: penalties and biases, temperature, and filters.

Pure functions of tensors on any device, called by the sampler. Weights are float32, their sums float64. Branches depend
on request parameters only, so a GPU is never waited for. A row's result is independent of the other rows and of the
order of equally probable tokens, so that it is the same in every batch.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch

from baton.domain.request import SamplingParams
from baton.grammar.matcher import MaskRow
from baton.model.to_device import int64_tensor, to_device

TOP_P_CANDIDATES = (1024, 8192)
"""Numbers of most probable tokens among which a nucleus is searched first, since sorting a vocabulary costs more.

Each search reads back whether the nucleus was found. Without sizes the vocabulary is sorted, which waits for no device.
"""

MIN_TEMPERATURE = torch.finfo(torch.float32).tiny
"""Replaces temperatures too small for float32; sampling is greedy then."""


def process_logits(
    logits: torch.Tensor, sampling: SamplingParams, prompt: Sequence[int], output: Sequence[int], banned: frozenset[int]
) -> None:
    """Applies penalties, `logit_bias`, bans and `allowed_token_ids` to one row [vocab_size], in place, in this order.

    Repetition (CTRL, arXiv:1909.05858) divides positive and multiplies negative logits of every token in prompt or
    output. Presence and frequency (as in OpenAI's API) are subtracted for tokens of the output, once and per count.
    """
    if sampling.repetition_penalty != 1.0:
        seen = torch.tensor([*prompt, *output]).unique()
        seen = to_device(seen, logits.device)
        old = logits[seen]
        logits[seen] = torch.where(old > 0, old / sampling.repetition_penalty, old * sampling.repetition_penalty)
    if output and (sampling.presence_penalty or sampling.frequency_penalty):
        seen, counts = torch.tensor(output).unique(return_counts=True)
        penalties = sampling.presence_penalty + sampling.frequency_penalty * counts
        logits[to_device(seen, logits.device)] -= to_device(penalties, logits.device)
    if sampling.logit_bias:
        tokens, biases = zip(*sampling.logit_bias, strict=True)
        added = torch.tensor(biases, dtype=logits.dtype)
        logits[int64_tensor(tokens, logits.device)] += to_device(added, logits.device)
    if banned:
        logits.index_fill_(0, int64_tensor(list(banned), logits.device), -torch.inf)
    if sampling.allowed_token_ids:
        allowed = int64_tensor(sampling.allowed_token_ids, logits.device)
        kept = logits[allowed]
        logits.fill_(-torch.inf)
        logits[allowed] = kept


def mask_logits(logits: torch.Tensor, masks: Mapping[int, MaskRow]) -> None:
    """Sets the logits of tokens without a bit to minus infinity, in place, for the rows that `masks` names.

    `logits`: [rows, vocab_size] on any device. Bits are unpacked on the host, which is faster than torch does it.
    """
    rows, bits = list(masks), np.stack(list(masks.values())).view(np.uint8)
    forbidden = np.unpackbits(~bits, axis=1, count=logits.shape[-1], bitorder="little").view(np.bool_)
    forbidden_here = to_device(torch.from_numpy(forbidden), logits.device)
    if rows == list(range(len(logits))):
        logits.masked_fill_(forbidden_here, -torch.inf)
        return
    places = int64_tensor(rows, logits.device)
    logits[places] = logits[places].masked_fill_(forbidden_here, -torch.inf)


def changes_logits(sampling: SamplingParams, banned: frozenset[int]) -> bool:
    """True if `process_logits` would change anything."""
    return bool(
        banned
        or sampling.allowed_token_ids
        or sampling.logit_bias
        or sampling.repetition_penalty != 1.0
        or sampling.presence_penalty
        or sampling.frequency_penalty
    )


@dataclass(frozen=True, slots=True)
class Filters:
    """Columns [rows, 1] of per-row parameters. Neutral values keep every token.

    `largest_k`: the largest `top_k` that excludes a token, or 0. `has_*`: some row uses the filter.
    """

    temperature: torch.Tensor
    top_k: torch.Tensor
    top_p: torch.Tensor
    min_p: torch.Tensor
    largest_k: int
    has_top_p: bool
    has_min_p: bool

    @classmethod
    def of(cls, rows: Sequence[SamplingParams], vocab_size: int, device: torch.device | str = "cpu") -> Filters:
        """Filters of `rows`; `top_k` 0 keeps all tokens."""
        top_k = [min(row.top_k or vocab_size, vocab_size) for row in rows]
        return cls(
            _column([row.temperature for row in rows], device),
            _column(top_k, device, torch.int64),
            _column([row.top_p for row in rows], device),
            _column([row.min_p for row in rows], device),
            max((k for k in top_k if k < vocab_size), default=0),
            any(row.top_p < 1.0 for row in rows),
            any(row.min_p > 0.0 for row in rows),
        )


def filter_weights(
    logits: torch.Tensor, filters: Filters, candidates: Sequence[int] = TOP_P_CANDIDATES
) -> torch.Tensor:
    """Weights [rows, vocab_size] after temperature, top-k, top-p and min-p: probabilities times a row's constant.

    Top-k keeps a token if fewer than k are more probable. Top-p keeps it if the mass of all more probable ones, of what
    top-k left, is below top-p. Min-p keeps it from that share of the maximum on. Equally probable tokens stay or go
    together. `candidates`: see `TOP_P_CANDIDATES`.
    """
    below_best = logits.float() - logits.amax(-1, keepdim=True).float()
    # Subtract before dividing: a tiny temperature must not produce infinities that are then subtracted.
    weights = (below_best / filters.temperature.clamp(min=MIN_TEMPERATURE)).exp_()  # the most probable token's is 1
    vocab_size = weights.shape[-1]
    if filters.largest_k:
        best = weights.topk(filters.largest_k, dim=-1).values
        kth = best.gather(-1, (filters.top_k - 1).clamp(max=best.shape[-1] - 1))
        weights.masked_fill_((weights < kth) & (filters.top_k < vocab_size), 0.0)
    if filters.has_top_p:
        weights.masked_fill_(weights < _top_p_threshold(weights, filters.top_p, candidates), 0.0)
    if filters.has_min_p:
        weights.masked_fill_(weights < filters.min_p, 0.0)
    return weights


def _top_p_threshold(weights: torch.Tensor, top_p: torch.Tensor, sizes: Sequence[int]) -> torch.Tensor:
    """The smallest weight [rows, 1] of each row's nucleus; 0 where every token is in it."""
    mass = weights.sum(-1, keepdim=True, dtype=torch.float64) * top_p
    vocab_size = weights.shape[-1]
    for num_best in (*(size for size in sizes if size < vocab_size), vocab_size):
        best = weights.topk(num_best, dim=-1).values
        inside = best.cumsum(-1, dtype=torch.float64) - best < mass
        if num_best < vocab_size and not bool((inside[:, -1:] & (top_p < 1.0)).any()):
            break
    last = inside.sum(-1, keepdim=True).clamp(min=1) - 1
    return torch.where(top_p < 1.0, best.gather(-1, last), 0.0)


def _column(values: Sequence[float], device: torch.device | str, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return to_device(torch.tensor(values, dtype=dtype)[:, None], device)
