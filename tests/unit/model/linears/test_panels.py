"""Products in panels at every level: against float64, equal in every batch, and unpacked bit for bit."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from baton.model.kernels.build import IsaLevel
from baton.model.kernels.library import load_kernels
from baton.model.linears.panels import PanelLinear, pack_panels, panels_support, unpack_panels
from tests.kernels import kernel_levels

pytestmark = pytest.mark.skipif(not kernel_levels(), reason="the kernels are not built")

ERROR = {torch.float32: 4e-6, torch.bfloat16: 2**-7}
MANY_ROWS = 193
"""One row more than the kernel's row block."""
LONG = 4864
"""More inputs than a block has, at every level."""


def numbers(*shape: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def product_of(level: IsaLevel, weight: torch.Tensor, bias: torch.Tensor | None = None) -> PanelLinear:
    return PanelLinear(load_kernels(level), weight, bias)


@pytest.mark.parametrize("level", kernel_levels())
@pytest.mark.parametrize("dtype", list(ERROR), ids=str)
@pytest.mark.parametrize("num_rows", [*range(1, 15), 24, 25, MANY_ROWS])
@pytest.mark.parametrize(("num_in", "num_out"), [(2, 1), (96, 45), (LONG, 64)])
def test_equals_float64(level: IsaLevel, dtype: torch.dtype, num_rows: int, num_in: int, num_out: int):
    x, weight = numbers(num_rows, num_in, dtype=dtype), numbers(num_out, num_in, dtype=dtype, seed=1)
    bias = numbers(num_out, dtype=dtype, seed=2)
    for added in (None, bias):
        wanted = x.double() @ weight.double().T + (0 if added is None else added.double())
        got = product_of(level, weight, added)(x)
        assert got.dtype == dtype
        torch.testing.assert_close(got.double(), wanted, rtol=ERROR[dtype], atol=ERROR[dtype] * num_in**0.5)


@pytest.mark.parametrize("level", kernel_levels())
@pytest.mark.parametrize("dtype", list(ERROR), ids=str)
@settings(max_examples=20)
@given(num_rows=st.integers(1, 220), first=st.integers(0, 219), seed=st.integers(0, 99))
def test_a_row_has_the_same_bits_in_every_batch(
    level: IsaLevel, dtype: torch.dtype, num_rows: int, first: int, seed: int
):
    x = numbers(220, 1030, dtype=dtype, seed=seed)
    product = product_of(level, numbers(37, 1030, dtype=dtype, seed=1), numbers(37, dtype=dtype, seed=2))
    some = x[first : first + num_rows]
    assert torch.equal(product(some), product(x)[first : first + num_rows])


@pytest.mark.parametrize("level", kernel_levels())
def test_a_nan_stays_in_its_row(level: IsaLevel):
    x = numbers(3, 64)
    x[1, 3], x[2, 5] = torch.nan, torch.inf
    out = product_of(level, numbers(5, 64, seed=1))(x)
    assert torch.isfinite(out[0]).all()
    assert out[1].isnan().all()
    assert out[2].isinf().all()


@pytest.mark.parametrize("dtype", list(ERROR), ids=str)
def test_a_weight_is_unpacked_bit_for_bit(dtype: torch.dtype):
    weight = numbers(45, 96, dtype=dtype)
    assert torch.equal(unpack_panels(pack_panels(weight, 32), 45), weight)
    assert torch.equal(product_of(kernel_levels()[-1], weight).weight(), weight)


def test_the_layout_is_panels_of_steps_of_outputs():
    weight = torch.arange(12.0).reshape(3, 4)
    assert pack_panels(weight, 2).flatten().tolist() == [0, 4, 1, 5, 2, 6, 3, 7, 8, 0, 9, 0, 10, 0, 11, 0]
    pairs = pack_panels(weight.bfloat16(), 2).flatten().tolist()
    assert pairs == [0, 1, 4, 5, 2, 3, 6, 7, 8, 9, 0, 0, 10, 11, 0, 0]


def test_views_and_further_axes_are_supported():
    weight, x = numbers(40, 64), numbers(64, 6).T.unflatten(0, (2, 3))
    product = product_of(kernel_levels()[-1], weight.T.contiguous().T)
    torch.testing.assert_close(product(x), x @ weight.T, rtol=1e-5, atol=1e-5)
    assert product(numbers(0, 64)).shape == (0, 40)


def test_weights_and_rows_of_other_shapes_are_refused():
    assert panels_support(numbers(8, 65), None)
    assert panels_support(numbers(8, 64), numbers(8))
    assert not panels_support(numbers(8, 65, dtype=torch.bfloat16), None), "it is multiplied by pairs"
    assert not panels_support(numbers(8, 64, dtype=torch.float16), None)
    assert not panels_support(numbers(8, 64), numbers(8, dtype=torch.bfloat16))
    product = product_of(kernel_levels()[-1], numbers(8, 64))
    for wrong in (numbers(1, 32), numbers(1, 64, dtype=torch.bfloat16)):
        with pytest.raises(ValueError, match="does not go with"):
            product(wrong)
