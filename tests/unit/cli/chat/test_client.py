"""Streams that break in every place: each event is seen once, and a question is asked once."""

from __future__ import annotations

import pytest

from baton.services.cli.chat import client as client_module
from baton.services.cli.chat.answer import AnswerFailed
from baton.services.cli.chat.client import ChatClient
from tests.unit.cli.chat.scripted_router import ID, Act, scripted_router

PATH = "/v1/chat/completions"
RESUMED = f"/v1/requests/{ID}/stream"
A, B, C, END = (f"{ID}:1", "a"), (f"{ID}:2", "b"), (f"{ID}:3", "c"), (f"{ID}:4", "[DONE]")


@pytest.fixture(autouse=True)
def short_waits(monkeypatch):
    monkeypatch.setattr(client_module, "FIRST_WAIT_S", 0.001)


async def read(*routers: str) -> list[tuple[str, bool]]:
    client = ChatClient(routers, None)
    try:
        return [(event.data, event.resumed) async for event in client.stream(PATH, {"model": "m"})]
    finally:
        await client.close()


async def failure(router: str) -> str:
    with pytest.raises(AnswerFailed) as failed:
        await read(router)
    return str(failed.value)


async def test_a_whole_stream_is_read():
    with scripted_router(Act([A, B, END])) as router:
        assert await read(router.url) == [("a", False), ("b", False)]
    assert router.asked == [("POST", PATH, None)]


@pytest.mark.parametrize("complete", [False, True], ids=["cut", "ended without DONE"])
async def test_a_broken_stream_goes_on_after_its_last_event(complete):
    with scripted_router(Act([A, B], complete=complete), Act([], complete=False), Act([C, END])) as router:
        assert await read(router.url) == [("a", False), ("b", False), ("c", True)]
    assert router.asked == [("POST", PATH, None), ("GET", RESUMED, B[0]), ("GET", RESUMED, B[0])]


async def test_a_stream_that_broke_before_its_first_event_is_read_from_the_start():
    with scripted_router(Act([], complete=False), Act([A, END])) as router:
        assert await read(router.url) == [("a", True)]
    assert router.asked[1] == ("GET", RESUMED, None)


async def test_another_router_continues():
    busy = Act(status=503, body=b'{"error": {"message": "draining"}}')
    with scripted_router(Act([A], complete=False), busy) as one, scripted_router(Act([B, END])) as other:
        assert await read(one.url, other.url) == [("a", False), ("b", True)]
    assert [asked[0] for asked in other.asked] == ["GET"]


async def test_a_router_that_is_not_there_is_passed_over():
    with scripted_router(Act([A, END])) as router:
        assert await read("http://127.0.0.1:1", router.url) == [("a", False)]


async def test_resuming_ends_at_its_bound():
    broken = [Act([], complete=False) for _ in range(client_module.MAX_RESUMES)]
    with (
        scripted_router(Act([A], complete=False), *broken) as router,
        pytest.raises(AnswerFailed, match="does not answer"),
    ):
        await read(router.url)
    assert len(router.asked) <= client_module.MAX_RESUMES + 1


@pytest.mark.parametrize(("status", "words"), [(400, "HTTP 400: odd"), (429, "HTTP 429"), (503, "HTTP 503")])
async def test_a_refused_question_is_not_asked_again(status, words):
    with (
        scripted_router(Act(status=status, body=b'{"error": {"message": "odd"}}')) as router,
        pytest.raises(AnswerFailed, match=words),
    ):
        await read(router.url)
    assert len(router.asked) == 1


async def test_a_forgotten_request_is_an_error():
    lost = Act(status=404, body=b'{"error": {"message": "no such request"}}')
    with (
        scripted_router(Act([A], complete=False), lost) as router,
        pytest.raises(AnswerFailed, match="no such request"),
    ):
        await read(router.url)
