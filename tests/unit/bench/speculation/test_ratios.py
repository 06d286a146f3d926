"""The speculation experiment on a tiny model: rows emit their transcripts, and right drafts save steps."""

from __future__ import annotations

import itertools
from pathlib import Path

import pytest

from baton.model.loading.loader import LoadedModel, load_model
from bench.harness.model_shapes import ModelShape
from bench.harness.random_models import save_random_model
from bench.speculation.ratios import AGAIN, EMPTY, NGRAM, OFF, PAGE_SIZE, DraftArm, measure
from bench.speculation.transcripts import OUTPUT_TOKENS, PROMPT_TOKENS, transcripts

SHAPE = ModelShape("llama", 300, 32, 48, 2, 4, 2, 8, 2048, 1e4)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> LoadedModel:
    directory: Path = tmp_path_factory.mktemp("model")
    return load_model(save_random_model(SHAPE, directory), page_size=PAGE_SIZE)


def test_transcripts_are_endless_and_of_their_lengths():
    for kind in ("copy", "prose"):
        for text in itertools.islice(transcripts(kind, 300, 1), 3):
            assert len(text.output) == OUTPUT_TOKENS
            assert len(text.prompt) >= PROMPT_TOKENS
            assert max(*text.prompt, *text.output) < 300


def test_right_drafts_save_steps(model: LoadedModel):
    steps = {}
    for arm in (OFF, EMPTY, NGRAM, "oracle 0.9", "oracle 0.6, tree 2,2"):
        block = DraftArm(model, arm, 1, transcripts("copy", 300, 2), 2).run(80)
        assert 80 <= block.num_tokens < 80 + 16
        assert block.cpu_s > 0
        steps[arm] = block.num_steps
    assert steps[OFF] == steps[EMPTY] == 80
    assert steps["oracle 0.6, tree 2,2"] < 80
    assert steps["oracle 0.9"] < 70
    assert steps[NGRAM] < 80


def test_a_line_for_each_arm(model: LoadedModel, capsys: pytest.CaptureFixture[str]):
    measure(model, "prose", 2, rotations=2, num_tokens=20, seed=0)
    lines = capsys.readouterr().out.splitlines()
    assert [line.split(" | ")[2] for line in lines] == [AGAIN, EMPTY, NGRAM]
