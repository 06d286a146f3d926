"""The decoder step's experiment runs every way there is, on one set of weights, and compares them with the first."""

from __future__ import annotations

import io

import pytest
from rich.console import Console

from bench import decoder_step
from bench.decoder_step import measure, parse
from tests.kernels import kernel_levels


def test_every_way_is_measured_and_compared_with_the_first(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(decoder_step, "BLOCK_S", 0.0)
    monkeypatch.setattr(decoder_step, "ReadProbe", lambda: lambda: 1e9)
    options = parse("--shape tiny --dtypes float32 --batches 1 3 --context 40 --rotations 2".split())
    blocks, findings = measure(options, Console(file=io.StringIO()))
    ways = ["stock", "lean"] + (["stock, kernels", "lean, kernels"] if kernel_levels() else [])
    assert {block.arm for block in blocks} == {f"float32, {rows} rows: {way}" for rows in (1, 3) for way in ways}
    assert all(len(block.values) == len(block.cpu_s) >= decoder_step.MIN_STEPS for block in blocks)
    speeds = [found for found in findings if found.name.endswith("speed over stock")]
    assert len(speeds) == 2 * (len(ways) - 1)
    assert all(found.num_rotations == 2 and found.over_all.median > 0.0 for found in findings)
