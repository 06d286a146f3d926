"""A suffix automaton over a growing sequence of tokens: its longest suffix that occurred before, and where.

Online construction (Blumer et al., 1985, "The smallest automaton recognizing the subwords of a text"): constant time a
token on average, at most two states a token. Most states have one transition, which lies in two arrays; dicts hold the
transitions of the others. Pure Python: about 4 us and 150 bytes a token. The reference of `native_suffix`.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from typing import Protocol

NO_STATE, NO_TOKEN = -1, -1
SEPARATOR = -2
"""Ends a text inside an index of several: a token that no vocabulary has. Continuations end before any negative one."""
BYTES_PER_TOKEN = 160
"""Memory of a token in this implementation, at most, in what was measured."""
ROOT = 0
MAX_UPDATED_STATES = 8
"""States whose latest occurrence a token updates: shorter and shorter suffixes, so the longest ones stay recent."""


class SuffixIndex(Protocol):
    """Tokens, and the longest suffix of them that has an earlier occurrence, of `match_length`, up to `match_end`."""

    @property
    def match_length(self) -> int: ...

    @property
    def match_end(self) -> int: ...

    def __len__(self) -> int: ...

    def extend(self, tokens: Sequence[int]) -> None:
        """Adds tokens at the end."""
        ...

    def continuation(self, max_tokens: int) -> tuple[int, ...]:
        """The tokens behind the earlier occurrence. What lies behind the end of the sequence repeats them.

        With no match they are those from the first on; without any token there are none.
        """
        ...

    @property
    def num_bytes(self) -> int:
        """Memory that it takes."""
        ...

    def match(self, text: Sequence[int]) -> tuple[int, int]:
        """Length of the longest suffix of another text that occurs here, and one past a recent occurrence."""
        ...

    def continuation_at(self, first: int, max_tokens: int) -> tuple[int, ...]:
        """The tokens from `first` on, up to a negative one."""
        ...


class SuffixAutomaton:
    """Grows by `append`. `match_length` and `match_end` describe the longest suffix that has an earlier occurrence."""

    def __init__(self) -> None:
        self.tokens = array("q")
        self.match_length = 0
        self.match_end = 0  # one past the last token of the occurrence before
        self._length = array("q", [0])  # of the longest string of a state
        self._link = array("q", [NO_STATE])
        self._end = array("q", [0])  # one past a recent occurrence
        self._token = array("q", [NO_TOKEN])  # the first transition of a state
        self._target = array("q", [NO_STATE])
        self._more: dict[int, dict[int, int]] = {}  # the others
        self._last = ROOT

    def __len__(self) -> int:
        return len(self.tokens)

    def extend(self, tokens: Sequence[int]) -> None:
        """See `SuffixIndex.extend`."""
        for token in tokens:
            self.append(token)

    def append(self, token: int) -> None:
        """Adds a token at the end."""
        self.tokens.append(token)
        end = len(self.tokens)
        new = self._add_state(end, NO_STATE, end)
        state = self._last
        while state != NO_STATE and (target := self._next(state, token)) == NO_STATE:
            self._set_next(state, token, new)
            state = self._link[state]
        if state == NO_STATE:
            self._link[new] = ROOT
        elif self._length[target] == self._length[state] + 1:
            self._link[new] = target
        else:
            self._link[new] = self._split(state, token, target)
        self._last = new
        self._find_match(end)

    def continuation(self, max_tokens: int) -> tuple[int, ...]:
        """See `SuffixIndex.continuation`."""
        return self.continuation_at(self.match_end, max_tokens)

    @property
    def num_bytes(self) -> int:
        """See `SuffixIndex.num_bytes`. An estimate."""
        return BYTES_PER_TOKEN * len(self.tokens)

    def match(self, text: Sequence[int]) -> tuple[int, int]:
        """See `SuffixIndex.match`."""
        state, length = ROOT, 0
        for token in text:
            while (target := self._next(state, token)) == NO_STATE and state != ROOT:
                state = self._link[state]
                length = self._length[state]
            if target != NO_STATE:
                state, length = target, length + 1
        return length, self._end[state]

    def continuation_at(self, first: int, max_tokens: int) -> tuple[int, ...]:
        """See `SuffixIndex.continuation_at`. What lies behind the end of all tokens repeats them."""
        num_tokens = len(self.tokens)
        period = num_tokens - first
        if max_tokens <= period or period == 0:
            found = tuple(self.tokens[first : first + max_tokens])
        else:
            found = tuple([self.tokens[first + place % period] for place in range(max_tokens)])
        return next((found[:place] for place, token in enumerate(found) if token < 0), found)

    def _find_match(self, end: int) -> None:
        """Reads the latest earlier occurrence of the longest repeated suffix; then this one is the latest."""
        state = self._link[self._last]
        self.match_length, self.match_end = self._length[state], self._end[state]
        for _ in range(MAX_UPDATED_STATES):
            if state == ROOT:
                return
            self._end[state] = end
            state = self._link[state]

    def _split(self, state: int, token: int, target: int) -> int:
        """Takes the shorter strings out of `target` into a state of their own, which it returns."""
        clone = self._add_state(self._length[state] + 1, self._link[target], self._end[target])
        self._token[clone], self._target[clone] = self._token[target], self._target[target]
        if target in self._more:
            self._more[clone] = dict(self._more[target])
        while state != NO_STATE and self._next(state, token) == target:
            self._set_next(state, token, clone)
            state = self._link[state]
        self._link[target] = clone
        return clone

    def _add_state(self, length: int, link: int, end: int) -> int:
        self._length.append(length)
        self._link.append(link)
        self._end.append(end)
        self._token.append(NO_TOKEN)
        self._target.append(NO_STATE)
        return len(self._length) - 1

    def _next(self, state: int, token: int) -> int:
        if self._token[state] == token:
            return self._target[state]
        more = self._more.get(state)
        return NO_STATE if more is None else more.get(token, NO_STATE)

    def _set_next(self, state: int, token: int, target: int) -> None:
        known = self._token[state]
        if known in (NO_TOKEN, token):
            self._token[state], self._target[state] = token, target
        else:
            self._more.setdefault(state, {})[token] = target
