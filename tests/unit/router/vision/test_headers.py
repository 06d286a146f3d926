"""Image headers: format and size are what a decoder finds, and what is not a whole still image is refused."""

from __future__ import annotations

import io
import struct

import pytest
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image, ImageOps

from baton.services.router.vision.headers.image_header import UnreadableImage
from baton.services.router.vision.headers.reader import read_header
from tests.unit.router.vision.pictures import picture, saved

SIDES = st.integers(1, 70)
KINDS = [
    ("PNG", "RGB", {}),
    ("PNG", "RGBA", {}),
    ("PNG", "P", {}),
    ("PNG", "1", {}),
    ("JPEG", "RGB", {}),
    ("JPEG", "L", {"progressive": True}),
    ("WEBP", "RGB", {}),
    ("WEBP", "RGB", {"lossless": True}),
    ("WEBP", "RGBA", {}),
]
WHOLE = [picture(30, 20, format, mode=mode, **options) for format, mode, options in KINDS]


@pytest.mark.parametrize(("format", "mode", "options"), KINDS)
@given(width=SIDES, height=SIDES, orientation=st.integers(1, 8))
def test_format_and_size_are_those_of_a_decoder(format, mode, options, width, height, orientation):
    data = picture(width, height, format, mode=mode, orientation=orientation, **options)
    header = read_header(data)
    decoded = Image.open(io.BytesIO(data), formats=[header.format])
    assert (header.format, header.width, header.height) == (format, *decoded.size)
    assert header.shown_size == ImageOps.exif_transpose(decoded).size


@pytest.mark.parametrize("data", WHOLE)
def test_every_cut_of_a_file_is_refused(data):
    for end in range(len(data)):
        with pytest.raises(UnreadableImage):
            read_header(data[:end])


@pytest.mark.parametrize("data", [data for data in WHOLE if data[:2] != b"\xff\xd8"])
def test_data_behind_the_end_is_refused(data):
    with pytest.raises(UnreadableImage, match="followed by other data"):
        read_header(data + b"PK\3\4 another file")


def test_a_camera_may_add_data_behind_a_jpeg():
    data = picture(30, 20, "JPEG")
    assert read_header(data + picture(3, 2, "JPEG")) == read_header(data)


def test_animations_are_refused():
    frames = [Image.new("RGB", (8, 8), colour) for colour in ("red", "blue")]
    for format in ("PNG", "WEBP"):
        with pytest.raises(UnreadableImage, match="is animated"):
            read_header(saved(frames[0], format, save_all=True, append_images=frames[1:]))


@pytest.mark.parametrize(
    ("data", "why"),
    [
        (b"", "is empty"),
        (picture(4, 4, "GIF"), "is GIF: send PNG, JPEG or WebP"),
        (picture(4, 4, "BMP"), "is BMP"),
        (picture(4, 4, "TIFF"), "is TIFF"),
        (b"<svg xmlns='http://www.w3.org/2000/svg'/>", "is SVG"),
        (b"%PDF-1.7", "is PDF"),
        (b"\0\0\0\x1cftypheic", "is HEIF or AVIF"),
        (b"GET / HTTP/1.1", "is no image that is accepted"),
    ],
)
def test_other_data_are_named(data, why):
    with pytest.raises(UnreadableImage, match=why):
        read_header(data)


def test_a_size_of_zero_is_refused():
    data = bytearray(picture(4, 4))
    data[16:20] = bytes(4)
    with pytest.raises(UnreadableImage, match="has no pixels"):
        read_header(bytes(data))


def test_the_header_comes_first_and_once():
    data = picture(4, 4)
    header = data[8:33]
    for damaged in (data[:8] + data[33:], data[:33] + header + data[33:]):
        with pytest.raises(UnreadableImage, match="damaged header"):
            read_header(damaged)


def test_a_file_of_many_empty_parts_is_refused_soon():
    empty = struct.pack(">I4sI", 0, b"tEXt", 0)
    data = picture(4, 4)
    with pytest.raises(UnreadableImage, match="too many parts"):
        read_header(data[:33] + 20_000 * empty + data[33:])
    with pytest.raises(UnreadableImage, match="too many parts"):
        read_header(b"\xff\xd8" + 5000 * b"\xff\xe0\0\2")


def test_arithmetic_and_lossless_jpeg_are_refused():
    data = picture(4, 4, "JPEG")
    with pytest.raises(UnreadableImage, match="kind that is not accepted"):
        read_header(data.replace(b"\xff\xc0", b"\xff\xc3", 1))


@given(st.data())
def test_damaged_files_are_read_or_refused_and_nothing_else(data):
    file = bytearray(data.draw(st.sampled_from(WHOLE)))
    for _ in range(data.draw(st.integers(1, 6))):
        file[data.draw(st.integers(0, min(len(file), 200) - 1))] = data.draw(st.integers(0, 255))
    try:
        header = read_header(bytes(file))
    except UnreadableImage:
        return
    assert min(header.width, header.height) > 0


@given(st.sampled_from([b"\x89PNG\r\n\x1a\n", b"\xff\xd8\xff", b"RIFF\x20\0\0\0WEBP", b""]), st.binary(max_size=300))
def test_noise_behind_a_signature_is_refused(start, noise):
    with pytest.raises(UnreadableImage):
        read_header(start + noise)
