"""Outputs of earlier requests, from which those with the same salt may draft. Bounded; pure.

A salt has some generations of a suffix index each. Outputs go to the newest one; memory is taken back by dropping the
oldest generation of the salt that was used least recently. Nothing is ever looked up under another salt: whether drafts
are accepted shows in the timing of answers, so a shared index would tell one tenant what another one generated.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Sequence

from baton.engine.drafts.suffix_automaton import SEPARATOR, SuffixIndex

NUM_GENERATIONS = 4
"""A generation takes at most this part of the memory, so that no more than that is forgotten at once."""
GENERATION_BYTES = 1024
"""What a generation takes beside its index."""
MAX_OUTPUT_TOKENS = 4096
"""Tokens of one output that are stored: half a millisecond in the step that ends it, with the native index."""


class _Generation:
    def __init__(self, index: SuffixIndex) -> None:
        self.index = index
        self.num_bytes = GENERATION_BYTES + index.num_bytes


class SuffixStore:
    """Suffix indexes by salt, together at most `max_bytes` after every call."""

    def __init__(
        self, max_bytes: int, new_index: Callable[[], SuffixIndex], max_output_tokens: int = MAX_OUTPUT_TOKENS
    ) -> None:
        """`max_output_tokens`: of one output that are stored."""
        self.max_output_tokens = max_output_tokens
        self._max_bytes = max_bytes
        self._new_index = new_index
        self._salts: OrderedDict[str, list[_Generation]] = OrderedDict()  # least recently used first; newest last
        self.num_bytes = 0

    def add(self, salt: str, output: Sequence[int]) -> None:
        """Stores the first tokens of an output."""
        if not output:
            return
        generations = self._salts.setdefault(salt, [])
        self._salts.move_to_end(salt)
        if not generations or generations[-1].num_bytes >= self._max_bytes // NUM_GENERATIONS:
            generations.append(_Generation(self._new_index()))
            self.num_bytes += generations[-1].num_bytes
        newest = generations[-1]
        before = newest.num_bytes
        newest.index.extend([*output[: self.max_output_tokens], SEPARATOR])
        newest.num_bytes = GENERATION_BYTES + newest.index.num_bytes
        self.num_bytes += newest.num_bytes - before
        while self.num_bytes > self._max_bytes:
            self._drop_oldest()

    def continuation(
        self, salt: str, tail: Sequence[int], min_length: int, max_tokens: int
    ) -> tuple[tuple[int, ...], int]:
        """What followed the longest suffix of `tail` that an output has, and its length.

        Nothing and 0 if that is shorter than `min_length`. Of equal matches the newest generation's counts.
        """
        generations = self._salts.get(salt)
        if generations is None:
            return (), 0
        self._salts.move_to_end(salt)
        length, end, best = 0, 0, generations[-1]
        for each in reversed(generations):
            found, found_end = each.index.match(tail)
            if found > length:
                length, end, best = found, found_end, each
        if length < min_length:
            return (), 0
        return best.index.continuation_at(end, max_tokens), length

    def _drop_oldest(self) -> None:
        salt, generations = next(iter(self._salts.items()))
        self.num_bytes -= generations.pop(0).num_bytes
        if not generations:
            del self._salts[salt]
