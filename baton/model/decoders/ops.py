"""What the lean decoder needs besides matrix products and attention, as a protocol, and its plain torch version.

`Ops` is called by `baton.model.lean` on the engine thread, a few times a layer. `TorchOps` is right on every device and
is what the native kernels are compared with. Knows tensors and pages, no weights' names and no requests.

Activations are [tokens, features], contiguous, float32 or bfloat16; the arithmetic inside an operation is float32 and
rounded once, at its end. `out`, where given, has the result's shape and dtype and is returned; it may be the input that
the operation says it may be, and nothing else that the operation reads.
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
    """Cosines and sines of every position, [max_positions, rotary_dim / 2] each: float32, contiguous, attention factor
    included. Feature i turns with feature i + rotary_dim / 2; features from `rotary_dim` on stay as they are."""

    cos: torch.Tensor
    sin: torch.Tensor

    @property
    def rotary_dim(self) -> int:
        return 2 * self.cos.shape[1]


@dataclass(frozen=True, slots=True)
class HeadShape:
    """How a row of a fused projection is cut: the query's heads, then the keys', then the values', one size for all."""

    num_heads: int
    num_kv_heads: int
    head_dim: int

    @property
    def num_features(self) -> int:
        """Of the fused row."""
        return (self.num_heads + 2 * self.num_kv_heads) * self.head_dim


@dataclass(frozen=True, slots=True)
class QkNorm:
    """RMSNorm of every single query and key head before rotation: weights [head_dim], float32."""

    query: torch.Tensor
    key: torch.Tensor
    eps: float


class Ops(Protocol):
    """Used from one thread. Nothing here keeps a tensor after it has returned."""

    def rms_norm(
        self, x: torch.Tensor, weight: torch.Tensor, eps: float, out: torch.Tensor | None = None
    ) -> torch.Tensor:
        """`x / sqrt(mean(x^2) + eps) * weight` by rows (arXiv:1910.07467); `weight` is float32. `out` may be x."""
        ...

    def add_rms_norm(
        self, x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float, out: torch.Tensor | None = None
    ) -> torch.Tensor:
        """`residual += x` in place, rounded to its dtype; then `rms_norm` of what `residual` holds. `out` may be x."""
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
        """Query and key heads of `qkv` [tokens, heads.num_features], normed where `norms` says so and rotated (RoPE,
        arXiv:2104.09864) by `positions` [tokens] int64; K and V go into `layer`'s pages at the step's places.

        Returns the query, [tokens, num_heads, head_dim], contiguous. `qkv` may be overwritten; `out` is not in it.
        """
        ...

    def act_and_mul(
        self, gate_up: torch.Tensor, activation: Activation, out: torch.Tensor | None = None
    ) -> torch.Tensor:
        """`activation(gate) * up` of [tokens, 2 * width], gate first: [tokens, width]."""
        ...


class TorchOps:
    """`Ops` in plain torch, on any device."""

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
    """[tokens, heads, head_dim] -> the same in float32."""
    return rms_norm(heads.float(), weight.shape, weight, eps)


def _rotate(heads: torch.Tensor, rope: RopeTable, positions: torch.Tensor) -> torch.Tensor:
    """Float32 [tokens, heads, head_dim], rotated."""
    cos, sin = rope.cos[positions, None], rope.sin[positions, None]  # [tokens, 1, rotary_dim / 2]
    first, second, rest = heads.tensor_split([rope.cos.shape[1], rope.rotary_dim], dim=-1)
    return torch.cat((first * cos - second * sin, second * cos + first * sin, rest), dim=-1)
