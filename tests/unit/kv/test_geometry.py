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
