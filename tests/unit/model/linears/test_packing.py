"""The choice of a layout, and packing and unpacking the linear layers of both decoders."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.nn.functional import linear

from baton.model.kernels.library import Kernels, load_kernels
from baton.model.linears import onednn, packing
from baton.model.linears.linear import make_linear
from baton.model.linears.onednn import OneDnnLinear, onednn_is_correct
from baton.model.linears.packed_modules import PackedModule, pack_modules, unpack_modules
from baton.model.linears.packing import WeightLayout, WeightPacker, choose_packer, panel_packer
from baton.model.linears.panels import PanelLinear
from tests.kernels import kernel_levels

needs_kernels = pytest.mark.skipif(not kernel_levels(), reason="the kernels are not built")


def best() -> Kernels:
    return load_kernels(kernel_levels()[-1])


def numbers(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def chosen(wanted: WeightLayout, kernels: Kernels | None, dtype: torch.dtype, device: str = "cpu") -> WeightLayout:
    packer = choose_packer(wanted, kernels, dtype, device)
    return WeightLayout.PLAIN if packer is None else packer.layout


@needs_kernels
def test_panels_are_chosen_wherever_kernels_exist():
    for dtype in (torch.float32, torch.bfloat16):
        assert chosen(WeightLayout.AUTO, best(), dtype) is WeightLayout.PANELS
    assert chosen(WeightLayout.PANELS, best(), torch.float16) is WeightLayout.PLAIN
    assert chosen(WeightLayout.PANELS, None, torch.float32) is WeightLayout.PLAIN
    assert chosen(WeightLayout.AUTO, best(), torch.float32, "cuda") is WeightLayout.PLAIN
    assert chosen(WeightLayout.PLAIN, best(), torch.float32) is WeightLayout.PLAIN


def test_onednn_packs_without_kernels_where_it_is_faster(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(packing, "onednn_is_faster", lambda: True)
    assert chosen(WeightLayout.AUTO, None, torch.float32) is WeightLayout.ONEDNN
    monkeypatch.setattr(packing, "onednn_is_faster", lambda: False)
    assert chosen(WeightLayout.AUTO, None, torch.float32) is WeightLayout.PLAIN
    assert chosen(WeightLayout.ONEDNN, None, torch.float32) is WeightLayout.ONEDNN
    assert chosen(WeightLayout.ONEDNN, None, torch.float16) is WeightLayout.PLAIN


def test_a_missing_or_wrong_onednn_is_not_used(monkeypatch: pytest.MonkeyPatch):
    assert onednn_is_correct(torch.float32)
    monkeypatch.setattr(OneDnnLinear, "__call__", lambda self, x: x.new_ones(1, x.shape[1], 80))
    assert not onednn_is_correct(torch.float32)

    def missing(*_: object) -> OneDnnLinear:
        raise AttributeError("no such operator")

    monkeypatch.setattr(onednn, "OneDnnLinear", missing)
    assert not onednn_is_correct(torch.float32)
    assert chosen(WeightLayout.ONEDNN, None, torch.float32) is WeightLayout.PLAIN


def packers() -> list[WeightPacker]:
    found = choose_packer(WeightLayout.ONEDNN, None, torch.float32, "cpu")
    return [*([] if found is None else [found]), *([panel_packer(best())] if kernel_levels() else [])]


@pytest.mark.parametrize("packer", packers(), ids=lambda packer: packer.layout.value)
def test_stock_modules_are_packed_and_unpacked(packer: WeightPacker):
    model = nn.Sequential(
        nn.Linear(64, 96), nn.ModuleDict({"inner": nn.Linear(96, 8, bias=False), "norm": nn.LayerNorm(8)})
    )
    model.requires_grad_(False).eval()
    before = {name: parameter.clone() for name, parameter in model.named_parameters()}
    x = numbers(1, 3, 64)
    wanted = model[0](x)
    assert pack_modules(model, packer) == 2
    assert isinstance(model.get_submodule("1.inner"), PackedModule)
    torch.testing.assert_close(model[0](x), wanted)
    assert {name for name, _ in model.named_parameters()} == {"1.norm.weight", "1.norm.bias"}, "the weight is kept once"
    unpack_modules(model)
    assert type(model.get_submodule("0")) is nn.Linear
    after = dict(model.named_parameters())
    assert after.keys() == before.keys()
    assert all(torch.equal(after[name], before[name]) for name in before)


@pytest.mark.parametrize("packer", packers(), ids=lambda packer: packer.layout.value)
def test_a_lean_linear_is_packed_and_unpacked(packer: WeightPacker):
    weight, bias, x = numbers(16, 64), numbers(16, seed=1), numbers(5, 64, seed=2)
    product = make_linear(weight, bias)
    plain = product(x)
    assert torch.equal(plain, linear(x, weight, bias))
    assert product.pack(packer)
    torch.testing.assert_close(product(x), plain, rtol=1e-5, atol=1e-5)
    assert product.pack(packer), "it is so already"
    product.unpack()
    assert torch.equal(product(x), plain)


@needs_kernels
def test_a_rejected_weight_stays_plain():
    odd = make_linear(numbers(16, 65).bfloat16())
    assert not odd.pack(panel_packer(best()))
    model = nn.Sequential(nn.Linear(65, 4), nn.Linear(4, 2)).bfloat16()
    assert pack_modules(model, panel_packer(best())) == 1
    assert type(model.get_submodule("0")) is nn.Linear
    assert isinstance(panel_packer(best()).pack(numbers(4, 4), None), PanelLinear)
