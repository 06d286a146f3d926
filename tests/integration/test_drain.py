"""Workers that leave under load: `baton drain`, SIGTERM, one after another, and no client notices."""

from __future__ import annotations

import itertools
import json
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

import httpx2
import pytest

from baton.bundled import MODEL_DIR
from tests.cluster import Cluster, eventually
from tests.exactness.reference import Reference

pytestmark = pytest.mark.integration

NUM_TOKENS = 40
NUM_CLIENTS = 3
EXIT_TIMEOUT_S = 40.0


def prompt_of(number: int) -> list[int]:
    return [5 + (11 * i + 17 * number + i * i * number) % 500 for i in range(20 + 7 * number)]


PROMPTS = [prompt_of(number) for number in range(10)]


@pytest.fixture(scope="module")
def expected() -> list[list[int]]:
    """What an undisturbed run answers."""
    reference = Reference(MODEL_DIR)
    return [reference.generate(prompt, NUM_TOKENS) for prompt in PROMPTS]


def streamed(client: httpx2.Client, model: str, prompt: list[int]) -> list[int]:
    """The token ids of one stream, which must come to its end."""
    body = {
        "model": model, "prompt": prompt, "stream": True, "temperature": 0, "max_tokens": NUM_TOKENS,
        "ignore_eos": True, "return_token_ids": True,
    }  # fmt: skip
    tokens: list[int] = []
    with client.stream("POST", "/v1/completions", json=body) as response:
        assert response.status_code == 200, response.read()
        lines = [line.removeprefix("data: ") for line in response.iter_lines() if line.startswith("data: ")]
    assert lines[-1] == "[DONE]", lines[-1]
    for line in lines[:-1]:
        event = json.loads(line)
        assert "error" not in event, event
        tokens += event["choices"][0].get("token_ids") or []
    return tokens


class Load:
    """Clients that ask one prompt after another, until told to stop; their first failure is kept."""

    def __init__(self, cluster: Cluster, expected: list[list[int]]) -> None:
        self._cluster = cluster
        self._expected = expected
        self._stop = threading.Event()
        self._model = cluster.model_name
        self._answered = threading.Semaphore(0)
        self.num_answered = 0

    def run(self, number: int) -> None:
        with httpx2.Client(base_url=self._cluster.url, timeout=90.0, trust_env=False) as client:
            for index in itertools.count(number):
                if self._stop.is_set():
                    return
                at = index % len(PROMPTS)
                assert streamed(client, self._model, PROMPTS[at]) == self._expected[at]
                self.num_answered += 1
                self._answered.release()

    def stop(self) -> None:
        self._stop.set()

    def wait_for(self, num_answers: int) -> None:
        """Until so many more have been answered."""
        for _ in range(num_answers):
            assert self._answered.acquire(timeout=60.0), "no answer any more"


@contextmanager
def steady_load(cluster: Cluster, expected: list[list[int]]) -> Iterator[Load]:
    """Raises what went wrong for any client."""
    load = Load(cluster, expected)
    with ThreadPoolExecutor(NUM_CLIENTS) as pool:
        clients: list[Future[None]] = [pool.submit(load.run, 3 * number) for number in range(NUM_CLIENTS)]
        try:
            yield load
        finally:
            load.stop()
        for client in clients:
            client.result(90.0)


def drain_command(cluster: Cluster, *words: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "services.cli.main", "drain", *words, f"--redis-url={cluster.redis.url}"]
    return subprocess.run(command, capture_output=True, text=True, timeout=EXIT_TIMEOUT_S + 20, check=False)


def test_every_worker_is_restarted_and_no_request_fails(tmp_path: Path, expected: list[list[int]]) -> None:
    """Half of them by `baton drain`, half by SIGTERM; each comes back under its name, as another process."""
    with (
        Cluster(tmp_path, num_prefill=2, num_decode=2, prefill_flags={"token-budget": 32}) as cluster,
        steady_load(cluster, expected) as load,
    ):
        cluster.wait_links(4)
        for name, role in (
            ("prefill-0", "prefill"),
            ("decode-0", "decode"),
            ("prefill-1", "prefill"),
            ("decode-1", "decode"),
        ):
            load.wait_for(2 * NUM_CLIENTS)
            old = cluster.processes[name]
            old.expected_to_live = False
            if name.endswith("0"):
                said = drain_command(cluster, name)
                assert said.returncode == 0, said.stderr
                assert f"{name} is draining" in said.stderr
                assert said.stderr.rstrip().endswith(f"{name} has left")
            else:
                old.popen.send_signal(signal.SIGTERM)
            assert old.popen.wait(EXIT_TIMEOUT_S) == 0, old.tail()
            cluster.start(role, name)
            cluster.wait_links(4)
        load.wait_for(2 * NUM_CLIENTS)
        num_answered = load.num_answered
    assert num_answered >= 10 * NUM_CLIENTS


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    with Cluster(tmp_path_factory.mktemp("drain")) as cluster:
        yield cluster


def test_a_worker_of_another_page_size_is_refused_by_name(cluster: Cluster) -> None:
    """The link is refused in words, and the cluster serves on with the pairs that fit."""
    other = cluster.start("prefill", "prefill-x", {"page-size": 32})
    log = cluster.processes["decode-0"].log
    eventually(lambda: "prefill=prefill-x" in log.read_text(), 120.0, "decode has met the other worker")
    (refused,) = [line for line in log.read_text().splitlines() if "prefill=prefill-x" in line]
    assert "link_failed" in refused
    assert "page_size: 32 here, 16 there" in refused
    assert cluster.metric("decode-0", "baton_link_state", source="prefill-x") == 0
    for prompt in PROMPTS[:4]:
        assert cluster.complete(prompt, max_tokens=2, ignore_eos=True)["usage"]["completion_tokens"] == 2
    assert cluster.metric("prefill-x", "baton_prompt_tokens_total") == 0
    other.signal(signal.SIGTERM)
    assert other.popen.wait(EXIT_TIMEOUT_S) == 0
