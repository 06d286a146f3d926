"""Errors and disconnects: responses to the client, and the cleanup after them. Real server, real clients."""

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import openai
import pytest

from baton.domain.errors import (
    BatonError,
    Broken,
    DeadlineExceeded,
    Draining,
    NoWorkers,
    Overloaded,
    WorkerLost,
)
from tests.fake_dispatcher import RaiseError, WaitForGate, failing, one_token_chunks
from tests.service.http.http_server import MODEL, error_of, events_of, router, says, tokens_of

LOST = "a worker was lost or missing before the answer was complete: send the request again"


# --- disconnects ---
@pytest.mark.parametrize("stream", [False, True])
async def test_a_disconnect_before_the_first_token_aborts(stream: bool):
    gate = asyncio.Event()
    async with router(lambda sequence: [WaitForGate(gate)]) as world:
        asking = asyncio.create_task(world.chat(stream=stream, n=2))
        await world.dispatcher.until(lambda d: len(d.started) == 1)
        asking.cancel()
        await world.dispatcher.until(lambda d: len(d.aborted) == 1 and len(d.released) == 1)
        assert not world.dispatcher.outstanding
        assert await world.recorder.until_ended(1) == [("cancelled", "cancelled")]


async def test_a_disconnect_in_the_middle_aborts():
    gate = asyncio.Event()
    script = [*one_token_chunks(tokens_of("hello there", eos=False))[:-1], WaitForGate(gate)]
    async with router(lambda sequence: script) as world:
        stream = await world.lenient.completions.create(model=MODEL, prompt="x", stream=True)
        async for _ in stream:
            break
        await stream.close()
        await world.dispatcher.until(lambda d: len(d.aborted) == 1)
        assert await world.recorder.until_ended(1) == [("cancelled", "cancelled")]


# --- errors ---
@pytest.mark.parametrize(
    ("error", "status", "kind", "retry_after"),
    [
        (Overloaded("full", retry_after_s=2.2), 429, "rate_limit_error", "3"),
        (Overloaded("full", retry_after_s=9999), 429, "rate_limit_error", "120"),
        (NoWorkers("no decode worker"), 503, "service_unavailable_error", "1"),
        (Draining("going"), 503, "service_unavailable_error", "1"),
    ],
)
@pytest.mark.parametrize("stream", [False, True])
async def test_a_refusal_is_a_status_and_holds_no_slot(error, status: int, kind: str, retry_after: str, stream: bool):
    async with router(says("hi")) as world:
        world.dispatcher.refusals = [None, None, error]
        response = await world.chat(n=3, stream=stream)
        assert response.status_code == status
        assert response.headers["retry-after"] == retry_after
        assert error_of(response) == {"message": str(error), "type": kind, "param": None, "code": error.code}
        assert len(world.dispatcher.released) == 2
        assert world.dispatcher.started == []
        assert await world.recorder.until_ended(1) == [("refused", error.code)]


@pytest.mark.parametrize(
    ("error", "status", "code"),
    [
        (DeadlineExceeded("too late"), 504, "deadline_exceeded"),
        (WorkerLost("decode-0 is gone"), 503, "worker_lost"),
        (Broken("/secret/path"), 500, "internal_error"),
        (ZeroDivisionError("/secret/path"), 500, "internal_error"),
    ],
)
@pytest.mark.parametrize("stream", [False, True])
async def test_a_failure_before_the_first_token_is_a_status(error, status: int, code: str, stream: bool):
    async with router(lambda sequence: [RaiseError(error)]) as world:
        response = await world.chat(stream=stream)
        assert response.status_code == status
        assert error_of(response)["code"] == code
        assert "secret" not in response.text
        assert ("error" in {entry["log_level"] for entry in world.logs}) == (status == 500)
        assert await world.recorder.until_ended(1) == [
            ("failed", error.code if isinstance(error, BatonError) else "broken")
        ]


async def test_a_failure_after_the_first_token_is_the_last_event():
    async with router(
        lambda sequence: [*one_token_chunks(tokens_of("hi you"))[:1], RaiseError(WorkerLost("gone"))]
    ) as world:
        events = events_of((await world.chat(stream=True)).text)
        assert events[-1] == {
            "error": {"message": LOST, "type": "service_unavailable_error", "param": None, "code": "worker_lost"}
        }
        assert "[DONE]" not in events
        stream = await world.lenient.completions.create(model=MODEL, prompt="x", stream=True)
        with pytest.raises(openai.APIError, match="a worker was lost"):
            _ = [chunk async for chunk in stream]


async def test_a_failed_choice_ends_the_others():
    gate = asyncio.Event()

    def script(sequence):
        lead = sequence.id.count("-") == 1
        return (
            [*one_token_chunks(tokens_of("hi you"))[:1], WaitForGate(gate)]
            if lead
            else [RaiseError(WorkerLost("gone"))]
        )

    async with router(script) as world:
        response = await world.chat(n=2)
        assert response.status_code == 503
        assert len(world.dispatcher.aborted) == 1


async def test_an_end_without_a_finish_reason_is_an_internal_error():
    async with router(lambda sequence: one_token_chunks(tokens_of("hi you"))[:1]) as world:
        assert (await world.chat()).status_code == 500


async def test_the_deadline_holds_without_the_dispatcher(monkeypatch):
    monkeypatch.setattr("baton.services.router.streaming.token_stream.DEADLINE_GRACE_S", 0.0)
    gate = asyncio.Event()
    async with router(lambda sequence: [WaitForGate(gate)], request_deadline_s=0.05, ping_interval_s=0.01) as world:
        assert error_of(await world.chat(n=2))["code"] == "deadline_exceeded"
        assert events_of((await world.chat(stream=True)).text)[-1]["error"]["code"] == "deadline_exceeded"
        await world.dispatcher.until(lambda d: len(d.aborted) == 2)


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (b"", "not valid JSON"),
        (b"{", "not valid JSON"),
        (b'{"model": NaN}', "not valid JSON"),
        (b"\xff\xfe", "not valid JSON"),
        (b'{"model": "\xed\xa0\x80"}', "not valid JSON"),
        (b'{"model": "\\ud800"}', "not valid JSON"),
        (b'{"seed": ' + b"1" * 5000 + b"}", "must be|not valid JSON"),
        (b"[" * 100_000, "nested too deeply"),
        (b'{"metadata": ' + b"[" * 64 + b"]" * 64 + b"}", "nested too deeply"),
        (b'{"metadata": ' + b'{"a":' * 900 + b"1" + b"}" * 900 + b"}", "nested too deeply"),
        (b"[]", "must be a JSON object"),
        (b'"' + b"x" * 5000 + b'"', "must be a JSON object"),
        (b"{}", "model: must be"),
    ],
)
async def test_invalid_bodies_are_refused(content: bytes, words: str):
    async with router(says("hi")) as world:
        for path in ("/v1/chat/completions", "/v1/completions"):
            response = await world.http.post(path, content=content, headers={"content-type": "application/json"})
            assert response.status_code == 400
            assert len(error_of(response)["message"]) < 2000
            assert any(word in error_of(response)["message"] for word in words.split("|"))
        assert {outcome for outcome, _ in world.recorder.outcomes} == {"refused"}


async def test_unknown_paths_and_methods_have_http_statuses():
    async with router(says("hi"), max_body_bytes=2000) as world:
        assert error_of(await world.http.get("/nowhere"))["code"] == "not_found"
        assert (await world.http.get("/v1/models/")).status_code == 404
        response = await world.http.get("/v1/completions")
        assert (response.status_code, response.headers["allow"]) == (405, "POST")
        assert error_of(response)["code"] == "method_not_allowed"
        response = await world.http.post("/v1/completions", data={"prompt": "x"})
        assert (response.status_code, error_of(response)["code"]) == (415, "unsupported_content_type")
        response = await world.complete(model="other")
        assert (response.status_code, error_of(response)["code"]) == (404, "model_not_found")
        response = await world.complete(prompt="x " * 300)
        assert (response.status_code, error_of(response)["code"]) == (400, "context_length_exceeded")
        assert "256 tokens" in error_of(response)["message"]
        response = await world.complete(prompt="x" * 5000)
        assert (response.status_code, error_of(response)["code"]) == (413, "body_too_large")

        async def endless() -> AsyncIterator[bytes]:
            for _ in range(30):
                yield b" " * 100

        response = await world.http.post(
            "/v1/completions", content=endless(), headers={"content-type": "application/json"}
        )
        assert (response.status_code, error_of(response)["code"]) == (413, "body_too_large")


async def test_large_bodies_are_validated():
    async with router(says("hi")) as world:
        body: dict[str, Any] = {"user": "x" * 100_000}
        assert (await world.complete(**body)).status_code == 200
        assert error_of(await world.complete(**body, temperature=9))["param"] == "temperature"


async def test_moderate_nesting_is_accepted():
    deep: Any = "x"
    for _ in range(31):
        deep = {"a": [deep]}
    async with router(says("hi")) as world:
        assert (await world.complete(metadata=deep)).status_code == 200  # 63 levels, one of them the body's own
        assert (await world.complete(metadata={"a": [deep]})).status_code == 400


@pytest.mark.parametrize("char", ["x", "\U00010348", "\x1b", '"'])
async def test_error_messages_are_bounded_in_bytes(char: str):
    """A printed character may have four bytes, an escaped one six in JSON."""
    async with router(says("hi")) as world:
        messages = [{"role": char * 1000, "content": {char * 1000: 5}} for _ in range(20)]
        for response in (
            await world.chat(messages=messages),
            await world.chat(messages=messages, temperature=char * 5000, stop=char * 300),
            await world.chat(model=char * 5000),
            await world.http.get("/v1/models/" + "%F0%90%8D%88" * 2000),
        ):
            assert response.status_code in (400, 404)
            assert len(response.content) < 8 * 1024
            error_of(response)


async def test_a_failing_script_fails_every_sequence():
    async with router(failing(NoWorkers("none", retry_after_s=4))) as world:
        response = await world.complete()
        assert (response.status_code, response.headers["retry-after"]) == (503, "4")
