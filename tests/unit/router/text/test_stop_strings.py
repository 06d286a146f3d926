"""Stop strings compared with a naive search over the whole text, for any piece boundaries."""

from itertools import pairwise

from hypothesis import example, given, settings
from hypothesis import strategies as st

from baton.services.router.text.stop_strings import ReleasedText, StopMatcher

TEXT = st.text("abc", max_size=30)
STOPS = st.lists(st.text("abc", min_size=1, max_size=5), max_size=4)


def naive(text: str, stops: list[str]) -> tuple[str, bool]:
    """Cuts the longest stop at the first place where one ends."""
    for end in range(len(text) + 1):
        ending = [stop for stop in stops if text[:end].endswith(stop)]
        if ending:
            return text[: end - max(map(len, ending))], True
    return text, False


@settings(deadline=None)
@given(text=TEXT, stops=STOPS, cuts=st.lists(st.integers(0, 30)))
@example(text="abcd", stops=["abcd", "bc"], cuts=[])
def test_it_finds_what_a_naive_search_finds(text: str, stops: list[str], cuts: list[int]):
    borders = [0, *sorted(min(cut, len(text)) for cut in cuts), len(text)]
    matcher, shown, stopped = StopMatcher(stops), "", False
    for start, end in pairwise(borders):
        released = matcher.push(text[start:end])
        shown += released.text
        assert text.startswith(shown)
        stopped = released.stop is not None
        if stopped:
            break
    shown += matcher.finish()
    assert (shown, stopped) == naive(text, stops)


@settings(deadline=None)
@given(text=TEXT, stops=STOPS)
def test_it_holds_back_only_what_may_become_a_stop(text: str, stops: list[str]):
    matcher, shown = StopMatcher(stops), ""
    for count, char in enumerate(text, start=1):
        released = matcher.push(char)
        if released.stop is not None:
            return
        shown += released.text
        held = text[len(shown) : count]
        assert held == "" or any(stop.startswith(held) for stop in stops)
        assert len(held) < max(map(len, stops), default=1)


def test_without_stops_nothing_is_held():
    assert StopMatcher(()).push("anything") == ReleasedText("anything")


def test_text_held_for_a_stop_is_shown_when_none_comes():
    matcher = StopMatcher(["</end>"])
    assert matcher.push("one </e") == ReleasedText("one ")
    assert matcher.push("lse") == ReleasedText("</else")
    assert matcher.push("<") == ReleasedText("")
    assert matcher.finish() == "<"


@settings(deadline=None)
@given(text=TEXT, stops=STOPS, cuts=st.lists(st.integers(0, 30)))
def test_an_included_stop_is_what_an_excluded_one_cuts_off(text: str, stops: list[str], cuts: list[int]):
    borders = [0, *sorted(min(cut, len(text)) for cut in cuts), len(text)]
    matcher, shown, stop = StopMatcher(stops, include=True), "", None
    for start, end in pairwise(borders):
        released = matcher.push(text[start:end])
        shown += released.text
        assert text.startswith(shown)
        stop = released.stop
        if stop is not None:
            break
    shown += matcher.finish()
    before, stopped = naive(text, stops)
    assert (stop is not None) == stopped
    assert shown == before + ("" if stop is None else stops[stop])
