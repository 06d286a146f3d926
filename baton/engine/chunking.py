"""Cuts prompts into chunks. Only the tail may be partial; a non-final chunk ends on a page edge."""

from __future__ import annotations


def cut(start: int, end: int, budget_tokens: int, page_size: int) -> int:
    """Number of tokens of [start, end) to extend in this step, at most `budget_tokens`.

    All that remain if they fit. Otherwise as many as end on a page edge: 0 if the budget does not reach one.
    """
    left = end - start
    if left <= budget_tokens:
        return left
    edge = (start + budget_tokens) // page_size * page_size
    return max(0, edge - start)
