"""The stock decoder: runs the transformers module over one page pool.

Called by the runner on the engine thread, and by the self-check. Knows pages and positions, no requests.
"""

from __future__ import annotations

import inspect
from collections.abc import Sequence

import torch

from baton.domain.errors import Broken
from baton.model.attention.base import AttentionBackend, StepMetadata
from baton.model.attention.hf_hook import PagedHandler, use_handler
from baton.model.attention.layers import ObservedLayer
from baton.model.storage import PageStorage


class StockDecoder:
    """Runs `model`, the stock module with the paged hook set. `layers`: its observed layers."""

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
        """See `Decoder.forward`. Raises `Broken` if a layer was skipped."""
        if step.partial_pages.numel():
            self._storage.clear(step.partial_pages)
        self._backend.begin(step)
        handler = PagedHandler(self._storage, self._backend, step)
        wanted = {"logits_to_keep": keep} if self._keeps_logits else {}
        with use_handler(handler), torch.inference_mode():
            output = self._model(input_ids=input_ids[None], position_ids=positions[None], use_cache=False, **wanted)
        if handler.num_calls != self._num_layers:
            raise Broken(f"{handler.num_calls} of {self._num_layers} layers attended")
        logits: torch.Tensor = output.logits[0]
        return logits if self._keeps_logits else logits[keep]
