"""A cluster of real processes: the SDK, joining and leaving, drain, hang-ups in every phase, killed workers."""

from __future__ import annotations

import json
import signal
import socket
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx2
import openai
import pytest

from baton.bundled import MODEL_DIR
from baton.domain.arithmetic import ceil_div
from baton.domain.worker import NO_KERNELS
from tests.cluster import Cluster, completion_tokens, eventually, links_in, plain_client
from tests.exactness.reference import Reference
from tests.kernels import kernel_levels
from tests.lateness import in_time

pytestmark = pytest.mark.integration

SLOW_PREFILL = {"token-budget": 16}
"""Makes a long prompt take hundreds of steps, so a hang-up finds the middle of it."""
WITH_IDS = {"ignore_eos": True, "return_token_ids": True}
IN_FLIGHT_PAGES = 8
"""Pages that may have arrived between the kill and the read of the counters."""
PAGES_FREE_WITHIN_S = 1.0


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    with Cluster(tmp_path_factory.mktemp("life"), prefill_flags=SLOW_PREFILL) as cluster:
        yield cluster


@pytest.fixture
def sdk(cluster: Cluster) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{cluster.url}/v1", api_key="none", max_retries=0, timeout=60.0) as client:
        yield client


def long_prompt(num_tokens: int, salt: int = 0) -> list[int]:
    return [5 + (7 * i + salt + i * i * salt) % 500 for i in range(num_tokens)]


def test_the_openai_sdk(cluster: Cluster, sdk: openai.OpenAI) -> None:
    messages = [{"role": "user", "content": "What is Baton?"}]
    model = sdk.models.list().data[0].id
    whole = sdk.chat.completions.create(model=model, messages=messages, temperature=0, max_tokens=24)  # type: ignore[arg-type]
    chunks = list(
        sdk.chat.completions.create(  # type: ignore[call-overload]
            model=model,
            messages=messages,
            temperature=0,
            max_tokens=24,
            stream=True,
            stream_options={"include_usage": True},
        )
    )
    text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices)
    assert text == whole.choices[0].message.content
    assert text.strip()
    assert whole.usage is not None
    assert chunks[-1].usage.total_tokens == whole.usage.total_tokens
    plain = sdk.completions.create(model=model, prompt="Once upon a time", temperature=0, max_tokens=8)
    assert plain.usage is not None
    assert plain.usage.completion_tokens <= 8
    in_time(cluster.page_hold_time_s(time.monotonic()), PAGES_FREE_WITHIN_S, "pages are free")


def test_the_bundled_model_calls_a_tool_when_it_needs_one(cluster: Cluster, sdk: openai.OpenAI) -> None:
    """Unconstrained, whole and streamed. Then it tells of a result, which it often takes for another one."""
    schema = {"type": "object", "properties": {"location": {"type": "string"}}, "required": ["location"]}
    function = {"name": "get_weather", "description": "Get the weather at a location.", "parameters": schema}
    chat: Any = {"model": cluster.model_name, "tools": [{"type": "function", "function": function}], "temperature": 0}
    question: list[Any] = [{"role": "user", "content": "What is the weather in Oslo?"}]
    said = sdk.chat.completions.create(messages=question, **chat).choices[0]
    [call] = said.message.tool_calls or []
    assert (said.finish_reason, call.function.name) == ("tool_calls", "get_weather")
    assert json.loads(call.function.arguments) == {"location": "Oslo"}
    parts = [event.choices[0].delta for event in sdk.chat.completions.create(messages=question, stream=True, **chat)]
    written = [part.tool_calls[0].function for part in parts if part.tool_calls]
    assert [(one.name, one.arguments) for one in written] == [(call.function.name, call.function.arguments)]
    result = {"role": "tool", "tool_call_id": call.id, "content": "It's sunny."}
    question += [said.message.model_dump(exclude_none=True), result]
    told = sdk.chat.completions.create(messages=question, **chat).choices[0]
    assert (told.finish_reason, told.message.tool_calls) == ("stop", None)
    assert (told.message.content or "").startswith("It is ")
    question = [{"role": "user", "content": "What is Baton?"}]
    other = sdk.chat.completions.create(messages=question, **chat).choices[0]
    assert (other.finish_reason, other.message.tool_calls) == ("stop", None)
    assert other.message.content


@pytest.mark.skipif(not kernel_levels(), reason="the kernels are not built")
def test_a_worker_names_the_kernels_that_it_has_mapped(cluster: Cluster) -> None:
    """The metric against the process's own memory. The portable library is always there: it tells what the CPU has."""
    levels = [level.value for level in kernel_levels()]
    for worker in cluster.workers():
        lines = Path(f"/proc/{worker.popen.pid}/maps").read_text().splitlines()
        mapped = {Path(line.split()[-1]).stem for line in lines if "/kernels/built/" in line}
        named = [name for name in (*levels, NO_KERNELS) if cluster.metric(worker.name, "baton_kernels", level=name)]
        assert named == [level for level in levels if level in mapped][-1:]


def test_link_is_reported(cluster: Cluster) -> None:
    transports = list(links_in(cluster.processes["decode-0"].log.read_text()))
    assert transports == ["nixl"]
    assert cluster.metric("decode-0", "baton_link_state", source="prefill-0", destination="decode-0") == 1
    assert cluster.metric("decode-0", "baton_link_bandwidth_bytes_per_second") > 0


def test_a_refused_request_reaches_no_worker(cluster: Cluster) -> None:
    before = [cluster.metric(name, "baton_prompt_tokens_total") for name in ("prefill-0", "decode-0")]
    bad = [
        (b"{", 400),
        (b"[]", 400),
        (b'{"model": "no-such-model", "prompt": "x"}', 404),
        (json.dumps({"model": cluster.model_name, "prompt": ""}).encode(), 400),
        (json.dumps({"model": cluster.model_name, "prompt": [1] * 100_000}).encode(), 400),
        (json.dumps({"model": cluster.model_name, "prompt": "x", "temperature": 3}).encode(), 400),
        (json.dumps({"model": cluster.model_name, "prompt": [10**9]}).encode(), 400),
    ]
    for body, status in bad:
        response = cluster.client.post("/v1/completions", content=body, headers={"content-type": "application/json"})
        assert response.status_code == status, (body[:80], response.text)
        assert set(response.json()["error"]) == {"message", "type", "param", "code"}
    assert [cluster.metric(name, "baton_prompt_tokens_total") for name in ("prefill-0", "decode-0")] == before


def hang_up_after(cluster: Cluster, body: dict[str, object], num_lines: int) -> None:
    """Opens a stream, reads `num_lines` events and closes the connection."""
    with plain_client(base_url=cluster.url, timeout=60.0) as client:
        request = {"model": cluster.model_name, "stream": True, "temperature": 0, **body}
        with client.stream("POST", "/v1/completions", json=request) as response:
            assert response.status_code == 200
            lines = (line for line in response.iter_lines() if line.startswith("data:"))
            for _ in range(num_lines):
                next(lines)


def test_hang_up_while_decoding(cluster: Cluster) -> None:
    hang_up_after(cluster, {"prompt": long_prompt(40), "max_tokens": 3000, "ignore_eos": True}, 5)
    in_time(cluster.page_hold_time_s(time.monotonic()), PAGES_FREE_WITHIN_S, "pages are free")


def test_hang_up_in_the_middle_of_a_prefill(cluster: Cluster) -> None:
    """The client hangs up while chunks are computed, published and pulled."""
    body = json.dumps({"model": cluster.model_name, "prompt": long_prompt(3500, salt=1), "max_tokens": 8}).encode()
    url, num_aborts = httpx2.URL(cluster.url), cluster.metric("router-0", "baton_aborts_total")
    head = f"POST /v1/completions HTTP/1.1\r\nhost: {url.host}\r\ncontent-type: application/json\r\n"
    with socket.create_connection((url.host, url.port), 10.0) as connection:
        connection.sendall(f"{head}content-length: {len(body)}\r\n\r\n".encode() + body)
        eventually(lambda: cluster.pages("decode-0")["reserved"] > 0, 20.0, "chunks are being imported")
    in_time(cluster.page_hold_time_s(time.monotonic()), PAGES_FREE_WITHIN_S, "pages are free")
    assert cluster.metric("router-0", "baton_aborts_total") == num_aborts + 1, "it was cut short"


def test_a_worker_joins_and_leaves(cluster: Cluster) -> None:
    """Workers join and leave through Redis alone: the router never restarts."""
    joined = cluster.start("prefill", "prefill-1")
    cluster.wait_links(2)
    prompts = [long_prompt(30, salt=n) for n in range(2, 10)]

    def is_used() -> bool:
        with ThreadPoolExecutor(8) as pool:
            list(pool.map(lambda prompt: cluster.complete(prompt, max_tokens=4, ignore_eos=True), prompts))
        return cluster.metric("prefill-1", "baton_prompt_tokens_total") > 0

    eventually(is_used, 10.0, "the new worker is used")
    joined.signal(signal.SIGTERM)
    assert joined.popen.wait(20.0) == 0
    cluster.wait_links(1)
    cluster.complete(prompts[0], max_tokens=4)
    in_time(cluster.page_hold_time_s(time.monotonic()), PAGES_FREE_WITHIN_S, "pages are free")


def test_sigterm_lets_requests_finish(tmp_path: Path) -> None:
    """A draining decode worker finishes its requests; the client notices nothing."""
    reference = Reference(MODEL_DIR)
    prompt = long_prompt(33, salt=3)
    with Cluster(tmp_path, num_decode=1) as cluster, ThreadPoolExecutor(1) as pool:
        parameters = {"max_tokens": 200, "ignore_eos": True, "return_token_ids": True}
        answer = pool.submit(lambda: cluster.complete(prompt, **parameters))
        eventually(lambda: cluster.pages("decode-0")["live"] > 0, 20.0, "it is decoding")
        decode = cluster.processes["decode-0"]
        decode.signal(signal.SIGTERM)
        assert completion_tokens(answer.result(60.0)) == reference.generate(prompt, 200)
        assert decode.popen.wait(30.0) == 0
        refused = cluster.client.post("/v1/completions", json={"model": cluster.model_name, "prompt": "x"})
        assert refused.status_code == 503
        assert int(refused.headers["retry-after"]) >= 1


@pytest.mark.parametrize("victim", ["prefill-0", "decode-0"])
def test_kill_the_only_worker(victim: str, tmp_path: Path) -> None:
    """Without another worker the request ends with a typed error in time, and the survivor holds nothing."""
    survivor = "decode-0" if victim == "prefill-0" else "prefill-0"
    flags = {"request-deadline-s": 8}
    with Cluster(tmp_path, prefill_flags=SLOW_PREFILL, router_flags=flags) as cluster, ThreadPoolExecutor(1) as pool:
        body = {"model": cluster.model_name, "prompt": long_prompt(3000, salt=5), "max_tokens": 900}
        answer = pool.submit(lambda: cluster.client.post("/v1/completions", json=body, timeout=60.0))
        eventually(lambda: cluster.pages("decode-0")["reserved"] > 0, 20.0, "chunks are being imported")
        cluster.processes[victim].signal(signal.SIGKILL)
        response = answer.result(60.0)
        assert response.status_code in (500, 503, 504), response.text
        assert response.json()["error"]["code"] in ("worker_lost", "link_broken", "deadline_exceeded", "no_workers")
        eventually(lambda: cluster.has_no_busy_pages(survivor), 8.0, f"{survivor} holds nothing")


@pytest.mark.parametrize("digests", [True, False])
def test_kill_one_of_two_prefill_workers(digests: bool, tmp_path: Path) -> None:
    """Killed in mid-prompt: decode keeps the pages that it can prove. The answer is the same."""
    prompt, num_tokens = long_prompt(3500, salt=6), 20
    flags = {"digests": digests, "export-lease-s": 1.0}  # renewed every 0.1 s
    with Cluster(tmp_path, num_prefill=2, flags=flags, prefill_flags=SLOW_PREFILL) as cluster:
        cluster.wait_links(2)
        page_bytes, num_pages = cluster.page_bytes("decode-0"), ceil_div(len(prompt), 16)
        with ThreadPoolExecutor(1) as pool:
            answer = pool.submit(lambda: cluster.complete(prompt, max_tokens=num_tokens, **WITH_IDS))
            eventually(lambda: cluster.bytes_moved >= 40 * page_bytes, 40.0, "a part of the prompt has landed")
            (busy,) = [p.name for p in cluster.workers("prefill") if cluster.pages(p.name)["live"]]
            cluster.processes[busy].signal(signal.SIGKILL)
            cluster.processes[busy].popen.wait(10.0)
            num_bytes = cluster.bytes_moved
            tokens = completion_tokens(answer.result(60.0))
        assert tokens == Reference(MODEL_DIR).generate(prompt, num_tokens)
        assert cluster.metric("router-0", "baton_retries_total") >= 1
        num_kept = cluster.metric("decode-0", "baton_cached_tokens_total", role="decode") / 16
        assert num_kept >= 20
        assert cluster.bytes_moved - num_bytes <= (num_pages - num_kept + IN_FLIGHT_PAGES) * page_bytes
        cluster.wait_pages_free(8.0)


def test_kill_one_of_two_decode_workers(tmp_path: Path) -> None:
    """With another worker the stream continues after a pause, with the tokens of an undisturbed run."""
    prompt, num_tokens = long_prompt(100, salt=6), 400
    with Cluster(tmp_path, num_decode=2, prefill_flags=SLOW_PREFILL) as cluster:
        cluster.wait_links(2)
        with ThreadPoolExecutor(1) as pool:
            answer = pool.submit(lambda: cluster.complete(prompt, max_tokens=num_tokens, **WITH_IDS))
            busy = eventually(lambda: _decoding_worker(cluster), 20.0, "a decode worker is at it")
            cluster.processes[busy].signal(signal.SIGKILL)
            tokens = completion_tokens(answer.result(60.0))
        assert tokens == Reference(MODEL_DIR).generate(prompt, num_tokens)
        assert cluster.metric("router-0", "baton_retries_total") >= 1


def _decoding_worker(cluster: Cluster) -> str | None:
    return next((p.name for p in cluster.workers("decode") if cluster.pages(p.name)["live"]), None)
