"""With a file tier the cluster's greedy tokens are the model's own: cold, warm, and after `kill -9` and a restart."""

from __future__ import annotations

import random
import re
import signal
from pathlib import Path

import httpx2
import pytest

from baton.bundled import MODEL_DIR
from tests.cluster import Cluster, eventually
from tests.exactness.reference import Reference
from tests.exactness.test_cluster_exactness import NUM_TOKENS, PAGE_SIZE, ask, random_prompt

pytestmark = [pytest.mark.exactness, pytest.mark.integration]

START_S = 120.0
WRITE_S = 60.0
LATE = re.compile("file_tier_rests.*a read is late")
MAX_RESTARTS = 4


def test_a_killed_worker_restarts_warm_and_exact(tmp_path: Path) -> None:
    rng = random.Random(54)
    prompts = [random_prompt(rng, 12 * PAGE_SIZE + 3), random_prompt(rng, 5 * PAGE_SIZE)]
    num_pages = 12 + 4  # the last token of a prompt is always computed
    reference = Reference(MODEL_DIR)
    expected = [reference.generate(prompt, NUM_TOKENS) for prompt in prompts]
    flags = {"file-tier-dir": tmp_path / "tier", "token-budget": 24}
    with Cluster(tmp_path, transport="stream", flags={"page-size": PAGE_SIZE}, prefill_flags=flags) as cluster:

        def files(metric: str, **labels: str) -> float:
            return cluster.metric("prefill-0", metric, **labels)

        assert [ask(cluster, prompt) for prompt in prompts] == expected
        assert [ask(cluster, prompt) for prompt in prompts] == expected, "warm on the device"
        eventually(
            lambda: files("baton_tier_pages_total", result="written") == num_pages, WRITE_S, "the copies are complete"
        )
        for _ in range(MAX_RESTARTS):
            restart(cluster)
            assert [ask(cluster, prompt) for prompt in prompts] == expected, "warm from files"
            found, computed = files("baton_cached_tokens_total"), files("baton_step_tokens_sum")
            assert found + computed == files("baton_prompt_tokens_total"), "device + file + computed"
            assert files("baton_tier_corrupt_total") == 0
            if not LATE.search(cluster.processes["prefill-0"].log.read_text()):  # else a busy machine, and misses
                break
        assert files("baton_cached_tokens_total", tier="file") == num_pages * PAGE_SIZE


def restart(cluster: Cluster) -> None:
    """Kills the prefill worker and starts it again over the same directory."""
    victim = cluster.processes["prefill-0"]
    victim.signal(signal.SIGKILL)
    victim.popen.wait(30.0)
    cluster.start("prefill", "prefill-0")
    eventually(lambda: serves(cluster), START_S, "the worker serves again")
    cluster.wait_ready()


def serves(cluster: Cluster) -> bool:
    """True once the restarted worker is linked with the decode worker."""
    process = cluster.processes["prefill-0"]
    try:
        return "prefill_serving" in process.log.read_text() and cluster.metric("decode-0", "baton_link_state") == 1
    except httpx2.TransportError:
        return False
