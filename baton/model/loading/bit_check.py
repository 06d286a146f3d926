"""Checks at load if a token's logits have the same bits in longer segments and larger batches as alone.

A step that verifies drafts computes several tokens of a sequence at once. Where the bits are equal, its output is that
of plain decoding; otherwise two nearly equal tokens may change places. The same is checked for a tree of drafts, where
a model's steps can verify one. Called by `baton.engine.build`.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch

from baton.domain.arithmetic import ceil_div
from baton.model.attention.base import Segment, plan_step
from baton.model.attention.layers import ObservedLayer
from baton.model.attention.native_backend import MAX_ROW_TOKENS
from baton.model.decoders.base import Decoder
from baton.model.drafts.tree_support import tree_refusal
from baton.model.loading.loader import LoadedModel
from baton.model.loading.self_check import VerificationBits
from baton.model.storage import PageStorage
from baton.model.to_device import int64_tensor

SEGMENT_SIZES = (2, 3, 5, 8, MAX_ROW_TOKENS)
"""Segments that are computed alone; those of every size are computed together."""
MIN_PREFIX_TOKENS, MAX_PREFIX_TOKENS = 48, 384
NUM_OWN_TOKENS = 8
"""Tokens between the shared prefix and the checked ones, so that these do not begin at the edge of a page."""
TREE_PARENTS = (-1, 0, 0, 0, 1, 1, 2, 4, 4, 5, 7, 7, 8, 10, 10, 11)
"""The checked tree, as `Segment.parents`: of `MAX_ROW_TOKENS` tokens, of five generations below the first."""


def check_bits(model: LoadedModel) -> VerificationBits:
    """Computes the same 16 tokens one by one, in longer segments, in segments of many sizes, and as a tree.

    Takes three dozen steps over a few pages of its own.
    """
    page_size = model.geometry.page_size
    num_rows = 1 + len(SEGMENT_SIZES) + MAX_ROW_TOKENS
    rows = _CheckedRows(num_rows, page_size, _prefix_tokens(model.layers, page_size), model.device)
    storage = PageStorage.allocate(model.geometry, rows.num_pages, model.device)
    generator = torch.Generator().manual_seed(1)
    rows.tokens = torch.randint(model.config.vocab_size, (rows.start + MAX_ROW_TOKENS,), generator=generator).tolist()
    decoder = model.decoder(storage)
    rows.extend(decoder, [rows.part(0, 0, rows.num_shared)])
    rows.extend(decoder, [rows.part(row, rows.num_shared, NUM_OWN_TOKENS) for row in range(rows.num_rows)])
    steps = [rows.extend(decoder, [rows.part(0, rows.start + place, 1)]) for place in range(MAX_ROW_TOKENS)]
    single = torch.cat(steps)
    equal = True
    for row, size in enumerate(SEGMENT_SIZES, start=1):
        equal &= torch.equal(rows.extend(decoder, [rows.part(row, rows.start, size)]), single[:size])
    sizes = range(1, MAX_ROW_TOKENS + 1)
    mixed = rows.extend(decoder, [rows.part(len(SEGMENT_SIZES) + size, rows.start, size) for size in sizes])
    equal &= torch.equal(mixed, torch.cat([single[:size] for size in sizes]))
    if equal and not tree_refusal(model):
        equal = _has_bits_in_a_tree(rows, decoder)
    return VerificationBits.EXACT if equal else VerificationBits.ROUNDING


def _has_bits_in_a_tree(rows: _CheckedRows, decoder: Decoder) -> bool:
    """Computes a tree in one step, and each of its paths token by token. Overwrites what the rows had."""
    own = rows.tokens[rows.start :]
    tree = rows.extend(decoder, [_Part(0, rows.start, own, TREE_PARENTS)])
    paths = Segment(0, rows.start, MAX_ROW_TOKENS, (), parents=TREE_PARENTS).paths()
    leaves = [path for path in paths if path[-1] not in TREE_PARENTS]
    equal = True
    for depth in range(max(map(len, leaves))):
        nodes = [(row, path[depth]) for row, path in enumerate(leaves, start=1) if len(path) > depth]
        plain = rows.extend(decoder, [_Part(row, rows.start + depth, own[node : node + 1]) for row, node in nodes])
        equal &= torch.equal(plain, tree[[node for _, node in nodes]])
    return equal


def _prefix_tokens(layers: Iterable[ObservedLayer], page_size: int) -> int:
    """Shared tokens before the checked ones: full pages, and more than the windows where those are short enough."""
    reaches = [layer.window for layer in layers if layer.window is not None and layer.window < MAX_PREFIX_TOKENS]
    return ceil_div(max([MIN_PREFIX_TOKENS, *reaches]), page_size) * page_size


@dataclass(frozen=True, slots=True)
class _Part:
    """Tokens of one row in a step, from position `start` on; of a tree with `parents`, as in `Segment`."""

    row: int
    start: int
    tokens: Sequence[int]
    parents: tuple[int, ...] = ()


class _CheckedRows:
    """Rows with equal tokens: the pages of the prefix are shared, those behind it are each row's own."""

    def __init__(self, num_rows: int, page_size: int, num_shared: int, device: str) -> None:
        self._device = device
        self.num_rows, self.num_shared = num_rows, num_shared
        self.start = num_shared + NUM_OWN_TOKENS
        self.tokens: list[int] = []
        self._page_size = page_size
        self._num_prefix_pages = num_shared // page_size
        self._num_own_pages = ceil_div(NUM_OWN_TOKENS + MAX_ROW_TOKENS, page_size)
        self.num_pages = self._num_prefix_pages + num_rows * self._num_own_pages

    def part(self, row: int, start: int, num_tokens: int) -> _Part:
        """So many of the tokens that all rows have."""
        return _Part(row, start, self.tokens[start : start + num_tokens])

    def extend(self, decoder: Decoder, parts: Sequence[_Part]) -> torch.Tensor:
        """One step that extends rows. Logits [tokens, vocab_size]."""
        ids: list[int] = []
        positions: list[int] = []
        segments: list[Segment] = []
        for part in parts:
            size = len(part.tokens)
            segment = Segment(len(ids), part.start, size, self._table(part.row), parents=part.parents)
            segments.append(segment)
            ids += part.tokens
            depths = [len(path) - 1 for path in segment.paths()] if part.parents else range(size)
            positions += [part.start + depth for depth in depths]
        step = plan_step(segments, self._page_size, self._device)
        flat_ids, flat_positions = (int64_tensor(values, torch.device(self._device)) for values in (ids, positions))
        return decoder.forward(flat_ids, flat_positions, step, torch.arange(len(ids), device=self._device)).clone()

    def _table(self, row: int) -> list[int]:
        first = self._num_prefix_pages + row * self._num_own_pages
        return [*range(self._num_prefix_pages), *range(first, first + self._num_own_pages)]
