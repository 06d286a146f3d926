"""The GPU experiment on the CPU: every arm runs a worker's loop to its end, and figures are right."""

from __future__ import annotations

import io
import json
import sys
from pathlib import Path

import pytest
import torch
from rich.console import Console

from bench.engine import gpu
from bench.engine.gpu import ARMS, GpuFinding, measure, parse, save, table_of


def test_every_arm_is_measured_against_what_a_step_must_read(tmp_path: Path):
    options = parse("--shapes tiny --batches 1 3 --context 40 --turns 2".split())
    findings = measure(options, "cpu", Console(file=io.StringIO()), probe_bytes=1024 * 1024)
    assert [(found.num_rows, found.arm) for found in findings] == [(n, arm.name) for n in (1, 3) for arm in ARMS]
    assert all(0.0 < found.best_s <= found.median_s for found in findings)
    assert findings[0].limit_s < findings[-1].limit_s
    assert {found.num_graphs for found in findings} == {0}  # there are none on a CPU
    save(tmp_path / "gpu.json", findings, "cpu")
    content = json.loads((tmp_path / "gpu.json").read_text())
    assert content["findings"][0]["shape"] == "tiny"
    assert len(content["findings"]) == len(findings)


def test_shares_and_rates_follow_from_times():
    found = GpuFinding("qwen3-8b", 32, "graphs", median_s=0.008, best_s=0.007, limit_s=0.004, num_graphs=9)
    assert (found.share, found.tokens_per_s) == (0.5, 4000.0)
    text = io.StringIO()
    Console(file=text, width=120).print(table_of([found]))
    assert all(word in text.getvalue() for word in ("qwen3-8b", "8.00", "7.00", "4.00", "50%", "4000"))


def test_without_a_gpu_nothing_is_measured(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(gpu, "measure", lambda *_: pytest.fail("there is nothing to measure"))
    monkeypatch.setattr(sys, "argv", ["bench.engine.gpu"])
    with pytest.raises(SystemExit, match="no GPU"):
        gpu.main()
