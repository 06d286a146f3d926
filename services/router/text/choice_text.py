"""One choice's text as its tokens come: detokenised, cut at a stop string, one event a token.

`token_stream` drives it, one a choice; it waits for nothing and knows no dispatcher. An event is a msgspec struct: one
is made for every token, and a frozen dataclass takes ten times as long.
"""

from __future__ import annotations

import zlib
from collections.abc import Sequence

from msgspec import Struct

from baton.domain.request import FinishReason, OutputToken, StopParams
from baton.services.router.generation import TokenChunk
from baton.services.router.text.detokenizer import Detokenizer
from baton.services.router.text.parsers.base import AnswerParser, ParsedPiece, ToolCall
from baton.services.router.text.stop_strings import StopMatcher

NO_TOKEN = b"\xff\xff\xff\xff"
"""Stands in a digest for an event without a token."""

_NOTHING = ParsedPiece()


class TokenEvent(Struct, frozen=True):
    """A token of a choice, and the text that became certain with it: none, its own, or held-back text too.

    `token` None: the sequence ended without another token. `finish` comes with the choice's last event, and `stop`, the
    index of the stop string that ended it. `calls`: that became complete with it. `reasoning`: its text.
    `is_reasoning`: the token is part of the reasoning, its end included.
    """

    choice: int
    token: OutputToken | None
    text: str
    num_cached_tokens: int
    finish: FinishReason | None = None
    stop: int | None = None
    calls: tuple[ToolCall, ...] = ()
    reasoning: str = ""
    is_reasoning: bool = False


def add_token(digest: int, event: TokenEvent) -> int:
    """The digest of a choice's tokens, 0 for none, after one more event."""
    return zlib.crc32(NO_TOKEN if event.token is None else event.token.token.to_bytes(4, "little"), digest)


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

    With `include_stop` both are part of the text. A `parser` takes reasoning and calls out of the text; stop strings
    are looked for in what is left.
    """

    def __init__(
        self,
        choice: int,
        stop: StopParams,
        detokenizer: Detokenizer,
        stop_strings: Sequence[str],
        *,
        include_stop: bool = False,
        parser: AnswerParser | None = None,
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
            text, stop, piece, is_reasoning = "", None, _NOTHING, False
            if self._parser is None:
                if token is not None and finish is None:
                    text = self._detokenizer.push(token.token)
                else:
                    text = self._read(token, finish)
            else:
                piece, finish, is_reasoning = self._parse(self._parser, token, finish)
                text = piece.text
            if self._matcher is not None:
                text, finish, stop = self._match(self._matcher, text, finish)
            num_cached = chunk.num_cached_tokens
            events.append(
                TokenEvent(
                    self._choice, token, text, num_cached, finish, stop, piece.calls, piece.reasoning, is_reasoning
                )
            )
            if finish is not None:
                break
        return events

    def _read(self, token: OutputToken | None, finish: FinishReason | None) -> str:
        """The text that becomes certain with a token; with `finish` all that was held back, too."""
        if token is None or (
            finish is FinishReason.STOP and self._hides_stop_token and token.token in self._stop.stop_token_ids
        ):
            text = ""
        else:
            text = self._detokenizer.push(token.token)
        return text if finish is None else text + self._detokenizer.finish()

    def _parse(
        self, answer: AnswerParser, token: OutputToken | None, finish: FinishReason | None
    ) -> tuple[ParsedPiece, FinishReason | None, bool]:
        """What became certain, `STOP` if nothing more is shown, and True for a token of the reasoning.

        A marker is read by its token, even if it ends the choice, or if special tokens are no text.
        """
        parser = answer.parser
        is_reasoning = parser.in_reasoning
        marker = answer.markers.get(token.token) if token is not None else None
        if marker is None:
            piece = parser.push(self._read(token, finish))
        else:
            piece = parser.push(self._detokenizer.finish()) + parser.push_marker(marker)
        is_reasoning = token is not None and (is_reasoning or parser.in_reasoning)
        if finish is not None:
            piece += parser.finish()
        elif parser.is_done:
            finish = FinishReason.STOP
        return piece, finish, is_reasoning

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
