"""Configs and headers of packed checkpoints with a field changed end in a plan or in one line, never in a traceback."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from baton.model.errors import UnreadableModel, UnsupportedModel
from baton.model.loading.dequantize.methods import METHODS, weight_format
from baton.model.loading.dequantize.plan import StoredTensor

X = "model.layers.0.mlp.up_proj"
EXPERTS = "model.layers.0.mlp.experts.gate_up_proj"
GROUP = {
    "targets": ["Linear", "re:.*up.*"],
    "format": None,
    "weights": {"num_bits": 4, "type": "int", "symmetric": False, "strategy": "group", "group_size": 32},
}
CONFIGS: dict[str, dict[str, Any]] = {
    "awq": {"bits": 4, "group_size": 32, "version": "gemm", "zero_point": True},
    "compressed-tensors": {
        "format": "pack-quantized",
        "quantization_status": "compressed",
        "sparsity_config": {"format": "dense"},
        "transform_config": {},
        "config_groups": {"group_0": GROUP},
    },
    "fp8": {"weight_block_size": [24, 40]},
    "gptq": {"bits": 4, "group_size": 32, "checkpoint_format": "gptq", "dynamic": None},
    "mxfp4": {},
}
TENSORS: dict[str, dict[str, StoredTensor]] = {
    "awq": {
        f"{X}.qweight": StoredTensor("I32", (64, 12)),
        f"{X}.qzeros": StoredTensor("I32", (2, 12)),
        f"{X}.scales": StoredTensor("F16", (2, 96)),
    },
    "compressed-tensors": {
        f"{X}.weight_packed": StoredTensor("I32", (96, 8)),
        f"{X}.weight_scale": StoredTensor("BF16", (96, 2)),
        f"{X}.weight_zero_point": StoredTensor("I32", (12, 2)),
        f"{X}.weight_shape": StoredTensor("I64", (2,)),
        f"{X}.weight_g_idx": StoredTensor("I32", (64,)),
    },
    "fp8": {f"{X}.weight": StoredTensor("F8_E4M3", (96, 64)), f"{X}.weight_scale_inv": StoredTensor("F32", (4, 2))},
    "gptq": {
        f"{X}.qweight": StoredTensor("I32", (8, 96)),
        f"{X}.qzeros": StoredTensor("I32", (2, 12)),
        f"{X}.scales": StoredTensor("F16", (2, 96)),
        f"{X}.g_idx": StoredTensor("I32", (64,)),
    },
    "mxfp4": {
        f"{EXPERTS}_blocks": StoredTensor("U8", (4, 192, 2, 16)),
        f"{EXPERTS}_scales": StoredTensor("U8", (4, 192, 2)),
    },
}
DTYPES = ("F8_E4M3", "F8_E8M0", "F32", "BF16", "I32", "I8", "U8", "I64", "X")
JSON = st.recursive(
    st.none() | st.booleans() | st.integers(-2, 200) | st.floats() | st.text("re:(*Linear48", max_size=6),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text("abweights", max_size=8), inner, max_size=3),
    max_leaves=4,
)
SHAPES = st.lists(st.integers(0, 200), max_size=5).map(tuple)


@contextmanager
def one_line() -> Iterator[None]:
    """Lets a refusal pass if it is a line."""
    try:
        yield
    except (UnsupportedModel, UnreadableModel) as error:
        if "\n" in str(error):
            raise


def changed(value: Any, draw: Any) -> Any:
    """`value` with one thing in it, or itself, replaced."""
    keys = list(value) if isinstance(value, dict) else list(range(len(value))) if isinstance(value, list) else []
    if not keys or draw(st.booleans()):
        return draw(JSON)
    key = draw(st.sampled_from(keys))
    copied = value.copy()
    copied[key] = changed(value[key], draw)
    return copied


def test_every_method_has_a_checkpoint_here() -> None:
    assert CONFIGS.keys() == TENSORS.keys() == METHODS.keys()


@pytest.mark.parametrize("method", sorted(METHODS))
def test_unchanged_checkpoints_have_a_plan(method: str) -> None:
    found = weight_format({"quantization_config": {"quant_method": method, **CONFIGS[method]}})
    assert found is not None
    plan = found.plan(TENSORS[method], torch.float32)
    assert len(plan.weights) == 1
    assert plan.consumed == TENSORS[method].keys()


@pytest.mark.parametrize("method", sorted(METHODS))
@settings(deadline=None, max_examples=150)
@given(data=st.data())
def test_changed_configs_end_in_one_line(method: str, data: st.DataObject) -> None:
    base = CONFIGS[method]
    field = data.draw(st.sampled_from(sorted(base) or ["group_size"]))
    config = {"quant_method": method, **base, field: changed(base.get(field), data.draw)}
    with one_line():
        found = weight_format({"quantization_config": config})
        assert found is not None
        found.plan(TENSORS[method], torch.float32)


@pytest.mark.parametrize("method", sorted(METHODS))
@settings(deadline=None, max_examples=100)
@given(data=st.data())
def test_changed_headers_end_in_one_line(method: str, data: st.DataObject) -> None:
    found = weight_format({"quantization_config": {"quant_method": method, **CONFIGS[method]}})
    assert found is not None
    stored = dict(TENSORS[method])
    name = data.draw(st.sampled_from(sorted(stored)))
    tensor = stored.pop(name)
    other = StoredTensor(data.draw(st.sampled_from(DTYPES)), data.draw(SHAPES | st.just(tensor.shape)))
    if data.draw(st.booleans()):
        stored[name] = other
    if data.draw(st.booleans()):
        stored[data.draw(st.sampled_from((name[:-1], f"{name}_scale", f"{X}.weight", "weight_packed")))] = other
    with one_line():
        assert found.plan(stored, torch.float32).consumed <= stored.keys()
