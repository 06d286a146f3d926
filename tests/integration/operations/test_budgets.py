"""`baton role` on real processes under load: no request fails, every token is the model's, and caches stay."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import pytest

from baton.bundled import MODEL_DIR
from baton.services.cli.main import run
from tests.cluster import Cluster
from tests.exactness.reference import Reference
from tests.integration.operations.steady_load import Client, ReferenceCall, prompt_of, steady_load

pytestmark = pytest.mark.integration

NUM_TOKENS = 24
NUM_LONG_TOKENS = 120
NUM_FLIPS = 30
START = {"prefill-0": (512, None, None), "decode-0": (0, 64, 64), "decode-1": (32, 64, 64)}


def role(cluster: Cluster, name: str, prefill_tokens: int, rows: int | None = None, most: int | None = None) -> None:
    flags = {"prefill-tokens": prefill_tokens, "rows": rows, "reservations": most}
    words = [f"--{flag}={value}" for flag, value in flags.items() if value is not None]
    assert run(["role", name, f"--redis-url={cluster.redis.url}", *words]) == 0


def budget(cluster: Cluster, name: str, kind: str) -> float:
    return cluster.metric(name, "baton_budget", kind=kind)


def prompts_computed(cluster: Cluster) -> dict[str, float]:
    return {worker.name: cluster.metric(worker.name, "baton_prompt_tokens_total") for worker in cluster.workers()}


def wait_for_answers(clients: Sequence[Client], num: int = 2) -> None:
    """Each client gets `num` more answers: the last of them began after the call."""
    for client in clients:
        while client.answers_ready():
            client.wait_for_an_answer()
        for _ in range(num):
            client.wait_for_an_answer()


@pytest.fixture(scope="module")
def calls() -> list[ReferenceCall]:
    reference = Reference(MODEL_DIR)
    lengths = [NUM_LONG_TOKENS, *[NUM_TOKENS] * 4]
    return [
        ReferenceCall(prompt_of(number), reference.generate(prompt_of(number), length))
        for number, length in enumerate(lengths)
    ]


@pytest.fixture(scope="module")
def started(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    """One prefill worker and two decode workers, the same processes for every test: budgets are what changes."""
    with Cluster(tmp_path_factory.mktemp("budgets"), num_decode=2) as cluster:
        cluster.wait_links(2)
        processes = [worker.popen.pid for worker in cluster.workers()]
        yield cluster
        assert [worker.popen.pid for worker in cluster.workers()] == processes


@pytest.fixture
def cluster(started: Cluster) -> Cluster:
    """The cluster with the budgets of `START`."""
    for name, budgets in START.items():
        role(started, name, *budgets)
    return started


@contextmanager
def loaded(cluster: Cluster, calls: list[ReferenceCall]) -> Iterator[list[Client]]:
    """Clients at work; afterwards nothing was computed twice, and no page is held."""
    before = cluster.bytes_moved
    with steady_load(cluster, calls) as clients:
        yield clients
    assert cluster.tokens_recomputed == 0
    assert cluster.bytes_moved > before
    cluster.wait_pages_free(10.0)


def test_the_command_shows_and_refuses_by_name(started: Cluster, capsys: pytest.CaptureFixture[str]) -> None:
    """The first test: reservations follow rows only until someone sets them."""

    def ask(*words: str) -> tuple[int, str]:
        capsys.readouterr()
        code = run(["role", *words, f"--redis-url={started.redis.url}"])
        shown = capsys.readouterr()
        return code, (shown.out or shown.err).strip()

    assert ask("decode-0") == (0, "decode-0: prefill tokens 0, rows 64, reservations 64")
    assert ask("decode-0", "--rows=3") == (0, "decode-0: prefill tokens 0, rows 3, reservations 3")
    code, text = ask("prefill-0", "--rows=4")
    assert code == 2
    assert "rows: a worker that was started as prefill has no rows" in text
    code, text = ask("decode-0", "--prefill-tokens=3")
    assert code == 2
    assert "prefill_tokens must be 0 or at least a page of 16" in text
    assert ask("decode-9")[0] == 2
    log = started.processes["decode-0"].log.read_text()
    assert [line for line in log.splitlines() if "budgets_changed" in line and "rows_before=64" in line]


def test_a_role_changes_under_load(cluster: Cluster, calls: list[ReferenceCall]) -> None:
    with loaded(cluster, calls) as clients:
        wait_for_answers(clients)
        role(cluster, "prefill-0", 0)
        wait_for_answers(clients)
        before = prompts_computed(cluster)
        wait_for_answers(clients)
        after = prompts_computed(cluster)
        assert after["prefill-0"] == before["prefill-0"], "it takes no prompts"
        assert after["decode-0"] == before["decode-0"], "a decode worker without a budget computes none"
        assert after["decode-1"] > before["decode-1"]
        role(cluster, "decode-0", 64)
        role(cluster, "decode-1", 0, 0)
        wait_for_answers(clients)
        before, cached = prompts_computed(cluster), cluster.metric("decode-0", "baton_cached_tokens_total")
        wait_for_answers(clients)
        after = prompts_computed(cluster)
        assert after["decode-0"] > before["decode-0"], "raised, it computes them"
        assert after["decode-1"] == before["decode-1"], "without rows it takes nothing"
        assert cluster.metric("decode-0", "baton_cached_tokens_total") > cached
        moved = cluster.bytes_moved
        role(cluster, "prefill-0", 256)
        role(cluster, "decode-0", 0)
        wait_for_answers(clients)
        assert cluster.bytes_moved > moved or cluster.metric("decode-0", "baton_cached_tokens_total") > cached
        assert [budget(cluster, name, "prefill_tokens") for name in START] == [256, 0, 0]


def test_no_request_fails_while_budgets_flip(cluster: Cluster, calls: list[ReferenceCall]) -> None:
    """Any budgets, 0 among them, on two workers, as fast as the command can; `decode-1` takes what they leave."""
    rng = random.Random(11)
    with loaded(cluster, calls) as clients:
        for number in range(NUM_FLIPS):
            if rng.random() < 0.5:
                role(cluster, "prefill-0", rng.choice([0, 16, 64, 512]))
            else:
                role(cluster, "decode-0", rng.choice([0, 16, 64]), rng.choice([0, 1, 2, 64]), rng.choice([0, 1, 64]))
            if number % 10 == 9:
                wait_for_answers(clients, 1)
        role(cluster, "prefill-0", 512)
        role(cluster, "decode-0", *START["decode-0"])
        wait_for_answers(clients)
    assert sum(client.num_answered for client in clients) >= 10
