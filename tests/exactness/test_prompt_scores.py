"""Scores of prompts are those of the model's own forward pass over the whole prompt, to 1e-5 in float32."""

from __future__ import annotations

import random
import signal
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx2
import openai
import pytest

from baton.domain.request import SamplingParams, StopParams
from baton.domain.scores.prompt_scores import ScoredToken
from baton.model.loading.config import DtypeChoice
from baton.model.loading.loader import DecoderChoice, load_model
from baton.model.sampling import prompt_scorer
from baton.services.local.pair import LocalPair, PairLimits
from baton.services.router.text.text_model import TextModel
from baton.transfer.nixl_agent import nixl_available
from tests.cluster import Cluster, completion_tokens, eventually
from tests.exactness.reference import Reference
from tests.exactness.score_reference import TOLERANCE, ScoreReference
from tests.lateness import met
from tests.stream_client import Event, ResumableCall
from tests.tiny_models import FAMILIES, VOCAB_SIZE, add_tokenizer, save_random_model

pytestmark = [pytest.mark.exactness, pytest.mark.integration]

PAGES, CHUNKS = {"page-size": 8}, {"token-budget": 24}
LENGTHS = (1, 2, 8, 9, 24, 25, 101)


def prompt_of(seed: int, num_tokens: int) -> list[int]:
    rng = random.Random(seed)
    return [rng.randrange(9, VOCAB_SIZE) for _ in range(num_tokens)]


def scored(pair: LocalPair, prompt: list[int], k: int) -> list[ScoredToken]:
    pair.submit(tuple(prompt), SamplingParams(temperature=0.0), StopParams(1), prompt_logprobs=k)
    [scores] = [part.scores for part in pair.run() if part.scores is not None]
    return scores.tokens(k)


@pytest.mark.parametrize("decoder", [DecoderChoice.LEAN, DecoderChoice.STOCK])
@pytest.mark.parametrize("family", ["llama", "qwen3", "gemma2"])
def test_every_length_and_chunk(
    family: str, decoder: DecoderChoice, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each prompt twice: its pages are cached the second time. A few rows of logits at a time."""
    monkeypatch.setitem(prompt_scorer.SCORE_ROWS, "cpu", 5)
    directory = save_random_model(family, tmp_path / family)
    reference = ScoreReference(directory)
    model = load_model(directory, dtype=DtypeChoice("float32"), page_size=8, decoder=decoder)
    pair = LocalPair(model, PairLimits(num_pages=64, token_budget=24))
    for length in LENGTHS:
        prompt = prompt_of(length, length)
        for k in (0, 3):
            if length == 1:
                pair.submit(tuple(prompt), SamplingParams(temperature=0.0), StopParams(1), prompt_logprobs=k)
                assert [part.scores for part in pair.run()] == [None]
            else:
                reference.check(prompt, scored(pair, prompt, k), k)


def test_the_families_are_known() -> None:
    assert {"llama", "qwen3", "gemma2"} <= set(FAMILIES)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return add_tokenizer(save_random_model("qwen3", tmp_path_factory.mktemp("model") / "qwen3"))


@pytest.fixture(scope="module")
def reference(model: Path) -> ScoreReference:
    return ScoreReference(model)


@pytest.fixture(scope="module", params=["stream"] if nixl_available() else ["nixl", "stream"])
def cluster(request: pytest.FixtureRequest, model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    with Cluster(
        tmp_path_factory.mktemp("scores"), model=str(model), transport=request.param, flags=PAGES, prefill_flags=CHUNKS
    ) as cluster:
        yield cluster


def test_an_echo_with_logprobs(cluster: Cluster, model: Path, reference: ScoreReference) -> None:
    """After a plain request whose pages are cached, and before one that finds them again."""
    prompt = prompt_of(1, 77)
    tokens = Reference(model).generate(prompt, 6)
    fields = {"max_tokens": 6, "ignore_eos": True, "return_token_ids": True, "temperature": 0}
    assert completion_tokens(cluster.complete(prompt, **fields)) == tokens
    body = cluster.complete(prompt, **fields, echo=True, logprobs=2, n=2)
    for choice in range(2):
        assert completion_tokens(body, choice) == tokens
        logprobs = body["choices"][choice]["logprobs"]
        assert len(logprobs["tokens"]) == len(prompt) + len(tokens)
        reference.check_logprobs([*prompt, *tokens], logprobs, 2)
        assert "".join(logprobs["tokens"]) == body["choices"][choice]["text"] or "\ufffd" in str(logprobs["tokens"])
        assert "prompt_logprobs" not in body["choices"][choice]
    again = cluster.complete(prompt, **fields)
    assert completion_tokens(again) == tokens
    assert again["usage"]["prompt_tokens_details"]["cached_tokens"] == 72


def test_named_tokens_of_every_place(cluster: Cluster, reference: ScoreReference) -> None:
    """The first token is prefill's, the others are decode's."""
    prompt, named = prompt_of(9, 41), [300, 9, 77]
    fields = {"max_tokens": 5, "ignore_eos": True, "return_token_ids": True, "return_tokens_as_token_ids": True}
    body = cluster.complete(prompt, **fields, temperature=0, logprobs=2, logprob_token_ids=named)
    tokens = completion_tokens(body)
    table = reference.table([*prompt, *tokens])[len(prompt) - 1 : -1]
    logprobs = body["choices"][0]["logprobs"]
    for row, token, top in zip(table, tokens, logprobs["top_logprobs"], strict=True):
        expected = {f"token_id:{id}": pytest.approx(float(row[id]), abs=TOLERANCE) for id in [*named, token]}
        assert top == expected


@pytest.mark.parametrize("k", [0, 1, 20])
def test_prompt_logprobs_of_both_endpoints(k: int, cluster: Cluster, reference: ScoreReference) -> None:
    prompts = [prompt_of(seed, 30 + seed) for seed in range(3)]
    body = cluster.complete(prompts, max_tokens=2, prompt_logprobs=k, n=2)
    assert [choice["index"] for choice in body["choices"]] == list(range(6))
    for choice in body["choices"]:
        reference.check_listed(prompts[choice["index"] // 2], choice["prompt_logprobs"], k)
        assert choice["logprobs"] is None
    fields: dict[str, Any] = {"model": cluster.model_name, "max_tokens": 2, "return_token_ids": True}
    fields |= {"messages": [{"role": "user", "content": "How many?"}], "prompt_logprobs": k}
    chat = cluster.client.post("/v1/chat/completions", json=fields).json()
    reference.check_listed(chat["prompt_token_ids"], chat["prompt_logprobs"], k)


def test_an_echo_alone_is_scored(cluster: Cluster, reference: ScoreReference) -> None:
    """`max_tokens: 0` answers nothing, in a whole response and in a stream; by the SDK."""
    client = openai.OpenAI(base_url=f"{cluster.url}/v1", api_key="none", max_retries=0)
    prompt = prompt_of(4, 50)
    fields: Any = {"model": cluster.model_name, "prompt": prompt, "max_tokens": 0, "echo": True, "logprobs": 3}
    whole = client.completions.create(**fields)
    [choice] = whole.choices
    assert choice.finish_reason == "length"
    assert whole.usage is not None
    assert (whole.usage.prompt_tokens, whole.usage.completion_tokens) == (50, 0)
    assert choice.logprobs is not None
    reference.check_logprobs(prompt, choice.logprobs.model_dump(), 3)
    assert len(choice.logprobs.tokens or []) == 50
    [event] = client.completions.create(**fields, stream=True)
    assert event.choices[0] == choice


def test_a_stream_has_the_scores_in_its_first_event(cluster: Cluster, reference: ScoreReference) -> None:
    prompt = prompt_of(5, 60)
    fields: Any = {"model": cluster.model_name, "prompt": prompt, "max_tokens": 5, "echo": True, "logprobs": 1}
    fields |= {"temperature": 0, "extra_body": {"ignore_eos": True, "prompt_logprobs": 2}}
    client = openai.OpenAI(base_url=f"{cluster.url}/v1", api_key="none", max_retries=0)
    whole = client.completions.create(**fields).choices[0].model_dump()
    first, *rest = [event.choices[0].model_dump() for event in client.completions.create(**fields, stream=True)]
    assert first["prompt_logprobs"] == whole["prompt_logprobs"]
    assert not any("prompt_logprobs" in event for event in rest)
    for name, column in whole["logprobs"].items():
        assert [entry for event in (first, *rest) for entry in event["logprobs"][name]] == column
    reference.check_logprobs(prompt, whole["logprobs"], 1)


def test_scored_and_plain_prompts_in_one_batch(cluster: Cluster, model: Path, reference: ScoreReference) -> None:
    plain, rng = Reference(model), random.Random(6)
    prompts = [prompt_of(seed, rng.randrange(2, 90)) for seed in range(24)]

    def run(index: int) -> dict[str, Any]:
        scores = {"prompt_logprobs": index % 4} if index % 2 else {}
        return cluster.complete(
            prompts[index], max_tokens=8, ignore_eos=True, return_token_ids=True, temperature=0, **scores
        )

    with ThreadPoolExecutor(len(prompts)) as pool:
        bodies = list(pool.map(run, range(len(prompts))))
    for index, (prompt, body) in enumerate(zip(prompts, bodies, strict=True)):
        assert completion_tokens(body) == plain.generate(prompt, 8)
        if index % 2:
            reference.check_listed(prompt, body["choices"][0]["prompt_logprobs"], index % 4)


def test_what_evaluation_harnesses_send(cluster: Cluster, model: Path, reference: ScoreReference) -> None:
    """lm-evaluation-harness: `local-completions` scores a batch of contexts with their continuations."""
    prompts = [prompt_of(seed, 20 + 7 * seed) for seed in range(6)]
    body = {"model": cluster.model_name, "prompt": prompts, "temperature": 0, "max_tokens": 1, "logprobs": 1}
    answer = cluster.client.post("/v1/completions", json={**body, "seed": 1234, "echo": True}).json()
    greedy = Reference(model)
    for prompt, choice in zip(prompts, answer["choices"], strict=True):
        logprobs, context = choice["logprobs"], len(prompt) - 5
        table = reference.table(prompt)
        expected = [float(table[at - 1, prompt[at]]) for at in range(context, len(prompt))]
        assert logprobs["token_logprobs"][context:-1] == pytest.approx(expected, abs=1e-5)
        is_greedy = [max(top.values()) == own for own, top in zip(
            logprobs["token_logprobs"][context:-1], logprobs["top_logprobs"][context:-1], strict=True
        )]  # fmt: skip
        assert is_greedy == [int(table[at - 1].argmax()) == prompt[at] for at in range(context, len(prompt))]
        continued = prompt[:context] + greedy.generate(prompt[:context], 3)
        [best] = cluster.client.post("/v1/completions", json={**body, "prompt": continued, "echo": True}).json()[
            "choices"
        ]
        columns = best["logprobs"]["token_logprobs"][context:-1], best["logprobs"]["top_logprobs"][context:-1]
        assert all(max(top.values()) == own for own, top in zip(*columns, strict=True))


def test_what_evaluation_harnesses_send_to_generate(cluster: Cluster, model: Path) -> None:
    """lm-evaluation-harness again: token ids or messages, and the texts that end an answer."""
    text, greedy = TextModel.load(model), Reference(model)
    common = {"model": cluster.model_name, "max_tokens": 24, "temperature": 0, "seed": 1234}
    for prompt in (prompt_of(seed, 40) for seed in range(4)):
        whole = text.decode(greedy.generate(prompt, 24), skip_special_tokens=True)
        stop = ["\n\n", whole[9:11]]
        body = {**common, "prompt": [prompt], "stop": stop}
        [choice] = cluster.client.post("/v1/completions", json=body).json()["choices"]
        assert choice["text"] == whole[: min(whole.find(one) for one in stop if one in whole)]
        assert (choice["finish_reason"], choice["index"]) == ("stop", 0)
    messages = [{"role": "user", "content": "What is 2 plus 3?"}]
    tokens = text.encode(text.render_chat(messages), add_special_tokens=False)
    answer = text.decode(greedy.generate(tokens, 24), skip_special_tokens=True)
    body = {**common, "messages": messages, "stop": [answer[12:14], "</s>", "\u0001", "\u0002"]}
    [choice] = cluster.client.post("/v1/chat/completions", json=body).json()["choices"]
    assert choice["message"]["content"] == answer[: answer.find(answer[12:14])]


def test_local_prompts_and_preempted_rows(model: Path, reference: ScoreReference, tmp_path: Path) -> None:
    """Decode computes the prompts itself, matches none of their pages, and rows go to host memory."""
    prompts = [prompt_of(seed, 20) for seed in range(6)]
    plain = Reference(model)
    tight = {"num-pages": 34, "max-rows": 8, "token-budget": 24}
    fields = {"max_tokens": 60, "ignore_eos": True, "return_token_ids": True, "temperature": 0}
    with (
        Cluster(tmp_path, model=str(model), num_prefill=0, flags=PAGES, decode_flags=tight) as cluster,
        ThreadPoolExecutor(6) as pool,
    ):
        cluster.complete(prompts[0], max_tokens=1)
        bodies = list(pool.map(lambda prompt: cluster.complete(prompt, **fields, prompt_logprobs=2), prompts))
        met(cluster.metric("decode-0", "baton_preemptions_total"), "more rows than the pool has room for")
        assert cluster.metric("decode-0", "baton_prompt_scores_total") == 6 * 19
    for prompt, body in zip(prompts, bodies, strict=True):
        assert completion_tokens(body) == plain.generate(prompt, 60)
        reference.check_listed(prompt, body["choices"][0]["prompt_logprobs"], 2)


def _kill(cluster: Cluster, name: str) -> None:
    cluster.processes[name].expected_running = False
    cluster.processes[name].signal(signal.SIGKILL)


def _kill_a_scorer(cluster: Cluster) -> str:
    """Kills the prefill worker that has scored a part of a prompt."""

    def has_scored(name: str) -> bool:
        try:
            return cluster.metric(name, "baton_prompt_scores_total") > 0
        except httpx2.ConnectError:  # its metrics are served a moment after its links are up
            return False

    def scorer() -> str | None:
        return next((p.name for p in cluster.workers("prefill") if has_scored(p.name)), None)

    name = str(eventually(scorer, 30.0, "a chunk is scored"))
    _kill(cluster, name)
    return name


@pytest.mark.parametrize("streamed", [False, True])
def test_a_kill_in_the_middle_of_a_scored_prompt(
    streamed: bool, model: Path, reference: ScoreReference, tmp_path: Path
) -> None:
    """Prefill dies after some chunks, then decode; a stream outlives its router, and can be read from the start."""
    prompt = prompt_of(8, 500)
    fields = {"max_tokens": 90, "ignore_eos": True, "return_token_ids": True, "temperature": 0, "prompt_logprobs": 1}
    with (
        Cluster(
            tmp_path,
            model=str(model),
            num_prefill=2,
            num_decode=2,
            num_routers=2,
            flags=PAGES,
            prefill_flags={"token-budget": 8, "long-prefill-token-threshold": 8},
        ) as cluster,
        ThreadPoolExecutor(1) as pool,
    ):
        expected = Reference(model).generate(prompt, 90)
        body = {"model": cluster.model_name, "prompt": prompt, **fields}
        if not streamed:
            answer = pool.submit(cluster.client.post, "/v1/completions", json=body)
            killed = _kill_a_scorer(cluster)
            choice = answer.result().json()["choices"][0]
            assert choice["token_ids"] == expected
            reference.check_listed(prompt, choice["prompt_logprobs"], 1)
            left = cluster.workers("prefill")[0].name
            assert left != killed
            num_scored = cluster.metric(left, "baton_prompt_scores_total")
            met(num_scored, "the kill and the prompt")
            assert num_scored == 499
            return
        call = ResumableCall(cluster.router_urls, {**body, "stream": True})
        tokens = pool.submit(lambda: list(call.run(60.0)))
        _kill_a_scorer(cluster)
        seen = eventually(lambda: [one for one in call.seen if one.token is not None], 30.0, "a token came")
        _kill(cluster, "decode-0")
        _kill(cluster, "router-0")
        assert [token for token in tokens.result() if token is not None] == expected
        first: Event = seen[0]
        request_id = first.id.partition(":")[0]
        url = f"{cluster.processes['router-1'].url}/v1/requests/{request_id}/stream"
        lines = [line for line in cluster.client.get(url).text.split("\n") if line.startswith("data: {")]
        assert '"prompt_logprobs"' in lines[0]
        assert '"prompt_logprobs"' not in "".join(lines[1:])
