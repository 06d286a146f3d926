"""Specs of configs, and the reasons for leaving a model to the stock decoder."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from baton.kv.geometry import LayerGeometry
from baton.model.attention.layers import ObservedLayer
from baton.model.decoders.lean_spec import FAMILIES, LeanSpec, Unsupported, lean_spec
from baton.model.decoders.ops import Activation, HeadShape
from tests import tiny_models

LAYER = ObservedLayer(LayerGeometry(2, 16, 16), num_heads=4, scale=0.25, window=None, softcap=None, has_sinks=False)
LAYERS = (LAYER,) * 3


def spec_of(family: str, **changes: Any) -> LeanSpec:
    spec = lean_spec({**tiny_models.FAMILIES[family]().to_dict(), **changes}, LAYERS)
    assert isinstance(spec, LeanSpec)
    return spec


def test_a_llama_spec():
    spec = spec_of("llama", rms_norm_eps=1e-5)
    assert spec == LeanSpec(FAMILIES["llama"], HeadShape(4, 2, 16), 1e-5, Activation.SILU, ("",) * 3, None, None)


def test_a_gemma_spec_has_scale_cap_and_two_ropes():
    spec = spec_of("gemma3_text")
    assert spec.rope_names == ("sliding_attention", "full_attention", "sliding_attention")
    assert (spec.activation, spec.embedding_scale, spec.logit_softcap) == (Activation.GELU_TANH, 8.0, None)
    assert spec_of("gemma2", final_logit_softcapping=30.0).logit_softcap == 30.0


def test_windows_and_caps_are_not_part_of_the_spec():
    windowed = (replace(LAYER, window=8), replace(LAYER, softcap=50.0), LAYER)
    assert lean_spec(tiny_models.FAMILIES["mistral"]().to_dict(), windowed) == spec_of("mistral")


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"model_type": "gpt_oss"}, "gpt_oss is none of gemma2"),
        ({"model_type": None}, "None is none of"),
        ({"hidden_act": "relu2"}, "activation is relu2"),
        ({"hidden_act": None}, "activation is None"),
        ({"rope_parameters": {"rope_type": "dynamic", "rope_theta": 1e4}}, "rotary scaling is dynamic"),
        ({"rope_parameters": {"rope_type": "longrope", "rope_theta": 1e4}}, "rotary scaling is longrope"),
        ({"rope_parameters": {"rope_type": "tomorrow's"}}, "rotary scaling is tomorrow's"),
    ],
)
def test_unknown_configs_are_left_to_the_stock_model(changes: dict[str, Any], reason: str):
    unserved = lean_spec({**tiny_models.FAMILIES["llama"]().to_dict(), **changes}, LAYERS)
    assert isinstance(unserved, Unsupported)
    assert reason in unserved.reason


def test_one_layer_of_an_unknown_rotary_scaling_is_enough():
    config = tiny_models.FAMILIES["gemma3_text"]().to_dict()
    config["rope_parameters"]["full_attention"]["rope_type"] = "longrope"
    assert lean_spec(config, LAYERS) == Unsupported("its rotary scaling is longrope")
    del config["rope_parameters"]["full_attention"]
    assert lean_spec(config, LAYERS) == Unsupported("its rotary scaling is missing")


@pytest.mark.parametrize(
    ("layer", "reason"),
    [
        (replace(LAYER, geometry=LayerGeometry(2, 16, 8)), "values of another size"),
        (replace(LAYER, has_sinks=True), "sinks"),
    ],
)
def test_layers_with_sinks_are_left_to_the_stock_model(layer: ObservedLayer, reason: str):
    unserved = lean_spec(tiny_models.FAMILIES["llama"]().to_dict(), (layer,) * 3)
    assert isinstance(unserved, Unsupported)
    assert reason in unserved.reason


def test_layers_of_different_shapes_are_left_to_the_stock_model():
    wide = replace(LAYER, geometry=LayerGeometry(4, 16, 16))
    assert lean_spec(tiny_models.FAMILIES["llama"]().to_dict(), (LAYER, wide)) == Unsupported(
        "its layers are of different shapes"
    )
