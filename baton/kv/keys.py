"""Keys of cached pages: a chained digest of all tokens up to the page's end, under a salt.

One flat key stands for a whole prefix, as in vLLM's block hashes. Router, prefill and decode compute the same key
without sending tokens. 128 bits of BLAKE2b, because a collision would serve another request's KV.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from hashlib import blake2b

from baton.domain.ids import PageKey

KEY_BYTES = 16


def root_key(salt: str) -> PageKey:
    """Key of the empty prefix. Requests with different salts share nothing."""
    return PageKey(blake2b(salt.encode(), digest_size=KEY_BYTES, person=b"baton-page-root").digest())


def next_key(parent: PageKey, tokens: Sequence[int]) -> PageKey:
    """Key of the page that holds `tokens`, exactly one page of them, after the prefix `parent`."""
    return PageKey(blake2b(array("I", tokens).tobytes(), key=parent, digest_size=KEY_BYTES).digest())


def page_keys(tokens: Sequence[int], page_size: int, salt: str) -> list[PageKey]:
    """Keys of all full pages of `tokens`, in order."""
    keys: list[PageKey] = []
    parent = root_key(salt)
    for start in range(0, len(tokens) - page_size + 1, page_size):
        parent = next_key(parent, tokens[start : start + page_size])
        keys.append(parent)
    return keys
