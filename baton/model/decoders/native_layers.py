"""Layers of a lean decoder in one native call, up to the last one. Called by the lean decoder on the engine thread.

Between two kernels the interpreter's code and data leave the caches: a step of few rows took a tenth of its time there.
The kernels, their order and their bits are those of `LeanDecoder`'s own loop.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain

import torch

from baton.domain.arithmetic import ceil_div
from baton.model.attention.base import AttentionBackend, StepMetadata
from baton.model.attention.layers import ObservedLayer
from baton.model.attention.native_backend import NativeAttention, NativeAttentionLayer
from baton.model.decoders.lean_weights import GatedFeedForward, LeanLayer, LeanModel
from baton.model.decoders.native_ops import NativeOps, RopeParams, require_dtype, rope_params
from baton.model.decoders.ops import Activation, Ops, RopeTable
from baton.model.kernels.library import Kernels
from baton.model.linears.linear import Linear
from baton.model.linears.panels import PanelLinear
from baton.model.storage import PageStorage

_LINE_BYTES = 64


class _PanelWeight(ctypes.Structure):
    """`PanelWeight` of kernels/src/layers.cpp."""

    _fields_ = (
        *((name, ctypes.c_void_p) for name in ("panels", "bias")),
        *((name, ctypes.c_int64) for name in ("num_in", "num_out")),
    )


class _DecoderLayer(ctypes.Structure):
    """`DecoderLayer` of kernels/src/layers.cpp."""

    _fields_ = (
        *((name, _PanelWeight) for name in ("qkv", "attention_out", "gate_up", "down")),
        *((name, ctypes.c_void_p) for name in ("feed_forward_norm", "next_norm")),
        ("rope", RopeParams),
        *((name, ctypes.c_void_p) for name in ("keys", "values")),
        ("attention", NativeAttentionLayer),
    )


class _LayerStep(ctypes.Structure):
    """`LayerStep` of kernels/src/layers.cpp."""

    _fields_ = (
        *((name, ctypes.c_bool) for name in ("is_bf16", "is_gelu")),
        ("eps", ctypes.c_float),
        *((name, ctypes.c_int64) for name in ("num_tokens", "hidden_size")),
        *((name, ctypes.c_void_p) for name in ("hidden", "residual")),
        *((name, ctypes.c_void_p) for name in ("qkv", "query", "attended", "change", "gate_up", "activated")),
        *((name, ctypes.c_void_p) for name in ("positions", "pages", "slots", "segments")),
    )


@dataclass(frozen=True, slots=True)
class _PackedProjection:
    """A projection and the panels that it had when its addresses were taken."""

    linear: Linear
    panels: PanelLinear


class NativeLayers:
    """All layers but the last one, over one storage. `usable_for` must hold for a step."""

    def __init__(
        self, kernels: Kernels, model: LeanModel, backend: NativeAttention, layers: ctypes.Array[_DecoderLayer],
        matrices: Sequence[_PackedProjection],
    ) -> None:  # fmt: skip
        """`layers`: in order; `matrices`: theirs, kept alive here."""
        self._kernels = kernels
        self._model = model
        self._backend = backend
        self._layers = layers
        self._matrices = tuple(matrices)
        self._has_window = any(layer.attention.window for layer in layers)
        rope, attention = layers[0].rope, layers[0].attention
        self._widths = (  # of the scratch buffers
            layers[0].qkv.num_out,
            rope.num_heads * rope.head_dim,
            attention.num_heads * attention.v_dim,
            layers[0].attention_out.num_out,
            max(layer.gate_up.num_out for layer in layers),
            max(layer.down.num_in for layer in layers),
        )

    @property
    def num_layers(self) -> int:
        """How many layers `run` computes."""
        return len(self._layers)

    @property
    def is_current(self) -> bool:
        """False if a matrix has been unpacked or packed anew."""
        return all(matrix.linear.panels is matrix.panels for matrix in self._matrices)

    def usable_for(self, hidden: torch.Tensor) -> bool:
        """True if the planned step can be computed here: by the kernels alone, in the weights' dtype."""
        plan = self._backend.native_plan
        same = hidden.dtype is self._backend.dtype and hidden.is_contiguous()
        return plan is not None and same and not (plan.has_trees and self._has_window)

    def run(self, hidden: torch.Tensor, residual: torch.Tensor, positions: torch.Tensor, step: StepMetadata) -> None:
        """Computes the layers of the planned step. `hidden` and `residual` [tokens, hidden_size] are replaced."""
        for tensor in (positions, step.token_pages, step.token_slots):
            if tensor.dtype is not torch.int64 or not tensor.is_contiguous():
                raise ValueError(f"positions, pages and slots are contiguous int64, not {tensor.dtype}")
        plan = self._backend.native_plan
        assert plan is not None, "run before begin"
        num_tokens, spec = len(hidden), self._model.spec
        line = _LINE_BYTES // hidden.itemsize
        sizes = [ceil_div(num_tokens * width, line) * line for width in self._widths]
        scratch = hidden.new_empty(sum(sizes))
        addresses, at = [], scratch.data_ptr()
        for size in sizes:
            addresses.append(at)
            at += size * hidden.itemsize
        layer_step = _LayerStep(
            *(hidden.dtype is torch.bfloat16, spec.activation is Activation.GELU_TANH, spec.eps),
            *(num_tokens, hidden.shape[1], hidden.data_ptr(), residual.data_ptr(), *addresses),
            *(positions.data_ptr(), step.token_pages.data_ptr(), step.token_slots.data_ptr()),
            ctypes.addressof(plan.struct),
        )
        self._kernels.run_layers(ctypes.addressof(self._layers), len(self._layers), ctypes.addressof(layer_step))


def make_native_layers(
    model: LeanModel,
    observed: Sequence[ObservedLayer],
    storage: PageStorage,
    ropes: Sequence[RopeTable],
    backend: AttentionBackend,
    ops: Ops,
) -> NativeLayers | None:
    """The layers of `model` but the last, if the kernels compute every part of them; otherwise None."""
    if type(backend) is not NativeAttention or type(ops) is not NativeOps or len(model.layers) < 2:
        return None
    if storage.has_window_slots:  # its layers do not share one plan
        return None
    if not all(map(_has_only_known_parts, model.layers[:-1])):  # asked every step of such a model, so before the rest
        return None
    matrices: list[list[_PackedProjection]] = []
    for layer in model.layers[:-1]:
        own = _matrices_of(layer, storage.dtype)
        if own is None:
            return None
        matrices.append(own)
    structs = []
    for index, (layer, own, following) in enumerate(zip(model.layers[:-1], matrices, model.layers[1:], strict=True)):
        keys, values = storage.keys(index), storage.values(index)
        if not (keys[0, 0].is_contiguous() and values[0, 0].is_contiguous()):
            return None
        require_dtype(torch.float32, layer.feed_forward_norm, following.attention_norm)
        seen = observed[index]
        structs.append(
            _DecoderLayer(
                *map(_weight_struct, own),
                *(layer.feed_forward_norm.data_ptr(), following.attention_norm.data_ptr()),
                rope_params(ropes[index], model.spec.heads, layer.qk_norm, storage, index),
                *(keys.data_ptr(), values.data_ptr()),
                backend.native_layer(index, model.spec.heads.num_heads, seen.scale, seen.window, seen.softcap),
            )
        )
    return NativeLayers(ops.kernels, model, backend, (_DecoderLayer * len(structs))(*structs), list(chain(*matrices)))


def _has_only_known_parts(layer: LeanLayer) -> bool:
    """True if the layer has no experts, and no norms after its parts."""
    has_norms = layer.attention_out_norm is not None or layer.feed_forward_out_norm is not None
    return isinstance(layer.feed_forward, GatedFeedForward) and not has_norms


def _matrices_of(layer: LeanLayer, dtype: torch.dtype) -> list[_PackedProjection] | None:
    """Those of a layer in the order of `DecoderLayer`; None if one has no panels of `dtype`."""
    part = layer.feed_forward
    assert isinstance(part, GatedFeedForward), "asked of a layer with experts"
    found = []
    for linear in (layer.qkv, layer.attention_out, part.gate_up, part.down):
        panels = linear.panels
        if panels is None or panels.dtype is not dtype:
            return None
        found.append(_PackedProjection(linear, panels))
    return found


def _weight_struct(matrix: _PackedProjection) -> _PanelWeight:
    num_out, num_in = matrix.panels.shape
    parts = matrix.panels.parts()
    bias = parts.get("bias")
    return _PanelWeight(parts["panels"].data_ptr(), None if bias is None else bias.data_ptr(), num_in, num_out)
