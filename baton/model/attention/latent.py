"""Multi-head latent attention (MLA: DeepSeek-V2, arXiv:2405.04434) over pages that keep the latent.

A token's page slot holds its normalised latent c [rank] and its rotated key k_pe [rope], shared by all heads, instead
of K and V of every head. transformers' modules cache the same pair and expand it (`expand_kv`); here the expansion is
left out, and the attention hook gets the pair as one KV head. `LatentAttention` then computes a segment in one of two
ways, which differ by rounding only:

- absorbed, for few new tokens: q_nope W_UK scores latents, and the weighted sum of latents times W_UV is the output. So
  a cached token costs rank + rope products a head and query, and is read as it is.
- expanded, for many: K and V of `BLOCK_TOKENS` cached tokens at a time, and an online softmax (arXiv:1805.02867).

The choice depends on the number of new tokens alone, so one decoded token is always computed the same way.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch

from baton.domain.arithmetic import ceil_div
from baton.kv.geometry import KVGeometry
from baton.model.attention.base import AttentionBackend, AttentionCall, LatentProjections, Segment, StepMetadata
from baton.model.attention.dense import working_dtype
from baton.model.attention.hf_hook import LATENT
from baton.model.storage import PageStorage
from baton.model.to_device import int64_tensor

MAX_ABSORBED_TOKENS = 56
MAX_ABSORBED_FLOAT32_TOKENS = 256
"""Longest segments that are absorbed. By operations the two ways break even at 171 new tokens (DeepSeek-V3); measured,
products of 16 bits favour the expanded way, and those of 32 bits the absorbed one (docs/results/latent-pages.md)."""

BLOCK_TOKENS = 1024
"""Cached tokens that are expanded at once."""

MAX_TILE_ELEMENTS = 1 << 23
"""Scores of a tile: num_heads x queries x keys."""

_ATTRIBUTES = ("expand_kv", "kv_b_proj", "kv_lora_rank", "num_heads", "qk_nope_head_dim", "qk_rope_head_dim")


def max_absorbed_tokens(geometry: KVGeometry) -> int:
    """Longest segment that is absorbed over pages of `geometry`."""
    return MAX_ABSORBED_FLOAT32_TOKENS if geometry.dtype == "float32" else MAX_ABSORBED_TOKENS


def keep_latents(model: torch.nn.Module, keep: bool) -> int:
    """Makes the model's MLA modules hand their latents to the attention hook, or expand them again.

    Returns the number of such modules. Their `kv_b_proj` must be an `nn.Linear` without a bias; others stay.
    """
    found: list[Any] = [module for module in model.modules() if _is_latent(module)]
    for module in found:
        vars(module).pop("expand_kv", None)
        vars(module).pop(LATENT, None)
        if keep:
            vars(module)["expand_kv"] = _keep_pair
            projections = LatentProjections(module.kv_b_proj, module.num_heads, module.qk_nope_head_dim)
            vars(module)[LATENT] = projections
    return len(found)


def projecting_linears(model: torch.nn.Module) -> list[torch.nn.Module]:
    """The linears whose weights the absorbed way reads, of modules that keep latents."""
    return [module.get_submodule("kv_b_proj") for module in model.modules() if hasattr(module, LATENT)]


def _is_latent(module: Any) -> bool:
    if not all(hasattr(module, name) for name in _ATTRIBUTES):
        return False
    return isinstance(module.kv_b_proj, torch.nn.Linear) and module.kv_b_proj.bias is None


def _keep_pair(latent: torch.Tensor, key_rope: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Stands in for `expand_kv`: [1, 1, tokens, rank] and [.., rope] -> one KV head's K [.., rank + rope] and V."""
    return torch.cat([latent, key_rope], -1), latent


@dataclass(frozen=True, slots=True)
class _Plan:
    """A step's segments by the way they are computed. `places`: the flat tokens of the absorbed ones; None: all."""

    places: torch.Tensor | None
    num_absorbed: int
    expanded: tuple[Segment, ...]


class LatentAttention:
    """An `AttentionBackend` for models whose layers all keep latents. `rows` attends to these as to one KV head.

    Segments of more than `max_absorbed` new tokens are expanded; by default those of `max_absorbed_tokens`.
    """

    def __init__(self, storage: PageStorage, rows: AttentionBackend, max_absorbed: int | None = None) -> None:
        self._storage = storage
        self._rows = rows
        self._max_absorbed = max_absorbed_tokens(storage.geometry) if max_absorbed is None else max_absorbed
        self._plan: _Plan | None = None

    def begin(self, step: StepMetadata) -> None:
        expanded = tuple(segment for segment in step.segments if segment.num_tokens > self._max_absorbed)
        if not expanded:
            self._plan = _Plan(None, step.num_tokens, ())
            self._rows.begin(step)
            return
        absorbed: list[Segment] = []
        places: list[int] = []
        for segment in step.segments:
            if segment.num_tokens <= self._max_absorbed:
                absorbed.append(replace(segment, offset=len(places)))
                places += range(segment.offset, segment.offset + segment.num_tokens)
        self._plan = _Plan(int64_tensor(places, self._storage.device), len(places), expanded)
        if absorbed:
            self._rows.begin(replace(step, segments=tuple(absorbed)))

    def attend(self, call: AttentionCall) -> torch.Tensor:
        plan, projections = self._plan, call.latent
        assert plan is not None, "attend before begin"
        assert projections is not None, "a layer without latents"
        if plan.places is None:
            return self._absorbed(call, projections, call.query)
        out = call.query.new_empty(*call.query.shape[:2], projections.v_head_dim)
        if plan.num_absorbed:
            out[plan.places] = self._absorbed(call, projections, call.query[plan.places])
        for segment in plan.expanded:
            place = slice(segment.offset, segment.offset + segment.num_tokens)
            out[place] = self._expanded(call, projections, call.query[place], segment)
        return out

    def _absorbed(self, call: AttentionCall, projections: LatentProjections, query: torch.Tensor) -> torch.Tensor:
        inner = replace(call, query=projections.absorb(query), latent=None)
        return projections.project(self._rows.attend(inner))

    def _expanded(
        self, call: AttentionCall, projections: LatentProjections, query: torch.Tensor, segment: Segment
    ) -> torch.Tensor:
        """Attention of one segment: `query` [tokens, heads, nope + rope] -> [tokens, heads, v_head_dim]."""
        dtype = working_dtype(query.dtype, query.device)
        heads = (query * call.scale).to(dtype).transpose(0, 1)
        softmax = _OnlineSoftmax(heads, projections.v_head_dim, segment.start)
        for start, rows in self._blocks(call.layer, segment):
            nope, values = projections.expand(rows[:, : projections.rank])
            rope = rows[:, projections.rank :].expand(projections.num_heads, -1, -1)
            softmax.add(torch.cat([nope, rope], -1).to(dtype), values.to(dtype), start)
        return softmax.result().transpose(0, 1).to(query.dtype)

    def _blocks(self, layer: int, segment: Segment) -> Iterator[tuple[int, torch.Tensor]]:
        """The segment's cached rows in blocks: the position of the first one, and [tokens, rank + rope]."""
        page_size = self._storage.geometry.page_size
        num_pages, step = ceil_div(segment.end, page_size), max(1, BLOCK_TOKENS // page_size)
        for first in range(0, num_pages, step):
            table = int64_tensor(segment.pages[first : min(num_pages, first + step)], self._storage.device)[None]
            rows = self._storage.select(table).keys(layer)[0, 0]
            yield first * page_size, rows[: segment.end - first * page_size]


class _OnlineSoftmax:
    """Attention of `query` [heads, tokens, dim], scaled, at positions from `start`, over one block after another."""

    def __init__(self, query: torch.Tensor, v_head_dim: int, start: int) -> None:
        num_heads, num_tokens, _ = query.shape
        self._query, self._start = query, start
        self._sums = query.new_zeros(num_heads, num_tokens, v_head_dim, dtype=torch.float32)
        self._weights = query.new_zeros(num_heads, num_tokens, 1, dtype=torch.float32)
        self._highest = query.new_full((num_heads, num_tokens, 1), -torch.inf, dtype=torch.float32)

    def add(self, keys: torch.Tensor, values: torch.Tensor, keys_start: int) -> None:
        """Adds keys [heads, slots, dim] and values [heads, slots, v_head_dim] at positions from `keys_start`."""
        num_heads, num_tokens, _ = self._query.shape
        num_queries = max(1, MAX_TILE_ELEMENTS // (num_heads * keys.shape[1]))
        oldest = max(0, keys_start - self._start)  # queries before the block see none of it
        for first in range(oldest, num_tokens, num_queries):
            self._add_tile(slice(first, min(num_tokens, first + num_queries)), keys, values, keys_start)

    def result(self) -> torch.Tensor:
        """[heads, tokens, v_head_dim], float32."""
        return self._sums / self._weights

    def _add_tile(self, tile: slice, keys: torch.Tensor, values: torch.Tensor, keys_start: int) -> None:
        scores = (self._query[:, tile] @ keys.transpose(-1, -2)).float()
        positions = torch.arange(self._start + tile.start, self._start + tile.stop, device=keys.device)[:, None]
        seen = torch.arange(keys_start, keys_start + keys.shape[1], device=keys.device)[None]
        scores.masked_fill_(seen > positions, -torch.inf)
        highest = torch.maximum(self._highest[:, tile], scores.amax(-1, keepdim=True))
        kept = (self._highest[:, tile] - highest).exp_()
        weights = scores.sub_(highest).exp_()
        self._weights[:, tile] = self._weights[:, tile] * kept + weights.sum(-1, keepdim=True)
        self._sums[:, tile] = self._sums[:, tile] * kept + (weights.to(values.dtype) @ values).float()
        self._highest[:, tile] = highest
