"""Token ids to text, one token at a time, without ever giving half a character.

`text.TextModel.detokenizer` picks one of two:

- `ByteDetokenizer` for byte-level vocabularies (GPT-2, Llama 3, Qwen, ...): every token is a string of bytes, so an
  incremental UTF-8 decoder does the whole job, exactly and in constant time a token.
- `WindowDetokenizer` for all others (SentencePiece, WordPiece): decodes a short window before and after each token and
  gives the difference, the method of vLLM and TGI. Spaces depend on neighbours there, hence the window.

`token_stream` drives them. They know nothing of stop strings.
"""

from __future__ import annotations

import codecs
from collections.abc import Callable, Sequence
from typing import Protocol

REPLACEMENT = "\N{REPLACEMENT CHARACTER}"

MAX_PENDING_TOKENS = 16
"""A window that long without a clean end holds bytes that are no text; it is given as it is."""


class Detokenizer(Protocol):
    """One sequence's state. The pieces joined are the text of all the tokens."""

    def push(self, token: int) -> str:
        """The text that is certain now that `token` has come; may be empty."""
        ...

    def finish(self) -> str:
        """What was held back; call it once, last."""
        ...


class ByteDetokenizer:
    """For vocabularies whose tokens are bytes."""

    def __init__(self, token_bytes: Callable[[int], bytes]) -> None:
        self._token_bytes = token_bytes
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")

    def push(self, token: int) -> str:
        return self._decoder.decode(self._token_bytes(token))

    def finish(self) -> str:
        return self._decoder.decode(b"", final=True)


class WindowDetokenizer:
    """For vocabularies whose tokens' text depends on the neighbours.

    `_window[:_num_read]` has been given already and is kept as context; the rest is pending. `context` are tokens that
    precede the sequence (a completion goes on where its prompt ends, so its first space must survive).
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
        """Returns what `text` adds to what was read; what was pending becomes the context."""
        piece = text[len(self._read_text) :]
        self._window = self._window[self._num_read :]
        self._num_read = len(self._window)
        self._read_text = self._decode(self._window)
        return piece
