"""The router's HTTP contract: responses and streams, over a real server and real clients."""

import asyncio
import json
import re

import pytest
from openai.types.chat import ChatCompletionMessageParam

from baton.domain.request import FinishReason, OutputToken, TokenLogprobs
from baton.services.router.generation import TokenChunk
from baton.telemetry import metrics
from tests.fake_dispatcher import EmitChunk, WaitForGate, one_token_chunks
from tests.service.http.http_server import MODEL, error_of, events_of, router, says, text_of, tokens_of

FOX = "The quick brown 🦊 jumps."


# --- responses ---
async def test_a_chat_without_streaming():
    async with router(says(FOX, num_cached_tokens=3)) as world:
        answer = await world.openai.chat.completions.create(
            model=MODEL, messages=[{"role": "user", "content": "hello"}]
        )
        [sequence] = world.dispatcher.admitted
        assert answer.choices[0].message.content == FOX
        assert (answer.choices[0].finish_reason, answer.choices[0].message.role) == ("stop", "assistant")
        assert answer.id == sequence.id
        assert (answer.object, answer.model) == ("chat.completion", MODEL)
        assert answer.system_fingerprint
        assert answer.usage
        assert answer.usage.prompt_tokens == len(sequence.prompt_tokens)
        assert answer.usage.completion_tokens == len(tokens_of(FOX))
        assert answer.usage.prompt_tokens_details
        assert answer.usage.prompt_tokens_details.cached_tokens == 3
        assert await world.recorder.until_ended(1) == [("finished", "stop")]
        assert [trace.output_tokens for trace in world.recorder.traces] == [len(tokens_of(FOX))]


async def test_a_call_may_have_128_choices():
    """Whole and streamed; one more is refused by name."""
    async with router(says("two words")) as world:
        answer = await world.openai.completions.create(model=MODEL, prompt="hello", n=128)
        assert [(choice.index, choice.text) for choice in answer.choices] == [(n, "two words") for n in range(128)]
        streamed = events_of((await world.complete(n=128, stream=True)).text)
        assert {text_of(streamed, choice) for choice in range(128)} == {"two words"}
        refused = await world.complete(n=129)
        assert (refused.status_code, error_of(refused)["param"]) == (400, "n")


async def test_a_streamed_chat_has_the_same_text():
    async with router(says(FOX)) as world:
        messages: list[ChatCompletionMessageParam] = [{"role": "user", "content": "hello"}]
        whole = await world.openai.chat.completions.create(model=MODEL, messages=messages, temperature=0)
        stream = await world.openai.chat.completions.create(
            model=MODEL, messages=messages, temperature=0, stream=True, stream_options={"include_usage": True}
        )
        chunks = [chunk async for chunk in stream]
        *pieces, last = chunks
        assert "".join(c.choices[0].delta.content or "" for c in pieces) == whole.choices[0].message.content == FOX
        assert [c.choices[0].delta.role for c in pieces] == ["assistant"] + [None] * (len(pieces) - 1)
        assert [c.choices[0].finish_reason for c in pieces] == [None] * (len(pieces) - 1) + ["stop"]
        assert len(pieces) == len(tokens_of(FOX))
        assert len({(c.id, c.created, c.model) for c in chunks}) == 1
        assert last.choices == []
        assert last.usage == whole.usage
        assert {c.usage for c in pieces} == {None}


async def test_completions_with_and_without_streaming():
    async with router(says(FOX)) as world:
        whole = await world.openai.completions.create(model=MODEL, prompt="hello", echo=True)
        stream = await world.lenient.completions.create(model=MODEL, prompt="hello", echo=True, stream=True)
        pieces = [chunk.choices[0].text async for chunk in stream]
        assert "".join(pieces) == whole.choices[0].text == "hello" + FOX
        assert pieces[0].startswith("hello")
        assert whole.object == "text_completion"


async def test_an_echo_alone_uses_no_worker():
    async with router(says(FOX)) as world:
        whole = (await world.complete(prompt=["a b", "c"], echo=True, max_tokens=0)).json()
        assert [choice["text"] for choice in whole["choices"]] == ["a b", "c"]
        assert {choice["finish_reason"] for choice in whole["choices"]} == {"length"}
        assert whole["usage"]["completion_tokens"] == 0
        events = events_of((await world.complete(prompt="a b", echo=True, max_tokens=0, stream=True)).text)
        assert text_of(events) == "a b"
        assert events[-1] == "[DONE]"
        assert world.dispatcher.admitted == []


async def test_choices_are_numbered_across_prompts():
    async with router(lambda sequence: one_token_chunks(tokens_of(sequence.id.rpartition("-")[2]))) as world:
        body = (await world.complete(prompt=["one", "two two"], n=2)).json()
        assert [choice["index"] for choice in body["choices"]] == [0, 1, 2, 3]
        assert [choice["text"] for choice in body["choices"]][1:] == ["1", "2", "3"]
        prompts = {sequence.prompt_tokens for sequence in world.dispatcher.admitted}
        assert body["usage"]["prompt_tokens"] == sum(map(len, prompts))


async def test_choices_start_after_the_first_token_of_their_leader():
    gates = {"": asyncio.Event(), "1": asyncio.Event(), "2": asyncio.Event()}

    def script(sequence):
        suffix = sequence.id.split("-")[2] if sequence.id.count("-") > 1 else ""
        return [*([WaitForGate(gates[suffix])] if not suffix else []), *one_token_chunks(tokens_of(f"choice {suffix}"))]

    async with router(script) as world:
        asking = asyncio.create_task(world.chat(n=3, stream=True))
        await world.dispatcher.until(lambda d: len(d.started) > 0)
        assert len(world.dispatcher.admitted) == 3
        assert len(world.dispatcher.started) == 1
        gates[""].set()
        events = events_of((await asking).text)
        assert [text_of(events, i) for i in range(3)] == ["choice ", "choice 1", "choice 2"]
        chunks = [c for event in events[:-1] for c in event["choices"]]
        for index in range(3):
            mine = [c for c in chunks if c["index"] == index]
            assert [("role" in c["delta"]) for c in mine] == [True] + [False] * (len(mine) - 1)
            assert [c["finish_reason"] is not None for c in mine] == [False] * (len(mine) - 1) + [True]
        await world.recorder.until_ended(1)
        [trace] = world.recorder.traces
        assert [s.output_tokens for s in trace.sequences] == [len(tokens_of(f"choice {suffix}")) for suffix in gates]


async def test_logprobs_in_both_shapes():
    token = tokens_of("fox", eos=False)[0]
    top = ((token, -0.5), (7, float("-inf")))
    said = TokenChunk((OutputToken(0, token, TokenLogprobs(-0.5, top)),), 0, FinishReason.LENGTH)
    async with router(lambda sequence: [EmitChunk(said)]) as world:
        chat = (await world.chat(logprobs=True, top_logprobs=2, max_tokens=1)).json()["choices"][0]
        [entry] = chat["logprobs"]["content"]
        assert (entry["logprob"], bytes(entry["bytes"]).decode()) == (-0.5, entry["token"])
        assert [t["logprob"] for t in entry["top_logprobs"]] == [-0.5, -9999.0]
        assert chat["finish_reason"] == "length"
        completion = (await world.complete(logprobs=2, max_tokens=1)).json()["choices"][0]["logprobs"]
        assert completion["tokens"] == [entry["token"]]
        assert completion["token_logprobs"] == [-0.5]
        assert completion["text_offset"] == [0]
        assert completion["top_logprobs"][0][entry["token"]] == -0.5
        streamed = events_of((await world.chat(logprobs=True, max_tokens=1, stream=True)).text)
        assert streamed[0]["choices"][0]["logprobs"]["content"][0]["token"] == entry["token"]


@pytest.mark.parametrize("stream", [False, True])
async def test_a_stop_string_across_tokens_is_an_end_and_no_abort(stream: bool):
    async with router(says(FOX, finish=FinishReason.LENGTH)) as world:
        response = await world.chat(stop=["wn 🦊 j"], stream=stream)
        if stream:
            events = events_of(response.text)
            assert text_of(events) == "The quick bro"
            assert events[-2]["choices"][0]["finish_reason"] == "stop"
        else:
            choice = response.json()["choices"][0]
            assert (choice["message"]["content"], choice["finish_reason"]) == ("The quick bro", "stop")
        await world.dispatcher.until(lambda d: len(d.finished) == 1)
        assert world.dispatcher.aborted == []
        assert await world.recorder.until_ended(1) == [("finished", "stop")]


# --- SSE ---
async def test_events_on_the_wire():
    async with router(says("hi you")) as world:
        response = await world.chat({"accept": "text/event-stream"}, stream=True)
        assert response.headers["content-type"].startswith("text/event-stream")
        assert response.headers["cache-control"] == "no-cache"
        assert response.headers["x-accel-buffering"] == "no"
        *events, rest = response.text.split("\n\n")
        assert rest == ""
        [sequence] = world.dispatcher.admitted
        num_tokens = len(events) - 1
        ids = [re.sub(r"~[0-9a-f]{8}", "~", event.split("\n")[0]) for event in events]
        assert ids[:-1] == [f"id: {sequence.id}:{i}~" for i in range(1, num_tokens + 1)]
        assert ids[-1] == f"id: {sequence.id}:{num_tokens}~+1"
        assert events[-1].endswith("data: [DONE]")


async def test_only_sse_clients_get_event_ids():
    async with router(says("hi you")) as world:
        response = await world.chat(stream=True)
        messages = [message for message in response.text.split("\n\n") if message]
        assert messages[-1] == "data: [DONE]"
        assert all(json.loads(message.removeprefix("data: ")) for message in messages[:-1])


async def test_every_chunk_has_usage_on_request():
    async with router(says("hi you")) as world:
        options = {"include_usage": True, "continuous_usage_stats": True}
        events = events_of((await world.complete(stream=True, stream_options=options)).text)[:-1]
        counts = [event["usage"]["completion_tokens"] for event in events]
        assert counts == [*range(1, len(events)), len(events) - 1]
        plain = events_of((await world.complete(stream=True)).text)[:-1]
        assert all("usage" not in event for event in plain)


async def test_a_silent_stream_sends_pings():
    gate = asyncio.Event()
    async with router(
        lambda sequence: [WaitForGate(gate), *one_token_chunks(tokens_of("hi"))], ping_interval_s=0.02
    ) as world:
        body = {"model": MODEL, "messages": [{"role": "user", "content": "x"}], "stream": True}
        async with world.http.stream("POST", "/v1/chat/completions", json=body) as response:
            lines = response.aiter_lines()
            assert [await anext(lines) for _ in range(4)] == [": ping", "", ": ping", ""]
            gate.set()
            rest = [line async for line in lines]
        assert text_of(events_of("\n".join(rest))) == "hi"


async def test_the_openai_sdk_ignores_pings():
    gate = asyncio.Event()
    script = [*one_token_chunks(tokens_of("hi", eos=False))[:-1], WaitForGate(gate), *one_token_chunks(tokens_of("ho"))]
    async with router(lambda sequence: script, ping_interval_s=0.02) as world:
        stream = await world.openai.chat.completions.create(
            model=MODEL, messages=[{"role": "user", "content": "x"}], stream=True
        )
        asyncio.get_running_loop().call_later(0.1, gate.set)
        assert "".join([chunk.choices[0].delta.content or "" async for chunk in stream]).endswith("ho")


# --- other endpoints and parameters ---
async def test_request_ids_and_times_are_on_every_response():
    async with router(says("hi")) as world:
        for path in ("/health", "/v1/models", "/version", "/nowhere"):
            response = await world.http.get(path, headers={"x-request-id": "trace-7<script>\t" + "y" * 500})
            assert response.headers["x-request-id"] == ("trace-7script" + "y" * 500)[:128]
            assert int(response.headers["openai-processing-ms"]) >= 0
        fresh = {(await world.http.get("/health")).headers["x-request-id"] for _ in range(2)}
        assert len(fresh) == 2
        streamed = await world.chat({"x-request-id": "mine"}, stream=True)
        assert streamed.headers["x-request-id"] == "mine"


async def test_models_health_ready_version():
    async with router(says("hi")) as world:
        listed = await world.openai.models.list()
        assert [model.id for model in listed.data] == [MODEL]
        model = (await world.http.get(f"/v1/models/{MODEL}")).json()
        assert (model["max_model_len"], model["object"]) == (256, "model")
        assert error_of(await world.http.get("/v1/models/a/b"))["code"] == "model_not_found"
        assert (await world.http.get("/health")).json() == {"status": "ok"}
        assert (await world.http.get("/ready")).json() == {"status": "ready", "detail": "1 pair"}
        world.readiness.append((False, "no decode worker"))
        response = await world.http.get("/ready")
        assert (response.status_code, response.headers["retry-after"]) == (503, "1")
        assert error_of(response)["message"] == "no decode worker"
        assert (await world.http.get("/metrics")).status_code == 404, "on a port of its own"
        assert b'baton_http_responses_total{route="/v1/models/{id:path}",status="404"}' in metrics.render()[0]
        assert b'baton_http_request_seconds_count{route="/v1/models/{id:path}"}' in metrics.render()[0]
        assert (await world.http.get("/version")).json()["version"]


async def test_stop_strings_have_no_effect_below_min_tokens():
    async with router(says("stop stop stop end")) as world:
        choice = (await world.complete(stop=["stop"], min_tokens=3)).json()["choices"][0]
        assert choice["text"].startswith("stop")
        assert (await world.complete(stop=["stop"])).json()["choices"][0]["text"] == ""
