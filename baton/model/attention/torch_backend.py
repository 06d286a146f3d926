"""Paged attention in plain torch: the reference on every device, and the fallback on CPUs.

Rows of one new token (decoding) are computed in groups of similar length, with one gather and one fused softmax a
group. So short rows share a call, and none is padded to the longest. Longer segments (prompt chunks) are computed one
by one, in tiles. Pages outside a layer's window are never read.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch

from baton.domain.arithmetic import ceil_div
from baton.model.attention.base import AttentionCall, Segment, StepMetadata, require_no_window, tree_mask
from baton.model.attention.dense import attend_chunk, attend_rows
from baton.model.storage import PageSelection, PageStorage

MAX_GROUP_PAGES = 512


@dataclass(frozen=True, slots=True)
class RowGroup:
    """Rows of one new token each, padded to one number of pages. `rows` index the step's flat tensors."""

    rows: torch.Tensor
    pages: PageSelection
    bias: torch.Tensor


@dataclass(frozen=True, slots=True)
class Chunk:
    """A segment of several new tokens, and its pages from `keys_start` on. `visible_ends` None: it has no blocks.

    `tree`: the tokens that each sees among the new ones; None: all up to itself.
    """

    segment: Segment
    pages: PageSelection
    keys_start: int
    visible_ends: list[int] | None = None
    tree: torch.Tensor | None = None


@dataclass(frozen=True, slots=True)
class WindowPlan:
    """A step's plan for the layers of one window."""

    groups: tuple[RowGroup, ...]
    chunks: tuple[Chunk, ...]


class TorchAttention:
    """An `AttentionBackend` over `storage`. Queries from position `first_key` on see no key before it."""

    def __init__(self, storage: PageStorage, first_key: int = 0) -> None:
        self._storage = storage
        self._first_key = first_key
        self._plans: dict[tuple[int | None, bool], WindowPlan] = {}  # by window and place of the layers
        self._step: StepMetadata | None = None

    def begin(self, step: StepMetadata) -> None:
        self._step = step
        self._plans.clear()

    def attend(self, call: AttentionCall) -> torch.Tensor:
        plan = self._plan(call)
        v_head_dim = self._storage.geometry.layers[call.layer].v_head_dim
        out = call.query.new_empty(*call.query.shape[:2], v_head_dim)
        for group in plan.groups:
            keys, values = group.pages.keys_and_values(call.layer)
            out[group.rows] = attend_rows(call, call.query[group.rows], keys, values, group.bias)
        for chunk in plan.chunks:
            segment = chunk.segment
            seen = slice(0, segment.end - chunk.keys_start)
            place = slice(segment.offset, segment.offset + segment.num_tokens)
            keys, values = (side[0, :, seen] for side in chunk.pages.keys_and_values(call.layer))
            places = segment.start, chunk.keys_start, self._first_key, chunk.visible_ends
            out[place] = attend_chunk(call, call.query[place], keys, values, *places, chunk.tree)
        return out

    def _plan(self, call: AttentionCall) -> WindowPlan:
        key = call.window, self._storage.is_apart(call.layer)
        if key not in self._plans:
            assert self._step is not None, "attend before begin"
            self._plans[key] = self._make_plan(self._step.of(is_apart=key[1]), *key)
        return self._plans[key]

    def _make_plan(self, step: StepMetadata, window: int | None, is_apart: bool) -> WindowPlan:
        spans = [_span(segment, step.page_size, window, is_apart) for segment in step.segments]
        rows = [span for span in spans if span.segment.num_tokens == 1]
        return WindowPlan(
            tuple(self._group(members, step.page_size, window) for members in _cut_groups(rows)),
            tuple(self._chunk(span, step.page_size, window) for span in spans if span.segment.num_tokens > 1),
        )

    def _chunk(self, span: _Span, page_size: int, window: int | None) -> Chunk:
        segment = span.segment
        ends = segment.visible_ends() if segment.blocks else None
        tree = None
        if segment.parents:
            require_no_window(window)
            tree = tree_mask(segment, self._storage.device)
        pages = self._select([span.pages], span.is_apart)
        return Chunk(segment, pages, span.first_page * page_size, ends, tree)

    def _group(self, members: Sequence[_Span], page_size: int, window: int | None) -> RowGroup:
        """Groups `members`, longest first. Shorter tables repeat their first page, which the bias masks."""
        num_pages = len(members[0].pages)
        tables = [[*span.pages, *span.pages[:1] * (num_pages - len(span.pages))] for span in members]
        ends = torch.tensor([span.segment.end for span in members])[:, None]
        first_slots = torch.tensor([span.first_page * page_size for span in members])[:, None]
        positions = first_slots + torch.arange(num_pages * page_size)
        hidden = positions >= ends
        if window is not None:
            hidden |= positions < ends - window
        if self._first_key:
            hidden |= (positions < self._first_key) & (ends > self._first_key)
        bias = torch.zeros(hidden.shape, dtype=self._storage.dtype).masked_fill_(hidden, -torch.inf)
        rows = torch.tensor([span.segment.offset for span in members])
        device = self._storage.device
        pages = self._select(tables, members[0].is_apart)
        return RowGroup(rows.to(device), pages, bias[:, None, None].to(device))

    def _select(self, tables: Sequence[Sequence[int]], is_apart: bool) -> PageSelection:
        pages = torch.tensor(tables, dtype=torch.int64, device=self._storage.device)
        return self._storage.select(pages, is_apart=is_apart)


@dataclass(frozen=True, slots=True)
class _Span:
    """The pages of a segment inside the window: the table from `first_page` to the last page in use.

    `is_apart`: they are slots of window parts.
    """

    segment: Segment
    first_page: int
    pages: list[int]
    is_apart: bool


def _span(segment: Segment, page_size: int, window: int | None, is_apart: bool) -> _Span:
    first_page, end_page = segment.first_seen_page(page_size, window), ceil_div(segment.end, page_size)
    return _Span(segment, first_page, list(segment.pages_between(first_page, end_page)), is_apart)


def _cut_groups(rows: Sequence[_Span]) -> Iterator[list[_Span]]:
    """Groups rows, longest first, so that padding at most doubles the work and a group fits the caches."""
    group: list[_Span] = []
    for span in sorted(rows, key=lambda span: len(span.pages), reverse=True):
        if group:
            longest = len(group[0].pages)
            if 2 * len(span.pages) < longest or (len(group) + 1) * longest > MAX_GROUP_PAGES:
                yield group
                group = []
        group.append(span)
    if group:
        yield group
