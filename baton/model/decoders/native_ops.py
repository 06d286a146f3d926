"""`Ops` on the native kernels: one call and one pass over memory for each operation.

Called by the lean decoder on the engine thread. Checks shapes, dtypes and strides, which the kernels do not.
"""

from __future__ import annotations

import ctypes

import torch

from baton.model.attention.base import StepMetadata
from baton.model.decoders.ops import Activation, HeadShape, Ops, QkNorm, RopeTable, TorchOps
from baton.model.kernels.library import Kernels, supports_dtype
from baton.model.storage import PageStorage


class RopeParams(ctypes.Structure):
    """`RopeParams` of kernels/src/rope_params.h."""

    _fields_ = (
        *((name, ctypes.c_int64) for name in ("num_heads", "num_kv_heads", "head_dim", "rotary_dim")),
        *((name, ctypes.c_void_p) for name in ("cosines", "sines", "query_norm", "key_norm")),
        ("eps", ctypes.c_float),
        *((name, ctypes.c_int64) for name in ("page_size", "page_stride", "group_heads", "group_stride")),
        *((name, ctypes.c_void_p) for name in ("key_scales", "value_scales")),
        ("scale_page_stride", ctypes.c_int64),
    )


class NativeOps:
    """`Ops` for float32 and bfloat16 on a CPU. Raises `ValueError` for an unsupported tensor."""

    def __init__(self, kernels: Kernels) -> None:
        self._kernels = kernels

    @property
    def kernels(self) -> Kernels:
        """The kernels that compute."""
        return self._kernels

    def rms_norm(
        self, x: torch.Tensor, weight: torch.Tensor, eps: float, out: torch.Tensor | None = None
    ) -> torch.Tensor:
        return self._norm(x, None, weight, eps, out)

    def add_rms_norm(
        self, x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float, out: torch.Tensor | None = None
    ) -> torch.Tensor:
        return self._norm(x, residual, weight, eps, out)

    def rope_and_write_kv(
        self,
        qkv: torch.Tensor,
        rope: RopeTable,
        heads: HeadShape,
        norms: QkNorm | None,
        positions: torch.Tensor,
        storage: PageStorage,
        layer: int,
        step: StepMetadata,
        out: torch.Tensor | None = None,
    ) -> torch.Tensor:
        if out is None:
            out = qkv.new_empty(qkv.shape[0], heads.num_heads, heads.head_dim)
        keys, values = storage.keys(layer), storage.values(layer)
        step = step.of(is_apart=storage.is_apart(layer))
        pages = (keys[0, 0], values[0, 0]) if storage.scales is None else ()
        require_dtype(qkv.dtype, qkv, out, *pages)
        require_dtype(torch.int64, positions, step.token_pages, step.token_slots)
        params = rope_params(rope, heads, norms, storage, layer)
        self._kernels.rope_and_write_kv(
            *(qkv.dtype is torch.bfloat16, ctypes.addressof(params), qkv.data_ptr(), positions.data_ptr()),
            *(step.token_pages.data_ptr(), step.token_slots.data_ptr(), qkv.shape[0]),
            *(keys.data_ptr(), values.data_ptr(), out.data_ptr()),
        )
        return out

    def act_and_mul(
        self, gate_up: torch.Tensor, activation: Activation, out: torch.Tensor | None = None
    ) -> torch.Tensor:
        num_tokens, width = gate_up.shape[0], gate_up.shape[1] // 2
        if out is None:
            out = gate_up.new_empty(num_tokens, width)
        require_dtype(gate_up.dtype, gate_up, out)
        is_gelu = activation is Activation.GELU_TANH
        is_bfloat16 = gate_up.dtype is torch.bfloat16
        self._kernels.act_and_mul(is_bfloat16, is_gelu, gate_up.data_ptr(), num_tokens, width, out.data_ptr())
        return out

    def _norm(
        self, x: torch.Tensor, residual: torch.Tensor | None, weight: torch.Tensor, eps: float, out: torch.Tensor | None
    ) -> torch.Tensor:
        if out is None:
            out = torch.empty_like(x)
        require_dtype(torch.float32, weight)
        require_dtype(x.dtype, x, out, *(() if residual is None else (residual,)))
        num_features = x.shape[-1]
        self._kernels.rms_norm(
            *(x.dtype is torch.bfloat16, x.data_ptr(), None if residual is None else residual.data_ptr()),
            *(weight.data_ptr(), eps, x.numel() // num_features, num_features, out.data_ptr()),
        )
        return out


def rope_params(
    rope: RopeTable, heads: HeadShape, norms: QkNorm | None, storage: PageStorage, layer: int
) -> RopeParams:
    """One layer's rotary embedding over `storage`. Raises `ValueError` for tensors of another dtype than float32."""
    keys, scales = storage.keys(layer), storage.scales
    weights = () if norms is None else (norms.query, norms.key)
    require_dtype(torch.float32, rope.cos, rope.sin, *weights)
    return RopeParams(
        *(heads.num_heads, heads.num_kv_heads, heads.head_dim, rope.rotary_dim),
        *(rope.cos.data_ptr(), rope.sin.data_ptr(), *(weight.data_ptr() for weight in weights)),
        *(() if norms else (None, None)),
        *(0.0 if norms is None else norms.eps, keys.shape[3]),
        *(keys.stride(0), keys.shape[2], keys.stride(1)),
        *((None, None, 0) if scales is None else scales.addresses(layer)),
    )


def choose_ops(storage: PageStorage, kernels: Kernels | None = None) -> Ops:
    """The operations of a lean decoder over `storage`."""
    if kernels is not None and storage.device.type == "cpu" and supports_dtype(storage.dtype):
        return NativeOps(kernels)
    return TorchOps()


def require_dtype(dtype: torch.dtype, *tensors: torch.Tensor) -> None:
    """Raises `ValueError` for a tensor that the kernels cannot take as one of `dtype`."""
    for tensor in tensors:
        if tensor.dtype is not dtype or not tensor.is_contiguous() or not tensor.is_cpu:
            raise ValueError(f"kernels take contiguous {dtype} on the CPU, not {tensor.dtype} {tuple(tensor.shape)}")
    if not (supports_dtype(dtype) or dtype is torch.int64):
        raise ValueError(f"kernels know float32 and bfloat16, not {dtype}")
