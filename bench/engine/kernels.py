"""Each native kernel alone: attention, products and sampling against torch and oneDNN.

    python -m bench.engine.kernels [--dtypes float32 bfloat16] [--parts attention linear sampling] [--rotations 5]
        [--seed 0] [--result FILE]

One core, one compute thread. Weights and pages are far larger than the caches, as in a model. Times are
the thread's CPU time; the baseline is this core's reading speed around each block. Figures compare medians inside one
rotation.
"""

from __future__ import annotations

import argparse
import random
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch
from rich.console import Console
from torch.nn.functional import linear

from baton.domain.request import SamplingParams
from baton.kv.geometry import KVGeometry, LayerGeometry
from baton.model.attention.base import AttentionBackend, AttentionCall, Segment, plan_step
from baton.model.attention.native_backend import NativeAttention
from baton.model.attention.torch_backend import TorchAttention
from baton.model.cpu import configure_threads
from baton.model.kernels.library import Kernels
from baton.model.linears.onednn import OneDnnLinear, onednn_is_correct
from baton.model.linears.panels import PanelLinear
from baton.model.loading.kernel_choice import KernelUse, choose_kernels
from baton.model.sampling.gumbel import draw_key
from baton.model.sampling.native import NativeSampler
from baton.model.sampling.sampler import SamplerBackend, TorchSampler
from baton.model.storage import PageStorage
from baton.settings.process import limit_cores, usable_cores
from bench.engine.bench_engine import time_steps
from bench.harness.ceilings import ReadProbe
from bench.harness.rotations import (
    Block,
    Finding,
    OnRotation,
    Remark,
    ResultSeries,
    TimedSamples,
    command_remark,
    make_finding,
    rotate,
    table_of,
)
from bench.harness.signals import run_command

PAGE_SIZE = 16
BLOCK_S = 0.3
MIN_STEPS = 3
WEIGHT_BYTES = 100_000_000
HEADS = ((14, 2, 64), (32, 8, 128))
BATCHES = {
    "8 rows of 512": [(511, 1)] * 8,
    "8 rows of 4096": [(4095, 1)] * 8,
    "32 rows of 512": [(511, 1)] * 32,
    "chunk of 64 at 1024": [(960, 64)],
    "chunk of 128 at 512": [(384, 128)],
    "chunk of 512 at 512": [(0, 512)],
    "chunk of 512 at 2048": [(1536, 512)],
}
MATRICES = ((4864, 896), (896, 4864))
NUM_ROWS = (1, 2, 4, 8, 16, 32, 64, 512)
VOCAB_SIZE = 151_936
NUM_SAMPLED_ROWS = 8
SAMPLINGS = {
    "temperature alone": SamplingParams(),
    "top-k 50": SamplingParams(top_k=50),
    "top-p 0.95": SamplingParams(top_p=0.95),
    "min-p 0.05": SamplingParams(min_p=0.05),
}

Arm = Callable[[], TimedSamples]


@dataclass(frozen=True, slots=True)
class KernelComparison:
    """Compared arms, the native one first. `num_bytes`: bytes that it must read once."""

    name: str
    arms: Mapping[str, Callable[[], object]]
    num_bytes: int


def attention_comparisons(kernels: Kernels, dtype: str, seed: int) -> list[KernelComparison]:
    """Every batch with every shape of heads, one layer each."""
    found = []
    for num_heads, num_kv_heads, head_dim in HEADS:
        layer = LayerGeometry(num_kv_heads, head_dim, head_dim)
        geometry = KVGeometry.of_layers((layer,), dtype, PAGE_SIZE)
        for name, lengths in BATCHES.items():
            num_tokens = sum(start + new for start, new in lengths)
            found.append(
                KernelComparison(
                    f"{dtype}, {num_heads}/{num_kv_heads} heads of {head_dim}, {name}",
                    _attention_arms(kernels, geometry, num_heads, lengths, seed),
                    num_tokens * geometry.num_bytes_per_token,
                )
            )
    return found


def _attention_arms(
    kernels: Kernels, geometry: KVGeometry, num_heads: int, lengths: Sequence[tuple[int, int]], seed: int
) -> dict[str, Callable[[], object]]:
    num_pages = sum(geometry.num_pages(start + new) for start, new in lengths)
    pages = random.Random(seed).sample(range(num_pages), num_pages)
    storage = PageStorage.allocate(geometry, num_pages)
    generator = torch.Generator().manual_seed(seed)
    for view in (storage.keys(0), storage.values(0)):
        view.copy_(torch.randn(view.shape, generator=generator))
    segments, first = [], 0
    for start, new in lengths:
        segments.append(Segment(first, start, new, [pages.pop() for _ in range(geometry.num_pages(start + new))]))
        first += new
    head_dim = geometry.layers[0].k_head_dim
    query = torch.randn(first, num_heads, head_dim, generator=generator).to(storage.keys(0).dtype)
    call, step = AttentionCall(0, query, head_dim**-0.5), plan_step(segments, PAGE_SIZE)

    def arm(backend: AttentionBackend) -> Callable[[], object]:
        backend.begin(step)
        return lambda: backend.attend(call)

    return {"native": arm(NativeAttention(kernels, storage)), "torch": arm(TorchAttention(storage))}


def linear_comparisons(kernels: Kernels, dtype: str, seed: int) -> list[KernelComparison]:
    """Every number of rows with each matrix, over more matrices than any cache holds."""
    torch_dtype = getattr(torch, dtype)
    generator = torch.Generator().manual_seed(seed)
    found = []
    for num_out, num_in in MATRICES:
        count = WEIGHT_BYTES // (num_out * num_in * torch_dtype.itemsize)
        weights = [torch.randn(num_out, num_in, generator=generator).to(torch_dtype) for _ in range(count)]
        methods: dict[str, Sequence[Callable[[torch.Tensor], torch.Tensor]]] = {
            "native": [PanelLinear(kernels, weight, None) for weight in weights],
            "torch": [partial(linear, weight=weight) for weight in weights],
        }
        if onednn_is_correct(torch_dtype):
            methods["packed"] = [OneDnnLinear(weight, None) for weight in weights]
        for num_rows in NUM_ROWS:
            x = torch.randn(num_rows, num_in, generator=generator).to(torch_dtype)
            arms = {name: partial(_each, products, x) for name, products in methods.items()}
            name = f"{dtype}, {num_out} x {num_in}, {num_rows} rows"
            found.append(KernelComparison(name, arms, count * num_out * num_in * torch_dtype.itemsize))
    return found


def sampling_comparisons(kernels: Kernels, dtype: str, seed: int) -> list[KernelComparison]:
    """Eight rows over a large vocabulary, logits of standard deviation three, with each sampling method."""
    generator = torch.Generator().manual_seed(seed)
    logits = (3 * torch.randn(NUM_SAMPLED_ROWS, VOCAB_SIZE, generator=generator)).to(getattr(torch, dtype))
    keys = [draw_key(seed, row) for row in range(NUM_SAMPLED_ROWS)]
    samplers: dict[str, SamplerBackend] = {"native": NativeSampler(kernels), "torch": TorchSampler()}
    methods: dict[str, Callable[[SamplerBackend], object]] = {"greedy": lambda sampler: sampler.argmax(logits)}
    for name, sampling in SAMPLINGS.items():
        methods[name] = partial(_draw, logits=logits, sampling=sampling, keys=keys)
    return [
        KernelComparison(
            f"{dtype}, {NUM_SAMPLED_ROWS} rows of {VOCAB_SIZE}, {name}",
            {arm: partial(method, sampler) for arm, sampler in samplers.items()},
            logits.nbytes,
        )
        for name, method in methods.items()
    ]


def _draw(sampler: SamplerBackend, logits: torch.Tensor, sampling: SamplingParams, keys: Sequence[int]) -> object:
    return sampler.sample(logits, [sampling] * len(keys), keys)


def _each(products: Sequence[Callable[[torch.Tensor], torch.Tensor]], x: torch.Tensor) -> object:
    return [product(x) for product in products]


def run(
    comparison: KernelComparison, rotations: int, seed: int, read: ReadProbe, console: Console, on_rotation: OnRotation
) -> list[Block]:
    """Runs all rotations; blocks are named after comparison and arm."""

    def timed(work: Callable[[], object]) -> Arm:
        def block() -> TimedSamples:
            work()  # replaces what the previous arm left in the caches
            return time_steps(work, block_s=BLOCK_S, min_steps=MIN_STEPS)

        return block

    arms = {f"{comparison.name}: {name}": timed(work) for name, work in comparison.arms.items()}
    with torch.inference_mode():
        return rotate(
            arms,
            lambda _: read(),
            num_rotations=rotations,
            seed=seed,
            console=console,
            on_rotation=on_rotation,
        )


def findings_of(comparison: KernelComparison, blocks: Sequence[Block]) -> list[Finding]:
    """The native arm's time, its reading speed over the ceiling, and its speed over each other arm's."""
    native, *others = (f"{comparison.name}: {name}" for name in comparison.arms)

    def share(group: tuple[Block, ...]) -> float:
        return comparison.num_bytes / _median(group[0]) / group[0].probe

    def gain(group: tuple[Block, ...]) -> float:
        return _median(group[1]) / _median(group[0])

    found = [
        make_finding(f"{native}: time", "ms", blocks, (native,), lambda group: 1e3 * _median(group[0]), _steady),
        make_finding(f"{native}: read / ceiling", "", blocks, (native,), share, _steady),
    ]
    return [
        *found,
        *(
            make_finding(f"{native} over {arm.rsplit(': ')[-1]}", "x", blocks, (native, arm), gain, _steady)
            for arm in others
        ),
    ]


COMPARISONS = {"attention": attention_comparisons, "linear": linear_comparisons, "sampling": sampling_comparisons}


def _steady(block: Block) -> bool:
    return block.has_steady_probe


def _median(block: Block) -> float:
    return statistics.median(block.cpu_s)


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--dtypes", nargs="+", default=["float32", "bfloat16"], choices=("float32", "bfloat16"))
    parser.add_argument("--parts", nargs="+", default=list(COMPARISONS), choices=list(COMPARISONS))
    parser.add_argument("--rotations", type=int, default=5)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--result", type=Path)
    flags = parser.parse_args()
    limit_cores([usable_cores()[-1]])
    configure_threads(1)
    chosen = choose_kernels(KernelUse.AUTO, "cpu")
    if chosen.kernels is None:
        raise SystemExit(chosen.note)
    console, read = Console(stderr=True, quiet=True), ReadProbe()
    remarks = [command_remark("bench.engine.kernels"), Remark("kernels", chosen.note)]
    series = ResultSeries(flags.result, "kernels", flags.rotations, remarks)
    for part in flags.parts:
        for dtype in flags.dtypes:
            for comparison in COMPARISONS[part](chosen.kernels, dtype, flags.seed):
                found = partial(findings_of, comparison)
                series.add(
                    run(comparison, flags.rotations, flags.seed, read, console, series.on_rotation(found)), found
                )
    Console(width=200).print(table_of(series.findings))


if __name__ == "__main__":
    run_command(main)
