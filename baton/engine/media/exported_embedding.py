"""Bytes of an embedding on their way to another worker, in parts with digests.

As pages do, they settle once: the source compares them before it gives them away, the puller when it has them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from baton.transfer.digest import page_digest

PART_BYTES = 1024 * 1024


@dataclass(frozen=True, slots=True)
class ExportedEmbedding:
    """Bytes in parts of `PART_BYTES`, and the digest that each part settled with."""

    num_rows: int
    data: bytearray
    digests: tuple[int, ...]

    @classmethod
    def settle(cls, num_rows: int, data: bytearray) -> ExportedEmbedding:
        """Digests the bytes of an embedding that was just made."""
        return cls(num_rows, data, part_digests(data))

    @property
    def is_intact(self) -> bool:
        """True while the bytes are those that were digested."""
        return part_digests(self.data) == self.digests


def part_digests(data: bytes | bytearray) -> tuple[int, ...]:
    """xxh3-64 of each part of `data`."""
    return tuple(map(page_digest, split_parts(data)))


def split_parts(data: bytes | bytearray) -> Sequence[memoryview]:
    """Views of `data`, of `PART_BYTES` each; the last one may be shorter."""
    view = memoryview(data)
    return [view[first : first + PART_BYTES] for first in range(0, len(view), PART_BYTES)]
