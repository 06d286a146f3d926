"""The native product at every level against float64, for many numbers of rows; and stock modules that use it."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from baton.model.kernels import linear as native_linear
from baton.model.kernels.build import Level
from baton.model.kernels.library import load_kernels
from baton.model.kernels.linear import MAX_FLOAT32_ROWS, NativeProduct, product_that_pays
from baton.model.kernels.modules import NativeLinear, use_product, use_torch
from baton.model.linear import make_linear
from tests.kernels import kernel_levels

pytestmark = pytest.mark.skipif(not kernel_levels(), reason="the kernels are not built")

ERROR = {torch.float32: 2e-6, torch.bfloat16: 2**-7}


def numbers(*shape: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def best() -> NativeProduct:
    return NativeProduct(load_kernels(kernel_levels()[-1]), None)


@pytest.mark.parametrize("level", kernel_levels())
@pytest.mark.parametrize("dtype", list(ERROR), ids=str)
@pytest.mark.parametrize("num_rows", [*range(1, 10), 15, 16, 17, 33])
@pytest.mark.parametrize(("num_in", "num_out"), [(32, 1), (96, 13), (896, 64)])
def test_equals_float64(level: Level, dtype: torch.dtype, num_rows: int, num_in: int, num_out: int):
    x, weight = numbers(num_rows, num_in, dtype=dtype), numbers(num_out, num_in, dtype=dtype, seed=1)
    bias = numbers(num_out, dtype=dtype, seed=2)
    product = NativeProduct(load_kernels(level), None)
    for added in (None, bias):
        wanted = x.double() @ weight.double().T + (0 if added is None else added.double())
        got = product(x, weight, added)
        assert got.dtype == dtype
        bound = ERROR[dtype] * num_in**0.5
        torch.testing.assert_close(got.double(), wanted, rtol=ERROR[dtype], atol=bound)


@pytest.mark.parametrize("level", kernel_levels())
def test_rows_do_not_depend_on_their_neighbours(level: Level):
    """What else is in the batch may change a request's numbers by no more than rounding."""
    x, weight = numbers(8, 96), numbers(13, 96, seed=1)
    product = NativeProduct(load_kernels(level), None)
    torch.testing.assert_close(product(x, weight, None)[5:6], product(x[5:6], weight, None), rtol=1e-5, atol=1e-5)
    same = product(x[5:6].expand(8, 96), weight, None)
    assert all(torch.equal(same[0], row) for row in same[:4]), "rows of one group are summed alike"


def test_a_nan_stays_one():
    x = numbers(2, 64)
    x[1, 3] = torch.nan
    out = best()(x, numbers(5, 64, seed=1), None)
    assert torch.isfinite(out[0]).all()
    assert out[1].isnan().all()


def test_what_does_not_fit_is_not_taken():
    product = best()
    assert product.takes(numbers(8, 64), None)
    assert product.takes(numbers(8, 64), numbers(8))
    assert not product.takes(numbers(8, 65), None)
    assert not product.takes(numbers(64, 32).T, None)
    assert not product.takes(numbers(8, 64, dtype=torch.float16), None)
    assert not product.takes(numbers(8, 64), numbers(8, dtype=torch.bfloat16))
    with pytest.raises(ValueError, match="does not go with"):
        product(numbers(1, 32), numbers(8, 64), None)
    with pytest.raises(ValueError, match="does not go with"):
        product(numbers(1, 64, dtype=torch.bfloat16), numbers(8, 64), None)


def test_it_pays_where_that_was_measured(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(torch, "get_num_threads", lambda: 1)
    kernels = load_kernels(kernel_levels()[-1])
    monkeypatch.setattr(native_linear, "has_bfloat16_arithmetic", lambda: False)
    emulated = product_that_pays(kernels, torch.bfloat16)
    assert emulated is not None
    assert emulated.pays(5000), "torch's emulation of bfloat16 is slower at every size"
    wide = product_that_pays(kernels, torch.float32)
    assert wide is not None
    assert wide.pays(MAX_FLOAT32_ROWS)
    assert not wide.pays(MAX_FLOAT32_ROWS + 1)
    monkeypatch.setattr(native_linear, "has_bfloat16_arithmetic", lambda: True)
    assert product_that_pays(kernels, torch.bfloat16) is None
    monkeypatch.setattr(torch, "get_num_threads", lambda: 2)
    assert product_that_pays(kernels, torch.float32) is None


class Counted(NativeProduct):
    """Notes how many rows it was asked for."""

    __slots__ = ("rows",)

    def __init__(self) -> None:
        super().__init__(load_kernels(kernel_levels()[-1]), MAX_FLOAT32_ROWS)
        self.rows: list[int] = []

    def __call__(self, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        self.rows.append(x.numel() // weight.shape[1])
        return super().__call__(x, weight, bias)


def test_stock_modules_keep_their_parameters_and_go_back():
    model = nn.Sequential(
        nn.Linear(64, 96), nn.ModuleDict({"odd": nn.Linear(33, 8), "even": nn.Linear(96, 8, bias=False)})
    )
    model.requires_grad_(False).eval()
    x, before = numbers(1, 3, 64), dict(model.named_parameters())
    wanted = model[0](x)
    product = Counted()
    assert use_product(model, product) == 2
    assert isinstance(model.get_submodule("0"), NativeLinear)
    assert type(model.get_submodule("1.odd")) is nn.Linear, "33 inputs do not fit"
    torch.testing.assert_close(model[0](x), wanted)
    model[0](numbers(1, MAX_FLOAT32_ROWS + 1, 64))
    assert product.rows == [3], "more rows than pay are torch's"
    use_torch(model)
    assert type(model.get_submodule("0")) is nn.Linear
    assert all(model.get_parameter(name) is parameter for name, parameter in before.items())


def test_the_lean_linear_uses_it_where_it_pays():
    weight, product = numbers(16, 64), Counted()
    linear = make_linear(weight)
    assert linear.use(product)
    for num_rows in (1, MAX_FLOAT32_ROWS, MAX_FLOAT32_ROWS + 1):
        x = numbers(num_rows, 64, seed=num_rows)
        torch.testing.assert_close(linear(x), x @ weight.T, rtol=1e-5, atol=1e-5)
    assert product.rows == [1, MAX_FLOAT32_ROWS]
    assert not linear.use(None)
    linear(numbers(1, 64))
    assert len(product.rows) == 2
    assert not make_linear(numbers(16, 65)).use(product)
