"""Gain of the lean decoder and the native kernels: one decode step with every decoder, with and without kernels.

    python -m bench.engine.decoder_step [--shape qwen2.5-0.5b] [--dtypes float32 bfloat16] [--batches 1 4 8]
        [--context 256] [--rotations 10] [--seed 0] [--result FILE]

All arms share one set of weights and one pool, on one core with one compute thread: the stock module and the lean
decoder, each with torch alone and, if they are built, with the native kernels. Times are the thread's CPU time, which
other processes disturb least. The baseline is the bytes of a step (weights once, and the rows' KV) over this core's
reading speed around the block.
"""

from __future__ import annotations

import argparse
import random
import statistics
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch
from rich.console import Console

from baton.kv.geometry import DTYPE_BYTES
from baton.model.attention.backend_choice import choose_backend
from baton.model.attention.base import Segment, plan_step
from baton.model.cpu import configure_threads
from baton.model.decoders.base import Decoder
from baton.model.decoders.lean import LeanDecoder
from baton.model.decoders.lean_spec import LeanSpec, lean_spec
from baton.model.decoders.lean_weights import make_lean_model
from baton.model.decoders.native_ops import choose_ops
from baton.model.decoders.ops import TorchOps
from baton.model.decoders.stock import StockDecoder
from baton.model.linears.packed_modules import pack_modules, unpack_modules
from baton.model.linears.packing import WeightLayout, panel_packer
from baton.model.loading.config import DtypeChoice
from baton.model.loading.kernel_choice import KernelUse, choose_kernels
from baton.model.loading.loader import DecoderChoice, LoadedModel, load_model
from baton.model.storage import PageStorage
from baton.settings.process import limit_cores, usable_cores
from bench.engine.bench_engine import time_steps
from bench.harness.ceilings import ReadProbe
from bench.harness.model_shapes import SHAPES
from bench.harness.random_models import save_random_model
from bench.harness.rotations import (
    Block,
    Finding,
    ResultSeries,
    TimedSamples,
    command_remark,
    make_finding,
    rotate,
    table_of,
)
from bench.harness.signals import run_command

PAGE_SIZE = 16
BLOCK_S = 1.0
MIN_STEPS = 3


@dataclass(frozen=True, slots=True)
class DecoderStepOptions:
    """One run's flags."""

    shape: str
    dtypes: tuple[str, ...]
    batches: tuple[int, ...]
    context: int
    rotations: int
    seed: int
    result: Path | None


def measure(options: DecoderStepOptions, console: Console) -> list[Finding]:
    """Measures every dtype and batch. Raises `BatonError` for a model that cannot be loaded."""
    read = ReadProbe()
    remarks = [command_remark("bench.engine.decoder_step")]
    series = ResultSeries(options.result, "decoder_step", options.rotations, remarks)
    with tempfile.TemporaryDirectory() as folder:
        save_random_model(SHAPES[options.shape], Path(folder), seed=options.seed)
        for dtype in options.dtypes:
            loaded = load_model(
                Path(folder),
                dtype=DtypeChoice(dtype),
                layout=WeightLayout.PLAIN,
                decoder=DecoderChoice.STOCK,
                kernels=KernelUse.NEVER,
            )
            storage = _pool(options, loaded)
            variants = _variants(loaded, storage)
            for num_rows in options.batches:
                arms = _arms(f"{dtype}, {num_rows} rows", variants, _step(options, storage, num_rows))
                found = partial(_findings_of_all, tuple(arms), _step_bytes(loaded, num_rows * options.context))
                run = rotate(
                    arms,
                    lambda _: read(),
                    num_rotations=options.rotations,
                    seed=options.seed,
                    console=console,
                    on_rotation=series.on_rotation(found),
                )
                series.add(run, found)
    return series.findings


def _pool(options: DecoderStepOptions, loaded: LoadedModel) -> PageStorage:
    """A pool for the largest batch, filled with random numbers."""
    num_pages = max(options.batches) * loaded.geometry.num_pages(options.context)
    storage = PageStorage.allocate(loaded.geometry, num_pages)
    generator = torch.Generator().manual_seed(options.seed)
    for layer in range(len(loaded.layers)):
        for side in (storage.keys(layer), storage.values(layer)):
            side.copy_(torch.randn(side.shape, generator=generator))
    return storage


@dataclass(frozen=True, slots=True)
class DecoderVariant:
    """A decoder, and the preparation of the shared weights that it needs."""

    prepare: Callable[[], object]
    decoder: Decoder


def _variants(loaded: LoadedModel, storage: PageStorage) -> dict[str, DecoderVariant]:
    """Variants by the name of the arm; the first is the reference."""
    module, layers = loaded.impl, loaded.layers
    assert isinstance(module, torch.nn.Module)
    spec = lean_spec(module.config.get_text_config().to_dict(), layers)  # type: ignore[operator,union-attr]
    assert isinstance(spec, LeanSpec)
    lean, num_slots = make_lean_model(module, spec), storage.num_pages * PAGE_SIZE
    plain = choose_backend(layers, storage)
    variants = {
        "stock": DecoderVariant(lambda: unpack_modules(module), StockDecoder(module, layers, storage, plain)),
        "lean": DecoderVariant(lean.unpack, LeanDecoder(lean, layers, storage, num_slots, plain, TorchOps())),
    }
    kernels = choose_kernels(KernelUse.AUTO, "cpu").kernels
    if kernels is not None:
        best, ops = choose_backend(layers, storage, kernels), choose_ops(storage, kernels)
        native = StockDecoder(module, layers, storage, best)
        variants["stock, kernels"] = DecoderVariant(lambda: pack_modules(module, panel_packer(kernels)), native)
        fast = LeanDecoder(lean, layers, storage, num_slots, best, ops)
        variants["lean, kernels"] = DecoderVariant(lambda: lean.pack(panel_packer(kernels)), fast)
    return variants


def _step(options: DecoderStepOptions, storage: PageStorage, num_rows: int) -> Callable[[Decoder], torch.Tensor]:
    """One token for each of `num_rows` rows of `context` tokens, on scattered pages."""
    rng = random.Random(options.seed)
    pages_a_row = storage.geometry.num_pages(options.context)
    scattered = rng.sample(range(storage.num_pages), num_rows * pages_a_row)
    last = options.context - 1
    segments = [
        Segment(row, last, 1, scattered[row * pages_a_row : (row + 1) * pages_a_row]) for row in range(num_rows)
    ]
    ids, positions, keep = torch.arange(num_rows) + 10, torch.full((num_rows,), last), torch.arange(num_rows)
    return lambda decoder: decoder.forward(ids, positions, plan_step(segments, PAGE_SIZE), keep)


def _arms(
    label: str, variants: Mapping[str, DecoderVariant], step: Callable[[Decoder], torch.Tensor]
) -> dict[str, Callable[[], TimedSamples]]:
    return {f"{label}: {name}": _timed(variant, step) for name, variant in variants.items()}


def _timed(variant: DecoderVariant, step: Callable[[Decoder], torch.Tensor]) -> Callable[[], TimedSamples]:
    def run() -> TimedSamples:
        variant.prepare()
        step(variant.decoder)  # replaces what the previous arm left in the caches
        return time_steps(lambda: step(variant.decoder), block_s=BLOCK_S, min_steps=MIN_STEPS)

    return run


def _step_bytes(loaded: LoadedModel, num_kv_tokens: int) -> int:
    """Weights once (a tied head is the embedding's own) and the KV of all rows."""
    weights = loaded.report.num_parameters * DTYPE_BYTES[loaded.config.dtype]
    return weights + num_kv_tokens * loaded.geometry.num_bytes_per_token


def _findings_of_all(arms: Sequence[str], num_bytes: int, blocks: Sequence[Block]) -> list[Finding]:
    return [found for arm in arms for found in _findings(arm, arms[0], num_bytes, blocks)]


def _findings(arm: str, first: str, num_bytes: int, blocks: Sequence[Block]) -> list[Finding]:
    def share(group: tuple[Block, ...]) -> float:
        return num_bytes / _median(group[0]) / group[0].probe

    found = [
        make_finding(f"{arm}: median step", "ms", blocks, (arm,), lambda group: 1e3 * _median(group[0])),
        make_finding(f"{arm}: best step", "ms", blocks, (arm,), lambda group: 1e3 * min(group[0].cpu_s)),
        make_finding(f"{arm}: read / ceiling", "", blocks, (arm,), share),
    ]
    if arm != first:
        pair = (first, arm)
        found.append(
            make_finding(f"{arm}: speed over stock", "", blocks, pair, lambda g: _median(g[0]) / _median(g[1]))
        )
    return found


def _median(block: Block) -> float:
    return statistics.median(block.cpu_s)


def parse(arguments: Sequence[str] | None = None) -> DecoderStepOptions:
    """From the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", default="qwen2.5-0.5b", choices=SHAPES)
    parser.add_argument("--dtypes", nargs="+", default=["float32", "bfloat16"], choices=("float32", "bfloat16"))
    parser.add_argument("--batches", nargs="+", type=int, default=[1, 4, 8])
    parser.add_argument("--context", type=int, default=256)
    parser.add_argument("--rotations", type=int, default=10)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--result", type=Path)
    flags = parser.parse_args(arguments)
    return DecoderStepOptions(
        shape=flags.shape,
        dtypes=tuple(flags.dtypes),
        batches=tuple(flags.batches),
        context=flags.context,
        rotations=flags.rotations,
        seed=flags.seed,
        result=flags.result,
    )


def main() -> None:
    """Command line."""
    options = parse()
    limit_cores([usable_cores()[-1]])
    configure_threads(1)
    Console().print(table_of(measure(options, Console(stderr=True))))


if __name__ == "__main__":
    run_command(main)
