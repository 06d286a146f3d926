"""Processes drain under load, by `baton drain` or SIGTERM; no client notices."""

from __future__ import annotations

import itertools
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from baton.bundled import MODEL_DIR
from tests.cluster import Cluster, completion_tokens, eventually
from tests.exactness.reference import Reference
from tests.integration.operations.steady_load import CALL_TIMEOUT_S, WITH_IDS, ReferenceCall, prompt_of, steady_load
from tests.stream_client import ask, tokens

pytestmark = pytest.mark.integration

NUM_TOKENS = 40
NUM_TOKENS_OF_A_LONG_ONE = 1000
EXIT_TIMEOUT_S = 40.0
ONE_OF_EACH = ("prefill", "decode", "router")
SHORT_DRAIN = {"drain-timeout-s": 0.05}
"""The router does not wait for its streams: a second later their clients must resume at the other router."""


PROMPTS = [prompt_of(number) for number in range(5)]


def reference_calls(cluster: Cluster) -> list[ReferenceCall]:
    """The first call has a long answer of some seconds. The reference model gives the answers of the others."""
    long, *short = PROMPTS
    answer = cluster.complete(long, max_tokens=NUM_TOKENS_OF_A_LONG_ONE, **WITH_IDS)
    reference = Reference(MODEL_DIR)
    return [
        ReferenceCall(long, completion_tokens(answer)),
        *(ReferenceCall(prompt, reference.generate(prompt, NUM_TOKENS)) for prompt in short),
    ]


def drain_command(cluster: Cluster, name: str) -> str:
    """Runs `baton drain` to its end, which must be a success, and returns what it wrote."""
    log = cluster.directory / f"drain-{name}.log"
    command = cluster.spawn(f"drain {name}", ["drain", name, f"--redis-url={cluster.redis.url}"], log)
    exit_code, written = command.wait(EXIT_TIMEOUT_S + 20), log.read_text()
    assert exit_code == 0, written
    return written


def drain(cluster: Cluster, name: str) -> None:
    """Drains a process until it has exited cleanly: workers `*-0` by command, all others by SIGTERM."""
    process = cluster.processes[name]
    process.expected_running = False
    if name in ("prefill-0", "decode-0"):
        written = drain_command(cluster, name)
        assert f"{name} is draining" in written
        assert written.rstrip().endswith(f"{name} has left")
    else:
        process.popen.send_signal(signal.SIGTERM)
    assert process.popen.wait(EXIT_TIMEOUT_S) == 0, process.tail()


def test_no_request_fails_while_every_process_restarts(tmp_path: Path) -> None:
    """Every process restarts under its name. A client whose router drains resumes at the other one, and every answer is
    the undisturbed one."""
    chunks = {"token-budget": 32}
    with Cluster(tmp_path, "bundled", 2, 2, num_routers=2, prefill_flags=chunks, router_flags=SHORT_DRAIN) as cluster:
        cluster.wait_links(4)
        model, calls = cluster.model_name, reference_calls(cluster)
        with steady_load(cluster, calls) as clients:
            for number, role in itertools.product(range(2), ONE_OF_EACH):
                clients[-1].wait_for_an_answer()
                if role == "router":
                    eventually(clients[0].is_at_the_beginning, CALL_TIMEOUT_S, "much is left of a long answer")
                drain(cluster, f"{role}-{number}")
                cluster.start(role, f"{role}-{number}")
                cluster.wait_links(4)
                cluster.wait_ready()
            for client in clients[1:]:
                client.wait_for_an_answer()
        assert cluster.bytes_moved > 0
        assert cluster.tokens_recomputed == 0
        for url in cluster.router_urls():
            with ask(url, calls[1].body(model)) as events:
                assert tokens(list(events)) == calls[1].answer
    assert clients[0].num_resumes >= 2, "either router cut its long answer off"
    assert sum(client.num_answered for client in clients) >= 10


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    with Cluster(tmp_path_factory.mktemp("drain")) as cluster:
        yield cluster


def test_a_worker_of_another_page_size_is_refused_by_name(cluster: Cluster) -> None:
    """The link is refused with a reason, and the cluster continues with the pairs that fit."""
    other = cluster.start("prefill", "prefill-x", {"page-size": 32})
    log = cluster.processes["decode-0"].log
    eventually(lambda: "source=prefill-x" in log.read_text(), 120.0, "decode has met the other worker")
    (refused,) = [line for line in log.read_text().splitlines() if "source=prefill-x" in line]
    assert "link_failed" in refused
    assert "page_size: 32 here, 16 there" in refused
    assert cluster.metric("decode-0", "baton_link_state", source="prefill-x") == 0
    for prompt in PROMPTS[:4]:
        assert cluster.complete(prompt, max_tokens=2, ignore_eos=True)["usage"]["completion_tokens"] == 2
    assert cluster.metric("prefill-x", "baton_prompt_tokens_total") == 0
    other.signal(signal.SIGTERM)
    assert other.popen.wait(EXIT_TIMEOUT_S) == 0
