"""`data:` URLs: base64 of at most so many bytes, declared as an image."""

from __future__ import annotations

import base64
import tracemalloc

import pytest
from hypothesis import given
from hypothesis import strategies as st

from baton.services.router.vision.data_url import decode_data_url, is_data_url
from baton.services.router.vision.headers.image_header import ImageHeader, UnreadableImage
from baton.services.router.vision.limits import ImageLimits
from tests.unit.router.vision.pictures import data_url

MAX = 1000


@given(st.binary(max_size=MAX))
def test_the_bytes_come_back(data):
    assert decode_data_url(data_url(data), MAX) == data
    assert decode_data_url("DATA:Image/JPEG;name=a.jpg;Base64," + base64.b64encode(data).decode(), MAX) == data


@pytest.mark.parametrize(
    ("url", "why"),
    [
        ("data:image/png", "without a type and a comma"),
        ("data:image/png;x=" + 200 * "a" + ";base64,AAAA", "without a type and a comma"),
        ("data:image/png,%89PNG", "not base64"),
        ("data:,AAAA", "not base64"),
        ("data:;base64,AAAA", "another type"),
        ("data:text/html;base64,AAAA", "another type"),
        ("data:image/png;base64,AAA", "not valid base64"),
        ("data:image/png;base64,AA AA", "not valid base64"),
        ("data:image/png;base64,AA=A", "not valid base64"),
        ("data:image/png;base64,\u0410AAA", "not valid base64"),
        (data_url(bytes(MAX + 1)), "over 1000 bytes"),
        (data_url(bytes(2 * MAX)), "over 1000 bytes"),
    ],
)
def test_others_are_refused(url, why):
    assert is_data_url(url)
    with pytest.raises(UnreadableImage, match=why):
        decode_data_url(url, MAX)


def test_a_url_that_is_too_long_is_not_decoded():
    url = data_url(bytes(3_000_000))
    tracemalloc.start()
    with pytest.raises(UnreadableImage, match="over 1000 bytes"):
        decode_data_url(url, MAX)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 100_000


@pytest.mark.parametrize("url", ["http://a/b.png", "file:///etc/passwd", "", "dat", "xdata:image/png;base64,AAAA"])
def test_other_schemes_are_no_data_urls(url):
    assert not is_data_url(url)


def test_limits_of_pixels_and_shape():
    limits = ImageLimits(max_pixels=100 * 100)
    limits.check(ImageHeader("PNG", 100, 100))
    limits.check(ImageHeader("PNG", 1, 200))
    for width, height in ((101, 100), (201, 1), (1, 201)):
        with pytest.raises(UnreadableImage):
            limits.check(ImageHeader("PNG", width, height))
