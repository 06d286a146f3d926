"""Turns the chunks of one choice into events: by calls of whoever has them, or by the task of the choice.

`token_stream` has one a choice and source. A choice that continues from a second source begins with events that its
reader has: they are compared and skipped.

    take <- a chunk that comes while the task waits: its events are added, no task wakes
    read <- a chunk that was yielded: the first, the last, one that a stop string ends, or one that `take` has left
"""

from __future__ import annotations

from collections.abc import Callable

from baton.domain.errors import ModelReplaced
from baton.services.router.generation import TokenChunk
from baton.services.router.text.choice_text import ChoiceText, DroppedText, TokenEvent, add_token

ANSWER_REPLACED = "the answer was begun again with another model: send the request again"


class ChoiceReader:
    """`add` gets the events of chunks that are taken. `num_given` events with `digest` were given before."""

    def __init__(
        self, text: ChoiceText | DroppedText, add: Callable[[TokenEvent], None], num_given: int = 0, digest: int = 0
    ) -> None:
        self._text = text
        self._add = add
        self._num_skipped = num_given
        self._digest = digest
        self._skipped = 0  # digest of the events that were skipped
        self._left: list[TokenEvent] | Exception | None = None  # what became of a chunk that `take` has left
        self.takes = False  # set by the task of the choice, which waits for its first chunk itself
        self.is_pending = num_given > 0  # the next chunk must be read here, not from the text

    def take(self, chunk: TokenChunk) -> bool:
        """A `TakeChunk`. Leaves an end of the choice, and an error, to the task of the choice."""
        if not self.takes or self._num_skipped or chunk.prompt_scores is not None or chunk.finish is not None:
            return False
        try:
            events = self._text.events(chunk)
            if events and events[-1].finish is not None:
                self._left, self.is_pending = events, True
                return False
            for event in events:
                self._add(event)
        except Exception as error:
            self._left, self.is_pending = error, True
            return False
        return True

    def read(self, chunk: TokenChunk) -> list[TokenEvent]:
        """The events of a chunk that was yielded, without those that were given before.

        Raises `ModelReplaced` if these are others than the source has.
        """
        left, self._left = self._left, None
        if isinstance(left, Exception):
            raise left
        events = self._text.events(chunk) if left is None else left
        kept = [event for event in events if not self._skips(event)]
        self.is_pending = self._num_skipped > 0
        return kept

    def _skips(self, event: TokenEvent) -> bool:
        if not self._num_skipped:
            return False
        self._num_skipped -= 1
        self._skipped = add_token(self._skipped, event)
        if event.finish is not None or (not self._num_skipped and self._skipped != self._digest):
            raise ModelReplaced(ANSWER_REPLACED)
        return True
