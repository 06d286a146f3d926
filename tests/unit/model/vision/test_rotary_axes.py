"""Cosines and sines of three axes equal those of transformers' modules."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from transformers import Qwen2VLTextConfig, Qwen3VLTextConfig
from transformers.models.qwen2_vl.modeling_qwen2_vl import Qwen2VLRotaryEmbedding
from transformers.models.qwen3_vl.modeling_qwen3_vl import Qwen3VLTextRotaryEmbedding

from baton.model.decoders.lean_weights import Rope
from baton.model.decoders.rotary_axes import feature_axes, rows_by_axes
from baton.model.errors import UnsupportedModel
from tests.tiny_models import small_shape


@pytest.mark.parametrize("sections", [[2, 3, 3], [4, 2, 2]])
@pytest.mark.parametrize(
    ("kind", "module"),
    [(Qwen2VLTextConfig, Qwen2VLRotaryEmbedding), (Qwen3VLTextConfig, Qwen3VLTextRotaryEmbedding)],
)
def test_rows_are_those_of_transformers(kind: Any, module: Any, sections: list[int]):
    rope_parameters = {"rope_type": "default", "rope_theta": 1e4, "mrope_section": sections}
    config = kind(**small_shape(rope_parameters=rope_parameters))
    stock = module(config)
    positions = torch.randint(50, (3, 20), generator=torch.Generator().manual_seed(0))
    cos, sin = (one[0, :, :8] for one in stock(torch.zeros(1), positions[:, None]))
    axes = feature_axes(config.to_dict(), 8)
    rows = rows_by_axes(Rope(stock.inv_freq, 1.0).table(50), positions, torch.tensor(axes))
    torch.testing.assert_close((rows.cos, rows.sin), (cos, sin))
    assert rows.cos.is_contiguous()
    assert set(axes or ()) == {0, 1, 2}


def test_models_of_one_axis_have_none():
    assert feature_axes({"model_type": "llama", "rope_parameters": {"rope_type": "default"}}, 8) is None
    assert feature_axes({"model_type": "gpt2"}, 8) is None


def test_sections_that_do_not_fit_are_refused():
    config = {"model_type": "qwen2_vl_text", "rope_parameters": {"mrope_section": [16, 24, 24]}}
    with pytest.raises(UnsupportedModel, match=r"sections \[16, 24, 24\] of three axes do not make 8 pairs"):
        feature_axes(config, 8)
