"""One choice's text as its tokens come: detokenised, cut at a stop string, one event a token.

`generation_stream` drives it, one a choice; it waits for nothing and knows no dispatcher.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from baton.domain.request import FinishReason, OutputToken, StopParams
from services.router.generation import TokenChunk
from services.router.text.detokenizer import Detokenizer
from services.router.text.stop_strings import StopMatcher


@dataclass(frozen=True, slots=True)
class TokenEvent:
    """A token of a choice, and the text that became certain with it: none, its own, or held-back text too.

    `token` None: the sequence ended without another token. `finish` comes with the choice's last event.
    """

    choice: int
    token: OutputToken | None
    text: str
    num_cached_tokens: int
    finish: FinishReason | None = None


class ChoiceText:
    """One choice's state. A stop token is no text; a stop string ends the text before it and the choice with it."""

    def __init__(self, choice: int, stop: StopParams, detokenizer: Detokenizer, stop_strings: Sequence[str]) -> None:
        self._choice = choice
        self._stop = stop
        self._detokenizer = detokenizer
        self._matcher = StopMatcher(stop_strings)
        self._num_tokens = 0

    def events(self, chunk: TokenChunk) -> Iterator[TokenEvent]:
        """One event a token; the one with `finish` is the last of the choice, whatever the chunk still holds."""
        for position, token in enumerate(chunk.tokens, start=1):
            event = self._event(token, chunk.num_cached_tokens, chunk.finish if position == len(chunk.tokens) else None)
            yield event
            if event.finish is not None:
                return
        if chunk.finish is not None and not chunk.tokens:
            text, _ = self._last_text("")
            yield TokenEvent(self._choice, None, text, chunk.num_cached_tokens, chunk.finish)

    def _event(self, token: OutputToken, num_cached_tokens: int, finish: FinishReason | None) -> TokenEvent:
        self._num_tokens += 1
        ends_silently = finish is FinishReason.STOP and token.token in self._stop.stop_token_ids
        piece = "" if ends_silently else self._detokenizer.push(token.token)
        text, stopped = self._release(piece) if finish is None else self._last_text(piece)
        return TokenEvent(self._choice, token, text, num_cached_tokens, FinishReason.STOP if stopped else finish)

    def _release(self, piece: str) -> tuple[str, bool]:
        """What of `piece` may be shown, and whether a stop string was met; none is looked for below `min_tokens`."""
        if self._num_tokens < self._stop.min_tokens:
            return piece, False
        released = self._matcher.push(piece)
        return released.text, released.stopped

    def _last_text(self, piece: str) -> tuple[str, bool]:
        """The same for the last token, with all that was held back."""
        text, stopped = self._release(piece + self._detokenizer.finish())
        return (text, True) if stopped else (text + self._matcher.finish(), False)
