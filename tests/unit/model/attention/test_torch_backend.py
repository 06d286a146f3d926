"""The torch backend against attention written out per query, over random batches, windows, caps and sinks."""

from __future__ import annotations

import math
import random
from typing import Any

import pytest
import torch

from baton.domain.arithmetic import ceil_div
from baton.kv.geometry import KVGeometry, LayerGeometry
from baton.model.attention import dense
from baton.model.attention.base import AttentionCall, Segment, plan_step
from baton.model.attention.hf_hook import PagedHandler
from baton.model.attention.torch_backend import TorchAttention
from baton.model.storage import PageStorage

PAGE_SIZE = 4
NUM_PAGES = 120
NUM_HEADS = 4
LAYER = LayerGeometry(2, 8, 6)


def naive(
    call: AttentionCall,
    query: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    position: int,
    end: int | None = None,
):
    """One query [heads, dim] at `position` against the keys [positions, kv_heads, dim] before `end`, in float64."""
    low = 0 if call.window is None else max(0, position - call.window + 1)
    end = position + 1 if end is None else end
    group = query.shape[0] // keys.shape[1]
    out = []
    for head in range(query.shape[0]):
        k = keys[low:end, head // group].double()
        scores = k @ query[head].double() * call.scale
        if call.softcap is not None:
            scores = call.softcap * torch.tanh(scores / call.softcap)
        if call.sinks is not None:
            scores = torch.cat([scores, call.sinks[head : head + 1].double()])
        weights = scores.softmax(0)[: len(k)]
        out.append(weights @ values[low:end, head // group].double())
    return torch.stack(out)


def random_segments(rng: random.Random, lengths: list[tuple[int, int]]) -> list[Segment]:
    """Segments of (start, new tokens), on scattered pages, with a page to spare."""
    pages = rng.sample(range(NUM_PAGES), NUM_PAGES)
    segments, first = [], 0
    for start, num_tokens in lengths:
        table = [pages.pop() for _ in range(ceil_div(start + num_tokens, PAGE_SIZE) + 1)]
        segments.append(Segment(first, start, num_tokens, table))
        first += num_tokens
    return segments


CASES: dict[str, dict[str, Any]] = {
    "plain": {},
    "window": {"window": 7},
    "window_of_one": {"window": 1},
    "softcap": {"softcap": 2.0},
    "sinks": {"sinks": torch.tensor([0.5, -1.0, 3.0, 0.0])},
    "all": {"window": 9, "softcap": 1.5, "sinks": torch.tensor([0.5, -1.0, 3.0, 0.0])},
}
BATCHES = {
    "decode": [(30, 1), (3, 1), (0, 1), (41, 1), (7, 1), (29, 1)],
    "chunks": [(0, 4), (5, 9), (0, 19), (12, 3)],
    "mixed": [(17, 1), (0, 11), (22, 1), (6, 5), (1, 1)],
}


@pytest.mark.parametrize("tile_tokens", [3, 128])
@pytest.mark.parametrize("batch", sorted(BATCHES))
@pytest.mark.parametrize("case", sorted(CASES))
@pytest.mark.parametrize("head_groups", [1, LAYER.num_kv_heads])
def test_equals_attention_written_out(case, batch, tile_tokens, head_groups, monkeypatch):
    monkeypatch.setattr(dense, "TILE_TOKENS", tile_tokens)
    rng = random.Random(f"{case}{batch}")
    generator = torch.Generator().manual_seed(3)
    storage = PageStorage.allocate(KVGeometry.of_layers((LAYER, LAYER), "float32", PAGE_SIZE, head_groups), NUM_PAGES)
    for view in (storage.keys(1), storage.values(1)):
        view.fill_(math.nan)  # unwritten slots show when they are read
    segments = random_segments(rng, BATCHES[batch])
    history = []
    for segment in segments:
        keys = torch.randn(segment.end, LAYER.num_kv_heads, LAYER.k_head_dim, generator=generator)
        values = torch.randn(segment.end, LAYER.num_kv_heads, LAYER.v_head_dim, generator=generator)
        history.append((keys, values))
        places = [(segment.pages[p // PAGE_SIZE], p % PAGE_SIZE) for p in range(segment.end)]
        storage.clear(torch.tensor([segment.pages[(segment.end - 1) // PAGE_SIZE]]))
        for position in range(segment.start):
            page, slot = places[position]
            storage.write(1, torch.tensor([page]), torch.tensor([slot]), keys[position], values[position])
    step = plan_step(segments, PAGE_SIZE)
    query = torch.randn(step.num_tokens, NUM_HEADS, LAYER.k_head_dim, generator=generator)
    call = AttentionCall(layer=1, query=query, scale=0.3, **CASES[case])
    backend = TorchAttention(storage)
    backend.begin(step)
    new_keys = torch.cat([keys[s.start :] for s, (keys, _) in zip(segments, history, strict=True)])
    new_values = torch.cat([values[s.start :] for s, (_, values) in zip(segments, history, strict=True)])
    out = PagedHandler(storage, backend, step).attend(call, new_keys, new_values)
    for segment, (keys, values) in zip(segments, history, strict=True):
        for offset in range(segment.num_tokens):
            place = segment.offset + offset
            wanted = naive(call, query[place], keys, values, segment.start + offset)
            torch.testing.assert_close(out[place].double(), wanted, rtol=1e-5, atol=1e-5)


def test_pages_left_of_the_window_are_not_read():
    storage = PageStorage.allocate(KVGeometry.of_layers((LAYER,), "float32", PAGE_SIZE), 20)
    segments = [Segment(0, 30, 1, list(range(8))), Segment(1, 20, 4, list(range(8, 14)))]
    for pages in (range(5), range(8, 11)):  # all whole pages left of a window of 6
        for view in (storage.keys(0), storage.values(0)):
            view[list(pages)] = math.nan
    backend = TorchAttention(storage)
    backend.begin(plan_step(segments, PAGE_SIZE))
    out = backend.attend(AttentionCall(layer=0, query=torch.ones(5, NUM_HEADS, 8), scale=1.0, window=6))
    assert torch.isfinite(out).all()


def test_low_precision_stays_near_float32():
    generator = torch.Generator().manual_seed(0)
    outputs = []
    for dtype in (torch.float32, torch.bfloat16):
        storage = PageStorage.allocate(KVGeometry.of_layers((LAYER,), str(dtype).removeprefix("torch."), PAGE_SIZE), 20)
        generator.manual_seed(0)
        for view in (storage.keys(0), storage.values(0)):
            view.copy_(torch.randn(view.shape, generator=generator))
        query = torch.randn(9, NUM_HEADS, 8, generator=generator).to(dtype)
        backend = TorchAttention(storage)
        backend.begin(plan_step([Segment(0, 12, 8, list(range(5))), Segment(8, 29, 1, list(range(5, 13)))], PAGE_SIZE))
        outputs.append(backend.attend(AttentionCall(layer=0, query=query, scale=0.35)))
    assert outputs[1].dtype == torch.bfloat16
    torch.testing.assert_close(outputs[1].float(), outputs[0], rtol=0.05, atol=0.05)


def test_a_step_lists_token_slots_and_partial_pages():
    segments = [Segment(0, 3, 2, [9, 5]), Segment(2, 0, 4, [1]), Segment(6, 4, 3, [7, 8]), Segment(9, 6, 1, [3, 2])]
    step = plan_step(segments, PAGE_SIZE)
    assert step.token_pages.tolist() == [9, 5, 1, 1, 1, 1, 8, 8, 8, 2]
    assert step.token_slots.tolist() == [3, 0, 0, 1, 2, 3, 0, 1, 2, 2]
    assert step.partial_pages.tolist() == [5, 8]


@pytest.mark.parametrize("tile_tokens", [2, 128])
def test_the_first_key_is_hidden_from_queries_behind_it(tile_tokens, monkeypatch):
    """A query at 0 still sees itself; all others see what they would see of a sequence without slot 0."""
    monkeypatch.setattr(dense, "TILE_TOKENS", tile_tokens)
    generator = torch.Generator().manual_seed(5)
    storage = PageStorage.allocate(KVGeometry.of_layers((LAYER,), "float32", PAGE_SIZE), 20)
    for view in (storage.keys(0), storage.values(0)):
        view.copy_(torch.randn(view.shape, generator=generator))
    segments = [Segment(0, 0, 7, [3, 1]), Segment(7, 0, 1, [9]), Segment(8, 6, 1, [2, 7]), Segment(9, 1, 3, [5])]
    query = torch.randn(12, NUM_HEADS, LAYER.k_head_dim, generator=generator)
    backend = TorchAttention(storage, first_key=1)
    backend.begin(plan_step(segments, PAGE_SIZE))
    out = backend.attend(AttentionCall(layer=0, query=query, scale=0.3))
    for segment in segments:
        sides = [side[list(segment.pages)].flatten(1, 2).transpose(1, 2).flatten(0, 1) for side in _sides(storage)]
        for offset in range(segment.num_tokens):
            position, place = segment.start + offset, segment.offset + offset
            first = min(1, position)
            keys, values = (side[first:] for side in sides)
            call = AttentionCall(layer=0, query=query, scale=0.3)
            wanted = naive(call, query[place], keys, values, position - first)
            torch.testing.assert_close(out[place].double(), wanted, rtol=1e-5, atol=1e-5)


def _sides(storage: PageStorage) -> tuple[torch.Tensor, torch.Tensor]:
    return storage.keys(0), storage.values(0)
