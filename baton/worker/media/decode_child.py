"""Decodes one image, in a process of its own: a file on standard input, raw RGB on standard output.

Run as a script by `image_decoder`, without Baton's packages. A file of a stranger is decoded here and nowhere else:
with bounds on memory and CPU time, and no right to write files. The reply begins with one line: `ok WIDTH HEIGHT`, or
`no` and the reason in our own words, since messages of Pillow name addresses of this process.
"""

from __future__ import annotations

import io
import resource
import sys
import warnings

MAX_MEMORY_BYTES = 1024 * 1024 * 1024
MAX_CPU_S = 10
FORMATS = ("PNG", "JPEG", "WEBP", "GIF")
MAGIC = (b"\x89PNG\r\n\x1a\n", b"\xff\xd8\xff", b"RIFF", b"GIF87a", b"GIF89a")


def main() -> None:
    """Command line: the most pixels."""
    for limit, value in (
        (resource.RLIMIT_AS, MAX_MEMORY_BYTES),
        (resource.RLIMIT_CPU, MAX_CPU_S),
        (resource.RLIMIT_FSIZE, 0),
        (resource.RLIMIT_CORE, 0),
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
        raise _RefusedImage("is no PNG, JPEG, WebP or GIF")
    from PIL import Image, ImageOps

    warnings.simplefilter("error")
    Image.MAX_IMAGE_PIXELS = max_pixels
    with Image.open(io.BytesIO(data), formats=FORMATS) as image:
        if image.width * image.height > max_pixels:
            raise _RefusedImage(f"has {image.width} x {image.height} pixels; {max_pixels} are the most")
        warnings.simplefilter("ignore")
        turned = ImageOps.exif_transpose(image).convert("RGB")
    return turned.size, turned.tobytes()


def _answer(line: str, pixels: bytes = b"") -> None:
    sys.stdout.buffer.write(line.encode() + b"\n" + pixels)
    sys.stdout.buffer.flush()


if __name__ == "__main__":
    main()
