"""A client that says nothing gets what the model's makers recommend."""

from __future__ import annotations

from pathlib import Path

import pytest

from baton.bundled import MODEL_DIR
from services.router.text.sampling_defaults import SamplingDefaults
from services.router.text.text_model import TextModel


def test_openai_defaults_without_a_recommendation() -> None:
    assert SamplingDefaults.read({}) == SamplingDefaults(1.0, 1.0, 0, 0.0, 1.0)


def test_the_makers_recommendation() -> None:
    recommended = {"do_sample": True, "temperature": 0.6, "top_k": 20, "top_p": 0.95}
    assert SamplingDefaults.read(recommended) == SamplingDefaults(temperature=0.6, top_k=20, top_p=0.95)


@pytest.mark.parametrize("odd", [None, "hot", True, -1, 99])
def test_what_makes_no_sense_is_left_alone(odd: object) -> None:
    assert SamplingDefaults.read({"temperature": odd, "top_p": odd}) == SamplingDefaults()


def test_the_bundled_model_names_its_own() -> None:
    assert TextModel.load(Path(MODEL_DIR)).sampling_defaults.temperature < 1.0
