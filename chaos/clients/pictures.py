"""Requests with an image, and one without, for a cluster of the bundled model for images."""

from __future__ import annotations

import base64
import random
import struct
import zlib

from chaos.clients.client import CHAT, ClientRequest
from chaos.clients.requests import GREEDY, chat

SIDE = 96
"""Of the picture, in pixels. It is noise, so that its file has as many bytes as its pixels: 27 KB."""


def png(side: int, seed: int) -> bytes:
    """The file of a square of noise, the same for each seed."""
    noise = random.Random(seed)
    rows = b"".join(b"\0" + noise.randbytes(3 * side) for _ in range(side))
    head = struct.pack(">IIBBBBB", side, side, 8, 2, 0, 0, 0)
    parts = ((b"IHDR", head), (b"IDAT", zlib.compress(rows)), (b"IEND", b""))
    chunks = (struct.pack(">I", len(d)) + n + d + struct.pack(">I", zlib.crc32(n + d)) for n, d in parts)
    return b"\x89PNG\r\n\x1a\n" + b"".join(chunks)


def look(name: str, seed: int, num_tokens: int) -> ClientRequest:
    """A question about a picture, with exactly `num_tokens` tokens of an answer."""
    url = f"data:image/png;base64,{base64.b64encode(png(SIDE, seed)).decode()}"
    parts = [{"type": "image_url", "image_url": {"url": url}}, {"type": "text", "text": "What is in the picture?"}]
    fixed = {"messages": [{"role": "user", "content": parts}], "max_tokens": num_tokens, "ignore_eos": True}
    return ClientRequest(name, CHAT, {**fixed, **GREEDY})


LOOK = look("look", 1, 40)
ASK = chat("ask", "What is in the picture?", 24, ignore_eos=True)
IMAGE_REQUESTS = (LOOK, ASK)
