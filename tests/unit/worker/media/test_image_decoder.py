"""Decoding in child processes: whole pictures come back, and hostile files cost an error, no memory and no worker."""

from __future__ import annotations

import ast
import gc
import io
import struct
import sys
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType

import pytest
from PIL import Image, ImageOps
from PIL.PngImagePlugin import PngInfo

from baton.services.router.vision.headers.reader import read_header
from baton.worker.media.image_decoder import CHILD_ENVIRONMENT, MAX_PIXELS, ImageDecoder, RgbImage, UnreadableMedia


def file_of(picture: Image.Image, format: str, **options: object) -> bytes:
    file = io.BytesIO()
    picture.save(file, format, **options)
    return file.getvalue()


def gradient(width: int = 40, height: int = 24) -> Image.Image:
    data = bytes((3 * x + 5 * y + c) % 256 for y in range(height) for x in range(width) for c in range(3))
    return Image.frombytes("RGB", (width, height), data)


def png_chunk(kind: bytes, data: bytes) -> bytes:
    return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))


def png_bomb(width: int, height: int) -> bytes:
    """A small file that claims many pixels."""
    header = struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    body = zlib.compress(bytes(1 << 20))
    return b"\x89PNG\r\n\x1a\n" + png_chunk(b"IHDR", header) + png_chunk(b"IDAT", body) + png_chunk(b"IEND", b"")


async def test_pictures_of_every_format_come_back(decoder: ImageDecoder):
    picture = gradient()
    whole = RgbImage(40, 24, picture.tobytes())
    assert await decoder.decode(file_of(picture, "PNG")) == whole
    assert await decoder.decode(file_of(picture, "WEBP", lossless=True)) == whole
    jpeg = file_of(picture, "JPEG")
    assert (await decoder.decode(jpeg)).pixels == Image.open(io.BytesIO(jpeg)).tobytes()
    red, blue = (Image.new("RGB", (8, 8), colour) for colour in ("red", "blue"))
    animated = await decoder.decode(file_of(red, "WEBP", lossless=True, save_all=True, append_images=[blue]))
    assert animated.pixels[:3] == b"\xff\0\0", "the first frame"


async def test_orientation_is_applied(decoder: ImageDecoder):
    exif = Image.Exif()
    exif[0x0112] = 6
    turned = await decoder.decode(file_of(gradient(), "JPEG", exif=exif.tobytes()))
    assert (turned.width, turned.height) == (24, 40)


XMP = b'<x:xmpmeta xmlns:x="adobe:ns:meta/" xmlns:tiff="t"><r tiff:Orientation="6"/></x:xmpmeta>'


def with_exif(data: bytes, format: str) -> bytes:
    return file_of(gradient(), format, exif=b"Exif\0\0" + data)


TEXT = PngInfo()
TEXT.add_itxt("XML:com.adobe.xmp", XMP.decode())
RAW = PngInfo()
RAW.add_text("Raw profile type exif", "\nexif\n 4\nnot hexadecimal")
UPRIGHT = {
    "a tag that runs past the end, on which Pillow warns": with_exif(
        b"II*\0\x08\0\0\0\x01\0" + struct.pack("<HHII", 0x010E, 2, 5000, 4000), "JPEG"
    ),
    "no TIFF": with_exif(b"nonsense", "JPEG"),
    "an orientation that does not exist": with_exif(
        b"II*\0\x08\0\0\0\x01\0" + struct.pack("<HHII", 0x0112, 3, 1, 9) + bytes(4), "JPEG"
    ),
    "XMP in a jpeg": file_of(gradient(), "JPEG", xmp=XMP),
    "XMP in a webp": file_of(gradient(), "WEBP", xmp=XMP),
    "XMP in a png": file_of(gradient(), "PNG", pnginfo=TEXT),
    "a raw profile in a png": file_of(gradient(), "PNG", pnginfo=RAW),
}


@pytest.mark.parametrize("name", UPRIGHT)
async def test_metadata_spoil_no_picture_and_xmp_turns_none(name: str, decoder: ImageDecoder):
    """Router and worker see the same size: that of EXIF alone."""
    header = read_header(UPRIGHT[name])
    image = await decoder.decode(UPRIGHT[name])
    assert (image.width, image.height) == header.shown_size == (40, 24)


@pytest.mark.parametrize("orientation", range(1, 9))
async def test_every_orientation_is_pillows_own(orientation: int, decoder: ImageDecoder):
    exif = Image.Exif()
    exif[0x0112] = orientation
    file = file_of(gradient(), "PNG", exif=exif.tobytes())
    expected = ImageOps.exif_transpose(Image.open(io.BytesIO(file)))
    assert await decoder.decode(file) == RgbImage(*expected.size, expected.tobytes())


async def test_a_child_sees_no_variable_and_no_folder_of_the_worker(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("BATON_TEST_SECRET", "x")
    code = "import os; print('no', sorted(set(os.environ) - {'LC_CTYPE'}), os.getcwd())"
    with other_child(code) as decoder, pytest.raises(UnreadableMedia) as seen:
        await decoder.decode(b"x")
    names, folder = str(seen.value).rsplit(" ", 1)
    assert ast.literal_eval(names) == list(CHILD_ENVIRONMENT)
    assert folder == "/"


@pytest.fixture
def decoder() -> Iterator[ImageDecoder]:
    decoder = ImageDecoder(MAX_PIXELS)
    yield decoder
    decoder.close()


@contextmanager
def other_child(code: str) -> Iterator[ImageDecoder]:
    decoder = ImageDecoder(MAX_PIXELS, max_children=1, command=(sys.executable, "-c", code))
    yield decoder
    decoder.close()


HOSTILE = {
    "nothing": b"",
    "text": b"<svg xmlns='http://www.w3.org/2000/svg'/>",
    "gif": file_of(gradient(), "GIF"),
    "tiff": file_of(gradient(), "TIFF"),
    "bmp": file_of(gradient(), "BMP"),
    "a cut png": file_of(gradient(), "PNG")[:60],
    "a cut jpeg": file_of(gradient(300, 300), "JPEG")[:2000],
    "magic only": b"\x89PNG\r\n\x1a\n",
    "a bomb by its header": png_bomb(60_000, 60_000),
    "too many pixels": png_bomb(5000, 5000),
    "fewer bytes than pixels": png_bomb(4000, 4000),
    "another file behind the magic": b"RIFF" + b"\xff" * 100,
}


@pytest.mark.parametrize("name", HOSTILE)
async def test_hostile_files_are_refused_in_our_own_words(name: str, decoder: ImageDecoder):
    with pytest.raises(UnreadableMedia) as refused:
        await decoder.decode(HOSTILE[name])
    assert "0x" not in str(refused.value)
    assert "PIL" not in str(refused.value)


@pytest.mark.parametrize("name", ["a bomb by its header", "too many pixels"])
async def test_a_picture_with_too_many_pixels_is_told_so(name: str, decoder: ImageDecoder):
    with pytest.raises(UnreadableMedia, match=f"has too many pixels; {MAX_PIXELS} are the most"):
        await decoder.decode(HOSTILE[name])


async def test_a_child_has_a_bound_of_memory_whatever_the_bound_of_pixels():
    """Black and white, 40 KB: 1.2 GiB of colours."""
    decoder = ImageDecoder(1 << 30)
    picture = file_of(Image.new("1", (18_000, 18_000)), "PNG")
    with pytest.raises(UnreadableMedia, match="needs too much memory"):
        await decoder.decode(picture)
    decoder.close()


CHILDREN = {
    "dies": "import os, sys; sys.stdin.buffer.read(); os.abort()",
    "claims more pixels": "print('ok 99999 99999')",
    "sends less": "print('ok 10 10')",
    "talks for ever on one line": "import sys; sys.stdout.write('x' * 100000)",
    "says nothing": "pass",
}


@pytest.mark.parametrize("name", CHILDREN)
async def test_a_child_that_fails_costs_its_image_only(name: str):
    with other_child(CHILDREN[name]) as decoder:
        for _ in range(2):
            with pytest.raises(UnreadableMedia):
                await decoder.decode(bytes(100_000))


@pytest.mark.parametrize(("within_s", "num_children"), [(600.0, 2), (0.0, 1)])
@pytest.mark.parametrize("num_deaths", [1, 5])
async def test_a_child_that_dies_soon_is_started_once_more(
    within_s: float, num_children: int, num_deaths: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr("baton.worker.media.image_decoder.RETRY_WITHIN_S", within_s)
    started = tmp_path / "started"
    code = f"""
import os, sys
with open({str(started)!r}, "a") as file:
    file.write("x")
if os.path.getsize({str(started)!r}) <= {num_deaths}:
    os.abort()
sys.stdout.write("ok 1 1" + chr(10) + "abc")
"""
    with other_child(code) as decoder:
        if num_deaths < num_children:
            assert await decoder.decode(b"x") == RgbImage(1, 1, b"abc")
        else:
            with pytest.raises(UnreadableMedia, match="cannot be decoded"):
                await decoder.decode(b"x")
    assert started.stat().st_size == num_children


def test_a_failed_image_is_kept_by_nothing():
    """Not by the frames of the errors of its two tries, until the garbage collector comes."""
    died = "import sys; sys.stdout.write('ok 1000 1000' + chr(10)); sys.stdout.flush(); sys.stdin.buffer.read(10)"
    gc.collect()
    gc.disable()
    try:
        with other_child(died) as decoder:
            for _ in range(2):
                with pytest.raises(UnreadableMedia):
                    decoder._decode(bytes(100_000))
        assert [len(one) for one in gc.get_objects() if type(one) is bytearray and len(one) == 3_000_000] == []
        held = [one for one in gc.get_objects() if type(one) is FrameType and one.f_code.co_name == "_decode_once"]
        assert held == []
    finally:
        gc.enable()


async def test_both_children_share_one_time_limit(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    limits = []
    real = ImageDecoder._decode_once

    def decode_once(decoder: ImageDecoder, data: bytes, timeout_s: float) -> RgbImage:
        limits.append(timeout_s)
        return real(decoder, data, timeout_s)

    monkeypatch.setattr(ImageDecoder, "_decode_once", decode_once)
    with other_child(CHILDREN["dies"]) as decoder:
        with pytest.raises(UnreadableMedia):
            await decoder.decode(b"x")
        assert len(limits) == 2
        assert limits[1] < limits[0]
        decoder.close()
        with pytest.raises(UnreadableMedia):
            decoder._decode(b"x")
        assert len(limits) == 3, "no second child after the end"


async def test_a_child_that_hangs_is_ended(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("baton.worker.media.image_decoder.DEADLINE_S", 0.3)
    monkeypatch.setattr("baton.worker.media.image_decoder.RETRY_WITHIN_S", 0.1)
    with other_child("import time; time.sleep(600)") as decoder, pytest.raises(UnreadableMedia, match="too long"):
        await decoder.decode(b"x")
