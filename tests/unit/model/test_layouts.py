"""Which layout is chosen where, and that linear layers of both decoders keep their weights in it and come back."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.nn.functional import linear

from baton.model import layouts, onednn
from baton.model.kernels.library import Kernels, load_kernels
from baton.model.kernels.panels import PanelProduct
from baton.model.layouts import Arrangement, Layout, choose_arrangement, in_panels
from baton.model.linear import make_linear
from baton.model.onednn import PackedProduct, onednn_works
from baton.model.stock_linears import ArrangedLinear, arrange_linears, restore_linears
from tests.kernels import kernel_levels

needs_kernels = pytest.mark.skipif(not kernel_levels(), reason="the kernels are not built")


def best() -> Kernels:
    return load_kernels(kernel_levels()[-1])


def numbers(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def chosen(wanted: Layout, kernels: Kernels | None, dtype: torch.dtype, device: str = "cpu") -> Layout:
    arrangement = choose_arrangement(wanted, kernels, dtype, device)
    return Layout.PLAIN if arrangement is None else arrangement.layout


@needs_kernels
def test_panels_are_chosen_wherever_the_kernels_multiply():
    for dtype in (torch.float32, torch.bfloat16):
        assert chosen(Layout.AUTO, best(), dtype) is Layout.PANELS
    assert chosen(Layout.PANELS, best(), torch.float16) is Layout.PLAIN
    assert chosen(Layout.PANELS, None, torch.float32) is Layout.PLAIN
    assert chosen(Layout.AUTO, best(), torch.float32, "cuda") is Layout.PLAIN
    assert chosen(Layout.PLAIN, best(), torch.float32) is Layout.PLAIN


def test_without_kernels_onednn_packs_where_it_pays(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(layouts, "onednn_pays", lambda: True)
    assert chosen(Layout.AUTO, None, torch.float32) is Layout.ONEDNN
    monkeypatch.setattr(layouts, "onednn_pays", lambda: False)
    assert chosen(Layout.AUTO, None, torch.float32) is Layout.PLAIN
    assert chosen(Layout.ONEDNN, None, torch.float32) is Layout.ONEDNN
    assert chosen(Layout.ONEDNN, None, torch.float16) is Layout.PLAIN


def test_onednn_is_not_trusted_where_it_is_absent_or_wrong(monkeypatch: pytest.MonkeyPatch):
    assert onednn_works(torch.float32)
    monkeypatch.setattr(PackedProduct, "__call__", lambda self, x: x.new_ones(1, x.shape[1], 80))
    assert not onednn_works(torch.float32)

    def missing(*_: object) -> PackedProduct:
        raise AttributeError("no such operator")

    monkeypatch.setattr(onednn, "PackedProduct", missing)
    assert not onednn_works(torch.float32)
    assert chosen(Layout.ONEDNN, None, torch.float32) is Layout.PLAIN


def arrangements() -> list[Arrangement]:
    found = choose_arrangement(Layout.ONEDNN, None, torch.float32, "cpu")
    return [*([] if found is None else [found]), *([in_panels(best())] if kernel_levels() else [])]


@pytest.mark.parametrize("arrangement", arrangements(), ids=lambda arrangement: arrangement.layout.value)
def test_stock_modules_are_swapped_and_go_back(arrangement: Arrangement):
    model = nn.Sequential(
        nn.Linear(64, 96), nn.ModuleDict({"inner": nn.Linear(96, 8, bias=False), "norm": nn.LayerNorm(8)})
    )
    model.requires_grad_(False).eval()
    before = {name: parameter.clone() for name, parameter in model.named_parameters()}
    x = numbers(1, 3, 64)
    wanted = model[0](x)
    assert arrange_linears(model, arrangement) == 2
    assert isinstance(model.get_submodule("1.inner"), ArrangedLinear)
    torch.testing.assert_close(model[0](x), wanted)
    assert {name for name, _ in model.named_parameters()} == {"1.norm.weight", "1.norm.bias"}, "the weight is kept once"
    restore_linears(model)
    assert type(model.get_submodule("0")) is nn.Linear
    after = dict(model.named_parameters())
    assert after.keys() == before.keys()
    assert all(torch.equal(after[name], before[name]) for name in before)


@pytest.mark.parametrize("arrangement", arrangements(), ids=lambda arrangement: arrangement.layout.value)
def test_a_lean_linear_is_arranged_and_goes_back(arrangement: Arrangement):
    weight, bias, x = numbers(16, 64), numbers(16, seed=1), numbers(5, 64, seed=2)
    product = make_linear(weight, bias)
    plain = product(x)
    assert torch.equal(plain, linear(x, weight, bias))
    assert product.arrange(arrangement)
    torch.testing.assert_close(product(x), plain, rtol=1e-5, atol=1e-5)
    assert product.arrange(arrangement), "it is so already"
    product.restore()
    assert torch.equal(product(x), plain)


@needs_kernels
def test_what_is_not_taken_stays_plain():
    odd = make_linear(numbers(16, 65).bfloat16())
    assert not odd.arrange(in_panels(best()))
    model = nn.Sequential(nn.Linear(65, 4), nn.Linear(4, 2)).bfloat16()
    assert arrange_linears(model, in_panels(best())) == 1
    assert type(model.get_submodule("0")) is nn.Linear
    assert isinstance(in_panels(best()).arrange(numbers(4, 4), None), PanelProduct)
