"""A worker's engine without a worker: loaded model, filled pool, runner, and batches for it.

Called by the engine's experiments, which time `runner.run`. `load_model`, `PageStorage`, `ModelRunner` and `Batch` are
the engine's own, so the measured code is a worker's.
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from baton.domain.ids import AttemptId, PageId, RequestId
from baton.domain.request import SamplingParams
from baton.engine.batch import Batch, Row, SampleSpec
from baton.engine.chunking import cut
from baton.engine.runner import ModelRunner
from baton.kv.geometry import DTYPE_BYTES
from baton.kv.memory import PageMemory
from baton.model.loading.config import DtypeChoice
from baton.model.loading.kernel_choice import KernelUse
from baton.model.loading.loader import DecoderChoice, LoadedModel, load_model
from baton.model.storage import PageStorage
from bench.harness.model_shapes import ModelShape
from bench.harness.rotations import TimedSamples

GREEDY = SamplingParams(temperature=0.0)
_FIRST_ID = 4
_SEED_PAGES = 64


@dataclass(frozen=True, slots=True)
class BenchEngine:
    """A loaded engine. Experiments use its `num_pages` pages one after another."""

    shape: ModelShape
    model: LoadedModel
    storage: PageStorage
    runner: ModelRunner
    num_pages: int
    seed: int

    @property
    def page_size(self) -> int:
        return self.model.geometry.page_size

    def step_bytes(self, num_rows: int, context: int) -> int:
        """Bytes that a decode step must read: every weight once, and the KV of every row's context.

        The embedding is the output head's weight; norms and biases are part of the parameters.
        """
        weights = self.model.report.num_parameters * DTYPE_BYTES[self.model.config.dtype]
        return weights + num_rows * context * self.model.geometry.num_bytes_per_token

    def decode_batch(self, num_rows: int, context: int) -> Batch:
        """A step of `num_rows` rows with `context` tokens each, the new one included, on scattered pages."""
        rng = random.Random(f"{self.seed}/{num_rows}/{context}")
        table_pages = self.model.geometry.num_pages(context)
        scattered = rng.sample(range(self.num_pages), num_rows * table_pages)
        rows = []
        for index in range(num_rows):
            history = self._tokens(rng, context)
            pages = [PageId(page) for page in scattered[index * table_pages : (index + 1) * table_pages]]
            spec = SampleSpec(GREEDY, history, context - 1)
            rows.append(Row(AttemptId(RequestId(f"r{index}"), 1), history[-1:], context - 1, pages, spec))
        return Batch(tuple(rows))

    def prefill_batches(self, num_tokens: int, budget_tokens: int) -> list[Batch]:
        """The steps of one prompt, cut like the prefill scheduler's."""
        rng = random.Random(f"{self.seed}/{num_tokens}")
        prompt = self._tokens(rng, num_tokens)
        pages = [PageId(page) for page in rng.sample(range(self.num_pages), self.model.geometry.num_pages(num_tokens))]
        batches, start = [], 0
        while start < num_tokens:
            end = start + cut(start, num_tokens, budget_tokens, self.page_size)
            spec = SampleSpec(GREEDY, prompt, num_tokens) if end == num_tokens else None
            batches.append(Batch((Row(AttemptId(RequestId("r"), 1), prompt[start:end], start, pages, spec),)))
            start = end
        return batches

    def _tokens(self, rng: random.Random, num_tokens: int) -> list[int]:
        return rng.choices(range(_FIRST_ID, self.shape.vocab_size), k=num_tokens)


def make_bench_engine(
    shape: ModelShape,
    directory: Path,
    *,
    dtype: DtypeChoice,
    decoder: DecoderChoice,
    kernels: KernelUse,
    page_size: int,
    max_pool_bytes: int,
    num_pages_wanted: Callable[[int], int],
    seed: int,
) -> BenchEngine:
    """Loads the model in `directory` and fills a pool of `num_pages_wanted(page_size)`, at most `max_pool_bytes`.

    Raises `UnreadableModel` or `UnsupportedModel`.
    """
    model = load_model(directory, dtype=dtype, page_size=page_size, decoder=decoder, kernels=kernels)
    num_pages = min(num_pages_wanted(page_size), max_pool_bytes // model.geometry.page_bytes)
    memory = PageMemory(num_pages, model.geometry.page_bytes, prefault=True)
    _fill(memory, model.config.torch_dtype, seed)
    storage = PageStorage.on_memory(model.geometry, memory)
    return BenchEngine(shape, model, storage, ModelRunner(model, storage), num_pages, seed)


def time_steps(run: Callable[[], object], *, block_s: float, min_steps: int) -> TimedSamples:
    """Repeats `run` for about `block_s` seconds, at least `min_steps` times."""
    wall_s: list[float] = []
    cpu_s: list[float] = []
    while len(wall_s) < min_steps or sum(wall_s) < block_s:
        began_s, cpu_began_s = time.perf_counter(), time.thread_time()
        run()
        cpu_s.append(time.thread_time() - cpu_began_s)
        wall_s.append(time.perf_counter() - began_s)
    return TimedSamples(tuple(wall_s), tuple(cpu_s))


def run_all(runner: ModelRunner, batches: Sequence[Batch]) -> None:
    """Runs the batches in order."""
    for batch in batches:
        runner.run(batch)


def _fill(memory: PageMemory, dtype: torch.dtype, seed: int) -> None:
    """Fills the pool with random numbers of the size of real keys and values."""
    pool = torch.frombuffer(memory.buffer, dtype=dtype).view(memory.num_pages, -1)
    done = min(_SEED_PAGES, memory.num_pages)
    pool[:done] = torch.randn(pool[:done].shape, generator=torch.Generator().manual_seed(seed)).to(dtype)
    while done < memory.num_pages:
        more = min(done, memory.num_pages - done)
        pool[done : done + more] = pool[:more]
        done += more
