"""An int8 product of a row has the same bits in every batch: alone, among others, in any chunks."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from baton.model.kernels.library import load_kernels
from baton.model.linears.int8 import Int8Linear
from tests.kernels import kernel_levels

pytestmark = pytest.mark.skipif(not kernel_levels(), reason="the kernels are not built")

levels = st.deferred(lambda: st.sampled_from(kernel_levels()))
magnitudes = st.sampled_from([0.0, 1e-35, 1e-9, 1.0, 127.0, 1e9, float("nan")])


@given(
    level=levels,
    dtype=st.sampled_from([torch.float32, torch.bfloat16]),
    num_in=st.integers(1, 200),
    num_out=st.integers(1, 12),
    row_sizes=st.lists(magnitudes, min_size=1, max_size=24),
    cuts=st.sets(st.integers(1, 23)),
    has_bias=st.booleans(),
    seed=st.integers(0, 2**32),
)
def test_a_rows_bits_do_not_depend_on_its_batch(level, dtype, num_in, num_out, row_sizes, cuts, has_bias, seed):
    generator = torch.Generator().manual_seed(seed)
    weight, bias = torch.randn(num_out, num_in, generator=generator), torch.randn(num_out, generator=generator)
    x = (torch.randn(len(row_sizes), num_in, generator=generator) * torch.tensor(row_sizes)[:, None]).to(dtype)
    product = Int8Linear(load_kernels(level), weight, bias if has_bias else None)
    whole = product(x)
    sizes = [cut for cut in sorted(cuts) if cut < len(row_sizes)]
    chunks = torch.cat([product(chunk) for chunk in x.tensor_split(sizes)])
    order = torch.randperm(len(row_sizes), generator=generator)
    shuffled = torch.empty_like(whole).index_copy(0, order, product(x[order]))
    alone = torch.cat([product(row[None]) for row in x])
    for other in (chunks, shuffled, alone):
        assert torch.equal(bits(other), bits(whole))


def test_bits_are_equal_beyond_one_row_block():
    x = torch.randn(700, 96, generator=torch.Generator().manual_seed(0))
    wide = torch.randn(130, 5000, generator=torch.Generator().manual_seed(1))
    for rows, num_out in ((x, 9), (wide, 6)):
        weight = torch.randn(num_out, rows.shape[1], generator=torch.Generator().manual_seed(2))
        for level in kernel_levels():
            product = Int8Linear(load_kernels(level), weight, None)
            assert torch.equal(product(rows), torch.cat([product(row[None]) for row in rows]))


def bits(x: torch.Tensor) -> torch.Tensor:
    """The bits of a tensor, so that NaNs compare equal."""
    return x.view(torch.int32 if x.dtype is torch.float32 else torch.int16)
