"""The decoder interface: flat tokens of many requests in, logits of chosen tokens out.

Implemented by the stock and the lean decoder. Called by the runner on the engine thread, and by the self-check. Knows
pages and positions, no requests.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

import torch

from baton.model.attention.base import StepMetadata
from baton.model.decoders.capture import HiddenCapture
from baton.model.vision.embedding import Embeds


class LogitsReader(Protocol):
    """Reads logits of many tokens, a few at a time, so that they are never all there at once."""

    @property
    def max_rows(self) -> int:
        """Most rows of logits at a time."""
        ...

    @property
    def places(self) -> torch.Tensor:
        """Indices of the flat tokens whose logits are read."""
        ...

    def add(self, logits: torch.Tensor) -> None:
        """Takes the next rows [at most `max_rows`, vocab_size]; they may be overwritten afterwards."""
        ...


def read_in_parts(reader: LogitsReader, hidden: torch.Tensor, head: Callable[[torch.Tensor], torch.Tensor]) -> None:
    """Passes the logits of `hidden` [tokens, hidden_size] on to the reader."""
    for part in hidden.split(reader.max_rows):
        reader.add(head(part))


class Decoder(Protocol):
    """A model over one storage of its geometry. Used from one thread, one step at a time."""

    def forward(
        self,
        input_ids: torch.Tensor,
        positions: torch.Tensor,
        step: StepMetadata,
        keep: torch.Tensor,
        reader: LogitsReader | None = None,
        embeds: Embeds | None = None,
        capture: HiddenCapture | None = None,
    ) -> torch.Tensor:
        """Returns logits [len(keep), vocab_size] after the tokens at indices `keep` of the flat [tokens] tensors.

        `positions` is [tokens], or [3, tokens] where tokens of a model with three axes differ between them. `reader`
        gets logits of further tokens, before the return. `embeds`: rows in place of the embeddings of some tokens.
        `capture` gets hidden states of all tokens. Afterwards the pages hold K and V of every token of the step.
        """
        ...
