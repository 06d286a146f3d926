"""Decodes one image, in a process of its own: a file on standard input, raw RGB on standard output.

Run as a script by `image_decoder`, without Baton's packages. A file of a stranger is decoded here and nowhere else:
with bounds on memory, CPU time and open files, files of no bytes, and none of the worker's variables. It runs as the
worker's user: it may read that user's files, and reach the network. The reply begins with one line: `ok WIDTH HEIGHT`,
or `no` and the reason in our own words, since messages of Pillow name addresses of this process.
"""

from __future__ import annotations

import io
import resource
import sys
import warnings
from typing import Any

MAX_MEMORY_BYTES = 1024 * 1024 * 1024
MAX_CPU_S = 10
MAX_OPEN_FILES = 64
FORMATS = ("PNG", "JPEG", "WEBP")
_ORIENTATION = 0x0112
MAGIC = (b"\x89PNG\r\n\x1a\n", b"\xff\xd8\xff", b"RIFF")


def main() -> None:
    """Command line: the most pixels."""
    for limit, value in (
        (resource.RLIMIT_AS, MAX_MEMORY_BYTES),
        (resource.RLIMIT_CPU, MAX_CPU_S),
        (resource.RLIMIT_FSIZE, 0),
        (resource.RLIMIT_CORE, 0),
        (resource.RLIMIT_NOFILE, MAX_OPEN_FILES),
    ):
        resource.setrlimit(limit, (value, value))
    data = sys.stdin.buffer.read()
    try:
        size, pixels = _decode(data, int(sys.argv[1]))
    except MemoryError:
        _answer("no needs too much memory")
    except Exception as error:
        _answer(f"no {error}" if type(error) is _RefusedImage else "no is damaged, or not a whole image")
    else:
        _answer(f"ok {size[0]} {size[1]}", pixels)


class _RefusedImage(Exception):
    """The message is ours."""


def _decode(data: bytes, max_pixels: int) -> tuple[tuple[int, int], bytes]:
    """Width and height, and three bytes a pixel, of the first frame, turned as its EXIF data say."""
    if not data.startswith(MAGIC):
        raise _RefusedImage("is no PNG, JPEG or WebP")
    from PIL import Image

    warnings.simplefilter("ignore")  # of metadata, which harm no picture
    warnings.simplefilter("error", Image.DecompressionBombWarning)
    Image.MAX_IMAGE_PIXELS = max_pixels
    try:
        with Image.open(io.BytesIO(data), formats=FORMATS) as image:
            image.load()  # EXIF of a PNG may follow its pixels
            turned = _turn(image.convert("RGB"), image.info.get("exif"))
    except (Image.DecompressionBombWarning, Image.DecompressionBombError):
        raise _RefusedImage(f"has too many pixels; {max_pixels} are the most") from None
    return turned.size, turned.tobytes()


def _turn(image: Any, exif_data: bytes | None) -> Any:
    """The image as its EXIF orientation says; as it is without one that can be read.

    XMP is not asked: the router, which counts by EXIF alone, would count another image.
    """
    from PIL import Image

    exif, way = Image.Exif(), Image.Transpose
    try:
        exif.load(exif_data or b"")
        orientation = exif.get(_ORIENTATION)
    except Exception:  # whatever is wrong with the metadata, the picture is whole
        return image
    turns = {
        2: way.FLIP_LEFT_RIGHT, 3: way.ROTATE_180, 4: way.FLIP_TOP_BOTTOM, 5: way.TRANSPOSE,
        6: way.ROTATE_270, 7: way.TRANSVERSE, 8: way.ROTATE_90,
    }  # fmt: skip
    turn = turns.get(orientation) if isinstance(orientation, int) else None
    return image if turn is None else image.transpose(turn)


def _answer(line: str, pixels: bytes = b"") -> None:
    sys.stdout.buffer.write(line.encode() + b"\n" + pixels)
    sys.stdout.buffer.flush()


if __name__ == "__main__":
    main()
