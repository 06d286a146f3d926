"""Embeddings of images: of one item, and of the rows that one step's tokens stand for. Values of tensors."""

from __future__ import annotations

from dataclasses import dataclass

import torch


@dataclass(frozen=True, slots=True)
class MediaEmbedding:
    """One item: `rows` [num_rows, hidden_size], in place of token embeddings.

    `deep[i]`, of the same shape, is added to the residual stream behind layer i (DeepStack, arXiv 2406.04334).
    """

    rows: torch.Tensor
    deep: tuple[torch.Tensor, ...] = ()


@dataclass(frozen=True, slots=True)
class Embeds:
    """Rows [n, hidden_size] for the flat tokens of a step at `places` [n], ascending.

    `deep`: as in `MediaEmbedding`.
    """

    places: torch.Tensor
    rows: torch.Tensor
    deep: tuple[torch.Tensor, ...] = ()
