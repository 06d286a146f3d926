"""Native attention and the writing of KV over pages of several head groups, against one head group.

    python -m bench.attention.head_groups [--dtypes bfloat16] [--rounds 60] [--seed 0]

One core, one compute thread. A call runs four layers, whose pages are far larger than the caches. Every round runs each
arm twice and times the second, in a random order. Figures are medians of the rounds' ratios to the first arm, with
quartiles. The second arm has one group as well, in other memory: it shows the noise. Times are the thread's CPU time.
"""

from __future__ import annotations

import argparse
import random
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import product

import torch

from baton.domain.arithmetic import ceil_div
from baton.kv.geometry import KVGeometry, LayerGeometry
from baton.kv.memory import PageMemory
from baton.model.attention.base import AttentionBackend, AttentionCall, Segment, StepMetadata, plan_step
from baton.model.attention.native_backend import NativeAttention
from baton.model.cpu import configure_threads
from baton.model.decoders.native_ops import NativeOps
from baton.model.decoders.ops import HeadShape, Ops, RopeTable
from baton.model.kernels.library import Kernels
from baton.model.loading.kernel_choice import KernelUse, choose_kernels
from baton.model.storage import PageStorage
from baton.settings.process import limit_cores, usable_cores
from bench.harness.signals import run_command

PAGE_SIZE, NUM_LAYERS = 16, 4
HEADS = ((14, 2, 64), (32, 8, 128), (16, 16, 64))
BATCHES = {"8 rows of 512": [(511, 1)] * 8, "8 rows of 2048": [(2047, 1)] * 8, "chunk of 128 at 512": [(384, 128)]}

Arms = dict[str, Callable[[], object]]


def head_group_numbers(num_kv_heads: int) -> list[int]:
    """Powers of two up to a group a head."""
    return [2**power for power in range(num_kv_heads.bit_length()) if num_kv_heads % 2**power == 0]


def layer_shape(num_kv_heads: int, head_dim: int) -> tuple[LayerGeometry, ...]:
    """The layers of one call."""
    return (LayerGeometry(num_kv_heads, head_dim, head_dim),) * NUM_LAYERS


def scattered_segments(lengths: Sequence[tuple[int, int]], seed: int) -> tuple[list[Segment], int]:
    """Segments of (start, new tokens) on pages in no order, and the number of pages."""
    counts = [ceil_div(start + new, PAGE_SIZE) for start, new in lengths]
    pages = random.Random(seed).sample(range(sum(counts)), sum(counts))
    segments, offset = [], 0
    for (start, new), count in zip(lengths, counts, strict=True):
        segments.append(Segment(offset, start, new, [pages.pop() for _ in range(count)]))
        offset += new
    return segments, sum(counts)


def filled_storage(geometry: KVGeometry, num_pages: int, seed: int) -> PageStorage:
    """Pages of random values in memory like a worker's pool."""
    memory = PageMemory(num_pages, geometry.page_bytes, prefault=True)
    storage, generator = PageStorage.on_memory(geometry, memory), torch.Generator().manual_seed(seed)
    for layer in range(NUM_LAYERS):
        for view in (storage.keys(layer), storage.values(layer)):
            view.copy_(torch.randn(view.shape, generator=generator))
    return storage


@dataclass(frozen=True, slots=True)
class LayerCalls:
    """What one call computes: queries of segments, and the projections that they come from."""

    heads: HeadShape
    step: StepMetadata
    query: torch.Tensor
    qkv: torch.Tensor
    rope: RopeTable

    @classmethod
    def random(cls, heads: HeadShape, segments: Sequence[Segment], dtype: torch.dtype) -> LayerCalls:
        """Random values for `segments`."""
        step = plan_step(segments, PAGE_SIZE)
        angles = torch.arange(4096)[:, None] * torch.linspace(1, 0.01, heads.head_dim // 2)
        query = torch.randn(step.num_tokens, heads.num_heads, heads.head_dim).to(dtype)
        qkv = torch.randn(step.num_tokens, heads.num_features).to(dtype)
        return cls(heads, step, query, qkv, RopeTable(angles.cos(), angles.sin()))

    def attend(self, backend: AttentionBackend) -> None:
        """Attention of all layers, planned before."""
        for layer in range(NUM_LAYERS):
            backend.attend(AttentionCall(layer, self.query, 0.1))

    def write(self, ops: Ops, storage: PageStorage) -> None:
        """Rotation and writing of all layers."""
        positions = torch.arange(self.step.num_tokens)
        for layer in range(NUM_LAYERS):
            ops.rope_and_write_kv(self.qkv, self.rope, self.heads, None, positions, storage, layer, self.step)


def comparisons(kernels: Kernels, dtype: str, seed: int) -> Iterator[tuple[str, Arms]]:
    """Name and arms of each comparison, the arm of one group first."""
    for (num_heads, num_kv_heads, head_dim), (batch, lengths) in product(HEADS, BATCHES.items()):
        segments, num_pages = scattered_segments(lengths, seed)
        calls = LayerCalls.random(HeadShape(num_heads, num_kv_heads, head_dim), segments, getattr(torch, dtype))
        attend: Arms = {}
        write: Arms = {}
        for number in (1, *head_group_numbers(num_kv_heads)):
            geometry = KVGeometry.of_layers(layer_shape(num_kv_heads, head_dim), dtype, PAGE_SIZE, number)
            storage = filled_storage(geometry, num_pages, seed)
            backend = NativeAttention(kernels, storage)
            backend.begin(calls.step)
            arm = f"{number} again" if str(number) in attend else str(number)
            attend[arm] = partial(calls.attend, backend)
            write[arm] = partial(calls.write, NativeOps(kernels), storage)
        name = f"{dtype}, {num_heads}/{num_kv_heads} heads of {head_dim}, {batch}"
        yield f"{name}: attention", attend
        yield f"{name}: rotate and write", write


def ratios(arms: Arms, rounds: int, seed: int) -> dict[str, list[float]]:
    """Each arm's times over those of the first arm, round by round."""
    order, rng = list(arms), random.Random(seed)
    first = order[0]
    found: dict[str, list[float]] = {name: [] for name in arms}
    for _ in range(rounds):
        rng.shuffle(order)
        seconds = {}
        for name in order:
            arms[name]()  # replaces what the previous arm left in the caches
            began = time.thread_time()
            arms[name]()
            seconds[name] = time.thread_time() - began
        for name, taken in seconds.items():
            found[name].append(taken / seconds[first])
    return found


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--dtypes", nargs="+", default=["bfloat16"], choices=("float32", "bfloat16"))
    parser.add_argument("--rounds", type=int, default=60)
    parser.add_argument("--seed", type=int, default=0)
    flags = parser.parse_args()
    limit_cores([usable_cores()[-1]])
    configure_threads(1)
    chosen = choose_kernels(KernelUse.AUTO, "cpu")
    if chosen.kernels is None:
        raise SystemExit(chosen.note)
    print(chosen.note)
    for dtype in flags.dtypes:
        with torch.inference_mode():
            for name, arms in comparisons(chosen.kernels, dtype, flags.seed):
                for arm, found in ratios(arms, flags.rounds, flags.seed).items():
                    low, middle, high = statistics.quantiles(found, n=4)
                    print(f"{name}, groups {arm}: {middle:.3f} ({low:.3f} to {high:.3f})", flush=True)


if __name__ == "__main__":
    run_command(main)
