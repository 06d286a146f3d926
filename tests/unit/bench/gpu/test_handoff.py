"""The experiment on a GPU's pages with pools in host memory: both processes run, and every page arrives."""

from __future__ import annotations

import sys

import pytest
import torch

from baton.kv.memory import MemoryKind
from bench.gpu import handoff
from bench.gpu.handoff import PoolShape, make_pool, measure

SHAPE = PoolShape(page_kib=32, num_pages=8)


def test_pages_are_of_about_the_size_that_was_asked_for():
    assert PoolShape(2304, 1).geometry.page_bytes == 2304 * 1024
    assert PoolShape(1, 1).geometry.page_bytes == 16 * 1024  # one layer at least


def test_pools_of_two_seeds_differ():
    """A pull that moves nothing would not be noticed otherwise."""
    one, same, other = (make_pool(SHAPE, MemoryKind.DRAM, seed).read([0])[0] for seed in (0, 0, 1))
    assert bytes(one) == bytes(same) != bytes(other)


def test_pulls_are_measured_with_and_without_digests():
    findings = measure(SHAPE, "stream", ((MemoryKind.DRAM, MemoryKind.DRAM),), num_pulls=2)
    assert [found.name for found in findings] == ["DRAM -> DRAM", "DRAM -> DRAM, digests"]
    assert all(0.0 < found.median_gb_per_s <= found.best_gb_per_s for found in findings)
    assert {found.path for found in findings} == {"stream"}


def test_without_a_gpu_nothing_is_measured(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(sys, "argv", ["bench.gpu.handoff"])
    with pytest.raises(SystemExit, match="no GPU"):
        handoff.main()
