"""Output tokens of one sequence, and how many of them the store has.

Keeps the tokens of a live sequence, four bytes each, so that a journal that the server lost can be written again.
Owned by a `RecordSync`; knows no store and no time.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial

from baton.domain.errors import Broken
from baton.domain.ids import AttemptId
from baton.domain.request import FinishReason, OutputToken, TokenLogprobs
from baton.store.store import JournalEntry

MAX_ENTRY_TOKENS = 4096


@dataclass(slots=True, eq=False)
class JournalBuffer:
    """Tokens `[first, first + len(tokens))`. The end of the journal is written with its last token.

    `ended`: no token follows. `closed`: nothing is written any more. `num_buffered` is the size in tokens, where each
    alternative among the logprobs counts as one. `due`: there is something to write; kept, since each change of a
    request asks for it several times.
    """

    first: int = 0
    tokens: array[int] = field(default_factory=partial(array, "I"))
    logprobs: dict[int, TokenLogprobs] = field(default_factory=dict)  # output index -> logprobs
    num_cached_tokens: int = 0
    finish: FinishReason | None = None
    failure_code: str = ""
    ended: bool = False
    closed: bool = False
    num_buffered: int = 0
    num_written: int = 0
    end_written: bool = False
    due: bool = field(default=False, init=False)

    def append(
        self, tokens: Sequence[OutputToken], *, num_cached_tokens: int, finish: FinishReason | None, failure_code: str
    ) -> int:
        """Appends tokens in order, and returns how many are not written yet.

        Skips tokens that it has, and all after its end. Raises `Broken` when one is missing before them.
        """
        if self.closed or self.ended:
            return 0
        if tokens and not self.tokens:
            self.first = tokens[0].index
        end = self.first + len(self.tokens)
        try:
            for token in tokens:
                if token.index > end:
                    raise Broken(f"a journal at token {end} cannot take token {token.index}")
                if token.index == end:
                    self.tokens.append(token.token)
                    end, self.num_buffered = end + 1, self.num_buffered + 1
                    if token.logprobs is not None:
                        self.logprobs[token.index] = token.logprobs
                        self.num_buffered += 1 + len(token.logprobs.top)
            self.num_cached_tokens, self.finish, self.failure_code = num_cached_tokens, finish, failure_code
            self.ended = finish is not None or bool(failure_code)
        finally:
            self._note_due()
        return len(self.tokens) - self.num_written

    def next_entry(self, id: AttemptId, max_tokens: int) -> JournalEntry:
        """Builds the next entry to write, of at most `max_tokens`.

        The end repeats the last token even if the store has it: that shows whether the journal is still there.
        """
        num_tokens = len(self.tokens)
        start = min(self.num_written, max(0, num_tokens - 1)) if self.ended else self.num_written
        end = min(num_tokens, start + max_tokens)
        first, is_last = self.first + start, end == num_tokens
        return JournalEntry(
            id,
            first,
            tuple(self.tokens[start:end]),
            self.num_cached_tokens,
            self.finish if is_last else None,
            self.failure_code if is_last else "",
            tuple(map(self.logprobs.get, range(first, self.first + end))) if self.logprobs else (),
        )

    def covers(self, entry: JournalEntry) -> bool:
        """True if nothing is due after `entry`."""
        return entry.first + len(entry.tokens) == self.first + len(self.tokens)

    def mark_written(self, end: int, *, ends: bool) -> None:
        """The store has the tokens before output index `end`, and the journal's end if `ends`."""
        self.num_written = max(self.num_written, end - self.first)
        self.end_written = self.end_written or ends
        self._note_due()

    def mark_end_stored(self) -> None:
        """The store has the end of the sequence, which is written after its journal."""
        self.num_written, self.end_written = len(self.tokens), True
        self._note_due()

    def rewind(self) -> bool:
        """The store has lost the journal: all is due again. Returns False when the first tokens are not known here."""
        self.num_written, self.end_written = 0, False
        self._note_due()
        return self.first == 0

    def close(self) -> None:
        """Gives the journal up and frees its tokens; idempotent."""
        self.closed = True
        self.tokens, self.logprobs, self.num_buffered = array("I"), {}, 0
        self._note_due()

    def _note_due(self) -> None:
        has_news = len(self.tokens) > self.num_written or (self.ended and not self.end_written)
        self.due = has_news and not self.closed
