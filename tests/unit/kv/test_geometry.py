"""Geometry of pages: sizes, offsets and parts."""

from __future__ import annotations

from dataclasses import replace

import pytest

from baton.kv.geometry import KVGeometry, LayerGeometry

GEOMETRY = KVGeometry((LayerGeometry(2, 8, 4), LayerGeometry(1, 16, 16)), "bfloat16", 16)


def test_sizes():
    assert GEOMETRY.num_bytes_per_token == (2 * (8 + 4) + 1 * (16 + 16)) * 2
    assert GEOMETRY.page_bytes == GEOMETRY.num_bytes_per_token * 16
    assert [GEOMETRY.num_pages(n) for n in (0, 1, 16, 17)] == [0, 1, 1, 2]


def test_layers_lie_one_after_the_other():
    (k0, v0), (k1, v1) = GEOMETRY.layer_offsets()
    assert (k0, v0) == (0, 2 * 8 * 16)
    assert (k1, v1) == (v0 + 2 * 4 * 16, v0 + 2 * 4 * 16 + 1 * 16 * 16)
    assert (v1 + 1 * 16 * 16) * 2 == GEOMETRY.page_bytes


def test_equal_geometries_have_equal_parts():
    assert KVGeometry(GEOMETRY.layers, "bfloat16", 16).parts() == GEOMETRY.parts()


@pytest.mark.parametrize(
    ("other", "part"),
    [
        (replace(GEOMETRY, dtype="float32"), "dtype"),
        (replace(GEOMETRY, page_size=32), "page_size"),
        (replace(GEOMETRY, layout="page-major/NHD"), "layout"),
        (replace(GEOMETRY, layers=GEOMETRY.layers[:1]), "layers"),
        (replace(GEOMETRY, layers=GEOMETRY.layers[::-1]), "layers"),
        (replace(GEOMETRY, layers=(LayerGeometry(2, 4, 8), GEOMETRY.layers[1])), "layers"),
    ],
)
def test_every_field_of_the_geometry_is_in_a_part(other: KVGeometry, part: str):
    ours, theirs = GEOMETRY.parts(), other.parts()
    assert [name for name in ours if ours[name] != theirs[name]] == [part]
