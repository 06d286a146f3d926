"""Output tokens of one sequence, and how many of them the store has.

Keeps the tokens of a live sequence, four bytes each, so that a journal that the server lost can be written again.
Owned by a `RecordSync`; knows no store and no time.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence

from baton.domain.errors import Broken
from baton.domain.ids import AttemptId
from baton.domain.request import FinishReason, OutputToken, TokenLogprobs
from baton.store.store import JournalEntry


class JournalBuffer:
    """Tokens `[first, end)` of one sequence; the end of the journal comes with its last token, if it has one."""

    def __init__(self) -> None:
        self._first = 0
        self._tokens = array("I")
        self._logprobs: dict[int, TokenLogprobs] = {}  # token index -> its logprobs, where there are any
        self._num_cached_tokens = 0
        self._finish: FinishReason | None = None
        self._failure_code = ""
        self._num_written = 0
        self._end_written = False
        self._closed = False
        self._num_buffered = 0

    @property
    def closed(self) -> bool:
        """Nothing of it is written any more."""
        return self._closed

    @property
    def ended(self) -> bool:
        return self._finish is not None or bool(self._failure_code)

    @property
    def num_unwritten(self) -> int:
        """Tokens that the store does not hold yet, as far as we know."""
        return 0 if self._closed else len(self._tokens) - self._num_written

    @property
    def due(self) -> bool:
        """Whether there is something to write."""
        return not self._closed and (len(self._tokens) > self._num_written or (self.ended and not self._end_written))

    @property
    def num_buffered(self) -> int:
        """What it takes to track, in tokens: each alternative among the logprobs counts as one."""
        return self._num_buffered

    def append(
        self, tokens: Sequence[OutputToken], *, num_cached_tokens: int, finish: FinishReason | None, failure_code: str
    ) -> None:
        """Takes tokens in order; those that it has already, and all after its end, are skipped. Raises `Broken` when
        one is missing before them."""
        if self._closed or self.ended:
            return
        for token in tokens:
            self._append_token(token)
        self._num_cached_tokens, self._finish, self._failure_code = num_cached_tokens, finish, failure_code

    def next_entry(self, id: AttemptId, max_tokens: int) -> JournalEntry:
        """What is to be written next. An end comes with the last token even if the store has that: it shows whether
        the journal is still there."""
        start = min(self._num_written, max(0, len(self._tokens) - 1)) if self.ended else self._num_written
        end = min(len(self._tokens), start + max_tokens)
        last = end == len(self._tokens)
        return JournalEntry(
            id,
            tuple(self._token(position) for position in range(start, end)),
            self._num_cached_tokens,
            self._finish if last else None,
            self._failure_code if last else "",
        )

    def mark_written(self, entry: JournalEntry) -> None:
        """The store holds the entry."""
        if entry.tokens:
            self._num_written = max(self._num_written, entry.tokens[-1].index + 1 - self._first)
        if entry.ends:
            self._end_written = True

    def rewind(self) -> bool:
        """The store holds nothing any more: all is to be written again. False when not all is known here."""
        self._num_written, self._end_written = 0, False
        return self._first == 0

    def close(self) -> None:
        """Gives it up; what was kept is freed. Idempotent."""
        self._closed = True
        self._tokens, self._logprobs, self._num_buffered = array("I"), {}, 0

    def _append_token(self, token: OutputToken) -> None:
        if not self._tokens:
            self._first = token.index
        end = self._first + len(self._tokens)
        if token.index < end:
            return
        if token.index > end:
            raise Broken(f"a journal at token {end} cannot take token {token.index}")
        self._tokens.append(token.token)
        self._num_buffered += 1
        if token.logprobs is not None:
            self._logprobs[token.index] = token.logprobs
            self._num_buffered += 1 + len(token.logprobs.top)

    def _token(self, position: int) -> OutputToken:
        index = self._first + position
        return OutputToken(index, self._tokens[position], self._logprobs.get(index))
