"""What a drafter sees of a prompt with images: its text. Pure.

All images are the same placeholder tokens. What followed those of one image says nothing about the next one, and no
placeholder may be drafted. A text without spans is passed on as it is.
"""

from __future__ import annotations

from collections.abc import Sequence

from baton.domain.media.span import MediaSpan

FIRST_HIDDEN = -3
"""Stands for the first span, less for each further one: no vocabulary has it, and no two spans of a row are equal.

`DRAFT_PLACEHOLDER` and `SEPARATOR` are the negative tokens above.
"""


def hide_media(tokens: Sequence[int], media: Sequence[MediaSpan]) -> Sequence[int]:
    """`tokens` with one negative token in place of each span. `media` in order, within `tokens`."""
    if not media:
        return tokens
    shown: list[int] = []
    at = 0
    for number, span in enumerate(media):
        shown += tokens[at : span.first]
        shown.append(FIRST_HIDDEN - number)
        at = span.end
    shown += tokens[at:]
    return shown


def num_drafted_tokens(tokens: Sequence[int]) -> int:
    """How many leading `tokens` of a proposal are of a vocabulary."""
    return next((place for place, token in enumerate(tokens) if token < 0), len(tokens))


def last_text(tokens: Sequence[int], max_tokens: int) -> Sequence[int]:
    """The end of `tokens` behind the last span, at most so many."""
    tail = tokens[-max_tokens:]
    hidden = next((back for back, token in enumerate(reversed(tail)) if token < 0), len(tail))
    return tail[len(tail) - hidden :]
