"""A cluster that drafts answers as one that does not, over HTTP: tokens, log probabilities, finish reasons and usage.

Real processes over both transfers. The reference is the pair of engines in one process, without a drafter. Every test
asserts that drafts were accepted. One decode worker of the cluster proposes chains, the other one trees; branches count
as accepted where the first guess was wrong.
"""

from __future__ import annotations

import itertools
import random
import signal
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from baton.domain.request import OutputToken, SamplingParams, StopParams
from baton.grammar import sources
from baton.model.loading.config import DtypeChoice
from baton.model.loading.loader import load_model
from baton.services.local.pair import LocalPair, PairLimits
from baton.transfer.nixl_agent import nixl_available
from tests.cluster import Cluster, completion_tokens, eventually, links_in
from tests.exactness.constrained_reference import ConstrainedReference, Draw
from tests.lateness import met
from tests.stream_client import ask, resume, tokens
from tests.tiny_models import VOCAB_SIZE, add_tokenizer, save_random_model

pytestmark = [pytest.mark.exactness, pytest.mark.integration]

PAGE_SIZE = 8
PAGES, CHUNKS = {"page-size": PAGE_SIZE}, {"token-budget": 24}
NGRAM: dict[str, Any] = {"drafter": "ngram"}
TREES: dict[str, Any] = {**NGRAM, "draft-tree": "3,2"}
NUM_TOKENS = 40
WAIT_S = 60.0
DRAWS: dict[str, dict[str, Any]] = {
    "greedy": {"temperature": 0},
    "seeded": {"temperature": 0.3, "seed": 4, "top_p": 0.9},
    "penalties": {"temperature": 0.5, "seed": 5, "frequency_penalty": 0.1, "repetition_penalty": 1.05},
    "bias": {"temperature": 0, "logit_bias": {"17": 1.5, "30": -100}},
}


def looping_prompt(seed: int, num_tokens: int = 45) -> list[int]:
    """Tokens that repeat, so that n-grams match from the first step on."""
    rng = random.Random(seed)
    part = [rng.randrange(9, VOCAB_SIZE) for _ in range(11)]
    return (part * 5)[:num_tokens]


def branching_prompt(seed: int, num_tokens: int = 90) -> list[int]:
    """Few different tokens in random order, so that several followed whatever three tokens the text ends with."""
    rng = random.Random(seed)
    return [rng.choice(FEW) for _ in range(num_tokens)]


FEW = (20, 21, 22)
ONLY_FEW = {str(token): 90 for token in FEW}
BRANCHING: dict[str, Any] = {"temperature": 2, "seed": 0, "logit_bias": ONLY_FEW}
"""An output that goes on like `branching_prompt`: the last continuation is the right guess now and then, as is another.

By `DraftPolicy` in process, at least 6 of 160 tokens are off the chain with seeds 0 and 2 of prompt and draw, whether
two drafts are verified a step or as many as pay if one costs a thirtieth or a tenth of a step.
"""


@dataclass(frozen=True)
class PlainEngine:
    """Both engines in one process, without a drafter."""

    pair: LocalPair

    def output(self, prompt: list[int], fields: dict[str, Any], num_tokens: int = NUM_TOKENS) -> list[OutputToken]:
        """The output for a body's `fields`."""
        bias = tuple((int(token), value) for token, value in fields.get("logit_bias", {}).items())
        names = ("temperature", "seed", "top_p", "frequency_penalty", "repetition_penalty")
        sampling = SamplingParams(
            **{name: fields[name] for name in names if name in fields}, logit_bias=bias, logprobs=2
        )
        ends = frozenset(fields.get("stop_token_ids", ()))
        stop = StopParams(num_tokens, fields.get("min_tokens", 0), ends)
        id = self.pair.submit(tuple(prompt), sampling, stop)
        assert id is not None
        return [token for part in self.pair.run() for token in part.tokens]

    def tokens(self, prompt: list[int], fields: dict[str, Any], num_tokens: int = NUM_TOKENS) -> list[int]:
        return [token.token for token in self.output(prompt, fields, num_tokens)]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return add_tokenizer(save_random_model("qwen3", tmp_path_factory.mktemp("model") / "qwen3"))


@pytest.fixture(scope="module")
def plain(model: Path) -> PlainEngine:
    loaded = load_model(model, dtype=DtypeChoice.FLOAT32, page_size=PAGE_SIZE)
    return PlainEngine(LocalPair(loaded, PairLimits(num_pages=256)))


@pytest.fixture(scope="module", params=["stream"] if nixl_available() else ["nixl", "stream"])
def cluster(request: pytest.FixtureRequest, model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    folder = tmp_path_factory.mktemp("drafting")
    with Cluster(
        folder, model=str(model), transport=request.param, flags=PAGES, prefill_flags=CHUNKS, decode_flags=NGRAM
    ) as cluster:
        cluster.start("decode", "decode-1", TREES)
        cluster.wait_links(2)
        yield cluster


def num_off_chain(cluster: Cluster, name: str) -> float:
    """Accepted drafts of trees that a chain would not have had."""
    return cluster.metric(name, "baton_draft_off_chain_total")


def num_accepted(cluster: Cluster) -> float:
    return sum(cluster.metric(p.name, "baton_draft_accepted_total") for p in cluster.workers("decode"))


def complete(cluster: Cluster, prompt: list[int], fields: dict[str, Any], **more: Any) -> dict[str, Any]:
    body = {"max_tokens": NUM_TOKENS, "ignore_eos": True, "return_token_ids": True, **fields, **more}
    return cluster.complete(prompt, **body)


def test_tokens_and_logprobs_of_every_draw(cluster: Cluster, plain: PlainEngine) -> None:
    """Three times: then prompts come from the prefix caches, at last all of them at once. Both workers draft."""
    cases = [(looping_prompt(seed), DRAWS[name]) for seed, name in enumerate(DRAWS)]
    expected = [plain.output(prompt, fields) for prompt, fields in cases]
    moved, accepted = cluster.bytes_moved, num_accepted(cluster)

    def answer(case: tuple[list[int], dict[str, Any]]) -> dict[str, Any]:
        return complete(cluster, *case, logprobs=2)

    with ThreadPoolExecutor(len(cases)) as pool:
        rounds = [[answer(case) for case in cases], [answer(case) for case in cases], list(pool.map(answer, cases))]
    for answers in rounds:
        for body, output in zip(answers, expected, strict=True):
            assert completion_tokens(body) == [token.token for token in output]
            assert body["usage"]["completion_tokens"] == NUM_TOKENS
            got = body["choices"][0]["logprobs"]["token_logprobs"]
            assert got == pytest.approx([token.logprobs.logprob for token in output if token.logprobs], abs=1e-5)
    assert cluster.bytes_moved > moved
    assert cluster.tokens_recomputed == 0
    assert num_accepted(cluster) > accepted
    for name in ("decode-0", "decode-1"):
        assert cluster.metric(name, "baton_draft_accepted_total", drafter="ngram") > 0
        assert cluster.metric(name, "baton_verification", bits="exact") == 1
    assert num_off_chain(cluster, "decode-0") == 0


def test_a_branch_is_accepted(cluster: Cluster, plain: PlainEngine) -> None:
    """New prompts, as the router gives them to the workers by turns, until the one with trees was right off a chain."""
    for seed in range(10):
        prompt, fields = branching_prompt(seed), BRANCHING | {"seed": seed}
        expected = plain.tokens(prompt, fields, 160)
        assert completion_tokens(complete(cluster, prompt, fields, max_tokens=160)) == expected
        if seed > 2 and num_off_chain(cluster, "decode-1"):
            break
    assert num_off_chain(cluster, "decode-1") > 0
    assert num_off_chain(cluster, "decode-0") == 0


def test_constrained_output(cluster: Cluster, model: Path) -> None:
    """Lists of few words, so that n-grams match, beside rows without a grammar; the second time all at once."""
    schema = {"type": "array", "items": {"enum": ["a", "bc", "def"]}, "minItems": 14, "maxItems": 30}
    reference, grammar = ConstrainedReference(model), sources.json_schema_grammar(schema)
    draws = [Draw(), Draw(temperature=0.6, seed=3), Draw(temperature=0.4, seed=5, frequency_penalty=0.2)]
    cases = [(looping_prompt(40 + seed), draw) for seed, draw in enumerate(draws)]
    expected = [reference.generate(grammar, prompt, 70, draw)[0] for prompt, draw in cases]
    accepted = num_accepted(cluster)

    def answer(case: tuple[list[int], Draw]) -> list[int]:
        prompt, draw = case
        fields: dict[str, Any] = {**draw.parameters(), "guided_json": schema, "max_tokens": 70}
        return completion_tokens(cluster.complete(prompt, **fields, return_token_ids=True))

    alone = [answer(case) for case in cases]
    assert num_accepted(cluster) > accepted
    with ThreadPoolExecutor(len(cases) + 1) as pool:
        free = pool.submit(complete, cluster, looping_prompt(1), DRAWS["greedy"])
        together = list(pool.map(answer, cases))
        assert len(completion_tokens(free.result())) == NUM_TOKENS
    assert alone == expected
    assert together == expected
    assert num_off_chain(cluster, "decode-0") == 0


def test_stops_in_the_middle_of_an_accepted_run(cluster: Cluster, plain: PlainEngine) -> None:
    prompt = looping_prompt(9)
    whole = plain.tokens(prompt, DRAWS["greedy"])
    for place in (7, 18, 25):
        fields = {**DRAWS["greedy"], "stop_token_ids": [whole[place]], "min_tokens": place - 3}
        expected = plain.tokens(prompt, fields)
        body = complete(cluster, prompt, fields)
        assert completion_tokens(body) == expected
        assert body["usage"]["completion_tokens"] == len(expected)
        assert body["choices"][0]["finish_reason"] == ("stop" if len(expected) < NUM_TOKENS else "length")
    for num_tokens in (1, 2, 5, 13):
        assert (
            completion_tokens(complete(cluster, prompt, DRAWS["greedy"], max_tokens=num_tokens)) == whole[:num_tokens]
        )


def test_forced_preemption_and_mixed_batches(model: Path, plain: PlainEngine, tmp_path: Path) -> None:
    """Prompts are computed beside rows with drafts, in a pool that is too small for two whole rows."""
    prompts = [looping_prompt(seed, 20) for seed in range(20, 26)]
    expected = [plain.tokens(prompt, DRAWS["greedy"], 160) for prompt in prompts]
    tight = {"num-pages": 34, "max-rows": 8, "token-budget": 24, **NGRAM}
    with (
        Cluster(tmp_path, model=str(model), num_prefill=0, flags=PAGES, decode_flags=tight) as cluster,
        ThreadPoolExecutor(6) as pool,
    ):
        answers = list(pool.map(lambda prompt: complete(cluster, prompt, DRAWS["greedy"], max_tokens=160), prompts))
        met(cluster.metric("decode-0", "baton_preemptions_total"), "more rows than the pool has room for")
        assert num_accepted(cluster) > 0
        cluster.wait_pages_free(5.0)
    assert [completion_tokens(body) for body in answers] == expected


def test_kills_and_a_worker_that_does_not_draft(model: Path, plain: PlainEngine, tmp_path: Path) -> None:
    """Trees over the one transport and the other, and a worker that does not draft.

    Two decode workers are killed in one answer, one with trees only after a branch was accepted. So accepted paths are
    replayed with trees, or with and from plain steps.
    """
    prompt, num_tokens = branching_prompt(0), 900
    expected = plain.tokens(prompt, BRANCHING, num_tokens)
    with Cluster(
        tmp_path, model=str(model), num_routers=2, flags=PAGES, prefill_flags=CHUNKS, decode_flags=TREES
    ) as cluster:
        cluster.start("decode", "decode-1", {"drafter": "none", "draft-tree": ""})
        cluster.start("decode", "decode-2", {"transport": "stream"})
        cluster.wait_links(3)
        used = {way for process in cluster.workers("decode") for way in links_in(process.log.read_text())}
        assert used == ({"nixl", "stream"} if nixl_available() is None else {"stream"})
        body = {"model": cluster.model_name, "prompt": prompt, "max_tokens": num_tokens, "stream": True}
        body |= {**BRANCHING, "return_token_ids": True, "ignore_eos": True}

        def is_ripe(name: str) -> bool:
            return name == "decode-1" or num_off_chain(cluster, name) > 0

        with ask(cluster.router_urls()[1], body) as events:
            seen = list(itertools.islice(events, 8))
            killed = {kill_busy(cluster, is_ripe)}
            seen += itertools.islice(events, 40)
            killed.add(kill_busy(cluster, is_ripe))
            seen += itertools.islice(events, 40)
            _kill(cluster, "router-1")
        with resume(cluster.url, seen[-1]) as events:
            seen += events
        assert [token for token in tokens(seen) if token is not None] == expected
        assert killed & {"decode-0", "decode-2"}, "a worker with accepted branches was killed"
        if "decode-1" in killed:  # the last one drafts
            assert num_accepted(cluster) > 0


def kill_busy(cluster: Cluster, is_ripe: Callable[[str], bool]) -> str:
    """Kills the decode worker that has the only row, once `is_ripe(its name)`. Returns its name."""

    def only_busy() -> str:
        running = [p.name for p in cluster.workers("decode") if p.expected_running]
        busy = [name for name in running if cluster.pages(name)["live"]]
        return busy[0] if len(busy) == 1 else ""

    name: str = eventually(only_busy, WAIT_S, "one decode worker has a row")
    eventually(lambda: is_ripe(name), WAIT_S, f"{name} has accepted a branch")
    met(cluster.pages(name)["live"], f"the kill of {name} and its row")
    _kill(cluster, name)
    return name


def _kill(cluster: Cluster, name: str) -> None:
    process = cluster.processes[name]
    process.expected_running = False
    process.signal(signal.SIGKILL)
    process.popen.wait(20.0)  # until then it still counts as running
