"""Inputs of attention: the step (built once, shared by all layers) and the call (one a layer).

The runner builds `StepMetadata` from its rows; backends read it. Knows positions and pages, no requests.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch

from baton.model.to_device import int64_tensor


@dataclass(frozen=True, slots=True)
class Segment:
    """New tokens of one sequence at positions [start, start + num_tokens). `pages` is its table from position 0.

    `first_page`: number of the first of `pages`, if those before it are left out.

    In the step's flat tensors they are at [offset, offset + num_tokens). A token in one of `blocks`, (start, end) in
    order, attends to the keys of all of it: to those behind it, too. A block may begin before the segment and must not
    end behind it.

    `parents`: the tokens are a tree in adjacent slots: the index of the token before each, less than its own, and -1
    for the first token and no other. A token attends to what lies before the segment and to its path, and its position
    is `start` and the length of that path. Layers with a window cannot have trees. Empty: a chain.
    """

    offset: int
    start: int
    num_tokens: int
    pages: Sequence[int]
    blocks: tuple[tuple[int, int], ...] = ()
    parents: tuple[int, ...] = ()
    first_page: int = 0

    def pages_between(self, first: int, end: int) -> Sequence[int]:
        """Pages number [first, end). Raises `ValueError` for some that are left out."""
        if first < self.first_page:
            raise ValueError(f"page {first} is needed, and pages before {self.first_page} are left out")
        return self.pages[first - self.first_page : end - self.first_page]

    def first_seen_page(self, page_size: int, window: int | None) -> int:
        """Number of the page with the first key that the segment's tokens see; `window` None: they see all keys."""
        return 0 if window is None else max(0, self.start - window + 1) // page_size

    def paths(self) -> list[list[int]]:
        """For each token of a tree the tokens that it attends to among the new ones: its path, and itself."""
        paths: list[list[int]] = []
        for token, parent in enumerate(self.parents):
            paths.append([*(paths[parent] if parent >= 0 else ()), token])
        return paths

    @property
    def end(self) -> int:
        """One past the last new position: the number of keys that the last new token attends to."""
        return self.start + self.num_tokens

    def visible_ends(self) -> list[int]:
        """One past the last key that each new token attends to."""
        ends = list(range(self.start + 1, self.end + 1))
        for first, end in self.blocks:
            begin = max(first, self.start) - self.start
            ends[begin : end - self.start] = [end] * (end - self.start - begin)
        return ends


@dataclass(frozen=True, slots=True)
class StepMetadata:
    """One forward pass: its segments, and [tokens] tensors with the page and slot of each new token's K and V.

    `partial_pages` lists the pages that this step begins and does not fill. `windowed`: the same step in the slots of a
    storage that keeps window parts apart; None: all layers are in the pages.
    """

    segments: tuple[Segment, ...]
    page_size: int
    token_pages: torch.Tensor
    token_slots: torch.Tensor
    partial_pages: torch.Tensor
    windowed: StepMetadata | None = None

    @property
    def num_tokens(self) -> int:
        return self.token_pages.shape[0]

    def of(self, *, is_apart: bool) -> StepMetadata:
        """The step in the numbers that a layer counts by: of slots if it `is_apart` from the pages, else of pages."""
        if not is_apart:
            return self
        assert self.windowed is not None, "a step without its window slots"
        return self.windowed

    @property
    def is_decode_only(self) -> bool:
        """True if every segment is one token."""
        return all(segment.num_tokens == 1 for segment in self.segments)

    @property
    def has_blocks(self) -> bool:
        """True if some token attends to keys behind it."""
        return any(segment.blocks for segment in self.segments)

    @property
    def has_trees(self) -> bool:
        """True if the tokens of some segment are a tree."""
        return any(segment.parents for segment in self.segments)


def tree_mask(segment: Segment, device: torch.device | str = "cpu") -> torch.Tensor:
    """[tokens, tokens], bool: True where a token of a tree attends to another one of it, or to itself."""
    mask = torch.zeros(segment.num_tokens, segment.num_tokens, dtype=torch.bool)
    for token, path in enumerate(segment.paths()):
        mask[token, path] = True
    return mask.to(device)


def require_no_window(window: int | None) -> None:
    """Raises `ValueError` for a layer that a tree cannot have: its window would count slots, not positions."""
    if window is not None:
        raise ValueError("a tree of drafts in a layer with a window")


def plan_step(segments: Sequence[Segment], page_size: int, device: torch.device | str = "cpu") -> StepMetadata:
    """Metadata of a step over adjacent segments."""
    pages: list[int] = []
    slots: list[int] = []
    partial_pages: list[int] = []
    for segment in segments:
        positions = range(segment.start, segment.end)
        first_page = segment.first_page
        pages += [segment.pages[position // page_size - first_page] for position in positions]
        slots += [position % page_size for position in positions]
        last_edge = segment.end // page_size * page_size
        if segment.start <= last_edge < segment.end:
            partial_pages.append(segment.pages[last_edge // page_size - first_page])
    token_pages, token_slots, partial = (int64_tensor(values, device) for values in (pages, slots, partial_pages))
    return StepMetadata(tuple(segments), page_size, token_pages, token_slots, partial)


class LatentProjections:
    """W_UK and W_UV of a layer of multi-head latent attention, views of the weight of `linear`.

    `linear` is [heads * (nope_dim + v_head_dim), rank], without a bias.
    """

    def __init__(self, linear: torch.nn.Linear, num_heads: int, nope_dim: int) -> None:
        self._linear = linear
        self.num_heads = num_heads
        self.nope_dim = nope_dim
        self.rank = linear.in_features
        self.v_head_dim = linear.out_features // num_heads - nope_dim

    def absorb(self, query: torch.Tensor) -> torch.Tensor:
        """[tokens, heads, nope + rope] -> [tokens, heads, rank + rope], to be scored against latents."""
        nope, rope = query.split([self.nope_dim, query.shape[-1] - self.nope_dim], -1)
        absorbed = nope.transpose(0, 1) @ self._per_head()[:, : self.nope_dim]
        return torch.cat([absorbed.transpose(0, 1), rope], -1)

    def project(self, sums: torch.Tensor) -> torch.Tensor:
        """Weighted sums of latents [tokens, heads, rank] -> outputs [tokens, heads, v_head_dim]."""
        return (sums.transpose(0, 1) @ self._per_head()[:, self.nope_dim :].transpose(1, 2)).transpose(0, 1)

    def expand(self, latents: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """[slots, rank] -> K without position [heads, slots, nope_dim], and V [heads, slots, v_head_dim]."""
        both = torch.nn.functional.linear(latents, self._linear.weight).unflatten(-1, (self.num_heads, -1))
        nope, values = both.transpose(0, 1).split([self.nope_dim, self.v_head_dim], -1)
        return nope, values

    def _per_head(self) -> torch.Tensor:
        return self._linear.weight.view(self.num_heads, -1, self.rank)


@dataclass(frozen=True, slots=True)
class AttentionCall:
    """Attention of one layer: `query` [tokens, num_heads, k_head_dim].

    The query at position q attends to the key at position k iff q - window < k <= q (`window` None: no lower limit). In
    a block of its segment the upper limit is the block's last position.
    Scores are `softcap * tanh(scores / softcap)` where `softcap` is set. `sinks` [num_heads] adds a logit without a
    value to every softmax. `latent`: projections of a layer whose pages keep latents; its query is [tokens, num_heads,
    nope + rope].
    """

    layer: int
    query: torch.Tensor
    scale: float
    window: int | None = None
    softcap: float | None = None
    sinks: torch.Tensor | None = None
    latent: LatentProjections | None = None

    @property
    def is_plain(self) -> bool:
        """True if the call is a softmax over scores and nothing more."""
        return self.softcap is None and self.sinks is None


class AttentionBackend(Protocol):
    """Computes attention over the pages of one storage. Used from one thread, one step at a time."""

    def begin(self, step: StepMetadata) -> None:
        """Plans a step; its layers share the plan."""
        ...

    def attend(self, call: AttentionCall) -> torch.Tensor:
        """Returns [tokens, num_heads, v_head_dim] in the query's dtype. The new tokens' K and V are already written."""
        ...
