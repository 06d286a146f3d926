"""Geometry of pages: sizes, offsets and named differences."""

from __future__ import annotations

from dataclasses import replace

import pytest

from baton.kv.geometry import KVGeometry, LayerGeometry, describe_difference

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


def test_equal_geometries_can_be_linked():
    same = KVGeometry(GEOMETRY.layers, "bfloat16", 16)
    assert describe_difference(GEOMETRY.fingerprint("w1"), same.fingerprint("w1")) is None


@pytest.mark.parametrize(
    ("other", "difference"),
    [
        (replace(GEOMETRY, dtype="float32"), "dtype: bfloat16 here, float32 there"),
        (replace(GEOMETRY, page_size=32), "page_size: 16 here, 32 there"),
        (replace(GEOMETRY, layout="page-major/NHD"), "layout: page-major/HND here, page-major/NHD there"),
        (replace(GEOMETRY, layers=GEOMETRY.layers[:1]), "layers: 2 entries"),
    ],
)
def test_the_field_that_differs_is_named(other: KVGeometry, difference: str):
    said = describe_difference(GEOMETRY.fingerprint("w1"), other.fingerprint("w1"))
    assert said is not None
    assert said.startswith(difference)


@pytest.mark.parametrize("theirs", ["", "not json", '{"dtype":"bfloat16"', "3", "[]", "null"])
def test_a_fingerprint_that_cannot_be_read(theirs: str):
    assert describe_difference(GEOMETRY.fingerprint("w1"), theirs) == "fingerprint: not readable"


def test_a_difference_of_weights_is_named():
    assert describe_difference(GEOMETRY.fingerprint("w1"), GEOMETRY.fingerprint("w2")) == "weights: w1 here, w2 there"


def test_a_field_that_only_one_side_knows():
    theirs = GEOMETRY.fingerprint("w1")[:-1] + ',"quantized":true}'
    assert describe_difference(GEOMETRY.fingerprint("w1"), theirs) == "quantized: None here, True there"
