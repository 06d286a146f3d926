"""The bytes and the text of every token of a byte-level vocabulary, filled at the first use.

`TextModel` owns one table for all requests, and one in which special tokens are no text. Most tokens are whole
characters: their text is taken from the table as it is. Knows no sequence.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple


class TokenText(NamedTuple):
    """A token. `text`: of its bytes; None if they are not whole characters, so that the text depends on neighbours."""

    data: bytes
    text: str | None


class TokenTable(dict[int, TokenText]):
    """Token id -> `TokenText`. Threads may compute an entry twice; the entries are equal."""

    def __init__(self, token_bytes: Callable[[int], bytes]) -> None:
        """`token_bytes`: of any id; b"" for one that has no text."""
        super().__init__()
        self._token_bytes = token_bytes

    def __missing__(self, token: int) -> TokenText:
        data = self._token_bytes(token)
        try:
            text = data.decode("utf-8")
        except UnicodeDecodeError:
            text = None
        entry = self[token] = TokenText(data, text)
        return entry
