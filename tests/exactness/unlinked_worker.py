"""A second decode worker of other pages or weights: it is not linked, says why, and answers nothing."""

from __future__ import annotations

from collections.abc import Sequence

from tests.cluster import Cluster, eventually
from tests.exactness.test_cluster_exactness import ask, split

TRIES_S = 60.0


def check_unlinked_worker(
    cluster: Cluster, flags: dict[str, str], why: str, prompts: Sequence[list[int]], expected: list[list[int]]
) -> None:
    """Starts it with `flags`. The cluster gives `expected` for `prompts`, twice: the second time from caches."""
    other = cluster.start("decode", "decode-1", flags)
    eventually(lambda: "link_failed" in other.log.read_text(), TRIES_S, "the other worker has tried a link")
    assert why in other.log.read_text()
    eventually(lambda: cluster.has_no_busy_pages("decode-1"), TRIES_S, "the other worker serves its metrics")
    with split(cluster):
        for _ in range(2):
            assert [ask(cluster, prompt) for prompt in prompts] == expected
    assert cluster.metric("decode-1", "baton_link_state") == 0
    assert cluster.metric("decode-1", "baton_transfer_bytes_total") == 0
