"""`allowed_token_ids` and `bad_words`: the cluster's tokens are those of a loop over the model's own logits."""

from __future__ import annotations

import itertools
import random
import signal
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from baton.bundled import MODEL_DIR
from baton.grammar import sources
from baton.services.router.text.text_model import TextModel
from tests import grammars
from tests.cluster import Cluster, Process, completion_tokens
from tests.exactness.constrained_reference import ConstrainedReference, Draw
from tests.lateness import met
from tests.stream_client import ask, tokens
from tests.tiny_models import add_tokenizer, save_random_model

pytestmark = [pytest.mark.exactness, pytest.mark.integration]

PAGES, CHUNKS = {"page-size": 8}, {"token-budget": 24}
NUM_TOKENS = 40
ALLOWED = tuple(range(300, 340))
TEXT = TextModel.load(MODEL_DIR)


def prompt_of(seed: int, num_tokens: int = 37) -> list[int]:
    rng = random.Random(seed)
    return [rng.randrange(9, grammars.VOCAB_SIZE) for _ in range(num_tokens)]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return add_tokenizer(save_random_model("qwen3", tmp_path_factory.mktemp("model") / "qwen3"))


@pytest.fixture(scope="module")
def reference(model: Path) -> ConstrainedReference:
    return ConstrainedReference(model)


@pytest.fixture(scope="module")
def cluster(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    with Cluster(
        tmp_path_factory.mktemp("bans"), model=str(model), num_decode=2, flags=PAGES, prefill_flags=CHUNKS
    ) as cluster:
        yield cluster


def answer(cluster: Cluster, prompt: list[int], draw: Draw, **more: Any) -> dict[str, Any]:
    fields = {**draw.parameters(), "max_tokens": NUM_TOKENS, "return_token_ids": True, **more}
    return cluster.complete(prompt, **fields)


DRAWS = {
    "greedy": Draw(),
    "sampled": Draw(temperature=1.0, seed=5),
    "penalties": Draw(temperature=0.8, seed=6, frequency_penalty=0.7, repetition_penalty=1.3, min_tokens=9),
}


@pytest.mark.parametrize("name", DRAWS)
def test_only_allowed_tokens_are_sampled(name: str, cluster: Cluster, reference: ConstrainedReference) -> None:
    """With the raw log probabilities, for three choices; the second time over cached pages."""
    prompt, draw = prompt_of(len(name)), replace(DRAWS[name], allowed=ALLOWED)
    for _ in range(2):
        body = answer(cluster, prompt, draw, allowed_token_ids=list(ALLOWED), n=3, logprobs=1)
        for choice in range(3):
            expected, logprobs = reference.generate(None, prompt, NUM_TOKENS, replace(draw, seed=draw.seed + choice))
            assert completion_tokens(body, choice) == expected
            assert set(expected) <= set(ALLOWED)
            assert body["choices"][choice]["logprobs"]["token_logprobs"] == pytest.approx(logprobs, abs=1e-4)


@pytest.mark.parametrize("name", DRAWS)
def test_bad_words_are_not_written(name: str, cluster: Cluster, reference: ConstrainedReference) -> None:
    """Words that the answer has without them: every ban changes it, those of several tokens at their last one."""
    prompt, draw = prompt_of(20 + len(name)), DRAWS[name]
    seen = completion_tokens(answer(cluster, prompt, draw))
    words, sequences = _bans(seen)
    assert {len(sequence) for sequence in sequences} >= {1, 2}
    expected, _ = reference.generate(None, prompt, NUM_TOKENS, replace(draw, bad_words=sequences))
    assert expected != seen
    assert completion_tokens(answer(cluster, prompt, draw, bad_words=words)) == expected
    for sequence in sequences:
        windows = zip(*(expected[at:] for at in range(len(sequence))), strict=False)
        assert sequence not in windows


def _bans(seen: list[int]) -> tuple[list[str], tuple[tuple[int, ...], ...]]:
    """Words of the answer and their token sequences: of each text, and of the same behind a space."""
    words, sequences = list[str](), dict[tuple[int, ...], None]()
    for length, start in itertools.product((2, 1), range(3, len(seen), 4)):
        word = TEXT.decode(seen[start : start + length], skip_special_tokens=False)
        plain = TEXT.encode(word.lstrip(), add_special_tokens=False)
        if not word.strip() or "\ufffd" in word or len(plain) > 3:
            continue
        words.append(word)
        sequences[plain] = None
        spaced = TEXT.encode(" " + word.lstrip(), add_special_tokens=False)
        if len(spaced) == len(plain) and spaced[0] != plain[0]:
            sequences[spaced] = None
    return words, tuple(sequences)


def test_bans_and_a_grammar(cluster: Cluster, reference: ConstrainedReference) -> None:
    """Both hold; where they leave no token the request is refused."""
    prompt, draw, grammar = prompt_of(7), Draw(temperature=1.0, seed=8), sources.regex_grammar("[a-f]{3,9}-[0-9]{4}")
    banned = tuple(TEXT.encode(letter, add_special_tokens=False) for letter in "abc0123")
    expected, _ = reference.generate(grammar, prompt, NUM_TOKENS, replace(draw, bad_words=banned))
    fields = {"structured_outputs": {"regex": "[a-f]{3,9}-[0-9]{4}"}}
    assert completion_tokens(answer(cluster, prompt, draw, **fields, bad_words=list("abc0123"))) == expected
    refused = {"model": cluster.model_name, "prompt": prompt, **fields, "allowed_token_ids": [300]}
    error = cluster.client.post("/v1/completions", json=refused).json()["error"]
    assert (error["code"], error["type"]) == ("constraint_failed", "invalid_request_error")


def _kill(process: Process) -> None:
    process.expected_running = False
    process.signal(signal.SIGKILL)


def test_preemption_and_a_kill_in_the_middle(model: Path, reference: ConstrainedReference, tmp_path: Path) -> None:
    """Local prompts under few pages, then the death of the worker that writes: bans are a function of the tokens."""
    draw = Draw(temperature=1.0, seed=3)
    tight = {"num-pages": 34, "max-rows": 8, "token-budget": 24}
    prompts = [prompt_of(seed, 20) for seed in range(6)]
    with (
        Cluster(tmp_path, model=str(model), num_prefill=0, num_decode=1, flags=PAGES, decode_flags=tight) as cluster,
        ThreadPoolExecutor(6) as pool,
    ):
        words, sequences = _bans(completion_tokens(answer(cluster, prompts[0], draw)))
        banned = replace(draw, bad_words=sequences)
        expected = [reference.generate(None, prompt, 60, banned)[0] for prompt in prompts]
        bodies = list(pool.map(lambda one: answer(cluster, one, draw, bad_words=words, max_tokens=60), prompts))
        met(cluster.metric("decode-0", "baton_preemptions_total"), "more rows than the pool has room for")
        assert [completion_tokens(body) for body in bodies] == expected
        cluster.start("decode", "decode-1")
        body = {"model": cluster.model_name, "prompt": prompts[1], "max_tokens": 60, "stream": True, "bad_words": words}
        with ask(cluster.url, {**body, **draw.parameters(), "return_token_ids": True}) as events:
            seen = list(itertools.islice(events, 8))
            _kill(cluster.processes["decode-0"])
            seen += events
    assert [token for token in tokens(seen) if token is not None] == expected[1]
