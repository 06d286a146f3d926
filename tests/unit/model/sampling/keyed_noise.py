"""The noise of a draw, written down a second time: one token at a time, in plain Python and float64."""

from __future__ import annotations

import math
from hashlib import blake2b

MASK = (1 << 32) - 1


def key_of(seed: int, position: int) -> int:
    digest = blake2b(f"{seed}:{position}".encode(), digest_size=8, person=b"baton-sample").digest()
    return int.from_bytes(digest, "little")


def bits_of(key: int, token: int) -> int:
    """32 bits for a token: a multiply-xorshift permutation of its id, with half of the key in each round."""
    bits = (token * 0x9E3779B9 + (key & MASK)) & MASK
    bits = (bits ^ bits >> 16) * 0x7FEB352D & MASK
    bits = ((bits ^ bits >> 15) + (key >> 32)) * 0x846CA68B & MASK
    return bits ^ bits >> 16


def gumbel(key: int, token: int) -> float:
    """A standard Gumbel number for a token under a key."""
    return -math.log(-math.log1p(-(bits_of(key, token) + 0.5) / 2.0**32))
