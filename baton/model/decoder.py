"""A model over one page pool: flat tokens of many requests in, logits of chosen tokens out.

What a decoder is, the one that runs the stock model, and which attention and operations decoders get on this machine.
Called by the runner on the engine thread, and by the self-check. Knows pages and positions, no requests.
"""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from typing import Protocol

import torch

from baton.domain.errors import Broken
from baton.model.attention.base import AttentionBackend, StepMetadata
from baton.model.attention.flashinfer_backend import FlashinferAttention, flashinfer_serves
from baton.model.attention.hf import PagedHandler, handling
from baton.model.attention.native_backend import NativeAttention, max_native_segment_tokens, native_serves
from baton.model.attention.torch_backend import TorchAttention
from baton.model.geometry import ObservedLayer
from baton.model.kernels.library import Kernels, takes
from baton.model.kernels.ops import NativeOps
from baton.model.ops import Ops, TorchOps
from baton.model.storage import PageStorage


class Decoder(Protocol):
    """A model on a storage of its geometry. Used from one thread, one step at a time."""

    def forward(
        self, input_ids: torch.Tensor, positions: torch.Tensor, step: StepMetadata, keep: torch.Tensor
    ) -> torch.Tensor:
        """Logits [len(keep), vocab_size] after the tokens at places `keep` of the flat [tokens] tensors.

        Afterwards the pages hold the K and V of every token of the step.
        """
        ...


class StockDecoder:
    """`model` is the stock module with the paged hook set; `layers` is what was observed of it."""

    def __init__(
        self,
        model: torch.nn.Module,
        layers: Sequence[ObservedLayer],
        storage: PageStorage,
        backend: AttentionBackend,
    ) -> None:
        self._model = model
        self._num_layers = len(layers)
        self._storage = storage
        self._backend = backend
        self._keeps_logits = "logits_to_keep" in inspect.signature(model.forward).parameters

    def forward(
        self, input_ids: torch.Tensor, positions: torch.Tensor, step: StepMetadata, keep: torch.Tensor
    ) -> torch.Tensor:
        """As `Decoder.forward`. Raises `Broken` if a layer was skipped."""
        if step.part_filled.numel():
            self._storage.clear(step.part_filled)
        self._backend.begin(step)
        handler = PagedHandler(self._storage, self._backend, step)
        wanted = {"logits_to_keep": keep} if self._keeps_logits else {}
        with handling(handler), torch.inference_mode():
            output = self._model(input_ids=input_ids[None], position_ids=positions[None], use_cache=False, **wanted)
        if handler.num_calls != self._num_layers:
            raise Broken(f"{handler.num_calls} of {self._num_layers} layers attended")
        logits: torch.Tensor = output.logits[0]
        return logits if self._keeps_logits else logits[keep]


def choose_backend(
    layers: Sequence[ObservedLayer], storage: PageStorage, kernels: Kernels | None = None
) -> AttentionBackend:
    """flashinfer or the native kernels where they can serve every layer, torch everywhere else."""
    if flashinfer_serves(layers, storage):
        return FlashinferAttention(layers, storage)
    if kernels is not None and native_serves(kernels, layers, storage):
        return NativeAttention(kernels, storage, max_native_segment_tokens(kernels, storage.keys(0).dtype))
    return TorchAttention(storage)


def choose_ops(storage: PageStorage, kernels: Kernels | None = None) -> Ops:
    """What the lean decoder computes with beside `storage`."""
    if kernels is not None and storage.device.type == "cpu" and takes(storage.keys(0).dtype):
        return NativeOps(kernels)
    return TorchOps()


def configure_threads(num_threads: int) -> None:
    """Compute threads of this process. Two workers that share cores lose more than half of their speed."""
    torch.set_num_threads(num_threads)
