"""Both engines in one thread: batches, streams, stops, errors, and what a breakpoint in the handoff sees."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import replace

import pytest

import baton
from baton.domain.errors import ContextOverflow
from baton.domain.request import FinishReason, SamplingParams, StopParams
from baton.services.local.llm import LLM
from baton.services.local.pair import LocalPair, PairLimits
from baton.transfer.base import Pull

GREEDY = SamplingParams(temperature=0.0)
STOP = StopParams(12)
PROMPTS = [[7 * n % 500 + 5 for n in range(start, start + length)] for start, length in ((0, 3), (5, 40), (9, 61))]


@pytest.fixture(scope="module")
def llm() -> LLM:
    return LLM(page_size=8, limits=PairLimits(num_pages=64, max_rows=4, token_budget=24))


def assert_nothing_is_left(pair: LocalPair) -> None:
    for loop in (pair.prefill, pair.decode):
        pool = loop._turn.cache.pool
        pool.check()
        assert pool.num_free + pool.num_cached == pool.num_pages
        assert loop.num_requests == 0


def test_the_package_gives_the_class_lazily():
    code = "import sys, baton; assert 'torch' not in sys.modules; print(baton.LLM.__name__)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "LLM"
    with pytest.raises(AttributeError, match="no attribute 'Engine'"):
        _ = baton.Engine


def test_a_batch_gives_the_tokens_of_each_prompt_alone(llm: LLM):
    together = llm.generate(PROMPTS * 3, GREEDY, stop=STOP)
    alone = [llm.generate(prompt, GREEDY, stop=STOP)[0] for prompt in PROMPTS]
    assert together == alone * 3
    assert {len(completion.tokens) for completion in together} == {12}
    assert_nothing_is_left(llm.pair)


def test_a_stream_is_the_completion_in_pieces(llm: LLM):
    (whole,) = llm.generate("What is Baton?", GREEDY)
    pieces = list(llm.generate("What is Baton?", GREEDY, stream=True))
    assert "".join(piece.text for piece in pieces) == whole.text
    assert tuple(piece.token for piece in pieces) == whole.tokens
    assert [piece.finish for piece in pieces[:-1]] == [None] * (len(pieces) - 1)
    assert pieces[-1].finish is whole.finish is FinishReason.STOP


def test_a_stream_that_is_closed_early_leaves_nothing_behind(llm: LLM):
    stream = llm.generate(PROMPTS, GREEDY, stop=STOP, stream=True)
    next(iter(stream))
    stream.close()  # type: ignore[attr-defined]
    assert_nothing_is_left(llm.pair)


def test_a_first_token_that_is_the_last_needs_no_decode(llm: LLM):
    (completion,) = llm.generate(PROMPTS[1], GREEDY, stop=StopParams(1))
    assert (len(completion.tokens), completion.finish) == (1, FinishReason.LENGTH)
    assert_nothing_is_left(llm.pair)


def test_a_prompt_that_can_never_fit_is_refused_and_the_next_one_served(llm: LLM):
    with pytest.raises(ContextOverflow):
        llm.generate([5] * (64 * 8 + 1), GREEDY)
    assert llm.generate(PROMPTS[0], GREEDY, stop=STOP)[0].finish is FinishReason.LENGTH


def test_sampling_depends_on_the_seed_alone(llm: LLM):
    sampling = SamplingParams(temperature=1.0, seed=3)
    first, second = (llm.generate(PROMPTS, sampling, stop=STOP) for _ in range(2))
    other = llm.generate(PROMPTS, replace(sampling, seed=4), stop=STOP)
    assert first == second != other


def test_decode_computes_on_pages_that_the_transfer_copied(monkeypatch: pytest.MonkeyPatch):
    llm = LLM(page_size=8)
    pulls: list[Pull] = []
    copy_pages = llm.pair.copy_pages

    def record(pull: Pull) -> None:
        pulls.append(pull)
        copy_pages(pull)

    monkeypatch.setattr(llm.pair.decode, "_hooks", replace(llm.pair.decode._hooks, submit=record))
    llm.generate(PROMPTS[2], GREEDY, stop=STOP)
    assert sum(len(pull.local_pages) for pull in pulls) == 8  # 61 tokens on pages of 8
    llm.generate(PROMPTS[2], GREEDY, stop=STOP)
    assert sum(len(pull.local_pages) for pull in pulls) == 9, "full pages come from decode's prefix cache"


def test_a_corrupt_page_is_read_again(monkeypatch: pytest.MonkeyPatch):
    llm = LLM(page_size=8)
    wanted = llm.generate(PROMPTS[2], GREEDY, stop=STOP)
    llm = LLM(page_size=8)
    num_writes = 0
    write = llm.pair.decode_memory.write

    def corrupt_once(pages, contents):
        nonlocal num_writes
        num_writes += 1
        write(pages, [memoryview(bytes(len(page))) for page in contents] if num_writes == 1 else contents)

    monkeypatch.setattr(llm.pair.decode_memory, "write", corrupt_once)
    assert llm.generate(PROMPTS[2], GREEDY, stop=STOP) == wanted
    assert num_writes > 1
