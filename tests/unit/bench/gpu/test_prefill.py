"""The GPU's prefill experiment on the CPU: both kinds of attention run whole prompts, and figures follow from times."""

from __future__ import annotations

import io
import sys

import pytest
import torch
from rich.console import Console

from bench.gpu import prefill
from bench.gpu.prefill import PrefillFinding, measure, table_of


def test_every_prompt_is_measured_with_the_chosen_attention_and_with_torch():
    findings = measure(["tiny"], [20, 40], 16, 1, "cpu", probe_size=64)
    assert [found.num_tokens for found in findings] == [20, 20, 40, 40]
    assert [found.attention for found in findings[1::2]] == ["TorchAttention"] * 2
    assert all(0.0 < found.best_s <= found.median_s for found in findings)
    assert findings[0].limit_s < findings[2].limit_s  # more tokens need more operations


def test_rates_follow_from_times():
    found = PrefillFinding("qwen3-8b", 2048, "FlashinferAttention", median_s=0.08, best_s=0.07, limit_s=0.04)
    assert found.tokens_per_s == 25_600.0
    text = io.StringIO()
    Console(file=text, width=120).print(table_of([found]))
    assert all(word in text.getvalue() for word in ("qwen3-8b", "80.0", "70.0", "40.0", "50%", "25600"))


def test_without_a_gpu_nothing_is_measured(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(prefill, "measure", lambda *_: pytest.fail("there is nothing to measure"))
    monkeypatch.setattr(sys, "argv", ["bench.gpu.prefill"])
    with pytest.raises(SystemExit, match="no GPU"):
        prefill.main()
