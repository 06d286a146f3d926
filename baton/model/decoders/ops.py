"""Operations of the lean decoder besides matrix products and attention: the interface, and plain torch.

Called a few times a layer on the engine thread. `TorchOps` is the reference for the native kernels. Knows tensors and
pages, no weight names and no requests.

Activations are [tokens, features], contiguous, float32 or bfloat16. Operations compute in float32 and round once, at
the end. `out`, where given, has the result's shape and dtype and is returned. It may only be an input where the
operation allows it.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass
from typing import Protocol

import torch
from torch.nn.functional import gelu, rms_norm, silu

from baton.model.attention.base import StepMetadata
from baton.model.storage import PageStorage


class Activation(enum.Enum):
    """The activation of a gated feed-forward layer."""

    SILU = "silu"
    GELU_TANH = "gelu_tanh"


@dataclass(frozen=True, slots=True)
class RopeTable:
    """Cosines and sines of every position, [max_positions, rotary_dim / 2] each: float32, contiguous.

    The attention factor is included. Feature i rotates with feature i + rotary_dim / 2. Features from `rotary_dim` on
    are unchanged.
    """

    cos: torch.Tensor
    sin: torch.Tensor

    @property
    def rotary_dim(self) -> int:
        return 2 * self.cos.shape[1]


@dataclass(frozen=True, slots=True)
class HeadShape:
    """The cut of a fused projection's row: query heads, key heads, value heads, all of one size."""

    num_heads: int
    num_kv_heads: int
    head_dim: int

    @property
    def num_features(self) -> int:
        """Features of the fused row."""
        return (self.num_heads + 2 * self.num_kv_heads) * self.head_dim


@dataclass(frozen=True, slots=True)
class QkNorm:
    """RMSNorm of every query and key head before rotation: weights [head_dim], float32."""

    query: torch.Tensor
    key: torch.Tensor
    eps: float


class Ops(Protocol):
    """Used from one thread. Keeps no tensor after a call."""

    def rms_norm(
        self, x: torch.Tensor, weight: torch.Tensor, eps: float, out: torch.Tensor | None = None
    ) -> torch.Tensor:
        """`x / sqrt(mean(x^2) + eps) * weight` by rows (arXiv:1910.07467). `weight` is float32; `out` may be x."""
        ...

    def add_rms_norm(
        self, x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float, out: torch.Tensor | None = None
    ) -> torch.Tensor:
        """Adds x to `residual` in place, rounded to its dtype, then returns `rms_norm` of it. `out` may be x."""
        ...

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
        """Rotates query and key heads of `qkv` [tokens, heads.num_features] and writes K and V to `layer`'s pages.

        Heads are normalised first where `norms` is given. RoPE (arXiv:2104.09864) uses `positions` [tokens] int64;
        pages and slots come from `step`. Returns the query [tokens, num_heads, head_dim], contiguous. `qkv` may be
        overwritten; `out` must not overlap it.
        """
        ...

    def act_and_mul(
        self, gate_up: torch.Tensor, activation: Activation, out: torch.Tensor | None = None
    ) -> torch.Tensor:
        """`activation(gate) * up` of [tokens, 2 * width], gate first: [tokens, width]."""
        ...


class TorchOps:
    """`Ops` in plain torch on any device."""

    def rms_norm(
        self, x: torch.Tensor, weight: torch.Tensor, eps: float, out: torch.Tensor | None = None
    ) -> torch.Tensor:
        return _into(out, rms_norm(x.float(), weight.shape, weight, eps), x.dtype)

    def add_rms_norm(
        self, x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float, out: torch.Tensor | None = None
    ) -> torch.Tensor:
        return self.rms_norm(residual.add_(x), weight, eps, out)

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
        split = qkv.view(qkv.shape[0], -1, heads.head_dim)  # [tokens, heads of all kinds, head_dim]
        query, keys, values = split.split([heads.num_heads, heads.num_kv_heads, heads.num_kv_heads], dim=1)
        if norms is None:
            turned = split[:, : heads.num_heads + heads.num_kv_heads].float()
        else:
            normed = (_norm_heads(query, norms.query, norms.eps), _norm_heads(keys, norms.key, norms.eps))
            turned = torch.cat(normed, dim=1)
        rotated = _rotate(turned, rope, positions)
        step = step.of(is_apart=storage.is_apart(layer))
        storage.write(layer, step.token_pages, step.token_slots, rotated[:, heads.num_heads :].to(qkv.dtype), values)
        return _into(out, rotated[:, : heads.num_heads], qkv.dtype).contiguous()

    def act_and_mul(
        self, gate_up: torch.Tensor, activation: Activation, out: torch.Tensor | None = None
    ) -> torch.Tensor:
        gate, up = gate_up.float().chunk(2, dim=-1)
        active = silu(gate) if activation is Activation.SILU else gelu(gate, approximate="tanh")
        return _into(out, active.mul_(up), gate_up.dtype)


def _into(out: torch.Tensor | None, result: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    return result.to(dtype) if out is None else out.copy_(result)


def _norm_heads(heads: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """Normalises [tokens, heads, head_dim] in float32."""
    return rms_norm(heads.float(), weight.shape, weight, eps)


def _rotate(heads: torch.Tensor, rope: RopeTable, positions: torch.Tensor) -> torch.Tensor:
    """Rotates float32 [tokens, heads, head_dim]."""
    cos, sin = rope.cos[positions, None], rope.sin[positions, None]  # [tokens, 1, rotary_dim / 2]
    first, second, rest = heads.tensor_split([rope.cos.shape[1], rope.rotary_dim], dim=-1)
    return torch.cat((first * cos - second * sin, second * cos + first * sin, rest), dim=-1)
