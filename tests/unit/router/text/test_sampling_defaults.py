"""Sampling defaults from the model's own configuration."""

from __future__ import annotations

from pathlib import Path

import pytest

from baton.bundled import MODEL_DIR
from baton.services.router.text.sampling_defaults import SamplingDefaults
from baton.services.router.text.text_model import TextModel


def test_openai_defaults_apply_without_a_config() -> None:
    assert SamplingDefaults.read({}) == SamplingDefaults(1.0, 1.0, 0, 0.0, 1.0)


def test_a_model_s_defaults_are_read() -> None:
    recommended = {"do_sample": True, "temperature": 0.6, "top_k": 20, "top_p": 0.95}
    assert SamplingDefaults.read(recommended) == SamplingDefaults(temperature=0.6, top_k=20, top_p=0.95)


@pytest.mark.parametrize("odd", [None, "hot", True, -1, 99])
def test_invalid_defaults_are_ignored(odd: object) -> None:
    assert SamplingDefaults.read({"temperature": odd, "top_p": odd}) == SamplingDefaults()


def test_the_bundled_model_has_its_own_defaults() -> None:
    assert TextModel.load(Path(MODEL_DIR)).sampling_defaults.temperature < 1.0
