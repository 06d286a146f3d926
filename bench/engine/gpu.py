"""A GPU's decode step over the memory's limit, and the gain of CUDA graphs and host overlap.

    python -m bench.engine.gpu [--shapes qwen3-0.6b qwen3-8b] [--batches 1 32 128] [--context 1024] [--turns 50]
        [--result FILE]

A turn is the decode worker's whole engine loop: schedule, step, sample, commit, emit. The limit is its bytes
(weights once, and the rows' KV) over the speed of a copy in the device's memory. Random weights in bfloat16. Exits with
an error without a GPU.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table

from baton.engine.runner import ModelRunner
from baton.model.loading.config import DtypeChoice
from baton.model.loading.loader import LoadedModel, load_model
from baton.model.storage import PageStorage
from bench.engine.bench_engine import BenchEngine
from bench.engine.decode_loop import WARMUP_TURNS, EffectSink, make_decode_loop, pages_needed
from bench.harness.model_shapes import SHAPES, ModelShape
from bench.harness.random_models import save_random_model

PAGE_SIZE = 16
PROBE_BYTES = 1024 * 1024 * 1024
PROBE_COPIES = 10


@dataclass(frozen=True, slots=True)
class GpuArm:
    """One way to run the loop."""

    name: str
    graphs: bool
    overlaps: bool


ARMS = (GpuArm("step by step", False, False), GpuArm("graphs", True, False), GpuArm("graphs, overlap", True, True))


@dataclass(frozen=True, slots=True)
class GpuOptions:
    """One run's flags."""

    shapes: tuple[str, ...]
    batches: tuple[int, ...]
    context: int
    turns: int
    seed: int
    result: Path | None


@dataclass(frozen=True, slots=True)
class GpuFinding:
    """Turns of one arm. `limit_s`: time of the reads alone. `num_graphs` 0: nothing could be captured."""

    shape: str
    num_rows: int
    arm: str
    median_s: float
    best_s: float
    limit_s: float
    num_graphs: int

    @property
    def share(self) -> float:
        """Limit over the median turn."""
        return self.limit_s / self.median_s

    @property
    def tokens_per_s(self) -> float:
        return self.num_rows / self.median_s


def measure(options: GpuOptions, device: str, console: Console, probe_bytes: int = PROBE_BYTES) -> list[GpuFinding]:
    """Measures every shape, batch and arm. Raises `UnsupportedModel`, and `torch.OutOfMemoryError` if a GPU is too
    small."""
    bytes_per_s = copy_speed(device, probe_bytes)
    console.print(f"a copy in the device's memory reads and writes {bytes_per_s / 1e9:.0f} GB/s")
    findings: list[GpuFinding] = []
    for name in options.shapes:
        with tempfile.TemporaryDirectory() as folder:
            save_random_model(SHAPES[name], Path(folder), seed=options.seed, device=device)
            model = load_model(Path(folder), dtype=DtypeChoice.BFLOAT16, page_size=PAGE_SIZE, device=device)
        engine = make_gpu_engine(SHAPES[name], model, options)
        for num_rows in options.batches:
            limit_s = engine.step_bytes(num_rows, options.context) / bytes_per_s
            for arm in ARMS:
                found = run_arm(engine, name, arm, num_rows, options, limit_s)
                console.print(f"{name}, {num_rows} rows, {arm.name}: {1e3 * found.median_s:.2f} ms")
                findings.append(found)
    return findings


def copy_speed(device: str, num_bytes: int) -> float:
    """Bytes a second, read and written, of a copy within the device's memory; best of `PROBE_COPIES`."""
    source, target = (torch.zeros(num_bytes, dtype=torch.uint8, device=device) for _ in range(2))
    seconds = []
    for _ in range(PROBE_COPIES):
        _wait(device)
        began_s = time.perf_counter()
        target.copy_(source)
        _wait(device)
        seconds.append(time.perf_counter() - began_s)
    return 2 * num_bytes / min(seconds)


def make_gpu_engine(shape: ModelShape, model: LoadedModel, options: GpuOptions) -> BenchEngine:
    """An engine whose pool fits the largest batch, filled with random numbers."""
    num_pages = pages_needed(PAGE_SIZE, max(options.batches), options.context, options.turns)
    storage = PageStorage.allocate(model.geometry, num_pages, model.device, has_scratch=True)
    generator = torch.Generator(storage.device).manual_seed(options.seed)
    for layer in range(len(model.layers)):
        for side in (storage.keys(layer), storage.values(layer)):
            side.normal_(generator=generator)
    return BenchEngine(shape, model, storage, ModelRunner(model, storage), num_pages, options.seed)


def run_arm(
    engine: BenchEngine, shape: str, arm: GpuArm, num_rows: int, options: GpuOptions, limit_s: float
) -> GpuFinding:
    """Times turns of one arm after a few warm-up turns."""
    runner = ModelRunner(engine.model, engine.storage, num_rows if arm.graphs else 0)
    with EffectSink() as sink:
        loop = make_decode_loop(engine, runner, sink, num_rows, options.context, options.turns, arm.overlaps)
        seconds = []
        for _ in range(WARMUP_TURNS + options.turns):
            began_s = time.perf_counter()
            loop.turn()  # returns when its tokens are on the host, so the device has finished
            seconds.append(time.perf_counter() - began_s)
    timed = seconds[WARMUP_TURNS:]
    num_graphs = len(runner.graph_sizes)
    return GpuFinding(shape, num_rows, arm.name, statistics.median(timed), min(timed), limit_s, num_graphs)


def table_of(findings: Sequence[GpuFinding]) -> Table:
    """A table for the terminal."""
    table = Table("shape", "rows", "arm", "median ms", "best ms", "limit ms", "share", "tokens/s", "graphs")
    for found in findings:
        times = (f"{1e3 * seconds:.2f}" for seconds in (found.median_s, found.best_s, found.limit_s))
        rest = f"{found.share:.0%}", f"{found.tokens_per_s:.0f}", str(found.num_graphs)
        table.add_row(found.shape, str(found.num_rows), found.arm, *times, *rest)
    return table


def save(path: Path, findings: Sequence[Any], device: str) -> None:
    """Saves findings, dataclasses of one kind, as JSON."""
    machine = torch.cuda.get_device_name() if device == "cuda" else device
    content = {"device": machine, "torch": torch.__version__, "findings": [asdict(found) for found in findings]}
    path.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")


def parse(arguments: Sequence[str] | None = None) -> GpuOptions:
    """From the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shapes", nargs="+", default=["qwen3-0.6b", "qwen3-8b"], choices=SHAPES)
    parser.add_argument("--batches", nargs="+", type=int, default=[1, 32, 128])
    parser.add_argument("--context", type=int, default=1024)
    parser.add_argument("--turns", type=int, default=50)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--result", type=Path)
    flags = parser.parse_args(arguments)
    return GpuOptions(tuple(flags.shapes), tuple(flags.batches), flags.context, flags.turns, flags.seed, flags.result)


def main() -> None:
    """Command line."""
    options = parse()
    if not torch.cuda.is_available():
        sys.exit("torch finds no GPU here; nothing to measure.")
    console = Console(stderr=True)
    findings = measure(options, "cuda", console)
    if options.result is not None:
        save(options.result, findings, "cuda")
    Console(width=120).print(table_of(findings))  # as wide as the table, also into a file


def _wait(device: str) -> None:
    if device == "cuda":
        torch.cuda.synchronize()


if __name__ == "__main__":
    main()
