"""The identity of an image: a digest of its file and of all that its embedding depends on besides the weights. Pure.

The router computes it to name the image, the worker to check the bytes that it received.
"""

from __future__ import annotations

from hashlib import blake2b

from baton.domain.media.span import IDENTITY_BYTES

LOW_DETAIL = "low"
"""The option that halves the pixel bound of a processor that has one. All other values of `detail` mean its own."""


class MediaHasher:
    """Digests a file as it arrives: BLAKE2b-128 of the processor's digest, the detail and all bytes."""

    def __init__(self, processor: str, detail: str) -> None:
        """`processor`: as in `WorkerRecord`. A detail other than `LOW_DETAIL` counts as none."""
        self._hasher = blake2b(digest_size=IDENTITY_BYTES, person=b"baton-media")
        for text in (processor, detail if detail == LOW_DETAIL else ""):
            self._hasher.update(len(text.encode()).to_bytes(8, "little") + text.encode())

    def update(self, data: bytes) -> None:
        """Adds the next bytes of the file."""
        self._hasher.update(data)

    def identity(self) -> bytes:
        """The identity of the file so far."""
        return self._hasher.digest()


def media_identity(data: bytes, processor: str, detail: str = "") -> bytes:
    """The identity, 16 bytes, of an image whose file is `data`."""
    hasher = MediaHasher(processor, detail)
    hasher.update(data)
    return hasher.identity()
