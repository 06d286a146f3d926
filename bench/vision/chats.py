"""Chats of the images experiment. Pure: seeded words and pictures, none twice but where a cache is meant."""

from __future__ import annotations

import base64
import io
import random
from dataclasses import dataclass
from typing import Any

from PIL import Image

WORDS = ("what", "is", "in", "the", "picture", "red", "green", "blue", "circle", "square", "left", "right", "top", "it")
NUM_BEFORE, NUM_BEHIND = 60, 20
"""Words before an image and behind it."""

Message = dict[str, Any]


@dataclass(frozen=True, slots=True)
class ChatDraw:
    """Draws texts and pictures of `side` pixels."""

    rng: random.Random
    side: int

    def words(self, count: int) -> str:
        """A text that no other one begins with: its first words are a number."""
        number = [WORDS[self.rng.randrange(len(WORDS))] for _ in range(10)]
        return " ".join([*number, *(self.rng.choice(WORDS) for _ in range(max(0, count - len(number))))])

    def picture(self) -> str:
        """A PNG of noise as a `data:` URL."""
        image = Image.frombytes("RGB", (self.side, self.side), self.rng.randbytes(3 * self.side * self.side))
        file = io.BytesIO()
        image.save(file, "PNG")
        return f"data:image/png;base64,{base64.b64encode(file.getvalue()).decode()}"


def shown(before: str, url: str, behind: str) -> list[Message]:
    """A chat with an image between two texts."""
    parts = [text_part(before), {"type": "image_url", "image_url": {"url": url}}, text_part(behind)]
    return [{"role": "user", "content": parts}]


def said(text: str) -> list[Message]:
    """A chat of text."""
    return [{"role": "user", "content": [text_part(text)]}]


def text_part(text: str) -> dict[str, str]:
    """A part of a message."""
    return {"type": "text", "text": text}
