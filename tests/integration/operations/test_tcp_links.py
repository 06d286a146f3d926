"""Links that NIXL would make over TCP use the stream: no killed reader takes its source along."""

from __future__ import annotations

import signal
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from baton.transfer.nixl_agent import nixl_available
from tests.cluster import Cluster, completion_tokens, eventually, links_in

pytestmark = pytest.mark.integration

ONLY_TCP = {"UCX_TLS": "tcp", "UCX_NET_DEVICES": "lo"}
NUM_TOKENS = 120
PROMPTS = [[5 + (11 * i + 3 * number) % 500 for i in range(60)] for number in range(4)]


def answer(cluster: Cluster, prompt: list[int]) -> list[int]:
    options = {"max_tokens": NUM_TOKENS, "return_token_ids": True, "ignore_eos": True}
    return completion_tokens(cluster.complete(prompt, **options))


def test_a_killed_reader_costs_a_pause_where_nixl_has_only_tcp(tmp_path: Path):
    if missing := nixl_available():
        pytest.skip(missing)
    with Cluster(tmp_path, num_decode=2, environment=ONLY_TCP) as cluster:
        cluster.wait_links(2)
        for name in ("decode-0", "decode-1"):
            log = cluster.processes[name].log.read_text()
            assert "link_avoids_tcp" in log
            assert list(links_in(log)) == ["stream"], "what is reported is what the link uses"
        expected = [answer(cluster, prompt) for prompt in PROMPTS]
        assert [len(tokens) for tokens in expected] == [NUM_TOKENS] * len(PROMPTS)
        for name in ("decode-0", "decode-1"):
            assert cluster.metric(name, "baton_transfer_bytes_total", transport="nixl") == 0
        assert sum(cluster.metric(f"decode-{i}", "baton_transfer_bytes_total", transport="stream") for i in (0, 1)) > 0
        victim = cluster.processes["decode-0"]
        with ThreadPoolExecutor(len(PROMPTS)) as pool:
            answers = [pool.submit(answer, cluster, prompt) for prompt in PROMPTS]
            eventually(lambda: cluster.pages("decode-0")["live"] > 0, 30.0, "the victim decodes")
            victim.signal(signal.SIGKILL)
            assert [one.result(60.0) for one in answers] == expected
        source = cluster.processes["prefill-0"]
        assert source.popen.poll() is None, source.tail()
        cluster.start("decode", "decode-0")
        cluster.wait_links(2)
        assert [answer(cluster, prompt) for prompt in PROMPTS] == expected
