"""Loading: accepted and refused models, and the self-check on a wrong model."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from baton.kv.geometry import LayerGeometry
from baton.model.attention import hf_hook, torch_backend
from baton.model.attention.base import AttentionCall
from baton.model.cpu import has_bfloat16_arithmetic
from baton.model.errors import UnreadableModel, UnsupportedModel
from baton.model.linears import packing
from baton.model.linears.onednn import OneDnnLinear
from baton.model.linears.packed_modules import PackedModule
from baton.model.linears.packing import WeightLayout
from baton.model.loading import loader
from baton.model.loading.allow_list import TOKEN_EXACT
from baton.model.loading.config import DtypeChoice, read_config
from baton.model.loading.kernel_choice import KernelUse
from baton.model.loading.loader import DecoderChoice, LoadedModel, load_model
from baton.model.loading.report import WeightReport
from baton.model.storage import PageStorage
from tests import tiny_models
from tests.kernels import kernel_levels


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_models.save_random_model("llama", tmp_path_factory.mktemp("llama"))


def with_config(directory: Path, source: Path, **changes: Any) -> Path:
    """A copy of `source`'s config with some fields changed; no weights."""
    config = json.loads((source / "config.json").read_text()) | changes
    (directory / "config.json").write_text(json.dumps(config))
    return directory


def stock_body(loaded: LoadedModel) -> nn.Module:
    assert isinstance(loaded.impl, nn.Module)
    return loaded.impl


def test_a_config_is_read(llama):
    config = read_config(llama, max_model_len=100)
    assert (config.model_type, config.max_model_len, config.vocab_size) == ("llama", 100, tiny_models.VOCAB_SIZE)
    assert config.dtype == "float32"
    assert read_config(llama).max_model_len == tiny_models.MAX_POSITIONS


def test_auto_dtype_is_the_checkpoints_where_the_machine_can(tmp_path, llama):
    stored = with_config(tmp_path, llama, dtype="bfloat16")
    assert read_config(stored).dtype == ("bfloat16" if has_bfloat16_arithmetic() else "float32")
    for dtype in ("bfloat16", "float16", "float32"):
        assert read_config(with_config(tmp_path, llama, dtype=dtype), device="cuda").dtype == "bfloat16"
    stored = with_config(tmp_path, llama, dtype="bfloat16")
    assert read_config(stored, dtype=DtypeChoice.FLOAT32).dtype == "float32"
    assert read_config(stored, dtype=DtypeChoice.BFLOAT16).torch_dtype is torch.bfloat16


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"model_type": "mamba"}, "'mamba' has not been seen"),
        ({"model_type": "roberta"}, "'roberta' has not been seen"),
        ({"is_encoder_decoder": True}, "encoder-decoder"),
        ({"attention_chunk_size": 128}, "attention_chunk_size"),
        ({"layer_types": ["full_attention", "linear_attention", "full_attention"]}, "linear_attention"),
        ({"rope_scaling": {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 1e4}}, "dynamic"),
        ({"rope_parameters": {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 1e4}}, "dynamic"),
    ],
)
def test_models_that_pages_get_wrong_are_refused(tmp_path, llama, changes, reason):
    with pytest.raises(UnsupportedModel, match=reason):
        read_config(with_config(tmp_path, llama, **changes))


@pytest.mark.parametrize(
    "changes",
    [
        {"num_hidden_layers": "x"},
        {"hidden_size": None},
        {"rope_parameters": 3},
        {"layer_types": 3},
        {"text_config": 5},
        {"model_type": "llava", "text_config": [1]},
        {"model_type": "llava", "text_config": {"model_type": "no-such-type"}},
        {"model_type": "gemma3", "text_config": {"hidden_size": "x"}},
    ],
)
def test_a_config_that_transformers_does_not_take_is_told_in_a_line(tmp_path, llama, changes):
    with pytest.raises(UnreadableModel, match=r"config\.json (is no config of transformers|has a text_config)") as info:
        read_config(with_config(tmp_path, llama, **changes))
    assert len(str(info.value).splitlines()) == 1


def test_the_context_may_be_lowered_but_not_raised(llama):
    with pytest.raises(UnsupportedModel, match="lower it"):
        read_config(llama, max_model_len=tiny_models.MAX_POSITIONS + 1)


def test_missing_and_truncated_directories_are_refused(tmp_path, llama):
    with pytest.raises(UnreadableModel, match="no model in"):
        load_model(tmp_path / "nowhere")
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(UnreadableModel, match="not JSON"):
        load_model(tmp_path)
    with_config(tmp_path, llama)
    with pytest.raises(UnreadableModel, match="weights in"):
        load_model(tmp_path)
    weights = (llama / "model.safetensors").read_bytes()
    (tmp_path / "model.safetensors").write_bytes(weights[: len(weights) // 2])
    with pytest.raises(UnreadableModel, match="weights in"):
        load_model(tmp_path)


def test_a_checkpoint_that_does_not_fill_the_architecture_is_refused(tmp_path, llama):
    deeper = with_config(tmp_path, llama, num_hidden_layers=4)
    (tmp_path / "model.safetensors").write_bytes((llama / "model.safetensors").read_bytes())
    with pytest.raises(UnreadableModel, match="missing"):
        load_model(deeper)


def test_the_geometry_is_the_observed_layers(tmp_path):
    model = load_model(tiny_models.save_random_model("gemma3_text", tmp_path), page_size=8)
    assert model.geometry.layers == (LayerGeometry(2, 16, 16),) * 3
    assert (model.geometry.dtype, model.geometry.page_size) == ("float32", 8)
    assert [layer.window for layer in model.layers] == [tiny_models.WINDOW, None, tiny_models.WINDOW]
    with pytest.raises(ValueError, match="another geometry"):
        model.decoder(PageStorage.allocate(load_model(tmp_path, page_size=4).geometry, 2))


def test_head_groups_are_part_of_the_geometry_and_divide_the_heads(tmp_path):
    directory = tiny_models.save_random_model("llama", tmp_path)
    assert load_model(directory, head_groups=2).geometry.group.head_groups == 2
    with pytest.raises(UnsupportedModel, match="cannot be cut into 4 groups, only into 1, 2"):
        load_model(directory, head_groups=4)


def test_progress_counts_up_to_all_tensors(llama, capfd):
    calls = []
    load_model(llama, on_progress=lambda done, total: calls.append((done, total)))
    done, total = zip(*calls, strict=True)
    assert list(done) == list(range(1, total[0] + 1))
    assert capfd.readouterr().err == ""


def test_bfloat16_passes_its_own_check(tmp_path):
    directory = tiny_models.save_random_model("qwen3", tmp_path, dtype=torch.bfloat16)
    result = load_model(directory, dtype=DtypeChoice.BFLOAT16).report.check
    assert 0.0 < result.gap <= result.bound < 0.2


@pytest.mark.parametrize(
    ("wrong", "dtype"),
    [
        ("window", DtypeChoice.FLOAT32),  # in bfloat16 one more key is within the rounding
        ("scale", DtypeChoice.FLOAT32),
        ("scale", DtypeChoice.BFLOAT16),
        ("sinks", DtypeChoice.FLOAT32),
        ("sinks", DtypeChoice.BFLOAT16),
    ],
)
def test_the_self_check_finds_a_wrong_attention(wrong, dtype, tmp_path, monkeypatch):
    changes = {"window": tiny_models.WINDOW + 1, "scale": 0.27, "sinks": None}
    attend = torch_backend.TorchAttention.attend

    def spoiled(self, call: AttentionCall) -> torch.Tensor:
        fields = {name: getattr(call, name) for name in AttentionCall.__dataclass_fields__}
        if wrong != "window" or call.window is not None:
            fields[wrong] = changes[wrong]
        return attend(self, AttentionCall(**fields))

    monkeypatch.setattr(torch_backend.TorchAttention, "attend", spoiled)
    directory = tiny_models.save_random_model("gpt_oss", tmp_path)
    with pytest.raises(UnsupportedModel, match="standard deviations"):
        load_model(directory, dtype=dtype, kernels=KernelUse.NEVER)


def test_a_model_with_a_layer_that_skips_attention_is_refused(llama, monkeypatch):
    monkeypatch.setattr(loader, "_text_config", lambda module: _OneLayerMore(module.config))
    with pytest.raises(UnsupportedModel, match="4 layers should call"):
        load_model(llama)


class _OneLayerMore:
    def __init__(self, config: Any) -> None:
        self._attn_implementation = hf_hook.ATTENTION_NAME
        self.num_hidden_layers = config.num_hidden_layers + 1


@pytest.mark.parametrize("kernels", list(KernelUse))
def test_stock_modules_keep_their_matrices_once(llama, kernels):
    layout = WeightLayout.PANELS if kernels is KernelUse.AUTO and kernel_levels() else WeightLayout.ONEDNN
    loaded = load_model(llama, layout=layout, decoder=DecoderChoice.STOCK, kernels=kernels)
    assert loaded.report.weights == WeightReport(layout, 3 * 7 + 1, "")
    assert loaded.report.check.passed
    model = stock_body(loaded)
    assert not any(type(module) is nn.Linear for module in model.modules())
    assert sum(p.numel() for p in model.parameters()) < loaded.report.num_parameters / 2


def test_a_tied_head_is_packed_and_the_embedding_stays_plain(tmp_path):
    directory = tiny_models.save_random_model("qwen3", tmp_path)
    loaded = load_model(directory, layout=WeightLayout.ONEDNN, decoder=DecoderChoice.STOCK)
    assert isinstance(stock_body(loaded).get_submodule("lm_head"), PackedModule)
    assert stock_body(loaded).get_submodule("model.embed_tokens").weight.shape == (tiny_models.VOCAB_SIZE, 64)
    assert loaded.report.check.passed


def test_a_layout_that_fails_is_undone(llama, monkeypatch):
    right = OneDnnLinear.__call__
    monkeypatch.setattr(OneDnnLinear, "__call__", lambda self, x: right(self, x) * (1.0 if x.dim() == 2 else 1.2))
    monkeypatch.setattr(packing, "onednn_is_correct", lambda dtype: True)
    loaded = load_model(llama, decoder=DecoderChoice.STOCK, kernels=KernelUse.NEVER, layout=WeightLayout.ONEDNN)
    assert (loaded.report.weights.layout, loaded.report.weights.num_matrices) == (WeightLayout.PLAIN, 0)
    assert "not onednn: logits differ" in loaded.report.weights.note
    assert loaded.report.check.passed
    assert any(type(module) is nn.Linear for module in stock_body(loaded).modules())


def test_the_allow_list_holds_the_families_that_the_exactness_tests_cover():
    assert tiny_models.FAMILIES.keys() <= TOKEN_EXACT
