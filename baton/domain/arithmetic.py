"""Integer arithmetic that several layers share."""

from __future__ import annotations


def ceil_div(numerator: int, denominator: int) -> int:
    """`numerator / denominator`, rounded up. `denominator` is positive."""
    return -(-numerator // denominator)
