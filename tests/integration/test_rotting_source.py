"""Pages that change at their source right after they settled: no answer is wrong, and none is lost."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import pytest

from chaos.testbed.fork_server import ForkedProcess, shared_fork_server
from tests.cluster import Cluster, completion_tokens

pytestmark = pytest.mark.integration

NUM_PROMPTS, NUM_ROUNDS = 20, 10
NUM_TOKENS = 12
NUM_CLIENTS = 4
PROGRAM = "tests.integration.rotting_prefill"


@dataclass
class RottingCluster(Cluster):
    """A cluster whose `prefill-0` has faulty memory once the file `trigger` exists."""

    mode: str = "after"

    @property
    def trigger(self) -> Path:
        return self.directory / "rot"

    def spawn(self, name: str, words: list[str], log: Path) -> ForkedProcess:
        if name != "prefill-0":
            return super().spawn(name, words, log)
        words = [self.mode, str(self.trigger), *words]
        return shared_fork_server().spawn(name, words, log, self.environment, PROGRAM)


def prompt_of(number: int) -> list[int]:
    return [5 + (13 * i + 7 * number + i * i * number) % 500 for i in range(40 + number)]


def ask(cluster: Cluster, number: int, salt: str) -> list[int]:
    options = {"max_tokens": NUM_TOKENS, "return_token_ids": True, "ignore_eos": True, "cache_salt": salt}
    return completion_tokens(cluster.complete(prompt_of(number), **options))


def answers(cluster: Cluster, num_rounds: int, name: str) -> list[list[list[int]]]:
    """The tokens of every prompt, round by round. Each round has prefix caches of its own."""
    with ThreadPoolExecutor(NUM_CLIENTS) as pool:
        return [
            list(pool.map(lambda number, salt=f"{name}-{i}": ask(cluster, number, salt), range(NUM_PROMPTS)))
            for i in range(num_rounds)
        ]


def num_wrong(found: list[list[list[int]]], wanted: list[list[int]]) -> int:
    return sum(tokens != right for one in found for tokens, right in zip(one, wanted, strict=True))


def test_none_of_200_answers_is_wrong_while_a_source_rots(tmp_path: Path):
    with RottingCluster(tmp_path, num_prefill=2) as cluster:
        cluster.wait_links(2)
        (wanted,) = answers(cluster, 1, "good")
        cluster.trigger.touch()
        cluster.processes["prefill-0"].expected_running = False  # it leaves after three incidents, if there is time
        found = answers(cluster, NUM_ROUNDS, "rotting")
        assert num_wrong(found, wanted) == 0
        assert cluster.metric("decode-0", "baton_integrity_failures_total", kind="page_digest") > 0
        assert cluster.processes["prefill-0"].popen.poll() in (None, 1)
        assert "verdict=source" in cluster.processes["decode-0"].log.read_text()
        assert num_wrong(answers(cluster, 1, "rotting-0"), wanted) == 0, "the caches hold no wrong page"


@pytest.mark.slow
def test_the_damage_changes_answers_where_no_digest_can_show_it(tmp_path: Path):
    """The control: without it the test above could pass over damage that no answer depends on."""
    with RottingCluster(tmp_path, mode="before") as cluster:
        (wanted,) = answers(cluster, 1, "good")
        cluster.trigger.touch()
        assert num_wrong(answers(cluster, 1, "rotting"), wanted) > 0
