"""Prefill refuses the commit of late pages, and the client gets the right tokens."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from baton.bundled import MODEL_DIR
from tests.cluster import Cluster, eventually
from tests.exactness.reference import Reference
from tests.stream_client import ResumableCall

pytestmark = pytest.mark.integration

NUM_TOKENS = 24
NUM_PROMPT_TOKENS = 300
NUM_TRIES = 8
PATIENCE_S = 60.0
WITHOUT_DIGESTS = {"digests": False, "export-lease-s": 2.5, "worker-ttl-s": 10, "page-size": 2}
"""Makes a commit ask prefill. A briefly stopped worker is not declared dead."""
PREFILL = {"token-budget": 2}
"""Makes every step one page. A prefill takes about a second, less than the lease, so decode stops before the seal."""
ROUTER = {"worker-ttl-s": 10, "max-attempts": 10}


@pytest.fixture
def cluster(tmp_path: Path) -> Iterator[Cluster]:
    with Cluster(
        tmp_path,
        transport="stream",
        flags=WITHOUT_DIGESTS,
        prefill_flags=PREFILL,
        router_flags=ROUTER,
    ) as cluster:
        yield cluster


def prompt_of(number: int) -> list[int]:
    return [5 + (13 * i + 7 * number + i * i * number) % 500 for i in range(NUM_PROMPT_TOKENS)]


def answer_with_a_pause(cluster: Cluster, body: dict[str, Any]) -> list[int | None]:
    """The tokens of a call whose decode worker is stopped before the seal until prefill's lease has expired."""
    decode, call = cluster.processes["decode-0"], ResumableCall(cluster.router_urls, body)

    num_bytes = cluster.bytes_moved
    with ThreadPoolExecutor(1) as pool:
        answer = pool.submit(call.run, PATIENCE_S)
        eventually(lambda: cluster.bytes_moved > num_bytes or call.seen, PATIENCE_S, "a chunk is pulled")
        decode.signal(signal.SIGSTOP)
        try:
            eventually(lambda: not cluster.pages("prefill-0")["live"], PATIENCE_S, "the prompt is sealed")
            eventually(lambda: not cluster.pages("prefill-0")["pinned"], PATIENCE_S, "the lease has ended")
        finally:
            decode.signal(signal.SIGCONT)
        return answer.result(PATIENCE_S)


def test_a_commit_after_the_lease_is_refused_and_the_answer_is_right(cluster: Cluster) -> None:
    """The attempt fails, the request succeeds. If the stop comes too late on a busy machine, another call follows."""
    reference = Reference(MODEL_DIR)

    def num_refused() -> float:
        return cluster.metric("decode-0", "baton_commit_total", result="invalid")

    assert num_refused() == 0
    for number in range(NUM_TRIES):
        prompt = prompt_of(number)
        body = {
            "model": cluster.model_name, "prompt": prompt, "stream": True, "temperature": 0, "max_tokens": NUM_TOKENS,
            "ignore_eos": True, "return_token_ids": True,
        }  # fmt: skip
        assert answer_with_a_pause(cluster, body) == reference.generate(prompt, NUM_TOKENS)
        if num_refused():
            break
    assert num_refused() >= 1
    assert cluster.metric("router-0", "baton_retries_total", reason="lease_ended") >= 1
    cluster.wait_pages_free(5.0)
