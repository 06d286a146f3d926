"""How well the duration of a step is predicted, and what chunk sizes make of it. On one core, with one thread.

    python -m bench.engine.step_time [--shape m150] [--steps 300] [--rows 8] [--prompt 6000] [--budget 512]

First, mixed steps drawn at random (up to 16 rows, up to two chunks): relative error of the prediction one step ahead.
Then, for each way to size chunks, a long prompt beside rows: a step is the time between two tokens of the rows.
"""

from __future__ import annotations

import argparse
import random
import tempfile
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from baton.settings.process import limit_cores, limit_threads, usable_cores
from bench.harness.model_shapes import SHAPES, ModelShape

if TYPE_CHECKING:
    from baton.domain.timing.step_time import StepTimeModel
    from baton.engine.batch import Batch
    from baton.engine.chunking import ChunkBudget
    from bench.engine.bench_engine import BenchEngine

PAGE_SIZE = 16
MAX_POOL_BYTES = 2 << 30
MAX_CONTEXT = 6_000
WARM_UP_STEPS = 60


def quantile(values: Sequence[float], share: float) -> float:
    """The value below which `share` of the values lie."""
    return sorted(values)[min(len(values) - 1, int(share * len(values)))]


def run_step(engine: BenchEngine, batch: Batch) -> float:
    """CPU seconds of one step, of which other processes change little."""
    began_s = time.thread_time()
    engine.runner.run(batch)
    return time.thread_time() - began_s


def with_chunk(engine: BenchEngine, batch: Batch, start: int, num_tokens: int) -> Batch:
    """The batch and a chunk of `num_tokens` after `start` others, which does not end its prompt."""
    whole = engine.prefill_batches(start + num_tokens, start + num_tokens)[0].rows[0]
    row = replace(whole, tokens=whole.tokens[start:], start=start, sample=None)
    return replace(batch, rows=(*batch.rows, row))


def draw(engine: BenchEngine, rng: random.Random) -> Batch:
    """A mixed step."""
    from baton.engine.batch import Batch

    num_rows, num_chunks = rng.randrange(17), rng.choice([0, 0, 1, 2])
    batch = engine.decode_batch(num_rows, rng.randrange(32, 2048)) if num_rows else Batch(())
    for _ in range(num_chunks or not num_rows):
        start = rng.choice([0, rng.randrange(MAX_CONTEXT // 2) // PAGE_SIZE * PAGE_SIZE])
        batch = with_chunk(engine, batch, start, rng.randrange(2, 512))
    return batch


def learn(engine: BenchEngine, num_steps: int, seed: int) -> tuple[StepTimeModel, list[float]]:
    """A model that has seen drawn steps, and the errors of its predictions after the first ones."""
    from baton.domain.timing.step_time import StepTimeModel
    from baton.engine.step_metrics import shape_of

    model, rng, errors = StepTimeModel(), random.Random(seed), []
    for step in range(num_steps):
        batch = draw(engine, rng)
        predicted_s, seconds = model.predict(shape_of(batch)), run_step(engine, batch)
        model.observe(shape_of(batch), seconds)
        if step >= WARM_UP_STEPS:
            errors.append(abs(predicted_s / seconds - 1))
    return model, errors


def prompt_beside_rows(
    engine: BenchEngine, chunks: ChunkBudget, model: StepTimeModel, num_rows: int, num_tokens: int
) -> list[float]:
    """Seconds of the steps in which a prompt of `num_tokens` is computed beside rows."""
    from baton.engine.batch import Batch
    from baton.engine.chunking import cut
    from baton.engine.step_metrics import shape_of

    rows = engine.decode_batch(num_rows, 500) if num_rows else Batch(())
    start, steps_s = 0, []
    while start < num_tokens:
        size = cut(start, num_tokens, chunks.tokens(shape_of(rows), start), PAGE_SIZE)
        batch = with_chunk(engine, rows, start, size)
        steps_s.append(run_step(engine, batch))
        model.observe(shape_of(batch), steps_s[-1])
        start += size
    return steps_s


def table(engine: BenchEngine, model: StepTimeModel, options: argparse.Namespace) -> list[str]:
    """The ways to size chunks, as lines of a Markdown table."""
    from baton.engine.chunking import ChunkBudget, ChunkPolicy

    lines = ["| chunks | steps | p50, ms | p99, ms | longest, ms | prompt, s |", "|---|---|---|---|---|---|"]
    ways = [
        ("fixed", options.budget, ChunkPolicy.FIXED, 0.0),
        ("fixed", options.budget // 4, ChunkPolicy.FIXED, 0.0),
        ("equal", options.budget, ChunkPolicy.EQUAL, 0.0),
        *(("itl", options.budget, ChunkPolicy.ITL, objective_s) for objective_s in options.objectives),
    ]
    for name, budget, chunking, objective_s in ways:
        chunks = ChunkBudget(budget, PAGE_SIZE, chunking, model, objective_s)
        steps_s = prompt_beside_rows(engine, chunks, model, options.rows, options.prompt)
        what = f"{name} {budget}" if not objective_s else f"{name} {1e3 * objective_s:.0f} ms"
        times = " | ".join(f"{1e3 * quantile(steps_s, share):.0f}" for share in (0.5, 0.99, 1.0))
        lines.append(f"| {what} | {len(steps_s)} | {times} | {sum(steps_s):.1f} |")
    return lines


def main() -> None:
    """Prints the errors and the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", default="m150", choices=SHAPES)
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--rows", type=int, default=8)
    parser.add_argument("--prompt", type=int, default=MAX_CONTEXT)
    parser.add_argument("--budget", type=int, default=512)
    parser.add_argument("--objectives", type=float, nargs="+", default=[0.3, 0.6], help="seconds")
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    limit_threads(1)
    limit_cores([usable_cores()[-1]])
    from baton.model.cpu import configure_threads

    configure_threads(1)
    with tempfile.TemporaryDirectory(prefix="baton-bench-") as folder:
        engine = _engine(SHAPES[options.shape], Path(folder), options.seed)
        model, errors = learn(engine, options.steps, options.seed)
        print(f"error one step ahead: median {quantile(errors, 0.5):.1%}, p90 {quantile(errors, 0.9):.1%}")
        print("\n".join(table(engine, model, options)))


def _engine(shape: ModelShape, directory: Path, seed: int) -> BenchEngine:
    from baton.model.loading.config import DtypeChoice
    from baton.model.loading.kernel_choice import KernelUse
    from baton.model.loading.loader import DecoderChoice
    from bench.engine.bench_engine import make_bench_engine
    from bench.harness.random_models import save_random_model

    save_random_model(shape, directory, seed=seed)
    return make_bench_engine(
        shape,
        directory,
        dtype=DtypeChoice.AUTO,
        decoder=DecoderChoice.AUTO,
        kernels=KernelUse.AUTO,
        page_size=PAGE_SIZE,
        max_pool_bytes=MAX_POOL_BYTES,
        num_pages_wanted=lambda page_size: 16 * 2048 // page_size + 2 * MAX_CONTEXT // page_size,
        seed=seed,
    )


if __name__ == "__main__":
    main()
