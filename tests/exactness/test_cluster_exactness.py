"""The cluster's greedy tokens over HTTP are the model's own, token for token, over both transfers.

Every cluster runs real processes. Every test asserts that page bytes moved and that decode recomputed no prompt token.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from baton.bundled import MODEL_DIR
from baton.transfer.nixl_agent import nixl_available
from tests.cluster import Cluster, completion_tokens
from tests.exactness.reference import Reference
from tests.lateness import met
from tests.tiny_models import (
    FAMILIES,
    VOCAB_SIZE,
    add_tokenizer,
    save_random_config,
    save_random_model,
    small_shape,
)
from tests.unit.model.dequantize.checkpoints import packed_copy
from tests.unit.model.dequantize.test_fp8 import BLOCKS, in_blocks
from tests.unit.model.loading.test_multimodal import own_tokens
from tests.unit.model.loading.test_multimodal import save as save_multimodal

pytestmark = [pytest.mark.exactness, pytest.mark.integration]

PAGE_SIZE = 8
TOKEN_BUDGET = 24
NUM_TOKENS = 12
PAGES = {"page-size": PAGE_SIZE}
CHUNKS = {"token-budget": TOKEN_BUDGET}
RANDOM_FAMILIES = sorted(set(FAMILIES) - {"gemma2"})
FEW_SLOTS: dict[str, Any] = {"num-pages": 120, "window-slots": 0.1}
WINDOW_SLOTS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "gemma3_text": ({}, FEW_SLOTS),
    "gpt_oss": ({"window-slots": "off"}, {**FEW_SLOTS, "overlap-scheduling": True}),
}
"""Flags of prefill and decode, by family with a window in some of the layers. Without flags they have slots."""


def random_prompt(rng: random.Random, num_tokens: int) -> list[int]:
    return [rng.randrange(5, VOCAB_SIZE) for _ in range(num_tokens)]


def shaped_prompts(seed: int) -> list[list[int]]:
    """Shorter than a page, exact multiples, one off, many chunks, and two that share a long prefix."""
    rng = random.Random(seed)
    shared = random_prompt(rng, 5 * PAGE_SIZE + 3)
    lengths = (1, PAGE_SIZE - 1, PAGE_SIZE, PAGE_SIZE + 1, 3 * PAGE_SIZE, 4 * TOKEN_BUDGET + 5)
    prompts = [random_prompt(rng, n) for n in lengths]
    return [*prompts, shared + random_prompt(rng, 4), shared + random_prompt(rng, 11)]


def ask(cluster: Cluster, prompt: list[int], num_tokens: int = NUM_TOKENS) -> list[int]:
    answer = cluster.complete(prompt, max_tokens=num_tokens, ignore_eos=True, return_token_ids=True)
    return completion_tokens(answer)


@contextmanager
def split(cluster: Cluster) -> Iterator[None]:
    """Asserts that bytes moved inside the block, that nothing was computed twice, and that no page stays in use."""
    num_bytes, num_tokens = cluster.bytes_moved, cluster.tokens_recomputed
    yield
    assert cluster.bytes_moved > num_bytes
    assert cluster.tokens_recomputed == num_tokens
    cluster.wait_pages_free(5.0)


def transports() -> list[str]:
    return ["stream"] if nixl_available() else ["nixl", "stream"]


@pytest.fixture(scope="module", params=transports())
def bundled(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    """Over `stream` decode's tokens come in sessions, as by default, over NIXL in calls."""
    policy = {"stream": "srpt", "nixl": "lpm"}[request.param]
    sessions = {"stream": {}, "nixl": {"sessions": "false"}}[request.param]
    chunking = {"stream": "equal", "nixl": "fixed"}[request.param]
    flags = {**CHUNKS, "prefill-policy": policy, "long-prefill-token-threshold": PAGE_SIZE, "chunking": chunking}
    with Cluster(
        tmp_path_factory.mktemp("bundled"), transport=request.param, flags=PAGES, prefill_flags=flags,
        router_flags=sessions,
    ) as cluster:  # fmt: skip
        yield cluster


@pytest.fixture(scope="module")
def bundled_reference() -> Reference:
    return Reference(MODEL_DIR)


def test_nixl_is_there() -> None:
    assert nixl_available() is None, "NIXL is part of the locked set: without it half of these tests would not run"


def test_prompts_of_every_shape(bundled: Cluster, bundled_reference: Reference) -> None:
    with split(bundled):
        for prompt in shaped_prompts(1):
            assert ask(bundled, prompt) == bundled_reference.generate(prompt, NUM_TOKENS), f"{len(prompt)} tokens"
    assert bundled.metric("router-0", "baton_sessions") == 2 * (bundled.transport == "stream")


def test_repeated_prompts_come_from_the_caches(bundled: Cluster, bundled_reference: Reference) -> None:
    """Repeats the prompts: full pages come from the prefix cache on either side."""
    prompts = shaped_prompts(2)[5:]
    expected = [bundled_reference.generate(prompt, NUM_TOKENS) for prompt in prompts]
    with split(bundled):
        assert [ask(bundled, prompt) for prompt in prompts] == expected
    before = bundled.bytes_moved
    with split(bundled):
        for prompt, tokens in zip(prompts, expected, strict=True):
            answer = bundled.complete(prompt, max_tokens=NUM_TOKENS, ignore_eos=True, return_token_ids=True)
            assert completion_tokens(answer) == tokens
            cached = answer["usage"]["prompt_tokens_details"]["cached_tokens"]
            assert cached == (len(prompt) - 1) // PAGE_SIZE * PAGE_SIZE
    assert bundled.bytes_moved - before <= 2 * len(prompts) * bundled.page_bytes("decode-0")


def test_a_conversation_moves_only_new_pages(bundled: Cluster, bundled_reference: Reference) -> None:
    """Turn n+1 begins with turn n and its answer. Decode has those pages; prefill computes only the rest."""
    rng = random.Random(3)
    tokens = random_prompt(rng, 4 * PAGE_SIZE)
    for _ in range(3):
        answer = ask(bundled, tokens, 2 * PAGE_SIZE)
        assert answer == bundled_reference.generate(tokens, 2 * PAGE_SIZE)
        tokens = tokens + answer + random_prompt(rng, PAGE_SIZE)
    before = bundled.bytes_moved
    with split(bundled):
        ask(bundled, tokens)
    pages_of_prompt = len(tokens) // PAGE_SIZE
    assert bundled.bytes_moved - before < pages_of_prompt / 2 * bundled.page_bytes("decode-0")


def test_32_concurrent_requests(bundled: Cluster, bundled_reference: Reference) -> None:
    rng = random.Random(4)
    prompts = [random_prompt(rng, rng.randrange(1, 90)) for _ in range(32)]
    with split(bundled), ThreadPoolExecutor(32) as pool:
        answers = list(pool.map(lambda prompt: ask(bundled, prompt), prompts))
    assert answers == [bundled_reference.generate(prompt, NUM_TOKENS) for prompt in prompts]


def test_concurrent_prompts_compute_a_shared_prefix_once(bundled: Cluster, bundled_reference: Reference) -> None:
    """Whenever the others come, they find the first one's pages, or wait for them; one page is not waited for."""
    rng = random.Random(10)
    shared = random_prompt(rng, 12 * PAGE_SIZE)
    prompts = [shared + random_prompt(rng, rng.randrange(1, 40)) for _ in range(8)]

    def run(prompt: list[int]) -> tuple[list[int], int]:
        answer = bundled.complete(prompt, max_tokens=NUM_TOKENS, ignore_eos=True, return_token_ids=True)
        return completion_tokens(answer), answer["usage"]["prompt_tokens_details"]["cached_tokens"]

    with split(bundled), ThreadPoolExecutor(len(prompts)) as pool:
        tokens, cached = zip(*pool.map(run, prompts), strict=True)
    assert list(tokens) == [bundled_reference.generate(prompt, NUM_TOKENS) for prompt in prompts]
    first, *others = sorted(cached)
    assert first == 0
    assert min(others) >= len(shared) - PAGE_SIZE


@pytest.mark.parametrize(("prefill", "decode"), [("lean", "stock"), ("stock", "lean")])
def test_workers_with_different_decoders(
    prefill: str, decode: str, tmp_path: Path, bundled_reference: Reference
) -> None:
    """They link, since their pages have one shape, and continue from each other's pages. The lean one runs ahead."""
    prompts = shaped_prompts(8)[2:6]
    with (
        Cluster(
            tmp_path,
            transport="stream",
            flags=PAGES,
            prefill_flags={**CHUNKS, "decoder": prefill},
            decode_flags={"decoder": decode, "overlap-scheduling": decode == "lean"},
        ) as cluster,
        split(cluster),
    ):
        answers = [ask(cluster, prompt) for prompt in prompts]
        assert ("overlap_scheduling" in cluster.processes["decode-0"].log.read_text()) == (decode == "lean")
    assert answers == [bundled_reference.generate(prompt, NUM_TOKENS) for prompt in prompts]


@contextmanager
def selfish(directory: Path, budget: int, **decode_flags: int | bool) -> Iterator[Cluster]:
    """A cluster without prefill workers."""
    with Cluster(
        directory, num_prefill=0, flags=PAGES, decode_flags={"token-budget": budget, **decode_flags}
    ) as cluster:
        yield cluster
        assert cluster.bytes_moved == cluster.tokens_recomputed == 0
        cluster.wait_pages_free(5.0)


@pytest.mark.parametrize("budget", [PAGE_SIZE, TOKEN_BUDGET])
def test_a_decode_worker_that_prefills_for_itself(budget: int, tmp_path: Path, bundled_reference: Reference) -> None:
    """Chunks beside rows, one after another and together, and a second time from the prefix cache."""
    prompts = shaped_prompts(6)
    expected = [bundled_reference.generate(prompt, NUM_TOKENS) for prompt in prompts]
    with selfish(tmp_path, budget) as cluster, ThreadPoolExecutor(len(prompts)) as pool:
        assert list(pool.map(lambda prompt: ask(cluster, prompt), prompts)) == expected
        assert [ask(cluster, prompt) for prompt in prompts] == expected
        assert cluster.metric("decode-0", "baton_cached_tokens_total", role="decode") > 0
        assert cluster.metric("router-0", "baton_ttft_seconds_count", path="local") == 2 * len(prompts)


def test_forced_preemption_beside_local_prompts(tmp_path: Path, bundled_reference: Reference) -> None:
    """The worker runs ahead where it can."""
    rng, small = random.Random(7), {"num-pages": 34, "max-rows": 8, "overlap-scheduling": True}
    prompts = [random_prompt(rng, 20) for _ in range(6)]
    expected = [bundled_reference.generate(prompt, 60) for prompt in prompts]
    with selfish(tmp_path, TOKEN_BUDGET, **small) as cluster, ThreadPoolExecutor(6) as pool:
        assert list(pool.map(lambda prompt: ask(cluster, prompt, 60), prompts)) == expected
        met(cluster.metric("decode-0", "baton_preemptions_total"), "more rows than the pool has room for")


@pytest.mark.parametrize("transport", transports())
def test_forced_preemption(transport: str, tmp_path: Path, bundled_reference: Reference) -> None:
    """Rows outgrow the pool. The newest go to host memory and come back; no request's tokens change.

    Each KV head is a head group, so that a page has two digests in both tiers.
    """
    rng = random.Random(5)
    prompts = [random_prompt(rng, 20) for _ in range(6)]
    num_tokens = 60
    tight = {"num-pages": 34, "max-rows": 8}
    flags = {**PAGES, "kv-head-groups": 2}
    with Cluster(tmp_path, transport=transport, flags=flags, prefill_flags=CHUNKS, decode_flags=tight) as cluster:
        with split(cluster), ThreadPoolExecutor(6) as pool:
            answers = list(pool.map(lambda prompt: ask(cluster, prompt, num_tokens), prompts))
        met(cluster.metric("decode-0", "baton_preemptions_total"), "more rows than the pool has room for")
    assert answers == [bundled_reference.generate(prompt, num_tokens) for prompt in prompts]


@pytest.mark.parametrize("family", RANDOM_FAMILIES)
def test_families(family: str, tmp_path: Path) -> None:
    """Random weights of every supported kind of attention; the transfers alternate.

    Window parts have slots on one side, or on both, and by default.
    """
    directory = add_tokenizer(save_random_model(family, tmp_path / family))
    reference = Reference(directory)
    choices = transports()
    transport = choices[RANDOM_FAMILIES.index(family) % len(choices)]
    prompts = shaped_prompts(6)
    prefill_flags, decode_flags = WINDOW_SLOTS.get(family, ({}, {}))
    with (
        Cluster(
            tmp_path, model=str(directory), transport=transport, flags=PAGES,
            prefill_flags={**CHUNKS, **prefill_flags}, decode_flags=decode_flags,
        ) as cluster,
        split(cluster),
        ThreadPoolExecutor(4) as pool,
    ):  # fmt: skip
        answers = list(pool.map(lambda prompt: ask(cluster, prompt), prompts))
        for worker, flags in (("prefill-0", prefill_flags), ("decode-0", decode_flags)):
            has_slots = family in WINDOW_SLOTS and flags.get("window-slots") != "off"
            assert (cluster.metric(worker, "baton_window_slots", state="unheld") > 0) is has_slots
    assert answers == [reference.generate(prompt, NUM_TOKENS) for prompt in prompts]


@pytest.mark.parametrize("transport", transports())
def test_latent_pages(transport: str, tmp_path: Path) -> None:
    """Long chunks expand latents, short ones and decoded rows absorb them."""
    directory = add_tokenizer(save_random_model("deepseek_v3", tmp_path / "model"))
    rng = random.Random(8)
    shared = random_prompt(rng, 400)
    prompts = [random_prompt(rng, 20), shared, [*shared, 7, 8, 9], shared[:190] + random_prompt(rng, 300)]
    reference = Reference(directory)
    with (
        Cluster(tmp_path, model=str(directory), transport=transport, prefill_flags={"token-budget": 512}) as cluster,
        split(cluster),
        ThreadPoolExecutor(4) as pool,
    ):
        answers = list(pool.map(lambda prompt: ask(cluster, prompt, 60), prompts))
    assert answers == [reference.generate(prompt, 60) for prompt in prompts]


@pytest.mark.parametrize(("transport", "head_groups"), list(zip(transports(), (4, 2), strict=False)))
def test_pages_of_several_head_groups(transport: str, head_groups: int, tmp_path: Path) -> None:
    """4 KV heads, each a group of its own, or two a group; one group is what the other tests have."""
    config = transformers.LlamaConfig(**small_shape(num_attention_heads=8, num_key_value_heads=4))
    directory = add_tokenizer(save_random_config(config, tmp_path / "model"))
    reference, prompts = Reference(directory), shaped_prompts(9)
    flags = {**PAGES, "kv-head-groups": head_groups}
    with (
        Cluster(tmp_path, model=str(directory), transport=transport, flags=flags, prefill_flags=CHUNKS) as cluster,
        split(cluster),
        ThreadPoolExecutor(4) as pool,
    ):
        answers = list(pool.map(lambda prompt: ask(cluster, prompt), prompts))
    assert answers == [reference.generate(prompt, NUM_TOKENS) for prompt in prompts]


SAMPLED = {"temperature": 0.9, "top_p": 0.95, "top_k": 50, "frequency_penalty": 0.3, "seed": 1234}


def sampled(cluster: Cluster) -> list[list[int]]:
    rng = random.Random(7)
    answers = []
    for n in (3, PAGE_SIZE, 50):
        prompt = random_prompt(rng, n)
        answer = cluster.complete(prompt, max_tokens=24, ignore_eos=True, return_token_ids=True, n=2, **SAMPLED)
        answers += [completion_tokens(answer, 0), completion_tokens(answer, 1)]
    return answers


_SAMPLED_BEFORE: dict[str, list[list[int]]] = {}


def test_seeded_sampling_repeats(bundled: Cluster) -> None:
    """One seed gives the same tokens in two runs and over every transfer."""
    with split(bundled):
        first, second = sampled(bundled), sampled(bundled)
    assert first == second
    assert first[0] != first[1], "choices of one request draw differently"
    _SAMPLED_BEFORE[bundled.transport] = first
    assert len({str(tokens) for tokens in _SAMPLED_BEFORE.values()}) == 1


def test_the_text_model_of_a_packed_multimodal_checkpoint(tmp_path: Path) -> None:
    """FP8 weights beside a vision tower, as published; the tokens are the plain multimodal model's own."""
    save_multimodal("mistral3-mistral", tmp_path / "source")
    packed, plain = packed_copy(tmp_path / "source", tmp_path, in_blocks, BLOCKS)
    whole = transformers.AutoModelForImageTextToText.from_pretrained(plain, dtype=torch.float32).eval()
    prompts = shaped_prompts(9)[4:]
    model = str(add_tokenizer(packed))
    with Cluster(tmp_path, model=model, flags=PAGES, prefill_flags=CHUNKS) as cluster, split(cluster):
        assert [ask(cluster, prompt) for prompt in prompts] == own_tokens(whole, prompts)
