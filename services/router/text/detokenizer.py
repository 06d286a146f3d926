"""Decodes token ids to text, one token at a time, without ever returning half a character.

`TextModel.detokenizer` picks one of two:

- `ByteDetokenizer` for byte-level vocabularies (GPT-2, Llama 3, Qwen, ...). Every token is a string of bytes, so an
  incremental UTF-8 decoder is exact and takes constant time a token. Most tokens need none: see `token_table`.
- `WindowDetokenizer` for all others (SentencePiece, WordPiece). It decodes a short window with and without each token
  and returns the difference, as vLLM and TGI do. Spaces depend on the neighbours there.

`token_stream` drives them. They know nothing of stop strings.
"""

from __future__ import annotations

import codecs
from collections.abc import Callable, Sequence
from typing import Protocol

from baton.services.router.text.token_table import TokenTable

REPLACEMENT = "\N{REPLACEMENT CHARACTER}"

MAX_PENDING_TOKENS = 16
"""A window of this length without a valid end holds bytes that are no text. It is returned as it is."""


class Detokenizer(Protocol):
    """State of one sequence. The pieces, joined, are the text of all tokens."""

    def push(self, token: int) -> str:
        """Returns the text that becomes certain with `token`; may be empty."""
        ...

    def finish(self) -> str:
        """Returns the text held back. Call it once, at the end."""
        ...


class ByteDetokenizer:
    """Detokenizer for vocabularies whose tokens are bytes. A token of whole characters takes one look-up."""

    def __init__(self, table: TokenTable) -> None:
        self._table = table
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._has_part = False  # of a character

    def push(self, token: int) -> str:
        data, text = self._table[token]
        if text is not None and not self._has_part:
            return text
        text = self._decoder.decode(data)
        self._has_part = bool(self._decoder.getstate()[0])
        return text

    def finish(self) -> str:
        return self._decoder.decode(b"", final=True) if self._has_part else ""


class WindowDetokenizer:
    """Detokenizer for vocabularies where the text of a token depends on its neighbours.

    `_window[:_num_read]` was returned before and stays as context; the rest is pending. `context`: tokens before the
    sequence. A completion continues its prompt, so its first space must survive.
    """

    def __init__(self, decode: Callable[[Sequence[int]], str], context: Sequence[int] = ()) -> None:
        self._decode = decode
        self._window = list(context)
        self._num_read = len(self._window)
        self._read_text = decode(self._window) if self._window else ""

    def push(self, token: int) -> str:
        self._window.append(token)
        text = self._decode(self._window)
        overdue = len(self._window) - self._num_read > MAX_PENDING_TOKENS
        if len(text) <= len(self._read_text) or (text.endswith(REPLACEMENT) and not overdue):
            return ""
        return self._emit(text)

    def finish(self) -> str:
        return self._emit(self._decode(self._window))

    def _emit(self, text: str) -> str:
        """Returns what `text` adds to the text read so far. The pending tokens become the context."""
        piece = text[len(self._read_text) :]
        self._window = self._window[self._num_read :]
        self._num_read = len(self._window)
        self._read_text = self._decode(self._window)
        return piece
