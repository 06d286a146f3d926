"""Checks at load if a token's logits have the same bits in longer segments and larger batches as alone.

A step that verifies drafts computes several tokens of a sequence at once. Where the bits are equal, its output is that
of plain decoding; otherwise two nearly equal tokens may change places. Called by `baton.engine.build`.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch

from baton.domain.arithmetic import ceil_div
from baton.model.attention.base import Segment, plan_step
from baton.model.attention.layers import ObservedLayer
from baton.model.attention.native_backend import MAX_ROW_TOKENS
from baton.model.decoders.base import Decoder
from baton.model.loading.loader import LoadedModel
from baton.model.loading.self_check import VerificationBits
from baton.model.storage import PageStorage
from baton.model.to_device import int64_tensor

SEGMENT_SIZES = (2, 3, 5, 8, MAX_ROW_TOKENS)
"""Segments that are computed alone; those of every size are computed together."""
MIN_PREFIX_TOKENS, MAX_PREFIX_TOKENS = 48, 384
NUM_OWN_TOKENS = 8
"""Tokens between the shared prefix and the checked ones, so that these do not begin at the edge of a page."""


def check_bits(model: LoadedModel) -> VerificationBits:
    """Computes the same 16 tokens one by one, in longer segments, and in segments of every size side by side.

    Takes two dozen steps over a few pages of its own.
    """
    page_size = model.geometry.page_size
    num_rows = 1 + len(SEGMENT_SIZES) + MAX_ROW_TOKENS
    rows = _CheckedRows(num_rows, page_size, _prefix_tokens(model.layers, page_size), model.device)
    storage = PageStorage.allocate(model.geometry, rows.num_pages, model.device)
    generator = torch.Generator().manual_seed(1)
    rows.tokens = torch.randint(model.config.vocab_size, (rows.start + MAX_ROW_TOKENS,), generator=generator).tolist()
    decoder = model.decoder(storage)
    rows.extend(decoder, [(0, 0, rows.num_shared)])
    rows.extend(decoder, [(row, rows.num_shared, NUM_OWN_TOKENS) for row in range(rows.num_rows)])
    steps = [rows.extend(decoder, [(0, rows.start + place, 1)]) for place in range(MAX_ROW_TOKENS)]
    single = torch.cat(steps)
    equal = True
    for row, size in enumerate(SEGMENT_SIZES, start=1):
        equal &= torch.equal(rows.extend(decoder, [(row, rows.start, size)]), single[:size])
    sizes = range(1, MAX_ROW_TOKENS + 1)
    mixed = rows.extend(decoder, [(len(SEGMENT_SIZES) + size, rows.start, size) for size in sizes])
    equal &= torch.equal(mixed, torch.cat([single[:size] for size in sizes]))
    return VerificationBits.EXACT if equal else VerificationBits.ROUNDING


def _prefix_tokens(layers: Iterable[ObservedLayer], page_size: int) -> int:
    """Shared tokens before the checked ones: full pages, and more than the windows where those are short enough."""
    reaches = [layer.window for layer in layers if layer.window is not None and layer.window < MAX_PREFIX_TOKENS]
    return ceil_div(max([MIN_PREFIX_TOKENS, *reaches]), page_size) * page_size


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

    def extend(self, decoder: Decoder, parts: Sequence[tuple[int, int, int]]) -> torch.Tensor:
        """One step that extends rows: `parts` are (row, start, number of tokens). Logits [tokens, vocab_size]."""
        ids: list[int] = []
        positions: list[int] = []
        segments: list[Segment] = []
        for row, start, num_tokens in parts:
            segments.append(Segment(len(ids), start, num_tokens, self._table(row)))
            ids += self.tokens[start : start + num_tokens]
            positions += range(start, start + num_tokens)
        step = plan_step(segments, self._page_size, self._device)
        flat_ids, flat_positions = (int64_tensor(values, torch.device(self._device)) for values in (ids, positions))
        return decoder.forward(flat_ids, flat_positions, step, torch.arange(len(ids), device=self._device)).clone()

    def _table(self, row: int) -> list[int]:
        first = self._num_prefix_pages + row * self._num_own_pages
        return [*range(self._num_prefix_pages), *range(first, first + self._num_own_pages)]
