"""Quantised weights and rows, and the int8 product at every level: exact, also for the largest sums."""

from __future__ import annotations

import pytest
import torch

from baton.model.int8_rows import INT8_MAX, quantize_rows
from baton.model.kernels.build import IsaLevel
from baton.model.kernels.library import load_kernels
from baton.model.linears.int8 import MAX_INPUTS, Int8Linear, quantize_weight
from tests.kernels import kernel_levels

ROUNDING = {torch.float32: 2e-6, torch.bfloat16: 2**-8}
each_level = pytest.mark.parametrize("level", kernel_levels())


def numbers(*shape: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def in_float64(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
    """The product of the quantised numbers; only steps after the integer sum round."""
    (rows, row_scales), (channels, scales) = quantize_rows(x), quantize_weight(weight)
    sums = rows.double() @ channels.double().T
    return sums * scales.double() * row_scales.double()[:, None] + (0 if bias is None else bias.double())


def test_a_weight_is_rounded_to_half_a_step_of_its_channel():
    weight = numbers(600, 40) * torch.logspace(-6, 6, 600)[:, None]
    values, scales = quantize_weight(weight)
    assert values.dtype == torch.int8
    assert values.abs().amax(1).tolist() == [INT8_MAX] * 600, "every channel uses its whole range"
    assert ((values * scales[:, None] - weight).abs() <= 0.5001 * scales[:, None]).all()


def test_channels_of_tiny_weights_become_zeros():
    weight = torch.stack([torch.zeros(8), torch.full((8,), 1e-38), torch.full((8,), -0.25)])
    values, scales = quantize_weight(weight)
    assert values[:2].count_nonzero() == 0
    assert scales[:2].tolist() == [0.0, 0.0]
    assert values[2].tolist() == [-INT8_MAX] * 8


@pytest.mark.parametrize("strange", [torch.nan, torch.inf, -torch.inf])
def test_a_weight_that_is_not_finite_is_refused(strange: float):
    weight = numbers(4, 8)
    weight[2, 3] = strange
    with pytest.raises(ValueError, match="not finite"):
        quantize_weight(weight)


@each_level
@pytest.mark.parametrize("dtype", list(ROUNDING), ids=str)
@pytest.mark.parametrize("num_rows", [*range(1, 6), 17, 70])
@pytest.mark.parametrize(("num_in", "num_out"), [(1, 1), (33, 7), (64, 64), (200, 9), (4865, 5)])
def test_a_product_equals_that_of_the_integers(
    level: IsaLevel, dtype: torch.dtype, num_rows: int, num_in: int, num_out: int
):
    x, weight, bias = numbers(num_rows, num_in, dtype=dtype), numbers(num_out, num_in, seed=1), numbers(num_out, seed=2)
    for added in (None, bias):
        wanted = in_float64(x, weight, added)
        got = Int8Linear(load_kernels(level), weight, added)(x)
        assert got.dtype == dtype
        bound = ROUNDING[dtype] * wanted.abs().max().item()
        if level is IsaLevel.PORTABLE:  # without fused operations a tie may round to the other side: one step
            bound += 0.01 * wanted.abs().max().item()
        torch.testing.assert_close(got.double(), wanted, rtol=ROUNDING[dtype], atol=bound)


@each_level
@pytest.mark.parametrize("num_rows", [1, 2, 3])
@pytest.mark.parametrize("num_in", [64, 896, 4864])
def test_the_largest_sums_do_not_saturate(level: IsaLevel, num_rows: int, num_in: int):
    """u8 times s8 products added in pairs exceed an int16: 2 * 255 * 127."""
    weight = torch.full((6, num_in), 1.0)
    weight[1], weight[2] = -1.0, torch.tensor([1.0, -1.0]).repeat(num_in // 2)
    weight[3], weight[4] = -weight[2], weight[2].roll(2)
    product = Int8Linear(load_kernels(level), weight, None)
    for signs in (1.0, -1.0, weight[2], weight[3]):
        x = torch.ones(num_rows, num_in) * signs
        torch.testing.assert_close(product(x), x @ weight.T, rtol=1e-6, atol=0.0)


@each_level
def test_zero_rows_give_the_bias_and_nan_stays_in_its_row(level: IsaLevel):
    weight, bias, x = numbers(5, 96), numbers(5, seed=1), numbers(7, 96, seed=2)
    product = Int8Linear(load_kernels(level), weight, bias)
    alone = [product(row[None])[0] for row in x]
    x[1], x[2], x[4, 3], x[5, 95] = 0.0, 1e-38, torch.nan, torch.inf
    out = product(x)
    assert torch.equal(out[1], bias)
    assert torch.equal(out[2], bias)
    assert out[4].isnan().all()
    assert out[5].isnan().all()
    assert all(torch.equal(out[row], alone[row]) for row in (0, 3, 6))


@pytest.mark.skipif(not kernel_levels(), reason="the kernels are not built")
def test_rows_that_do_not_match_the_weight_are_refused():
    product = Int8Linear(load_kernels(kernel_levels()[-1]), numbers(5, 96), None)
    for x in (numbers(2, 95), numbers(96), numbers(2, 3, 96), numbers(2, 96).half()):
        with pytest.raises(ValueError, match="does not go with"):
            product(x)
    assert product(numbers(0, 96)).shape == (0, 5)
    assert torch.equal(product(numbers(96, 3).T), product(numbers(96, 3).T.contiguous()))


@pytest.mark.skipif(not kernel_levels(), reason="the kernels are not built")
def test_a_weight_whose_sums_may_overflow_is_refused():
    with pytest.raises(ValueError, match="may not fit an int32"):
        Int8Linear(load_kernels(kernel_levels()[-1]), torch.ones(1, MAX_INPUTS + 1), None)
    for level in kernel_levels():
        most = Int8Linear(load_kernels(level), torch.ones(1, MAX_INPUTS), None)
        assert most(torch.ones(1, MAX_INPUTS)).item() == MAX_INPUTS


@pytest.mark.skipif(not kernel_levels(), reason="the kernels are not built")
def test_int8_takes_a_quarter_of_float32():
    product = Int8Linear(load_kernels(kernel_levels()[-1]), numbers(512, 1024), None)
    assert product.num_bytes < 0.26 * 4 * 512 * 1024
