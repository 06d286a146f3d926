"""Geometry of pages: sizes, offsets, alignment, head groups, and the parts of digests and fingerprints."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from baton.kv.geometry import FORMAT_VERSION, PAGE_ALIGNMENT, KVGeometry, LatentGeometry, LayerGeometry, PageGroup

LAYERS = (LayerGeometry(2, 8, 4), LayerGeometry(4, 16, 16))
GEOMETRY = KVGeometry.of_layers(LAYERS, "bfloat16", 16)
LATENT = LatentGeometry(512, 64)
FULL = GEOMETRY.group


def with_group(**changes: Any) -> KVGeometry:
    return replace(GEOMETRY, groups=(replace(FULL, **changes),))


def test_sizes():
    assert GEOMETRY.num_bytes_per_token == (2 * (8 + 4) + 4 * (16 + 16)) * 2
    assert GEOMETRY.page_bytes == 8192, "4864 bytes, rounded up to 4 KiB"
    assert KVGeometry.of_layers((LayerGeometry(2, 64, 64),) * 24, "bfloat16", 16).page_bytes == 196608, "48 x 4 KiB"
    assert [GEOMETRY.num_pages(n) for n in (0, 1, 16, 17)] == [0, 1, 1, 2]


def test_layers_lie_one_after_the_other():
    (k0, v0), (k1, v1) = GEOMETRY.layer_offsets()
    assert (k0, v0) == (0, 2 * 8 * 16)
    assert (k1, v1) == (v0 + 2 * 4 * 16, v0 + 2 * 4 * 16 + 4 * 16 * 16)
    assert (v1 + 4 * 16 * 16) == GEOMETRY.group_stride


def test_a_head_group_holds_its_heads_of_every_layer():
    geometry = with_group(head_groups=2)
    (k0, v0), (k1, v1) = geometry.layer_offsets()
    assert (k0, v0) == (0, 1 * 8 * 16)
    assert (k1, v1) == (v0 + 1 * 4 * 16, v0 + 1 * 4 * 16 + 2 * 16 * 16)
    assert v1 + 2 * 16 * 16 == geometry.group_stride == GEOMETRY.group_stride // 2


@pytest.mark.parametrize("head_groups", [0, 3, 4])
def test_groups_that_do_not_divide_the_heads_are_refused(head_groups: int):
    with pytest.raises(ValueError, match=f"{head_groups} KV head groups do not divide the 2 KV heads"):
        with_group(head_groups=head_groups)


def test_parts_cover_the_page_group_by_group():
    assert GEOMETRY.part_ends == (8192,), "the last part includes the padding"
    assert with_group(head_groups=2).part_ends == (4864 // 2, 8192)


@pytest.mark.parametrize(
    ("changes", "num_bytes"),
    [
        ({"layers": (*LAYERS, LATENT)}, 16 * (512 + 64) * 2),
        ({"draft_layers": LAYERS[:1]}, 16 * 2 * (8 + 4) * 2),
        ({"scale_bytes": 100}, 100),
        ({"tail_elements": 896}, 896 * 2),
    ],
)
def test_whatever_is_replicated_is_one_more_part(changes: dict[str, Any], num_bytes: int):
    geometry = with_group(head_groups=2, **changes)
    sharded = (4864 // 2, 4864)
    assert geometry.part_ends[:-1] == sharded
    assert 0 <= geometry.page_bytes - (sharded[-1] + num_bytes) < PAGE_ALIGNMENT
    assert geometry.part_ends[-1] == geometry.page_bytes
    assert geometry.layer_offsets()[:2] == with_group(head_groups=2).layer_offsets(), "attention layers keep offsets"


def test_a_page_of_latent_layers_alone_has_one_part():
    geometry = replace(GEOMETRY, groups=(PageGroup("full", None, (LATENT,) * 61),))
    assert geometry.num_bytes_per_token == 70_272, "DeepSeek-V3"
    assert geometry.part_ends == (geometry.page_bytes,)


def test_latent_layers_follow_the_head_groups():
    geometry = with_group(head_groups=2, layers=(LATENT, *LAYERS, LATENT))
    first, *between, last = geometry.layer_offsets()
    assert between == with_group(head_groups=2).layer_offsets()
    assert first == (2 * geometry.group_stride,) * 2, "V lies in K"
    assert last == (first[0] + 16 * (512 + 64),) * 2


def test_several_page_groups_are_refused():
    with pytest.raises(ValueError, match="not of 2"):
        KVGeometry("float32", 16, (FULL, replace(FULL, name="window", window=128)))


def test_equal_geometries_have_equal_parts():
    assert KVGeometry.of_layers(LAYERS, "bfloat16", 16).parts() == GEOMETRY.parts()
    assert GEOMETRY.parts()["page_format"] == str(FORMAT_VERSION) == "2"


@pytest.mark.parametrize(
    ("other", "part"),
    [
        (replace(GEOMETRY, dtype="float32"), "dtype"),
        (replace(GEOMETRY, page_size=32), "page_size"),
        (replace(GEOMETRY, version=3), "page_format"),
        (with_group(head_groups=2), "kv_head_groups"),
        (with_group(layers=LAYERS[:1]), "page_group"),
        (with_group(layers=LAYERS[::-1]), "page_group"),
        (with_group(layers=(LayerGeometry(2, 4, 8), LAYERS[1])), "page_group"),
        (with_group(layers=(*LAYERS, LATENT)), "page_group"),
        (with_group(name="window"), "page_group"),
        (with_group(window=64), "page_group"),
        (with_group(draft_layers=LAYERS[:1]), "page_group"),
        (with_group(scale_bytes=64), "page_group"),
        (with_group(tail_elements=64), "page_group"),
    ],
)
def test_every_field_of_the_geometry_is_in_a_part(other: KVGeometry, part: str):
    ours, theirs = GEOMETRY.parts(), other.parts()
    assert [name for name in ours if ours[name] != theirs[name]] == [part]


def test_draft_layers_are_pages_of_their_own_behind_the_others():
    draft = LayerGeometry(1, 8, 16), LayerGeometry(2, 4, 4)
    geometry = with_group(head_groups=2, layers=(*LAYERS, LATENT))
    with_draft = geometry.with_draft_layers(draft)
    assert geometry.draft is None
    assert with_draft.draft == KVGeometry.of_layers(draft, geometry.dtype, geometry.page_size)
    assert with_draft.draft_offset == geometry.num_bytes_per_token * geometry.page_size // 2
    assert with_draft.layer_offsets() == geometry.layer_offsets()
    assert with_draft.with_draft_layers(()) == geometry


WINDOWED = KVGeometry.of_layers((*LAYERS, *LAYERS), "bfloat16", 16).with_window_part(128, (0, 2, 3))


def test_layers_with_a_window_lie_behind_all_others():
    """An offset or a part that overlaps would mix the layers' KV, or leave some of it behind."""
    num_full, num_window = 4 * 32 * 16, (2 * 12 + 2 * 12 + 4 * 32) * 16
    assert (WINDOWED.window_start, WINDOWED.page_bytes) == (4096, 4096 + 8192), "each rounded up to 4 KiB"
    assert WINDOWED.part_ends == (WINDOWED.window_start, WINDOWED.page_bytes)
    assert WINDOWED.num_leading_parts == 1
    first = WINDOWED.window_start // 2
    at = [first, 0, first + 2 * 12 * 16, first + 4 * 12 * 16]
    assert [keys for keys, _ in WINDOWED.layer_offsets()] == at
    sizes = [layer.num_kv_heads * layer.k_head_dim * 16 for layer in WINDOWED.layers]
    assert [values - keys for keys, values in WINDOWED.layer_offsets()] == sizes
    assert (num_full * 2, num_window * 2) == (4096, WINDOWED.num_bytes_per_token * 16 - 4096)


def test_draft_layers_and_the_tail_come_before_the_window_part():
    """Their KV is needed of every page, so it must be in the range that is read of every page."""
    geometry = WINDOWED.with_draft_layers(LAYERS[:1], tail_elements=5)
    assert geometry.draft_offset == 4 * 32 * 16
    assert geometry.tail_offset == geometry.draft_offset + 2 * 12 * 16
    assert geometry.part_ends == (4096, geometry.window_start, geometry.page_bytes)
    assert geometry.num_leading_parts == 2
    assert geometry.tail_offset + 5 <= geometry.window_start // 2 == geometry.layer_offsets()[0][0]


def test_models_without_windows_keep_their_pages_and_parts():
    """Workers before window parts and workers with them are linked, for all models that have none."""
    assert GEOMETRY.without_window_part() == GEOMETRY
    assert (GEOMETRY.window_start, GEOMETRY.num_leading_parts) == (GEOMETRY.page_bytes, 1)
    recorded = "full, all positions, 2 layers, digest 4132f3b6996fdab92bc7bb68b5236f30"
    assert GEOMETRY.parts()["page_group"] == recorded, "as before there were window parts"
    assert GEOMETRY.layer_offsets() == [(0, 256), (384, 1408)]


def test_workers_with_and_without_a_window_part_differ_in_one_named_part():
    whole = WINDOWED.without_window_part()
    others = [whole, whole.with_window_part(64, (0, 2, 3)), whole.with_window_part(128, (0, 2))]
    for other in others:
        ours, theirs = WINDOWED.parts(), other.parts()
        assert [name for name in ours if ours[name] != theirs[name]] == ["page_group"]


def test_int8_pages_and_head_groups_have_no_window_part():
    assert WINDOWED.quantized() == WINDOWED.without_window_part().quantized()
    for changes in ({"head_groups": 2}, {"scale_bytes": 64}, {"window": None}):
        with pytest.raises(ValueError, match="a window part needs a window, one head group and no scales"):
            replace(WINDOWED.group, **changes)
