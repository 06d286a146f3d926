"""Tests every kernel of a level on numbers before it may serve. Called once a process, by `kernel_choice`.

Runs small random inputs of both dtypes through each kernel, against torch or float64. Takes some milliseconds.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch

from baton.domain.request import SamplingParams
from baton.kv.geometry import KVGeometry, LatentGeometry, LayerGeometry
from baton.model.attention.base import AttentionCall, Segment, StepMetadata, plan_step
from baton.model.attention.native_backend import NativeAttention
from baton.model.attention.torch_backend import TorchAttention
from baton.model.decoders.native_ops import NativeOps
from baton.model.decoders.ops import Activation, HeadShape, Ops, QkNorm, RopeTable, TorchOps
from baton.model.int8_rows import INT8_MAX, quantize_rows
from baton.model.kernels.library import Kernels
from baton.model.linears.int8 import Int8Linear
from baton.model.linears.panels import PanelLinear
from baton.model.sampling.distribution import Filters, filter_weights
from baton.model.sampling.gumbel import draw_key, sample_by_gumbel
from baton.model.sampling.native import NativeSampler
from baton.model.storage import PageStorage

_RELATIVE_ERROR = {torch.float32: 1e-5, torch.bfloat16: 2e-2}
_PAGE_SIZE, _NUM_PAGES = 4, 40
_HEADS = HeadShape(6, 2, 64)
_WRITES_KV = "rope_and_write_kv"
_SEGMENTS = (Segment(0, 6, 1, [3, 9]), Segment(1, 0, 11, [5, 1, 7]), Segment(12, 66, 1, list(range(11, 28))))


def first_wrong_kernel(kernels: Kernels) -> str | None:
    """Name and error of the first wrong kernel; None if all are right."""
    for dtype, bound in _RELATIVE_ERROR.items():
        for name, got, wanted in _cases(kernels, dtype):
            error = ((got.double() - wanted.double()).abs().max() / wanted.double().abs().max()).item()
            if not error <= bound:  # a NaN is wrong
                return f"{name} of {dtype} is off by {error:.2g}"
    return None if _samples_correctly(kernels) else "the choice of tokens is another one than torch's"


def _samples_correctly(kernels: Kernels) -> bool:
    logits = 3 * torch.randn(5, 5000, generator=torch.Generator().manual_seed(0))
    rows = [SamplingParams(top_k=40), SamplingParams(top_p=0.9), SamplingParams(min_p=0.1), SamplingParams()]
    rows.append(SamplingParams(temperature=0.5, top_k=500, top_p=0.7, min_p=0.01))
    keys = [draw_key(seed, 0) for seed in range(len(rows))]
    sampler = NativeSampler(kernels)
    sampled = sample_by_gumbel(filter_weights(logits, Filters.of(rows, logits.shape[1])), keys)
    return torch.equal(sampler.sample(logits, rows, keys), sampled) and torch.equal(
        sampler.argmax(logits), logits.argmax(-1)
    )


def _cases(kernels: Kernels, dtype: torch.dtype) -> Iterator[tuple[str, torch.Tensor, torch.Tensor]]:
    """Yields a kernel's name, its result, and the expected result."""
    generator = torch.Generator().manual_seed(0)

    def numbers(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator).to(dtype)

    for num_rows in (1, 3, 7, 29):
        x, weight, bias = numbers(num_rows, 192), numbers(45, 192), numbers(45)
        exact = x.double() @ weight.double().T + bias.double()
        yield "multiply", PanelLinear(kernels, weight, bias)(x), exact
    yield from _int8_cases(kernels, dtype, numbers)
    for geometry in _geometries(dtype):
        yield from _page_cases(kernels, geometry, numbers)


def _page_cases(
    kernels: Kernels, geometry: KVGeometry, numbers: Callable[..., torch.Tensor]
) -> Iterator[tuple[str, torch.Tensor, torch.Tensor]]:
    step, storage = plan_step(_SEGMENTS, _PAGE_SIZE), PageStorage.allocate(geometry, _NUM_PAGES)
    _fill(storage, numbers)
    native, plain = NativeOps(kernels), TorchOps()
    for name, gives in _op_cases(numbers(step.num_tokens, _HEADS.num_features), step):
        got, wanted = gives(native, storage), gives(plain, storage)
        if storage.scales is not None and name == _WRITES_KV:
            wanted[:, _HEADS.num_heads :] = _either_step(got[:, _HEADS.num_heads :], wanted[:, _HEADS.num_heads :])
        yield name, got, wanted
    query = numbers(step.num_tokens, _HEADS.num_heads, _HEADS.head_dim)
    calls = [
        AttentionCall(0, query, 0.2),
        AttentionCall(0, query[:, : _HEADS.num_kv_heads], 0.2),  # a head by itself takes the small-M path
        AttentionCall(0, query, 0.2, window=5, softcap=3.0, sinks=torch.linspace(-1, 2, _HEADS.num_heads)),
        AttentionCall(1, query, 0.2),  # latents, where there are any
    ]
    for call in calls:
        answers = []
        for backend in (NativeAttention(kernels, storage), TorchAttention(storage)):
            backend.begin(step)
            answers.append(backend.attend(call))
        yield "attention" if storage.scales is None else "attention over int8", answers[0], answers[1]


def _either_step(got: torch.Tensor, wanted: torch.Tensor) -> torch.Tensor:
    """`got` where it is one of 255 steps away: sums that differ in the last bit may round to another one."""
    step_size = 1.01 * wanted.abs().amax(-1, keepdim=True) / INT8_MAX
    return torch.where((got - wanted).abs() <= step_size, got, wanted)


def _int8_cases(
    kernels: Kernels, dtype: torch.dtype, numbers: Callable[..., torch.Tensor]
) -> Iterator[tuple[str, torch.Tensor, torch.Tensor]]:
    """Includes the largest possible sums, at which narrower accumulators would saturate."""
    weight, bias = numbers(7, 200), numbers(7)
    weight[0], weight[1] = 1.0, -1.0
    product = Int8Linear(kernels, weight, bias)
    for num_rows in (1, 2, 5):
        x = numbers(num_rows, 200)
        x[-1] = 1.0
        (rows, row_scales), (channels, scales) = quantize_rows(x), quantize_rows(weight)
        exact = (rows.double() @ channels.double().T) * scales.double() * row_scales.double()[:, None]
        yield "linear_int8", product(x), exact + bias.double()


def _op_cases(x: torch.Tensor, step: StepMetadata) -> Iterator[tuple[str, Callable[[Ops, PageStorage], torch.Tensor]]]:
    """Each operation by its name, on copies of `x` [tokens, features]."""
    weight = torch.linspace(0.5, 1.5, x.shape[1])
    yield "rms_norm", lambda ops, _: ops.rms_norm(x, weight, 1e-6)
    yield "add_rms_norm", lambda ops, _: ops.add_rms_norm(x, x.flip(0), weight, 1e-6)
    yield "act_and_mul with silu", lambda ops, _: ops.act_and_mul(x, Activation.SILU)
    yield "act_and_mul with gelu_tanh", lambda ops, _: ops.act_and_mul(x, Activation.GELU_TANH)
    yield _WRITES_KV, lambda ops, storage: _rotated(ops, x.clone(), step, storage)


def _rotated(ops: Ops, qkv: torch.Tensor, step: StepMetadata, storage: PageStorage) -> torch.Tensor:
    """The query, and K and V read from their pages: [tokens, heads of all kinds, head_dim]."""
    angles = torch.arange(80)[:, None] * torch.linspace(1, 0.01, _HEADS.head_dim // 2)
    rope = RopeTable(angles.cos(), angles.sin())
    positions = torch.tensor([p for segment in _SEGMENTS for p in range(segment.start, segment.end)])
    weight = torch.linspace(0.5, 1.5, _HEADS.head_dim)
    norms = QkNorm(weight, weight, 1e-6)
    query = ops.rope_and_write_kv(qkv, rope, _HEADS, norms, positions, storage, 0, step)
    tokens = torch.arange(step.num_tokens)
    written = storage.select(step.token_pages[:, None]).keys_and_values(0)
    return torch.cat([query, *(side[tokens, :, step.token_slots] for side in written)], 1)


def _geometries(dtype: torch.dtype) -> Iterator[KVGeometry]:
    """Plain pages with a layer of latents, and pages of int8."""
    layer = LayerGeometry(_HEADS.num_kv_heads, _HEADS.head_dim, _HEADS.head_dim)
    latent = LatentGeometry(_HEADS.head_dim - 16, 16)
    name = str(dtype).removeprefix("torch.")
    yield KVGeometry.of_layers((layer, latent), name, _PAGE_SIZE)
    yield KVGeometry.of_layers((layer, layer), name, _PAGE_SIZE).quantized()


def _fill(storage: PageStorage, numbers: Callable[..., torch.Tensor]) -> None:
    """Random K and V in every slot of both layers."""
    page_size = storage.geometry.page_size
    slots = torch.arange(storage.num_pages * page_size)
    for layer, shape in enumerate(storage.geometry.layers):
        keys = numbers(len(slots), shape.num_kv_heads, shape.k_head_dim)
        values = numbers(len(slots), shape.num_kv_heads, shape.v_head_dim)
        storage.write(layer, slots // page_size, slots % page_size, keys, values)
