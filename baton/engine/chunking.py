"""Where a prompt is cut: only its tail may be partial, a non-final chunk ends on a page edge."""

from __future__ import annotations


def cut(start: int, end: int, budget_tokens: int, page_size: int) -> int:
    """How many tokens of [start, end) to extend in this step, at most `budget_tokens`.

    All that is left if it fits; else as much as ends on a page edge, which may be 0 when the budget does not reach one.
    """
    left = end - start
    if left <= budget_tokens:
        return left
    edge = (start + budget_tokens) // page_size * page_size
    return max(0, edge - start)
