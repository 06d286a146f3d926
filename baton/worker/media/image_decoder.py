"""Decodes images in child processes, one for each image: what kills a decoder costs that image and nothing else.

A child that ends soon without an answer is started once more: the machine may have been short of memory.
"""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

CHILD = Path(__file__).with_name("decode_child.py")
MAX_PIXELS = 16 * 1024 * 1024
"""Of one image, by its header and after decoding."""
MAX_LINE_BYTES = 256
CHILD_ENVIRONMENT = {"LANG": "C.UTF-8"}
"""All variables of a child: those of this process may be secrets."""
DEADLINE_S = 20.0
"""Of an image, from the start of its first child to the end of the last."""
RETRY_WITHIN_S = 5.0
"""A child that failed later, perhaps by its limit of CPU time, is not started again."""


class UnreadableMedia(Exception):
    """The file is not an image that is served. The message follows the words "the image"."""


class _ChildFailed(Exception):
    """The child ended, or was ended, without an answer that makes sense."""


@dataclass(frozen=True, slots=True)
class RgbImage:
    """`pixels`: three bytes each, row by row."""

    width: int
    height: int
    pixels: bytes


class ImageDecoder:
    """At most `max_children` run at once; further calls wait. `close` after use."""

    def __init__(self, max_pixels: int, max_children: int = 2, command: tuple[str, ...] = ()) -> None:
        """`command`: of the child, without its argument; () for ours."""
        self.max_pixels = max_pixels
        self._threads = ThreadPoolExecutor(max_children, "baton-decode")
        self._closed = False
        self._command = command or (sys.executable, "-I", str(CHILD))

    async def decode(self, data: bytes) -> RgbImage:
        """The first frame of the file `data`. Raises `UnreadableMedia`, also where its child dies or is late."""
        return await asyncio.get_running_loop().run_in_executor(self._threads, self._decode, data)

    def close(self) -> None:
        """Takes no more images. Those under way end by their deadline."""
        self._closed = True
        self._threads.shutdown(wait=False, cancel_futures=True)

    def _decode(self, data: bytes) -> RgbImage:
        began = time.monotonic()
        try:
            return self._decode_once(data, DEADLINE_S)
        except _ChildFailed as error:
            why = str(error)  # the error itself holds the frames that hold the file and the pixels
        spent_s = time.monotonic() - began
        if spent_s < RETRY_WITHIN_S and not self._closed:
            try:
                return self._decode_once(data, DEADLINE_S - spent_s)
            except _ChildFailed as error:
                why = str(error)
        raise UnreadableMedia(why)

    def _decode_once(self, data: bytes, timeout_s: float) -> RgbImage:
        """In one child. Raises `UnreadableMedia` or `_ChildFailed`."""
        with os.fdopen(os.memfd_create("image"), "w+b") as file:
            file.write(data)
            file.seek(0)
            child = subprocess.Popen(
                (*self._command, str(self.max_pixels)),
                stdin=file,
                stdout=subprocess.PIPE,
                stderr=subprocess.DEVNULL,
                bufsize=0,
                cwd="/",
                env=CHILD_ENVIRONMENT,
            )
        timer = threading.Timer(timeout_s, child.kill)
        timer.start()
        try:
            return self._read(child)
        except ValueError:
            late = "took too long to decode" if not timer.is_alive() else ""
            raise _ChildFailed(late or "cannot be decoded within the limits of memory and time") from None
        finally:
            timer.cancel()
            child.kill()
            with child:
                pass

    def _read(self, child: subprocess.Popen[bytes]) -> RgbImage:
        """The child's answer, never more than the most pixels. Raises `ValueError` for one that makes no sense."""
        assert child.stdout is not None
        verdict, *words = child.stdout.readline(MAX_LINE_BYTES).decode().split()
        if verdict == "no":
            raise UnreadableMedia(" ".join(words))
        width, height = map(int, words)
        if not (width > 0 and height > 0 and width * height <= self.max_pixels):
            raise ValueError
        pixels = bytearray(3 * width * height)
        view, at = memoryview(pixels), 0
        while at < len(pixels):
            count = child.stdout.readinto(view[at:])  # type: ignore[attr-defined]
            if not count:
                raise ValueError
            at += count
        return RgbImage(width, height, bytes(pixels))
