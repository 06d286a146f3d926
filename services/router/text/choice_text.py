"""One choice's text as its tokens come: detokenised, cut at a stop string, one event a token.

`token_stream` drives it, one a choice; it waits for nothing and knows no dispatcher.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from baton.domain.request import FinishReason, OutputToken, StopParams
from services.router.generation import TokenChunk
from services.router.text.detokenizer import Detokenizer
from services.router.text.parsers.base import OutputParser, ParsedPiece, ToolCall
from services.router.text.stop_strings import StopMatcher


@dataclass(frozen=True, slots=True)
class TokenEvent:
    """A token of a choice, and the text that became certain with it: none, its own, or held-back text too.

    `token` None: the sequence ended without another token. `finish` comes with the choice's last event, and `stop`, the
    index of the stop string that ended it. `calls`: that became complete with it.
    """

    choice: int
    token: OutputToken | None
    text: str
    num_cached_tokens: int
    finish: FinishReason | None = None
    stop: int | None = None
    calls: tuple[ToolCall, ...] = ()


class DroppedText:
    """State of a choice without an answer (`max_tokens: 0`). A worker samples a token all the same: it is dropped."""

    def __init__(self, choice: int) -> None:
        self._choice = choice

    def events(self, chunk: TokenChunk) -> list[TokenEvent]:
        """The only event of the choice."""
        if not chunk.tokens and chunk.finish is None:
            return []
        return [TokenEvent(self._choice, None, "", chunk.num_cached_tokens, FinishReason.LENGTH)]


class ChoiceText:
    """State of one choice. A stop token is no text; a stop string ends the text before it, and the choice.

    With `include_stop` both are part of the text. A `parser` takes calls out of the text; stop strings are looked for
    in what is left.
    """

    def __init__(
        self,
        choice: int,
        stop: StopParams,
        detokenizer: Detokenizer,
        stop_strings: Sequence[str],
        *,
        include_stop: bool = False,
        parser: OutputParser | None = None,
    ) -> None:
        self._choice = choice
        self._stop = stop
        self._detokenizer = detokenizer
        self._matcher = StopMatcher(stop_strings, include=include_stop) if stop_strings else None
        self._parser = parser
        self._hides_stop_token = not include_stop
        self._num_tokens = 0

    def events(self, chunk: TokenChunk) -> list[TokenEvent]:
        """One event a token. The event with `finish` is the last of the choice: later tokens of the chunk are cut."""
        if not chunk.tokens and chunk.finish is None:
            return []
        events: list[TokenEvent] = []
        num_left = len(chunk.tokens)
        for token in chunk.tokens or (None,):
            num_left -= 1
            finish = chunk.finish if num_left <= 0 else None
            self._num_tokens += token is not None
            if token is None or (
                finish is FinishReason.STOP and self._hides_stop_token and token.token in self._stop.stop_token_ids
            ):
                text = ""
            else:
                text = self._detokenizer.push(token.token)
            if finish is not None:
                text += self._detokenizer.finish()
            stop, calls = None, tuple[ToolCall, ...]()
            if self._parser is not None:
                text, calls, finish = self._parse(self._parser, text, finish)
            if self._matcher is not None:
                text, finish, stop = self._match(self._matcher, text, finish)
            events.append(TokenEvent(self._choice, token, text, chunk.num_cached_tokens, finish, stop, calls))
            if finish is not None:
                break
        return events

    @staticmethod
    def _parse(
        parser: OutputParser, text: str, finish: FinishReason | None
    ) -> tuple[str, tuple[ToolCall, ...], FinishReason | None]:
        """Text that is no call, complete calls, and `STOP` if nothing more is shown."""
        piece = parser.push(text)
        last = parser.finish() if finish is not None else ParsedPiece()
        if finish is None and parser.is_done:
            finish = FinishReason.STOP
        return piece.text + last.text, piece.calls + last.calls, finish

    def _match(
        self, matcher: StopMatcher, text: str, finish: FinishReason | None
    ) -> tuple[str, FinishReason | None, int | None]:
        """Text that may be shown, `STOP` once a stop string was met, and its index.

        Below `min_tokens` none is looked for.
        """
        if self._num_tokens >= self._stop.min_tokens:
            released = matcher.push(text)
            if released.stop is not None:
                return released.text, FinishReason.STOP, released.stop
            text = released.text
        return (text, None, None) if finish is None else (text + matcher.finish(), finish, None)
