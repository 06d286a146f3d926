"""The runner contract: copies first, one result for each row that samples; the fake detects misuse."""

from __future__ import annotations

from pathlib import Path

import pytest

from baton.domain.errors import Broken
from baton.domain.ids import AttemptId, PageId, RequestId
from baton.domain.request import SamplingParams
from baton.engine.batch import Batch, HostCopy, Row, SampleSpec, StepOutput
from baton.engine.fake_runner import SLOT_BYTES, FakeRunner, fake_token
from baton.engine.runner import ModelRunner
from baton.kv.memory import PageMemory
from baton.model.loading.loader import load_model
from baton.model.storage import PageStorage
from tests import tiny_models
from tests.exactness.random_scheduler import RandomScheduler
from tests.exactness.test_runner_exactness import make_prompts

PAGE_SIZE = 4
VOCAB_SIZE = 101
GREEDY = SamplingParams(temperature=0.0)


def fake(num_pages: int = 16, num_host_slots: int = 4) -> FakeRunner:
    page_bytes = PAGE_SIZE * SLOT_BYTES
    return FakeRunner(PageMemory(num_pages, page_bytes), PAGE_SIZE, VOCAB_SIZE, PageMemory(num_host_slots, page_bytes))


def row(tokens: list[int], start: int, pages: list[int], *, samples: bool = True, name: str = "r") -> Row:
    """The row that extends `tokens[:start]` to all of `tokens`."""
    spec = SampleSpec(GREEDY, tokens, len(tokens)) if samples else None
    return Row(AttemptId(RequestId(name), 1), tokens[start:], start, [PageId(page) for page in pages], spec)


def step(runner: FakeRunner, *rows: Row, copies: tuple[HostCopy, ...] = ()) -> StepOutput:
    return runner.run(Batch(rows, copies))


def test_the_fake_gives_equal_tokens_in_any_chunks():
    tokens = list(range(5, 15))
    ((whole,),) = step(fake(), row(tokens, 0, [1, 2, 3])).sampled
    runner = fake()
    assert step(runner, row(tokens[:6], 0, [9, 7], samples=False)).sampled == ((),)
    ((chunked,),) = step(runner, row(tokens, 6, [9, 7, 8])).sampled
    assert whole == chunked
    assert whole.token == fake_token(tokens, VOCAB_SIZE)
    assert (runner.num_steps, runner.num_tokens) == (2, 10)


def test_the_fake_obeys_bans_and_seeds():
    said = fake_token([1, 2], VOCAB_SIZE)
    assert fake_token([1, 2], VOCAB_SIZE, banned=frozenset({said})) == (said + 1) % VOCAB_SIZE
    assert fake_token([1, 2], VOCAB_SIZE, seed=3) == (said + 3) % VOCAB_SIZE


def test_the_fake_passes_the_random_scheduler():
    page_bytes = PAGE_SIZE * SLOT_BYTES
    runner = FakeRunner(PageMemory(400, page_bytes), PAGE_SIZE, VOCAB_SIZE, PageMemory(16, page_bytes))
    prompts = make_prompts(PAGE_SIZE)
    outputs = RandomScheduler(runner, 400, PAGE_SIZE, 16, seed=4).generate(prompts, 9, GREEDY)
    for prompt, output in zip(prompts, outputs, strict=True):
        tokens = list(prompt)
        for token in output:
            assert token == fake_token(tokens, VOCAB_SIZE)
            tokens.append(token)


TOKENS = list(range(20, 30))


@pytest.mark.parametrize(
    ("rows", "what"),
    [
        ([row(TOKENS, 6, [1, 3, 4])], "does not hold the KV of position 4"),  # page 3 was never written
        ([row(TOKENS, 6, [1, 5, 4])], "does not hold the KV of position 4"),  # page 5 is another request's
        ([row([9, *TOKENS[1:]], 6, [1, 2, 4])], "does not hold the KV of position 0"),  # right pages, other tokens
        ([row(TOKENS, 7, [1, 2, 4])], "does not hold the KV of position 6"),  # a position was skipped
        ([row(TOKENS, 6, [1, 2])], "2 pages do not hold 10 tokens"),
        ([row(TOKENS, 10, [1, 2, 4])], "at least one token"),
        ([row(TOKENS, 6, [1, 2, 4]), row(TOKENS, 6, [1, 2, 4], name="s")], "another row of this step writes"),
    ],
)
def test_the_fake_raises_broken_where_pages_and_rows_disagree(rows, what):
    runner = fake()
    step(runner, row(TOKENS[:6], 0, [1, 2]), row([3] * 8, 0, [6, 5], name="other"))
    with pytest.raises(Broken, match=what):
        step(runner, *rows)


def test_the_fake_does_not_let_a_row_use_what_the_same_step_writes():
    runner = fake()
    with pytest.raises(Broken, match="position 0"):
        step(runner, row(TOKENS[:4], 0, [1]), row(TOKENS[:6], 4, [1, 2], name="s"))


def test_the_fake_finds_a_page_that_was_overwritten():
    runner = fake()
    step(runner, row(TOKENS[:6], 0, [1, 2]))
    step(runner, row([1, 2, 3], 0, [1], name="thief"))
    with pytest.raises(Broken, match="page 1"):
        step(runner, row(TOKENS, 6, [1, 2, 4]))


def test_a_preempted_row_comes_back_into_other_pages():
    runner = fake()
    step(runner, row(TOKENS[:6], 0, [1, 2]))
    out = HostCopy((PageId(1), PageId(2)), (3, 0), to_host=True)
    assert step(runner, row([1, 2, 3], 0, [1], name="thief"), copies=(out,)).sampled[0]
    back = HostCopy((PageId(8), PageId(9)), (3, 0), to_host=False)
    assert step(runner, row(TOKENS[:7], 6, [8, 9]), copies=(back,)) == step(fake(), row(TOKENS[:7], 0, [1, 2]))


def test_copies_alone_are_a_step():
    copy = HostCopy((PageId(1),), (0,), to_host=True)
    assert fake().run(Batch((), (copy,))) == StepOutput(())
    with pytest.raises(Broken, match="swap space"):
        FakeRunner(PageMemory(1, PAGE_SIZE * 16), PAGE_SIZE, VOCAB_SIZE).run(Batch((), (copy,)))


def test_memory_of_another_page_size_is_refused():
    with pytest.raises(ValueError, match="64 bytes"):
        FakeRunner(PageMemory(1, 10), PAGE_SIZE, VOCAB_SIZE)


def test_the_model_runner_samples_only_rows_that_ask(tmp_path: Path):
    model = load_model(tiny_models.save_random_model("llama", tmp_path), page_size=PAGE_SIZE)
    storage = PageStorage.allocate(model.geometry, 16)
    runner = ModelRunner(model, storage)
    output = runner.run(
        Batch((row(TOKENS[:8], 0, [1, 2], samples=False), row(TOKENS, 0, [5, 6, 7]), row([4], 0, [3], samples=False)))
    )
    assert [not sampled for sampled in output.sampled] == [True, False, True]
    assert runner.run(Batch((row(TOKENS, 8, [1, 2, 4]),))).sampled == output.sampled[1:2]
    assert runner.run(Batch((row(TOKENS[:4], 0, [9], samples=False),))).sampled == ((),)


def test_the_model_runner_waits_for_the_device_without_sampling_too(tmp_path: Path):
    class Watched(PageStorage):
        num_finishes = 0

        def synchronize(self) -> None:
            self.num_finishes += 1

    model = load_model(tiny_models.save_random_model("llama", tmp_path), page_size=PAGE_SIZE)
    storage = Watched.allocate(model.geometry, 16, host=PageMemory(1, model.geometry.page_bytes))
    assert isinstance(storage, Watched)
    runner = ModelRunner(model, storage)
    runner.run(Batch((row(TOKENS[:8], 0, [1, 2], samples=False),)))
    assert storage.num_finishes == 1
    runner.run(Batch((), (HostCopy((PageId(1),), (0,), to_host=True),)))
    assert storage.num_finishes == 2


def test_the_model_runner_clears_a_pages_last_contents(tmp_path: Path):
    model = load_model(tiny_models.save_random_model("llama", tmp_path), page_size=PAGE_SIZE)
    memory = PageMemory(4, model.geometry.page_bytes)
    runner = ModelRunner(model, PageStorage.on_memory(model.geometry, memory))
    num_used = model.geometry.num_bytes_per_token * PAGE_SIZE
    for page in range(4):
        memory.page(page)[:num_used] = b"\xff" * num_used  # NaN in every dtype; nothing ever writes the padding
    dirty = runner.run(Batch((row(TOKENS[:6], 0, [3, 1]),)))
    pages = bytes(memory.page(3)), bytes(memory.page(1))
    memory.buffer[:] = bytes(len(memory.buffer))
    assert runner.run(Batch((row(TOKENS[:6], 0, [3, 1]),))) == dirty
    assert (bytes(memory.page(3)), bytes(memory.page(1))) == pages
