"""Attention over latent pages (MLA) against pages with every head's K and V, and its two ways against each other.

    python -m bench.attention.latent [--dtypes bfloat16] [--heads 16 128] [--rounds 30] [--seed 0]

One core, one compute thread, one layer with the sizes of DeepSeek-V2 and V3: rank 512, rope 64, nope and value 128. The
times of latent pages include the products with W_UK and W_UV, those of full pages do not include the expansion of new
tokens. Rounds and figures are those of `bench.attention.head_groups`.
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Iterator, Sequence
from functools import partial

import torch

from baton.kv.geometry import CacheLayer, KVGeometry, LatentGeometry, LayerGeometry
from baton.kv.memory import PageMemory
from baton.model.attention.base import AttentionBackend, AttentionCall, LatentProjections, StepMetadata, plan_step
from baton.model.attention.latent import LatentAttention
from baton.model.attention.native_backend import NativeAttention
from baton.model.cpu import configure_threads
from baton.model.kernels.library import Kernels
from baton.model.loading.kernel_choice import KernelUse, choose_kernels
from baton.model.storage import PageStorage
from baton.settings.process import limit_cores, usable_cores
from bench.attention.head_groups import PAGE_SIZE, Arms, ratios, scattered_segments
from bench.harness.signals import run_command

RANK, ROPE_DIM, NOPE_DIM, V_DIM = 512, 64, 128, 128
DECODE_BATCHES = {"8 rows of 512": [(511, 1)] * 8, "4 rows of 2048": [(2047, 1)] * 4}
CHUNKS = (32, 48, 64, 96, 171, 512)
NUM_CACHED = 1024
ABSORB_ALL, EXPAND_ALL = 1 << 30, 0


def storage_of(layer: CacheLayer, dtype: str, num_pages: int) -> PageStorage:
    """Pages of random values in memory like a worker's pool."""
    geometry = KVGeometry.of_layers((layer,), dtype, PAGE_SIZE)
    storage = PageStorage.on_memory(geometry, PageMemory(num_pages, geometry.page_bytes, prefault=True))
    storage.keys(0).normal_()
    storage.values(0).normal_()
    return storage


class Layer:
    """One layer's projections and storage for `segments`, given as (start, new tokens)."""

    def __init__(self, kernels: Kernels, dtype: str, num_heads: int, lengths: Sequence[tuple[int, int]], seed: int):
        self._kernels, self._dtype, self._num_heads = kernels, dtype, num_heads
        segments, self._num_pages = scattered_segments(lengths, seed)
        self._step = plan_step(segments, PAGE_SIZE)
        linear = torch.nn.Linear(RANK, num_heads * (NOPE_DIM + V_DIM), bias=False, dtype=getattr(torch, dtype))
        self._projections = LatentProjections(linear, num_heads, NOPE_DIM)

    def latent(self, *limits: int) -> list[partial[None]]:
        """Calls over latents, one for each longest absorbed segment."""
        storage = storage_of(LatentGeometry(RANK, ROPE_DIM), self._dtype, self._num_pages)
        rows = [NativeAttention(self._kernels, storage) for _ in limits]
        backends = [LatentAttention(storage, *arguments) for arguments in zip(rows, limits, strict=True)]
        return [self._call(backend, self._projections) for backend in backends]

    def full(self) -> partial[None]:
        """A call over K and V of every head."""
        layer = LayerGeometry(self._num_heads, NOPE_DIM + ROPE_DIM, V_DIM)
        return self._call(NativeAttention(self._kernels, storage_of(layer, self._dtype, self._num_pages)), None)

    def _call(self, backend: AttentionBackend, projections: LatentProjections | None) -> partial[None]:
        shape = self._step.num_tokens, self._num_heads, NOPE_DIM + ROPE_DIM
        query = torch.randn(shape).to(getattr(torch, self._dtype))
        return partial(_run, backend, self._step, AttentionCall(0, query, 0.1, latent=projections))


def _run(backend: AttentionBackend, step: StepMetadata, call: AttentionCall) -> None:
    backend.begin(step)
    backend.attend(call)


def comparisons(kernels: Kernels, dtype: str, num_heads: int, seed: int) -> Iterator[tuple[str, Arms]]:
    """Name and arms of each comparison."""
    name = f"{dtype}, {num_heads} heads"
    for batch, lengths in DECODE_BATCHES.items():
        layer = Layer(kernels, dtype, num_heads, lengths, seed)
        yield f"{name}, {batch}", {"K and V": layer.full(), "latents": layer.latent(ABSORB_ALL)[0]}
    for num_new in CHUNKS:
        calls = Layer(kernels, dtype, num_heads, [(NUM_CACHED, num_new)], seed).latent(ABSORB_ALL, EXPAND_ALL)
        yield f"{name}, {num_new} new tokens at {NUM_CACHED}", dict(zip(("absorbed", "expanded"), calls, strict=True))


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--dtypes", nargs="+", default=["bfloat16"], choices=("float32", "bfloat16"))
    parser.add_argument("--heads", nargs="+", type=int, default=[16, 128])
    parser.add_argument("--rounds", type=int, default=30)
    parser.add_argument("--seed", type=int, default=0)
    flags = parser.parse_args()
    limit_cores([usable_cores()[-1]])
    configure_threads(1)
    chosen = choose_kernels(KernelUse.AUTO, "cpu")
    if chosen.kernels is None:
        raise SystemExit(chosen.note)
    print(chosen.note)
    torch.manual_seed(flags.seed)
    with torch.inference_mode():
        for dtype in flags.dtypes:
            for num_heads in flags.heads:
                for name, arms in comparisons(chosen.kernels, dtype, num_heads, flags.seed):
                    for arm, found in ratios(arms, flags.rounds, flags.seed).items():
                        low, middle, high = statistics.quantiles(found, n=4)
                        print(f"{name}, {arm}: {middle:.3f} ({low:.3f} to {high:.3f})", flush=True)


if __name__ == "__main__":
    run_command(main)
