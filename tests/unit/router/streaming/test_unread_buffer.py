"""Unread output comes back as it went in, and its bounds choose who is hung up."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from baton.domain.request import FinishReason, OutputToken, TokenLogprobs
from baton.services.router.openai.bounds import MAX_STOP_STRINGS
from baton.services.router.streaming.unread_buffer import MAX_UNREAD_LOGPROB_BYTES, UnreadBudget, UnreadBuffer
from baton.services.router.text.choice_text import TokenEvent
from baton.services.router.text.parsers.base import ToolCall

LOGPROBS = st.builds(
    TokenLogprobs,
    st.floats(allow_nan=False),
    st.lists(st.tuples(st.integers(0, 2**32 - 1), st.floats(allow_nan=False)), max_size=20).map(tuple),
)
TOKENS = st.builds(OutputToken, st.integers(0, 2**32 - 1), st.integers(0, 2**32 - 1), st.none() | LOGPROBS)
CALLS = st.lists(st.builds(ToolCall, st.integers(0, 9), st.text(max_size=9), st.text(max_size=9)), max_size=2)
EVENTS = st.builds(
    TokenEvent,
    st.integers(0, 127),
    st.none() | TOKENS,
    st.text(),
    st.integers(0, 2**20),
    st.none() | st.sampled_from(FinishReason),
    st.none() | st.integers(0, MAX_STOP_STRINGS - 1),
    CALLS.map(tuple),
    st.text(max_size=9),
    st.booleans(),
)


def event(text: str = "word", choice: int = 0) -> TokenEvent:
    return TokenEvent(choice, OutputToken(0, 7), text, 0)


def never() -> None:
    raise AssertionError("no overflow is due")


def test_calls_and_reasoning_come_back() -> None:
    """Before the random events: those shrink for minutes where this is broken."""
    buffer = UnreadBuffer(UnreadBudget(), never)
    pushed = [replace(event(), calls=(ToolCall(0, "add", "{}"),)), replace(event(), reasoning="hm"), event("so")]
    for each in pushed:
        buffer.push(each)
    assert buffer.pop(3) == pushed


@given(st.lists(st.tuples(EVENTS, st.integers(0, 3))))
def test_events_come_back_in_order_and_bytes_are_counted(steps: list[tuple[TokenEvent, int]]) -> None:
    budget = UnreadBudget()
    buffer, other = UnreadBuffer(budget, never), UnreadBuffer(budget, never)
    other.push(event())
    num_other, popped = budget.num_bytes, []
    for step, num_popped in steps:
        buffer.push(step)
        popped += buffer.pop(num_popped)
    popped += buffer.pop(len(steps))
    assert popped == [step for step, _ in steps]
    assert (buffer.num_events, budget.num_bytes) == (0, num_other)


def test_a_token_without_logprobs_waits_in_few_bytes() -> None:
    budget = UnreadBudget()
    buffer = UnreadBuffer(budget, never)
    for _ in range(1000):
        buffer.push(event())
    assert budget.num_bytes <= 1000 * (24 + len("word"))


def test_the_least_recent_reader_is_hung_up_for_the_budget() -> None:
    hung_up: list[str] = []
    budget = UnreadBudget(max_bytes=10_000)
    first = UnreadBuffer(budget, lambda: hung_up.append("first"))
    second = UnreadBuffer(budget, lambda: hung_up.append("second"))
    third = UnreadBuffer(budget, lambda: hung_up.append("third"))
    for buffer in (first, second, third):
        buffer.push(event("x" * 3000))
        buffer.push(event("y"))
    first.pop(1)  # it reads: second has waited longest now
    first.push(event("x" * 4000))
    assert hung_up == ["second"]
    assert (first.num_events, second.num_events, third.num_events) == (2, 0, 2)
    second.push(event())
    assert (second.num_events, hung_up) == (0, ["second"])
    assert budget.num_bytes <= 10_000


def test_too_many_unread_logprobs_hang_up_their_own_reader() -> None:
    hung_up: list[bool] = []
    budget = UnreadBudget()
    buffer = UnreadBuffer(budget, lambda: hung_up.append(True))
    top = tuple((id, -1.0) for id in range(20))
    rich = TokenEvent(0, OutputToken(0, 7, TokenLogprobs(-1.0, top)), "", 0)
    num_events = 0
    while not hung_up:
        buffer.push(rich)
        num_events += 1
    assert num_events == MAX_UNREAD_LOGPROB_BYTES // (8 + 20 * 12) + 1
    assert (budget.num_bytes, hung_up) == (0, [True])


def test_a_closed_buffer_takes_nothing_and_reports_nothing() -> None:
    budget = UnreadBudget(max_bytes=1)
    buffer = UnreadBuffer(budget, never)
    buffer.close()
    buffer.push(event())
    buffer.overflow()
    assert (buffer.num_events, budget.num_bytes) == (0, 0)
