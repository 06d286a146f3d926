"""The decoder step experiment runs every variant on one set of weights and compares it with the first."""

from __future__ import annotations

import io
from pathlib import Path

import pytest
from rich.console import Console

from bench.engine import decoder_step
from bench.engine.decoder_step import measure, parse
from bench.report import load_result
from tests.kernels import kernel_levels


def test_every_variant_is_measured_and_compared_with_the_first(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    monkeypatch.setattr(decoder_step, "BLOCK_S", 0.0)
    monkeypatch.setattr(decoder_step, "ReadProbe", lambda: lambda: 1e9)
    result = tmp_path / "step.json"
    words = "--shape tiny --dtypes float32 --batches 1 3 --context 40 --rotations 2 --result"
    findings = measure(parse([*words.split(), str(result)]), Console(file=io.StringIO()))
    kept = load_result(result)
    blocks = kept.blocks
    assert [found.name for found in kept.findings] == [found.name for found in findings]
    ways = ["stock", "lean"] + (["stock, kernels", "lean, kernels"] if kernel_levels() else [])
    assert {block.arm for block in blocks} == {f"float32, {rows} rows: {way}" for rows in (1, 3) for way in ways}
    assert all(len(block.values) == len(block.cpu_s) >= decoder_step.MIN_STEPS for block in blocks)
    speeds = [found for found in findings if found.name.endswith("speed over stock")]
    assert len(speeds) == 2 * (len(ways) - 1)
    assert all(found.num_rotations == 2 and found.overall.median > 0.0 for found in findings)
