"""Every implementation of `Ops` returns float64's result, rounded, and writes only where the step says."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial

import pytest
import torch

from baton.kv.geometry import KVGeometry, LayerGeometry
from baton.model.attention.base import Segment, StepMetadata, plan_step
from baton.model.decoders.native_ops import NativeOps
from baton.model.decoders.ops import Activation, HeadShape, Ops, QkNorm, RopeTable, TorchOps
from baton.model.kernels.library import load_kernels
from baton.model.storage import PageStorage
from tests.kernels import kernel_levels

IMPLEMENTATIONS: dict[str, Callable[[], Ops]] = {
    "torch": TorchOps,
    **{level.value: partial(NativeOps, load_kernels(level)) for level in kernel_levels()},
}
"""Factories by name; one for each instruction set that an implementation has here."""

DTYPES = [torch.float32, torch.bfloat16]
TOLERANCE = {torch.float32: 2e-6, torch.bfloat16: 2**-8}  # relative: one rounding, and the error of float32 sums
EPS = 1e-6
NUM_PAGES = 9
MAX_POSITIONS = 64


@pytest.fixture(params=sorted(IMPLEMENTATIONS))
def ops(request: pytest.FixtureRequest) -> Ops:
    return IMPLEMENTATIONS[request.param]()


def numbers(*shape: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed + math.prod(shape))
    return torch.randn(*shape, generator=generator).to(dtype)


def assert_close(got: torch.Tensor, wanted: torch.Tensor, dtype: torch.dtype, slack: float = 1e-6) -> None:
    """`slack` is absolute: the cancellation error of float32 terms of size 1."""
    assert got.dtype == dtype
    assert got.is_contiguous()
    torch.testing.assert_close(got.double(), wanted, rtol=TOLERANCE[dtype], atol=slack)


def normed(x: torch.Tensor, weight: torch.Tensor, eps: float = EPS) -> torch.Tensor:
    wide = x.double()
    return wide / (wide.square().mean(-1, keepdim=True) + eps).sqrt() * weight.double()


ROWS = [(1, 896), (3, 64), (8, 100), (33, 17), (1, 1)]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("num_tokens", "num_features"), ROWS)
@pytest.mark.parametrize("place", ["new", "given", "in place"])
def test_rms_norm(ops: Ops, num_tokens: int, num_features: int, dtype: torch.dtype, place: str):
    x, weight = numbers(num_tokens, num_features, dtype=dtype), numbers(num_features, seed=1)
    wanted = normed(x, weight)
    out = {"new": None, "given": torch.full_like(x, torch.nan), "in place": x}[place]
    got = ops.rms_norm(x, weight, EPS, out)
    assert_close(got, wanted, dtype)
    if out is not None:
        assert got.data_ptr() == out.data_ptr()


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("size", [1e-4, 1.0, 1e4])
def test_rms_norm_of_small_and_large_numbers(ops: Ops, dtype: torch.dtype, size: float):
    x, weight = (numbers(4, 256) * size).to(dtype), numbers(256, seed=1)
    assert_close(ops.rms_norm(x, weight, 1e-5), normed(x, weight, 1e-5), dtype)


def test_rms_norm_of_zeros_is_zero(ops: Ops):
    assert torch.equal(ops.rms_norm(torch.zeros(2, 32), torch.ones(32), EPS), torch.zeros(2, 32))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("num_tokens", "num_features"), ROWS)
@pytest.mark.parametrize("place", ["new", "given", "in place"])
def test_add_rms_norm(ops: Ops, num_tokens: int, num_features: int, dtype: torch.dtype, place: str):
    x, residual = numbers(num_tokens, num_features, dtype=dtype), numbers(num_tokens, num_features, dtype=dtype, seed=2)
    weight = numbers(num_features, seed=1)
    total = x + residual
    out = {"new": None, "given": torch.full_like(x, torch.nan), "in place": x}[place]
    got = ops.add_rms_norm(x, residual, weight, EPS, out)
    assert torch.equal(residual, total)
    assert_close(got, normed(total, weight), dtype)
    if out is not None:
        assert got.data_ptr() == out.data_ptr()


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("activation", Activation)
@pytest.mark.parametrize(("num_tokens", "width"), [(1, 4864), (5, 96), (16, 33), (2, 1)])
@pytest.mark.parametrize("given", [False, True])
def test_act_and_mul(ops: Ops, num_tokens: int, width: int, activation: Activation, dtype: torch.dtype, given: bool):
    gate_up = (4.0 * numbers(num_tokens, 2 * width)).to(dtype)
    gate, up = gate_up.double().chunk(2, -1)
    if activation is Activation.SILU:
        wanted = gate * torch.sigmoid(gate) * up
    else:
        wanted = torch.nn.functional.gelu(gate, approximate="tanh") * up
    out = torch.full((num_tokens, width), torch.nan, dtype=dtype) if given else None
    got = ops.act_and_mul(gate_up, activation, out)
    assert_close(got, wanted, dtype, slack=2e-6)
    if out is not None:
        assert got.data_ptr() == out.data_ptr()


@pytest.mark.parametrize("activation", Activation)
def test_extreme_gates_do_not_overflow(ops: Ops, activation: Activation):
    gate_up = torch.tensor([[100.0, -100.0, 1e4, -1e4, 2.0, 3.0, 4.0, 5.0]])
    assert torch.equal(ops.act_and_mul(gate_up, activation), torch.tensor([[200.0, 0.0, 4e4, 0.0]]))


HEADS = [HeadShape(4, 2, 16), HeadShape(14, 2, 64), HeadShape(3, 3, 8), HeadShape(8, 1, 40), HeadShape(2, 1, 128)]
HEAD_GROUPS = [
    *((heads, 1) for heads in HEADS),
    *((HeadShape(14, 2, 64), 2), (HeadShape(3, 3, 8), 3), (HeadShape(8, 4, 16), 2), (HeadShape(8, 4, 16), 4)),
]
"""Shapes, and the number of head groups of their pages."""


def rope_table(rotary_dim: int) -> RopeTable:
    """A table with an attention factor, as YaRN has one."""
    angles = torch.arange(MAX_POSITIONS)[:, None] / 10.0 ** (torch.arange(0, rotary_dim, 2) / rotary_dim)
    return RopeTable(1.1 * angles.cos(), 1.1 * angles.sin())


def rotated(heads: torch.Tensor, rope: RopeTable, positions: torch.Tensor) -> torch.Tensor:
    """Rotates pairs (i, i + rotary_dim / 2) as complex numbers."""
    half = rope.rotary_dim // 2
    turn = torch.complex(rope.cos[positions].double(), rope.sin[positions].double())[:, None]
    turned = torch.complex(heads[..., :half].double(), heads[..., half : 2 * half].double()) * turn
    return torch.cat((turned.real, turned.imag, heads[..., 2 * half :].double()), -1)


def mixed_step(page_size: int) -> tuple[StepMetadata, torch.Tensor]:
    """A chunk that begins and ends inside pages, a whole page, and two single tokens."""
    segments = [
        Segment(0, page_size - 1, page_size + 3, [7, 2, 5]),
        Segment(page_size + 3, 0, page_size, [8]),
        Segment(2 * page_size + 3, 2 * page_size, 1, [1, 2, 6]),
        Segment(2 * page_size + 4, 3 * page_size - 1, 1, [3, 4, 1]),
    ]
    positions = [position for segment in segments for position in range(segment.start, segment.end)]
    return plan_step(segments, page_size), torch.tensor(positions)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("heads", "head_groups"), HEAD_GROUPS, ids=str)
@pytest.mark.parametrize("with_norms", [False, True])
@pytest.mark.parametrize("in_part", [False, True])
def test_rope_and_write_kv(
    ops: Ops, heads: HeadShape, head_groups: int, dtype: torch.dtype, with_norms: bool, in_part: bool
):
    page_size = 4
    step, positions = mixed_step(page_size)
    rope = rope_table(heads.head_dim // 4 * 2 if in_part else heads.head_dim)
    norms = None
    if with_norms:
        norms = QkNorm(1 + numbers(heads.head_dim, seed=3), 1 + numbers(heads.head_dim, seed=4), EPS)
    layers = (LayerGeometry(heads.num_kv_heads, heads.head_dim, heads.head_dim),) * 3
    geometry = KVGeometry.of_layers(layers, str(dtype).removeprefix("torch."), page_size, head_groups)
    storage = PageStorage.allocate(geometry, NUM_PAGES)
    qkv = numbers(step.num_tokens, heads.num_features, dtype=dtype)
    split = qkv.clone().view(step.num_tokens, -1, heads.head_dim)
    query, keys, values = split.split([heads.num_heads, heads.num_kv_heads, heads.num_kv_heads], 1)
    if norms is not None:
        query, keys = normed(query, norms.query), normed(keys, norms.key)

    got = ops.rope_and_write_kv(qkv, rope, heads, norms, positions, storage, 1, step)

    assert got.shape == (step.num_tokens, heads.num_heads, heads.head_dim)
    assert_close(got, rotated(query, rope, positions), dtype, slack=2e-6)
    places = (step.token_pages, slice(None), slice(None), step.token_slots)
    written = storage.keys(1)[places].flatten(1, 2)
    assert_close(written.contiguous(), rotated(keys, rope, positions), dtype, slack=2e-6)
    assert torch.equal(storage.values(1)[places].flatten(1, 2), values)
    storage.keys(1)[places] = 0
    storage.values(1)[places] = 0
    for layer in range(3):
        assert not storage.keys(layer).any(), "written where no token is"
        assert not storage.values(layer).any(), "written where no token is"


def test_the_query_is_written_to_the_given_output(ops: Ops):
    heads = HeadShape(4, 2, 16)
    step, positions = mixed_step(4)
    storage = PageStorage.allocate(KVGeometry.of_layers((LayerGeometry(2, 16, 16),), "float32", 4), NUM_PAGES)
    qkv = numbers(step.num_tokens, heads.num_features)
    arguments = (rope_table(16), heads, None, positions, storage, 0, step)
    out = torch.full((step.num_tokens, 4, 16), torch.nan)
    wanted = ops.rope_and_write_kv(qkv.clone(), *arguments)
    got = ops.rope_and_write_kv(qkv, *arguments, out)
    assert got.data_ptr() == out.data_ptr()
    assert torch.equal(got, wanted)
