"""What a stored call has in place of an image's file: all that is needed to build the same prompt again.

It takes the place of the URL. Only bodies that come from the state store may have one; a client's is refused.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

SCHEME = "baton-media:"
_FORM = re.compile(r"baton-media:([0-9a-f]{32})/([0-9a-f]{32})/([1-9]\d{0,8})x([1-9]\d{0,8})/(\d{1,10})")


@dataclass(frozen=True, slots=True)
class ImageReference:
    """`identity` of the file, digest of its `processor`, size as shown in pixels, and bytes."""

    identity: bytes
    processor: str
    width: int
    height: int
    num_bytes: int

    def __str__(self) -> str:
        return f"{SCHEME}{self.identity.hex()}/{self.processor}/{self.width}x{self.height}/{self.num_bytes}"

    @classmethod
    def parse(cls, url: str) -> ImageReference | None:
        """The reference that `url` is; None for any other URL."""
        found = _FORM.fullmatch(url)
        if found is None:
            return None
        identity, processor, width, height, num_bytes = found.groups()
        return cls(bytes.fromhex(identity), processor, int(width), int(height), int(num_bytes))
