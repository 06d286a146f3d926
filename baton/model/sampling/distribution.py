"""From logits to tokens: penalties and biases, temperature, filters, and sampling by the inverse CDF.

Pure functions of tensors on any device, called by the sampler. Weights are float32, sums of them float64.
What depends on the requests is decided on the host, before anything is computed, so that a GPU is not waited for.
Everything is independent of the order of tokens with equal probability and of the other rows, so that a row gives the
same token in any batch.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from hashlib import blake2b

import torch

from baton.domain.request import SamplingParams
from baton.model.to_device import int64_tensor, to_device

TOP_P_CANDIDATES = (1024, 8192)
"""A nucleus is looked for among this many of the likeliest tokens first: sorting a vocabulary costs more than a row.

Whether it was found there is read back. Where that would mean to wait for a device, no size, the vocabulary is sorted.
"""

MIN_TEMPERATURE = torch.finfo(torch.float32).tiny
"""What a temperature that float32 cannot hold counts as: as good as greedy."""


def process_logits(
    logits: torch.Tensor, sampling: SamplingParams, prompt: Sequence[int], output: Sequence[int], banned: frozenset[int]
) -> None:
    """Apply penalties, then `logit_bias`, then bans to one row [vocab_size], in place.

    Repetition (CTRL, arXiv:1909.05858) divides positive and multiplies negative logits of every token in prompt or
    output; presence and frequency (as in OpenAI's API) are subtracted for tokens of the output, once and per count.
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


def changes_logits(sampling: SamplingParams, banned: frozenset[int]) -> bool:
    """Whether `process_logits` would do anything."""
    return bool(
        banned
        or sampling.logit_bias
        or sampling.repetition_penalty != 1.0
        or sampling.presence_penalty
        or sampling.frequency_penalty
    )


@dataclass(frozen=True, slots=True)
class Filters:
    """Columns [rows, 1] of per-row parameters; neutral values let everything through.

    `largest_k` is the largest of all `top_k` that leave something out, or 0; `has_*`: whether any row uses the filter.
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
        """`top_k` 0 means all."""
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
    """Weights (probabilities times a row's constant) [rows, vocab_size] after temperature, top-k, top-p and min-p.

    A token stays in the top k if fewer than k tokens are more probable; in the nucleus if the mass of all more
    probable ones, of what top-k left, is below top-p; by min-p if it has that share of the most probable one's.
    Equals stay or go together. `candidates`: see there.
    """
    below_best = logits.float() - logits.amax(-1, keepdim=True).float()
    # Subtracted before it is divided: a tiny temperature must not make infinities of which nothing can be subtracted.
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
    """[rows, 1]: the weight of the last token of each row's nucleus; 0 where all tokens are in it."""
    mass = weights.sum(-1, keepdim=True, dtype=torch.float64) * top_p
    vocab_size = weights.shape[-1]
    for num_best in (*(size for size in sizes if size < vocab_size), vocab_size):
        best = weights.topk(num_best, dim=-1).values
        inside = best.cumsum(-1, dtype=torch.float64) - best < mass
        if num_best < vocab_size and not bool((inside[:, -1:] & (top_p < 1.0)).any()):
            break
    last = inside.sum(-1, keepdim=True).clamp(min=1) - 1
    return torch.where(top_p < 1.0, best.gather(-1, last), 0.0)


def uniform(seed: int, position: int) -> float:
    """One number in [0, 1) for (seed, position): 53 bits of BLAKE2b, the same in every process and attempt."""
    digest = blake2b(f"{seed}:{position}".encode(), digest_size=8, person=b"baton-sample").digest()
    return (int.from_bytes(digest, "little") >> 11) * 2.0**-53


def sample_by_cdf(weights: torch.Tensor, uniforms: Sequence[float]) -> torch.Tensor:
    """[rows] token ids: the first, in order of id, at which a row's cumulated probability passes its number.

    In the order of ids, and not of probability, a rounding difference in the logits moves the outcome only when it
    moves a boundary past the number, never because two near-equal tokens change places.
    """
    cumulated = weights.cumsum(-1, dtype=torch.float64)
    total = cumulated[:, -1:]
    numbers = _column(uniforms, weights.device, torch.float64)
    target = torch.minimum(numbers * total, torch.nextafter(total, torch.zeros_like(total)))
    return torch.searchsorted(cumulated, target, right=True).squeeze(-1).clamp(max=weights.shape[-1] - 1)


def _column(values: Sequence[float], device: torch.device | str, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return to_device(torch.tensor(values, dtype=dtype)[:, None], device)
