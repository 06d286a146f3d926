"""The decoder interface: flat tokens of many requests in, logits of chosen tokens out.

Implemented by the stock and the lean decoder. Called by the runner on the engine thread, and by the self-check. Knows
pages and positions, no requests.
"""

from __future__ import annotations

from typing import Protocol

import torch

from baton.model.attention.base import StepMetadata


class Decoder(Protocol):
    """A model over one storage of its geometry. Used from one thread, one step at a time."""

    def forward(
        self, input_ids: torch.Tensor, positions: torch.Tensor, step: StepMetadata, keep: torch.Tensor
    ) -> torch.Tensor:
        """Returns logits [len(keep), vocab_size] after the tokens at indices `keep` of the flat [tokens] tensors.

        Afterwards the pages hold K and V of every token of the step.
        """
        ...
