"""The events of one choice: one a token, with the same text for any chunk boundaries."""

from itertools import pairwise

from hypothesis import given, settings
from hypothesis import strategies as st

from baton.domain.request import FinishReason, OutputToken, StopParams
from baton.services.router.generation import TokenChunk
from baton.services.router.text.choice_text import ChoiceText, TokenEvent
from tests.unit.router.text.text_models import bundled

EOS = 2
TEXT = st.text("ab é🦊", max_size=20)
STOPS = st.lists(st.text("ab 🦊", min_size=1, max_size=3), max_size=2)


def deal(tokens: list[int], cuts: list[int], finish: FinishReason) -> list[TokenChunk]:
    """Returns the tokens in chunks cut at `cuts`; the last one has `finish`."""
    outputs = tuple(OutputToken(i, token) for i, token in enumerate(tokens))
    borders = sorted({0, len(outputs), *(min(cut, len(outputs)) for cut in cuts)})
    pairs = list(pairwise(borders)) or [(0, 0)]
    return [TokenChunk(outputs[a:b], 0, finish if b == len(outputs) else None) for a, b in pairs]


def run(chunks: list[TokenChunk], stops: list[str], *, min_tokens: int = 0) -> list[TokenEvent]:
    stop = StopParams(max_tokens=100, min_tokens=min_tokens, stop_token_ids=frozenset({EOS}))
    choice = ChoiceText(0, stop, bundled().detokenizer(skip_special_tokens=True), stops)
    events: list[TokenEvent] = []
    for chunk in chunks:
        events += choice.events(chunk)
        if events and events[-1].finish is not None:
            break
    return events


@settings(deadline=None)
@given(text=TEXT, cuts=st.lists(st.integers(0, 40), max_size=4), stops=STOPS)
def test_chunk_boundaries_do_not_change_the_text(text: str, cuts: list[int], stops: list[str]):
    tokens = [*bundled().encode(text, add_special_tokens=False), EOS]
    events = run(deal(tokens, cuts, FinishReason.STOP), stops)
    assert events == run(deal(tokens, list(range(40)), FinishReason.STOP), stops)
    first_stop = min((text.find(stop) + len(stop) for stop in stops if stop in text), default=None)
    shown = "".join(event.text for event in events)
    assert text.startswith(shown)
    assert (shown == text) == (first_stop is None)
    assert [event.finish for event in events] == [None] * (len(events) - 1) + [FinishReason.STOP]
    if first_stop is None:
        assert [event.token.token for event in events if event.token] == tokens


def test_a_stop_token_has_no_text_and_a_last_token_has():
    [token] = bundled().encode("a", add_special_tokens=False)
    special = OutputToken(0, EOS)
    assert run([TokenChunk((special,), 0, FinishReason.STOP)], [])[-1].text == ""
    assert run([TokenChunk((OutputToken(0, token),), 0, FinishReason.LENGTH)], [])[-1].text == "a"


def test_an_end_without_a_token_releases_held_text():
    [token] = bundled().encode("a", add_special_tokens=False)
    chunks = [TokenChunk((OutputToken(0, token),), 3), TokenChunk((), 3, FinishReason.LENGTH)]
    assert run(chunks, ["ab"]) == [
        TokenEvent(0, OutputToken(0, token), "", 3),
        TokenEvent(0, None, "a", 3, FinishReason.LENGTH),
    ]


def test_stop_strings_are_ignored_below_min_tokens():
    tokens = list(bundled().encode("a a a", add_special_tokens=False))
    events = run(deal([*tokens, EOS], [], FinishReason.STOP), ["a"], min_tokens=2)
    assert "".join(event.text for event in events) == bundled().decode(tokens[:1], skip_special_tokens=True) + " "
    assert len(events) == 2
