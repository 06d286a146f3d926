"""The path profile counts the project's own functions and values, and the router stays within its budget."""

from __future__ import annotations

import sys

import pytest

from baton.domain.arithmetic import ceil_div
from baton.services.cli.bench.results.records import MeasuredAnswer, PlannedRequest, row_of
from baton.services.cli.bench.workload.arrivals import rescale
from baton.session.session import MessageSession
from bench.router.path_profile import PathProfile, ProfileHook, Window, _summarize, profile_router
from tests.redis_server import require_redis

REQUEST = PlannedRequest(0, 0.0, (1,), 1)
ANSWER = MeasuredAnswer(0.0, 1.0, (), 0)
NUM_TOKENS = 96
MAX_REQUEST_FUNCTIONS = 590  # measured 572 to 579; 14 of them stand for calls of Starlette and asyncio
MAX_TOKEN_FUNCTIONS = 40
MAX_TOKEN_FILES = 20  # measured 18, and 19 beside other work: a file of about nine of ten tokens counts or not
MAX_TOKEN_VALUE_TYPES = 6
MAX_TOKEN_GENERATORS = 3
MAX_TRIES = 3  # what a busy machine calls besides, and what moves between tokens and frames, differs from run to run
MAX_TOKEN_AND_FRAME_FUNCTIONS = 46  # measured 33 to 43; by how many tokens a frame brings they move between the two


def foreign() -> None:
    """Not a function of the project's packages."""


def profiled(window: Window) -> None:
    hook = ProfileHook()
    sys.setprofile(hook)
    try:
        hook.window = window
        ceil_div(7, 2)
        rescale([1.0, 2.0], 4.0)
        row_of(REQUEST, ANSWER, due_s=0.0, start_s=0.0)
        foreign()
        hook.window = None
        ceil_div(7, 2)
    finally:
        sys.setprofile(None)


def test_only_own_functions_in_an_open_window_count():
    window = Window()
    profiled(window)
    names = {code.co_name: count for code, count in window.calls.items()}
    assert names["ceil_div"] == names["rescale"] == 1
    assert "foreign" not in names


def test_frozen_values_of_own_functions_count():
    window = Window()
    profiled(window)
    assert {"PlannedRequest", "MeasuredAnswer", "RequestRow"} <= set(window.value_types(list(window.calls)))


def test_a_function_of_most_tokens_is_on_the_token_path():
    token, idle = Window(), Window()
    token.calls.update({ceil_div.__code__: 9, rescale.__code__: 8})
    idle.calls[rescale.__code__] = 1
    chat = Window()
    chat.calls.update({**token.calls, row_of.__code__: 1})
    profile = _summarize(idle, (chat, token), token, 10)
    assert [name.split(":")[1] for name in profile.token_functions] == ["ceil_div"]
    assert profile.token_calls == 1.7
    assert [name.split(":")[1] for name in profile.request_functions] == ["ceil_div"]
    assert [name.split(":")[1] for name in profile.idle_functions] == ["rescale"]


def test_a_function_of_most_frames_is_not_on_the_token_path():
    token = Window()
    token.calls.update({MessageSession.receive.__code__: 3, ceil_div.__code__: 10, rescale.__code__: 3})
    token.calls[row_of.__code__] = 1
    profile = _summarize(Window(), (Window(), Window()), token, 10)
    assert [name.split(":")[1] for name in profile.token_functions] == ["ceil_div"]
    assert [name.split(":")[1] for name in profile.frame_functions] == ["rescale", "MessageSession.receive"]


def test_values_of_a_flush_are_not_on_the_token_path():
    token = Window()
    token.calls.update({ceil_div.__code__: 10, rescale.__code__: 1, row_of.__code__: 1})
    token.values.update({(ceil_div.__code__, "TokenChunk"): 10, (ceil_div.__code__, "Rare"): 1})
    token.values.update({(rescale.__code__, "JournalEntry"): 5, (row_of.__code__, "JournalEntry"): 5})
    assert _summarize(Window(), (token, token), token, 10).token_value_types == ("TokenChunk",)


@pytest.mark.integration
def test_a_streamed_chat_stays_within_its_budget():
    require_redis()
    for _ in range(MAX_TRIES):
        profile = profile_router(NUM_TOKENS)
        if not (over := excess(profile)):
            break
    assert over == {}


def excess(profile: PathProfile) -> dict[str, int]:
    """The counts above their bounds."""
    counts = {
        "request functions": (len(profile.request_functions), MAX_REQUEST_FUNCTIONS),
        "token functions": (len(profile.token_functions), MAX_TOKEN_FUNCTIONS),
        "token files": (len(profile.token_files), MAX_TOKEN_FILES),
        "token value types": (len(profile.token_value_types), MAX_TOKEN_VALUE_TYPES),
        "token generators": (len(profile.token_generators), MAX_TOKEN_GENERATORS),
        "token and frame functions": (
            len(profile.token_functions) + len(profile.frame_functions),
            MAX_TOKEN_AND_FRAME_FUNCTIONS,
        ),
    }
    return {name: count for name, (count, bound) in counts.items() if count > bound}


def test_counts_above_their_bounds_are_named():
    few, many = ("a:f",), tuple(f"{n}:f" for n in range(1 + MAX_REQUEST_FUNCTIONS))
    assert excess(PathProfile(few, few, 1.0, few, few, few, few)) == {}
    over = excess(PathProfile(many, few, 1.0, many[:41], many[:7], many[:4], many[:6]))
    assert over == {
        "request functions": 591,
        "token functions": 41,
        "token files": 41,
        "token value types": 7,
        "token generators": 4,
        "token and frame functions": 47,
    }
