"""A lean model as a record for a file, and back: what it is made of, with tensors replaced by their numbers.

The restored model computes with the same bytes and kernels, so its logits have the same bits. Matrices that torch
multiplies with have no record: it was seen to round otherwise at another address. Nor have experts, which are modules
of transformers.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from baton.model.decoders.lean_spec import LeanSpec
from baton.model.decoders.lean_weights import GatedFeedForward, LeanLayer, LeanModel, Rope
from baton.model.decoders.ops import QkNorm
from baton.model.kernels.library import Kernels
from baton.model.linears.linear import Linear, LinearLayout, LinearState


class NoRecord(Exception):
    """A model cannot be kept in a file. The message is the reason, to end a sentence."""


@dataclass(frozen=True, slots=True)
class LinearRecord:
    """A `LinearState` with the numbers of its tensors."""

    layout: LinearLayout
    shape: tuple[int, int]
    parts: dict[str, int]


@dataclass(frozen=True, slots=True)
class QkNormRecord:
    """A `QkNorm` with the numbers of its tensors."""

    query: int
    key: int
    eps: float


@dataclass(frozen=True, slots=True)
class LayerRecord:
    """A `LeanLayer` with the numbers of its tensors."""

    attention_norm: int
    qkv: LinearRecord
    qk_norm: QkNormRecord | None
    attention_out: LinearRecord
    attention_out_norm: int | None
    feed_forward_norm: int
    gate_up: LinearRecord
    down: LinearRecord
    feed_forward_out_norm: int | None


@dataclass(frozen=True, slots=True)
class RopeRecord:
    """A `Rope` with the number of its tensor."""

    inv_freq: int
    factor: float


@dataclass(frozen=True, slots=True)
class LeanRecord:
    """A `LeanModel` with the numbers of its tensors."""

    spec: LeanSpec
    embedding: int
    layers: tuple[LayerRecord, ...]
    ropes: tuple[RopeRecord, ...]
    layer_ropes: tuple[int, ...]
    norm: int
    head: LinearRecord


def record_model(model: LeanModel) -> tuple[LeanRecord, list[torch.Tensor]]:
    """The record and its tensors by number, contiguous. Raises `NoRecord`."""
    if model.feature_axes is not None:
        raise NoRecord("its positions have three axes")
    recorder = _Recorder()
    ropes = list({id(rope): rope for rope in model.ropes}.values())
    record = LeanRecord(
        spec=model.spec,
        embedding=recorder.add(model.embedding),
        layers=tuple(_record_layer(layer, recorder) for layer in model.layers),
        ropes=tuple(RopeRecord(recorder.add(rope.inv_freq), rope.factor) for rope in ropes),
        layer_ropes=tuple(next(i for i, rope in enumerate(ropes) if rope is own) for own in model.ropes),
        norm=recorder.add(model.norm),
        head=recorder.add_linear(model.head),
    )
    return record, recorder.tensors


def restore_model(record: LeanRecord, tensors: Sequence[torch.Tensor], kernels: Kernels) -> LeanModel:
    """The model of `record` on `tensors`. `kernels`: those that it was packed for."""

    def linear(stored: LinearRecord) -> Linear:
        parts = {name: tensors[number] for name, number in stored.parts.items()}
        return Linear.of_state(kernels, LinearState(stored.layout, stored.shape, parts))

    def layer(stored: LayerRecord) -> LeanLayer:
        norms, qk = tensors, stored.qk_norm
        return LeanLayer(
            attention_norm=norms[stored.attention_norm],
            qkv=linear(stored.qkv),
            qk_norm=None if qk is None else QkNorm(norms[qk.query], norms[qk.key], qk.eps),
            attention_out=linear(stored.attention_out),
            attention_out_norm=_optional(norms, stored.attention_out_norm),
            feed_forward_norm=norms[stored.feed_forward_norm],
            feed_forward=GatedFeedForward(linear(stored.gate_up), linear(stored.down)),
            feed_forward_out_norm=_optional(norms, stored.feed_forward_out_norm),
        )

    ropes = [Rope(tensors[rope.inv_freq], rope.factor) for rope in record.ropes]
    return LeanModel(
        spec=record.spec,
        embedding=tensors[record.embedding],
        layers=tuple(map(layer, record.layers)),
        ropes=tuple(ropes[number] for number in record.layer_ropes),
        norm=tensors[record.norm],
        head=linear(record.head),
    )


class _Recorder:
    """Numbers tensors in the order of use; a tied one has one number."""

    def __init__(self) -> None:
        self.tensors: list[torch.Tensor] = []
        self._numbers: dict[tuple[int, torch.dtype, tuple[int, ...]], int] = {}

    def add(self, tensor: torch.Tensor) -> int:
        contiguous = tensor.detach().contiguous()
        key = (contiguous.data_ptr(), contiguous.dtype, tuple(contiguous.shape))
        if key not in self._numbers:
            self._numbers[key] = len(self.tensors)
            self.tensors.append(contiguous)  # kept, so no other tensor gets its address
        return self._numbers[key]

    def add_linear(self, linear: Linear) -> LinearRecord:
        state = linear.state()
        if state is None:
            raise NoRecord("torch multiplies with a matrix, and its rounding depends on where that lies")
        return LinearRecord(state.layout, state.shape, {name: self.add(part) for name, part in state.parts.items()})


def _record_layer(layer: LeanLayer, recorder: _Recorder) -> LayerRecord:
    if not isinstance(layer.feed_forward, GatedFeedForward):
        raise NoRecord("the model has experts")
    qk = layer.qk_norm
    return LayerRecord(
        attention_norm=recorder.add(layer.attention_norm),
        qkv=recorder.add_linear(layer.qkv),
        qk_norm=None if qk is None else QkNormRecord(recorder.add(qk.query), recorder.add(qk.key), qk.eps),
        attention_out=recorder.add_linear(layer.attention_out),
        attention_out_norm=None if layer.attention_out_norm is None else recorder.add(layer.attention_out_norm),
        feed_forward_norm=recorder.add(layer.feed_forward_norm),
        gate_up=recorder.add_linear(layer.feed_forward.gate_up),
        down=recorder.add_linear(layer.feed_forward.down),
        feed_forward_out_norm=None
        if layer.feed_forward_out_norm is None
        else recorder.add(layer.feed_forward_out_norm),
    )


def _optional(tensors: Sequence[torch.Tensor], number: int | None) -> torch.Tensor | None:
    return None if number is None else tensors[number]
