"""Keys of cached pages: a chained digest of all tokens up to the page's end, under a salt.

One flat key stands for a whole prefix, as in vLLM's block hashes. Router, prefill and decode compute the same key
without sending tokens. 128 bits of BLAKE2b, because a collision would serve another request's KV.

The placeholder ids of all images are equal. So the key of a page with rows of an image covers the image's identity and
which of its rows they are (ADR 104). The key of a page of text does not depend on that rule.
"""

from __future__ import annotations

from array import array
from bisect import bisect_right
from collections.abc import Sequence
from hashlib import blake2b
from operator import attrgetter
from struct import Struct

from baton.domain.ids import PageKey
from baton.domain.media.span import MediaSpan

KEY_BYTES = 16
_COUNT = Struct("<Q")
_EXTRA = Struct("<5Q")


def root_key(salt: str) -> PageKey:
    """Key of the empty prefix. Requests with different salts share nothing."""
    return PageKey(blake2b(salt.encode(), digest_size=KEY_BYTES, person=b"baton-page-root").digest())


def next_key(parent: PageKey, tokens: Sequence[int], extras: bytes = b"") -> PageKey:
    """Key of the page that holds `tokens`, exactly one page of them, after the prefix `parent`.

    `extras`: `page_extras` of the page.
    """
    data = array("I", tokens).tobytes()
    if not extras:
        return PageKey(blake2b(data, key=parent, digest_size=KEY_BYTES).digest())
    whole = _COUNT.pack(len(tokens)) + data + extras
    return PageKey(blake2b(whole, key=parent, digest_size=KEY_BYTES, person=b"baton-page-media").digest())


def page_extras(start: int, end: int, media: Sequence[MediaSpan]) -> bytes:
    """What the key of the page with the tokens [start, end) covers beside them; empty for a page of text.

    `media` is in order. Of each span that touches the page: its tokens in the page, its grid, and which rows of which
    item they are.
    """
    extras = []
    for at in range(bisect_right(media, start, key=attrgetter("end")), len(media)):
        span = media[at]
        if span.first >= end:
            break
        first, last = max(start, span.first), min(end, span.end)
        height, width = (0, 0) if span.grid is None else (span.grid.height, span.grid.width)
        row = span.first_row + first - span.first
        extras.append(_EXTRA.pack(first - start, last - first, row, height, width) + span.identity)
    return b"".join(extras)


def page_keys(
    tokens: Sequence[int], page_size: int, salt: str, media: Sequence[MediaSpan] = (), known: Sequence[PageKey] = ()
) -> list[PageKey]:
    """Keys of all full pages of `tokens`, in order. `known`: those of its first pages, which are not computed again."""
    keys = list(known)
    parent = keys[-1] if keys else root_key(salt)
    begin, last = len(keys) * page_size, len(tokens) - page_size
    if media:
        for start in range(begin, last + 1, page_size):
            end = start + page_size
            parent = next_key(parent, tokens[start:end], page_extras(start, end, media))
            keys.append(parent)
    elif begin <= last:  # as `next_key`, of tokens that are packed once
        num_tokens = (last - begin) // page_size * page_size + page_size
        packed = memoryview(array("I", tokens[begin : begin + num_tokens]))
        for start in range(0, num_tokens, page_size):
            page = packed[start : start + page_size]
            parent = PageKey(blake2b(page, key=parent, digest_size=KEY_BYTES).digest())
            keys.append(parent)
    return keys
