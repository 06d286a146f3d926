"""Layout of a token's bytes in a page, and gathering, clearing and host copies of pages."""

from __future__ import annotations

import pytest
import torch

from baton.kv.geometry import KVGeometry, LatentGeometry, LayerGeometry
from baton.kv.memory import PageMemory
from baton.model.storage import PageStorage

UNEVEN = KVGeometry.of_layers((LayerGeometry(2, 6, 4), LayerGeometry(1, 8, 8), LayerGeometry(3, 6, 4)), "float32", 4)
EVEN = KVGeometry.of_layers((LayerGeometry(2, 8, 8), LayerGeometry(2, 8, 8)), "bfloat16", 4)
FOUR_HEADS = (LayerGeometry(4, 40, 24), LayerGeometry(4, 8, 8), LayerGeometry(8, 96, 64))
GROUPED = [KVGeometry.of_layers(FOUR_HEADS, "float32", 4, head_groups) for head_groups in (1, 2, 4)]
THREES = KVGeometry.of_layers((LayerGeometry(2, 24, 24),) * 2, "float32", 4)  # no power of two divides its rows
GEOMETRIES = [UNEVEN, EVEN, THREES, *GROUPED]


def filled(geometry: KVGeometry, num_pages: int = 6, num_host_slots: int = 3) -> tuple[PageStorage, PageMemory]:
    memory = PageMemory(num_pages, geometry.page_bytes)
    host = PageMemory(num_host_slots, geometry.page_bytes)
    storage = PageStorage.on_memory(geometry, memory, host)
    generator = torch.Generator().manual_seed(0)
    for layer in range(len(geometry.layers)):
        for view in (storage.keys(layer), storage.values(layer)):
            view.copy_(torch.randn(view.shape, generator=generator))
    return storage, memory


@pytest.mark.parametrize("geometry", GEOMETRIES)
def test_views_tile_the_page_without_gap_or_overlap(geometry):
    memory = PageMemory(3, geometry.page_bytes)
    storage = PageStorage.on_memory(geometry, memory)
    views = [view for n in range(len(geometry.layers)) for view in (storage.keys(n), storage.values(n))]
    for view in views:
        view.add_(1)
    item_bytes = views[0].element_size()
    flat = torch.frombuffer(memory.buffer, dtype=views[0].dtype).view(3, -1)
    num_used = geometry.num_bytes_per_token * geometry.page_size // item_bytes
    assert torch.equal(flat[:, :num_used], torch.ones(3, num_used, dtype=flat.dtype))
    assert not flat[:, num_used:].any(), "padding stays zero"
    assert sum(view.numel() for view in views) == 3 * num_used
    assert storage.address == memory.address


@pytest.mark.parametrize("geometry", GEOMETRIES)
def test_a_written_token_is_in_its_page_at_its_slot_under_its_head(geometry):
    storage, memory = filled(geometry)
    layer = 1
    shape = geometry.layers[layer]
    before = bytes(memory.buffer)
    keys = torch.full((2, shape.num_kv_heads, shape.k_head_dim), 7.0, dtype=storage.keys(0).dtype)
    values = torch.full((2, shape.num_kv_heads, shape.v_head_dim), 9.0, dtype=storage.keys(0).dtype)
    storage.write(layer, torch.tensor([4, 1]), torch.tensor([3, 0]), keys, values)
    assert storage.keys(layer)[4, :, :, 3].eq(7).all()
    assert storage.values(layer)[1, :, :, 0].eq(9).all()
    changed = sum(a != b for a, b in zip(before, memory.buffer, strict=True))
    assert 0 < changed <= 2 * geometry.layers[layer].num_elements_per_token * keys.element_size()


def test_one_group_is_layer_major_and_a_group_a_head_is_head_major():
    """The bytes of a written token lie where the format says, for every number of groups."""
    num_heads = 4
    for geometry in (KVGeometry.of_layers(FOUR_HEADS[:2], "float32", 4, n) for n in (1, 2, 4)):
        storage = PageStorage.allocate(geometry, 2)
        for layer, shape in enumerate(geometry.layers):
            heads = torch.arange(1.0, num_heads + 1)[None, :, None]
            sides = (
                100 * (layer + 1) + heads.expand(1, num_heads, dim) for dim in (shape.k_head_dim, shape.v_head_dim)
            )
            storage.write(layer, torch.tensor([1]), torch.tensor([2]), *sides)
        page, at = storage.page_bytes()[1].view(torch.float32), 0
        group_heads = num_heads // geometry.group.head_groups
        for group in range(geometry.group.head_groups):
            for layer, shape in enumerate(geometry.layers):
                for dim in (shape.k_head_dim, shape.v_head_dim):
                    for head in range(group * group_heads, (group + 1) * group_heads):
                        slots = page[at : at + 4 * dim].view(4, dim)
                        assert slots[2].eq(100 * (layer + 1) + head + 1).all()
                        assert not slots[[0, 1, 3]].any()
                        at += 4 * dim
            assert at == (group + 1) * geometry.group_stride


MIXED = KVGeometry.of_layers((LatentGeometry(6, 2), LayerGeometry(4, 8, 4), LatentGeometry(12, 4)), "float32", 4, 2)


def test_a_latent_layer_has_one_row_a_slot_whose_beginning_is_its_value():
    memory = PageMemory(3, MIXED.page_bytes)
    storage = PageStorage.on_memory(MIXED, memory)
    pages, slots = torch.tensor([2, 0]), torch.tensor([1, 3])
    for layer, (rank, rope_dim) in ((0, (6, 2)), (2, (12, 4))):
        rows = torch.arange(1.0, 2 * (rank + rope_dim) + 1).view(2, 1, -1) * (layer + 1)
        storage.write(layer, pages, slots, rows, rows[..., :rank])
        assert torch.equal(storage.keys(layer)[pages, 0, 0, slots], rows[:, 0])
        assert torch.equal(storage.values(layer)[pages, 0, 0, slots], rows[:, 0, :rank])
        keys, values = storage.select(torch.tensor([[1, 2]])).keys_and_values(layer)
        assert torch.equal(keys[0, 0, 5], rows[0, 0]), "slot 1 of the second page"
        assert torch.equal(values, keys[..., :rank])
        assert torch.equal(values, storage.select(torch.tensor([[1, 2]])).values(layer))
    assert not storage.keys(1).any(), "the other layer's bytes are untouched"
    page = storage.page_bytes()[2].view(torch.float32)
    at = MIXED.layer_offsets()[2][0] + 1 * (12 + 4)
    assert page[at : at + 16].tolist() == [3.0 * n for n in range(1, 17)]


@pytest.mark.parametrize("geometry", [*GEOMETRIES, MIXED])
def test_gathering_equals_indexing_the_views(geometry):
    storage, _ = filled(geometry)
    tables = torch.tensor([[5, 0, 3], [2, 2, 4]])
    selection = storage.select(tables)
    for layer, shape in enumerate(geometry.layers):
        for got, view, dim in (
            (selection.keys(layer), storage.keys(layer), shape.k_head_dim),
            (selection.values(layer), storage.values(layer), shape.v_head_dim),
        ):
            assert torch.equal(got, view.flatten(1, 2)[tables].transpose(1, 2).reshape(2, shape.num_kv_heads, -1, dim))


def test_clearing_touches_only_the_named_pages():
    storage, memory = filled(UNEVEN)
    before = [bytes(memory.page(page)) for page in range(6)]
    storage.clear(torch.tensor([1, 4]))
    for page in range(6):
        assert bytes(memory.page(page)) == (bytes(UNEVEN.page_bytes) if page in (1, 4) else before[page])


def test_a_round_trip_over_the_host_moves_whole_pages():
    storage, memory = filled(EVEN)
    before = [bytes(memory.page(page)) for page in range(6)]
    storage.copy_to_host([5, 2], [0, 2])
    storage.clear(torch.tensor([5, 2]))
    storage.copy_from_host([2, 0], [3, 5])
    assert [bytes(memory.page(page)) for page in (3, 5, 0)] == [before[2], before[5], before[0]]


def test_without_swap_space_copies_are_refused():
    storage = PageStorage.allocate(EVEN, 2)
    with pytest.raises(ValueError, match="no swap space"):
        storage.copy_to_host([0], [0])


def test_memory_of_another_page_size_is_refused():
    with pytest.raises(ValueError, match="pages of"):
        PageStorage.on_memory(EVEN, PageMemory(2, EVEN.page_bytes * 2))


@pytest.mark.parametrize("target", [*GEOMETRIES, KVGeometry.of_layers((LatentGeometry(24, 8),) * 2, "float32", 4)])
def test_draft_layers_lie_between_the_models_and_the_padding(target: KVGeometry):
    """Written through their view, they change no element of the model's layers, nor does these' change them."""
    draft = (LayerGeometry(2, 24, 8), LayerGeometry(1, 6, 6))
    geometry = target.with_draft_layers(draft)
    memory = PageMemory(3, geometry.page_bytes)
    storage = PageStorage.on_memory(geometry, memory)
    view = storage.draft_view()
    assert view.geometry.layers == draft
    for number, pages in ((1, storage), (2, view)):
        for layer in range(len(pages.geometry.layers)):
            pages.keys(layer).fill_(number)
            pages.values(layer).fill_(number)
    flat = torch.frombuffer(memory.buffer, dtype=view.keys(0).dtype).view(3, -1)
    ends = geometry.draft_offset, geometry.draft_offset + 4 * sum(layer.num_elements_per_token for layer in draft)
    assert flat[:, : ends[0]].eq(1).all()
    assert flat[:, ends[0] : ends[1]].eq(2).all()
    assert not flat[:, ends[1] :].any()
    gathered = view.select(torch.tensor([[2, 0]])).keys(0)
    assert gathered.shape == (1, 2, 8, 24)
    assert gathered.eq(2).all()


def test_pages_without_draft_layers_have_no_such_view():
    storage, _ = filled(EVEN)
    with pytest.raises(ValueError, match="no draft layers"):
        storage.draft_view()
