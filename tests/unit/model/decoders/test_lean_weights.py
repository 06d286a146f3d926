"""Weights are taken without copies, the stock module stays valid, and unknown modules are refused."""

from __future__ import annotations

import gc
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from torch import nn

from baton.model.attention import hf_hook
from baton.model.attention.layers import observe_layers
from baton.model.decoders import lean_weights
from baton.model.decoders.lean import LeanDecoder
from baton.model.decoders.lean_spec import LeanSpec, lean_spec
from baton.model.decoders.lean_weights import GatedFeedForward, LeanModel, Rope, make_lean_model
from baton.model.errors import UnsupportedModel
from baton.model.linears.linear import Linear, make_linear
from baton.model.linears.packing import WeightLayout, choose_packer
from baton.model.loading.loader import DecoderChoice, LoadedModel, load_model
from baton.model.storage import PageStorage
from tests import tiny_models
from tests.tiny_models import small_shape


def stock_module(directory: Path) -> Any:
    module = transformers.AutoModelForCausalLM.from_pretrained(directory, attn_implementation="eager")
    return module.eval().requires_grad_(False)


def spec_for(module: Any) -> LeanSpec:
    hf_hook.register()
    module.set_attn_implementation(hf_hook.ATTENTION_NAME)
    layers = observe_layers(module, module.config.num_hidden_layers, "cpu")
    module.set_attn_implementation("eager")
    spec = lean_spec(module.config.to_dict(), layers)
    assert isinstance(spec, LeanSpec)
    return spec


def storages(module: nn.Module) -> dict[int, int]:
    """Address -> bytes of all memory of the module's parameters."""
    found = [parameter.untyped_storage() for parameter in module.parameters()]
    return {storage.data_ptr(): storage.nbytes() for storage in found}


CONFIGS: dict[str, Callable[[], transformers.PreTrainedConfig]] = {
    **{family: tiny_models.FAMILIES[family] for family in ("llama", "qwen2", "qwen3", "gemma3_text", "qwen3_moe")},
    "phi3": lambda: transformers.Phi3Config(**small_shape()),
    "biases": lambda: transformers.LlamaConfig(**small_shape(attention_bias=True, mlp_bias=True)),
}


@pytest.mark.parametrize("name", sorted(CONFIGS))
def test_the_stock_module_stays_valid_on_the_same_memory(name: str, tmp_path: Path):
    module = stock_module(tiny_models.save_random_config(CONFIGS[name](), tmp_path))
    before = {name: parameter.clone() for name, parameter in module.named_parameters()}
    num_bytes = sum(storages(module).values())
    ids = torch.arange(20, 33)[None]
    logits = module(input_ids=ids, use_cache=False).logits
    lean = make_lean_model(module, spec_for(module))
    assert sum(storages(module).values()) == num_bytes, "a parameter is held twice"
    after = dict(module.named_parameters())
    assert after.keys() == before.keys()
    assert all(torch.equal(after[name], before[name]) for name in before)
    assert torch.equal(module(input_ids=ids, use_cache=False).logits, logits)
    assert lean.embedding.data_ptr() == module.get_submodule("model.embed_tokens").weight.data_ptr()


def live_tensor_bytes() -> int:
    """Bytes of all memory of tensors that Python can still reach, but for frozen ones."""
    tensors: list[Any] = [thing for thing in gc.get_objects() if type(thing) in (torch.Tensor, nn.Parameter)]
    found = {tensor.untyped_storage().data_ptr(): tensor.untyped_storage().nbytes() for tensor in tensors}
    return sum(found.values())


@pytest.mark.slow
def test_at_most_one_matrix_exists_twice(tmp_path: Path, monkeypatch):
    """When a matrix has been fused its parts still exist, and no part of earlier layers does.

    What exists before this test is frozen: `gc.get_objects` leaves it out, and a walk through it takes seconds.
    """
    gc.collect()
    gc.freeze()
    config = transformers.LlamaConfig(**small_shape(num_hidden_layers=3))
    module = stock_module(tiny_models.save_random_config(config, tmp_path))
    spec = spec_for(module)
    gc.collect()
    before, seen = live_tensor_bytes(), []

    def watched(weight: torch.Tensor, bias: torch.Tensor | None) -> Linear:
        seen.append(live_tensor_bytes() - before)
        return make_linear(weight, bias)

    monkeypatch.setattr(lean_weights, "make_linear", watched)
    lean = make_lean_model(module, spec)
    largest = 4 * 64 * 2 * 96  # bytes of gate and up
    assert len(seen) == 3 * 4 + 1
    assert largest <= max(seen) < 2 * largest
    assert len(lean.layers) == 3


@pytest.mark.parametrize("place", ["", "model", "model.layers.1", "model.layers.1.self_attn", "model.layers.2.mlp"])
def test_an_unknown_parameter_is_refused(place: str, tmp_path: Path):
    module = stock_module(tiny_models.save_random_model("llama", tmp_path))
    spec = spec_for(module)
    module.get_submodule(place).gate = nn.Linear(4, 4)
    with pytest.raises(UnsupportedModel, match=r"the stock module has gate\.bias"):
        make_lean_model(module, spec)


def test_an_unknown_kind_of_layer_is_refused(tmp_path: Path):
    module = stock_module(tiny_models.save_random_model("llama", tmp_path))
    spec = spec_for(module)

    class Adapted(nn.Linear):
        pass

    module.get_submodule("model.layers.0.mlp").up_proj = Adapted(64, 96, bias=False)
    with pytest.raises(UnsupportedModel, match="a Adapted where a linear layer was expected"):
        make_lean_model(module, spec)


def test_a_missing_part_is_refused(tmp_path: Path):
    module = stock_module(tiny_models.save_random_model("llama", tmp_path))
    spec = spec_for(module)
    del module.get_submodule("model").rotary_emb
    with pytest.raises(UnsupportedModel, match=r"built otherwise: .*rotary_emb"):
        make_lean_model(module, spec)


def test_half_a_bias_is_refused(tmp_path: Path):
    module = stock_module(tiny_models.save_random_model("qwen2", tmp_path))
    spec = spec_for(module)
    module.get_submodule("model.layers.0.self_attn.k_proj").bias = None
    with pytest.raises(UnsupportedModel, match="only some of the matrices to be fused have a bias"):
        make_lean_model(module, spec)


def test_a_rope_table_holds_scaled_cosines_and_sines():
    table = Rope(torch.tensor([1.0, 0.1]), factor=2.0).table(5)
    assert table.cos.shape == table.sin.shape == (5, 2)
    assert table.rotary_dim == 4
    assert table.cos[0].tolist() == [2.0, 2.0]
    assert table.sin[3, 1].item() == pytest.approx(2 * 0.29552, abs=1e-4)


def lean_body(loaded: LoadedModel) -> LeanModel:
    assert isinstance(loaded.impl, LeanModel)
    return loaded.impl


def test_a_layout_drops_the_plain_weights_and_can_be_undone(tmp_path: Path):
    loaded = load_model(
        tiny_models.save_random_model("qwen2", tmp_path), layout=WeightLayout.PLAIN, decoder=DecoderChoice.LEAN
    )
    lean = lean_body(loaded)
    x = torch.randn(3, 64, generator=torch.Generator().manual_seed(0))
    part = lean.layers[1].feed_forward
    assert isinstance(part, GatedFeedForward)
    products = (lean.head, lean.layers[0].qkv, part.gate_up)
    before = [product(x) for product in products]
    packed = choose_packer(WeightLayout.ONEDNN, None, torch.float32, "cpu")
    assert packed is not None
    with torch.inference_mode():
        assert lean.pack(packed) == 3 * 4 + 1
        arranged = [product(x) for product in products]
        lean.unpack()
    for ours, theirs in zip(arranged, before, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-5)
    assert all(torch.equal(product(x), old) for product, old in zip(products, before, strict=True))


def test_a_tied_head_is_packed_and_the_embedding_stays_plain(tmp_path: Path):
    directory = tiny_models.save_random_model("qwen3", tmp_path)
    plain = lean_body(load_model(directory, layout=WeightLayout.PLAIN, decoder=DecoderChoice.LEAN))
    loaded = load_model(directory, layout=WeightLayout.ONEDNN, decoder=DecoderChoice.LEAN)
    assert loaded.report.weights.num_matrices == 3 * 4 + 1
    assert loaded.report.check.passed
    assert torch.equal(lean_body(loaded).embedding, plain.embedding)


@pytest.mark.parametrize(("family", "num_tables"), [("llama", 1), ("gemma3_text", 2)])
def test_a_decoder_computes_one_table_for_layers_of_equal_angles(
    family: str, num_tables: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    model = load_model(tiny_models.save_random_model(family, tmp_path))
    made, make = [], Rope.table

    def counted(rope: Rope, max_positions: int) -> object:
        made.append(rope)
        return make(rope, max_positions)

    monkeypatch.setattr(Rope, "table", counted)
    decoder = model.decoder(PageStorage.allocate(model.geometry, 2))
    assert isinstance(decoder, LeanDecoder)
    assert len(decoder._ropes) == len(model.layers) > num_tables
    assert len(made) == num_tables
