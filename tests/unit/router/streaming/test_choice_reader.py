"""A choice's chunks become the same events whether they are taken by calls or read by its task."""

from __future__ import annotations

from collections.abc import Sequence
from typing import cast

import pytest

from baton.domain.errors import ModelReplaced
from baton.domain.request import FinishReason, OutputToken
from baton.services.router.generation import TokenChunk
from baton.services.router.streaming.choice_reader import ANSWER_REPLACED, ChoiceReader
from baton.services.router.streaming.token_stream import TokenStream
from baton.services.router.text.choice_text import ChoiceText, TokenEvent, add_token
from tests.unit.router.streaming.chunk_sources import ScriptedSource, chunks, request
from tests.unit.router.text.text_models import bundled

WAIT_S = 30.0


class EchoText:
    """Text of a choice: an event a token; `end` ends the choice, `bad` cannot be read."""

    def __init__(self, end: int | None = None, bad: int | None = None) -> None:
        self._end, self._bad = end, bad
        self.seen: list[int] = []

    def events(self, chunk: TokenChunk) -> list[TokenEvent]:
        found = list[TokenEvent]()
        for token in chunk.tokens:
            self.seen.append(token.token)
            if token.token == self._bad:
                raise ValueError("bad")
            finish = FinishReason.STOP if token.token == self._end else chunk.finish
            found.append(TokenEvent(0, token, str(token.token), 0, finish))
        return found


def chunk(*tokens: int, first: int = 0) -> TokenChunk:
    return TokenChunk(tuple(OutputToken(first + n, token) for n, token in enumerate(tokens)), 0)


def reader_of(text: EchoText, given: Sequence[TokenEvent] = ()) -> tuple[ChoiceReader, list[TokenEvent]]:
    added, digest = list[TokenEvent](), 0
    for event in given:
        digest = add_token(digest, event)
    return ChoiceReader(cast(ChoiceText, text), added.append, len(given), digest), added


def test_nothing_is_taken_before_the_task_allows_it():
    text = EchoText()
    reader, added = reader_of(text)
    assert not reader.take(chunk(1))
    assert text.seen == []
    reader.takes = True
    assert reader.take(chunk(1, 2))
    assert [event.text for event in added] == ["1", "2"]


def test_an_end_is_left_to_the_task_which_reads_it_once():
    text = EchoText(end=2)
    reader, added = reader_of(text)
    reader.takes = True
    assert not reader.take(chunk(1, 2))
    assert [event.finish for event in reader.read(chunk(1, 2))] == [None, FinishReason.STOP]
    assert (added, text.seen) == ([], [1, 2])


def test_the_last_chunk_is_left_unread():
    text = EchoText()
    reader, _ = reader_of(text)
    reader.takes = True
    last = TokenChunk((OutputToken(0, 5),), 0, FinishReason.LENGTH)
    assert not reader.take(last)
    assert text.seen == []
    assert [event.finish for event in reader.read(last)] == [FinishReason.LENGTH]


def test_an_error_is_raised_in_the_task():
    reader, added = reader_of(EchoText(bad=3))
    reader.takes = True
    assert not reader.take(chunk(1, 3))
    with pytest.raises(ValueError, match="bad"):
        reader.read(chunk(1, 3))
    assert added == []


def test_events_that_were_given_are_skipped_and_then_taken():
    given = EchoText().events(chunk(1, 2))
    reader, added = reader_of(EchoText(), given)
    reader.takes = True
    assert not reader.take(chunk(1)), "they are compared by the task"
    assert reader.read(chunk(1)) == []
    assert [event.text for event in reader.read(chunk(2, 3, first=1))] == ["3"]
    assert reader.take(chunk(4, first=3))
    assert [event.text for event in added] == ["4"]


def test_another_answer_is_found_out():
    reader, _ = reader_of(EchoText(), EchoText().events(chunk(1, 2)))
    with pytest.raises(ModelReplaced, match=ANSWER_REPLACED):
        reader.read(chunk(1, 7))


@pytest.mark.parametrize("stop_strings", [(), (" the",)])
async def test_a_stream_is_the_same_by_calls(stop_strings: tuple[str, ...]) -> None:
    """Also one that a stop string ends within a chunk, and one whose later chunks come after a full queue."""
    tokens = [5 + n * 37 % 900 for n in range(200)]
    streams = []
    for offers in (False, True):
        source = ScriptedSource({0: chunks(tokens), 1: chunks(tokens[:30])}, offers=offers)
        events = []
        async with TokenStream(bundled(), request(2, stop_strings=stop_strings), source) as stream:
            while stream.num_running:
                event = await stream.next(WAIT_S)
                assert event is not None
                events.append(event)
        streams.append([[event for event in events if event.choice == choice] for choice in (0, 1)])
        assert (source.num_taken > 0) is offers
        assert source.completed == [0, 1] or source.completed == [1, 0]
    assert streams[0] == streams[1]
