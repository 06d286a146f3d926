"""A stock model over one page pool: flat tokens of many requests in, logits of chosen tokens out.

Called by the runner on the engine thread, and by the self-check. Knows pages and positions, no requests.
"""

from __future__ import annotations

import inspect
from collections.abc import Sequence

import torch

from baton.domain.errors import Broken
from baton.model.attention.base import AttentionBackend, StepMetadata
from baton.model.attention.flashinfer_backend import FlashinferAttention, flashinfer_serves
from baton.model.attention.hf import PagedHandler, handling
from baton.model.attention.torch_backend import TorchAttention
from baton.model.geometry import ObservedLayer
from baton.model.storage import PageStorage


class Decoder:
    """`model` is the stock module with the paged hook set; `layers` is what was observed of it."""

    def __init__(self, model: torch.nn.Module, layers: Sequence[ObservedLayer], storage: PageStorage) -> None:
        self._model = model
        self._num_layers = len(layers)
        self._storage = storage
        self._backend = choose_backend(layers, storage)
        self._keeps_logits = "logits_to_keep" in inspect.signature(model.forward).parameters

    def forward(
        self, input_ids: torch.Tensor, positions: torch.Tensor, step: StepMetadata, keep: torch.Tensor
    ) -> torch.Tensor:
        """Logits [len(keep), vocab_size] after the tokens at places `keep` of the flat [tokens] tensors.

        Afterwards the pages hold the K and V of every token of the step. Raises `Broken` if a layer was skipped.
        """
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


def choose_backend(layers: Sequence[ObservedLayer], storage: PageStorage) -> AttentionBackend:
    """flashinfer where it can serve every layer, torch everywhere else."""
    if flashinfer_serves(layers, storage):
        return FlashinferAttention(layers, storage)
    return TorchAttention(storage)


def configure_threads(num_threads: int) -> None:
    """Compute threads of this process. Two workers that share cores lose more than half of their speed."""
    torch.set_num_threads(num_threads)
