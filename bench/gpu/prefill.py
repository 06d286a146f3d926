"""A GPU's prefill speed over its matrix units' limit, with attention by flashinfer and by torch.

    python -m bench.gpu.prefill [--shapes qwen3-0.6b qwen3-8b] [--prompts 2048 8192] [--budget 2048] [--runs 5]
        [--result FILE]

A run is one prompt in steps of `--budget` tokens, through the worker's runner, sampled at its end. The limit is the
prompt's operations (`ModelShape.prefill_flops`) at the speed of one large matrix product here. Random weights in
bfloat16. Exits with an error without a GPU.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import torch
from rich.console import Console
from rich.table import Table

from baton.domain.errors import Broken
from baton.engine.runner import ModelRunner
from baton.model.attention.torch_backend import TorchAttention
from baton.model.decoders.base import Decoder
from baton.model.decoders.lean import LeanDecoder
from baton.model.loading.config import DtypeChoice
from baton.model.loading.loader import LoadedModel, load_model
from baton.model.storage import PageStorage
from bench.engine.bench_engine import BenchEngine, run_all
from bench.engine.gpu import save
from bench.harness.model_shapes import SHAPES
from bench.harness.random_models import save_random_model

PAGE_SIZE = 16
PROBE_SIZE = 8192
PROBE_PRODUCTS = 10


@dataclass(frozen=True, slots=True)
class PrefillFinding:
    """Runs of one prompt. `limit_s`: time of its operations alone; `attention`: the class that computed it."""

    shape: str
    num_tokens: int
    attention: str
    median_s: float
    best_s: float
    limit_s: float

    @property
    def tokens_per_s(self) -> float:
        return self.num_tokens / self.median_s


class TorchAttentionModel:
    """A loaded model whose decoders compute attention in torch, wherever it runs. Delegates everything else to it."""

    def __init__(self, model: LoadedModel) -> None:
        self._model = model

    def __getattr__(self, name: str) -> Any:
        return getattr(self._model, name)

    def decoder(self, storage: PageStorage) -> Decoder:
        """The model's decoder over `storage`. Raises `Broken` for a stock one, which has no backend to replace."""
        decoder = self._model.decoder(storage)
        if not isinstance(decoder, LeanDecoder):
            raise Broken("only the lean decoder takes another attention backend")
        return decoder.with_backend(TorchAttention(storage))


def measure(
    shapes: Sequence[str], prompts: Sequence[int], budget: int, num_runs: int, device: str, probe_size: int = PROBE_SIZE
) -> list[PrefillFinding]:
    """Measures every shape, prompt and attention. Raises `UnsupportedModel`."""
    flops_per_s = matrix_speed(device, probe_size)
    findings: list[PrefillFinding] = []
    for name in shapes:
        with tempfile.TemporaryDirectory() as folder:
            save_random_model(SHAPES[name], Path(folder), device=device)
            model = load_model(Path(folder), dtype=DtypeChoice.BFLOAT16, page_size=PAGE_SIZE, device=device)
        num_pages = model.geometry.num_pages(max(prompts)) + 1
        storage = PageStorage.allocate(model.geometry, num_pages, device)
        own = ModelRunner(model, storage)
        in_torch = ModelRunner(cast(LoadedModel, TorchAttentionModel(model)), storage)
        engine = BenchEngine(SHAPES[name], model, storage, own, num_pages, 0)
        decoder = model.decoder(storage)
        chosen = type(decoder.backend).__name__ if isinstance(decoder, LeanDecoder) else type(decoder).__name__
        for num_tokens in prompts:
            limit_s = SHAPES[name].prefill_flops(num_tokens) / flops_per_s
            for attention, runner in ((chosen, own), ("TorchAttention", in_torch)):
                seconds = time_prompt(engine, runner, num_tokens, budget, num_runs)
                times = statistics.median(seconds), min(seconds), limit_s
                findings.append(PrefillFinding(name, num_tokens, attention, *times))
    return findings


def time_prompt(engine: BenchEngine, runner: ModelRunner, num_tokens: int, budget: int, num_runs: int) -> list[float]:
    """Seconds of each run, after one that is not counted. A run ends when its token is on the host."""
    batches = engine.prefill_batches(num_tokens, budget)
    seconds = []
    for _ in range(num_runs + 1):
        began_s = time.perf_counter()
        run_all(runner, batches)
        seconds.append(time.perf_counter() - began_s)
    return seconds[1:]


def matrix_speed(device: str, size: int) -> float:
    """Operations a second of a product of two bfloat16 matrices [size, size] of random numbers; best of some."""
    left, right = (torch.randn(size, size, device=device).to(torch.bfloat16) for _ in range(2))
    seconds = []
    for _ in range(PROBE_PRODUCTS):
        if device == "cuda":
            torch.cuda.synchronize()
        began_s = time.perf_counter()
        torch.mm(left, right)
        if device == "cuda":
            torch.cuda.synchronize()
        seconds.append(time.perf_counter() - began_s)
    return 2 * size**3 / min(seconds)


def table_of(findings: Sequence[PrefillFinding]) -> Table:
    """A table for the terminal."""
    table = Table("shape", "tokens", "attention", "median ms", "best ms", "limit ms", "limit / median", "tokens/s")
    for found in findings:
        times = (f"{1e3 * seconds:.1f}" for seconds in (found.median_s, found.best_s, found.limit_s))
        share = f"{found.limit_s / found.median_s:.0%}"
        table.add_row(found.shape, str(found.num_tokens), found.attention, *times, share, f"{found.tokens_per_s:.0f}")
    return table


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shapes", nargs="+", default=["qwen3-0.6b", "qwen3-8b"], choices=SHAPES)
    parser.add_argument("--prompts", nargs="+", type=int, default=[2048, 8192])
    parser.add_argument("--budget", type=int, default=2048)
    parser.add_argument("--runs", type=int, default=5)
    parser.add_argument("--result", type=Path)
    flags = parser.parse_args()
    if not torch.cuda.is_available():
        sys.exit("torch finds no GPU here; nothing to measure.")
    findings = measure(flags.shapes, flags.prompts, flags.budget, flags.runs, "cuda")
    if flags.result is not None:
        save(flags.result, findings, "cuda")
    Console(width=120).print(table_of(findings))


if __name__ == "__main__":
    main()
