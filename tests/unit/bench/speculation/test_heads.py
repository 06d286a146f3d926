"""The experiment with the trained head: all arms emit the same tokens, and only decode steps of all rows are timed."""

from __future__ import annotations

import pytest

from baton.bundled import HEAD_DIR, MODEL_DIR
from baton.model.loading.loader import load_model
from bench.speculation import heads
from bench.speculation.heads import ARMS, HeadArm, measure, questions
from bench.speculation.ratios import OFF, PAGE_SIZE


def test_a_line_for_each_arm_and_fewer_steps(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]):
    monkeypatch.setattr(heads, "OUTPUT_TOKENS", 24)
    model = load_model(MODEL_DIR, page_size=PAGE_SIZE).with_head(HEAD_DIR)
    measure(model, 1, rotations=2, seed=0)
    lines = capsys.readouterr().out.splitlines()
    assert [line.split(" | ")[2] for line in lines] == list(ARMS)[1:]
    steps = {}
    asked = questions(1, 2)
    for arm, widths in ARMS.items():
        block, outputs = HeadArm(model, widths, 2, max(map(len, asked))).run(asked)
        assert [len(output) for output in outputs] == [24, 24]
        assert 0 < block.num_tokens < 48
        steps[arm] = block.num_steps
    assert steps["head"] < steps[OFF]
    assert steps["head, tree 3,2"] < steps[OFF]
