"""The vision tower and projector of a loaded vision-language model: transformers' own, called as a function.

Called where images are encoded. Knows tensors of an image processor, no files.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from baton.model.vision.embedding import MediaEmbedding


class WrongRowCount(ValueError):
    """A tower made another number of rows than was expected: the placeholders were counted by other rules."""


class VisionTower:
    """`model`: transformers' model of tower, projector and layers, from which the layers were taken out."""

    def __init__(self, model: Any) -> None:
        self._model = model
        layers = getattr(model.config.vision_config, "deepstack_visual_indexes", None) or ()
        self.depth = len(layers)
        """Layers of the text model that get DeepStack rows."""

    def encode(self, inputs: Mapping[str, torch.Tensor], num_rows: Sequence[int]) -> list[MediaEmbedding]:
        """Embeddings of a batch of images. `inputs`: what the model's image processor gave for them, in order.

        `num_rows`: placeholders of each image. Raises `WrongRowCount` where the tower gives others.
        """
        with torch.inference_mode():
            placed = {name: self._place(tensor) for name, tensor in inputs.items()}
            output = self._model.get_image_features(**placed, return_dict=True)
        rows = _flat(output.pooler_output)
        deep = [_flat(layer) for layer in getattr(output, "deepstack_features", None) or ()]
        if len(rows) != sum(num_rows):
            raise WrongRowCount(f"{len(rows)} rows for {sum(num_rows)} placeholders")
        parts = zip(*(tensor.split(list(num_rows)) for tensor in (rows, *deep)), strict=True)
        return [MediaEmbedding(own, tuple(more)) for own, *more in parts]

    @property
    def hidden_size(self) -> int:
        """Numbers of a row."""
        return int(self._model.config.get_text_config().hidden_size)

    def _place(self, tensor: torch.Tensor) -> torch.Tensor:
        """The tensor where the weights are; numbers in their format."""
        some = next(self._model.parameters())
        return tensor.to(some.device, some.dtype) if tensor.is_floating_point() else tensor.to(some.device)


def _flat(parts: torch.Tensor | Sequence[torch.Tensor]) -> torch.Tensor:
    """Rows of all images, [rows, hidden_size]."""
    return torch.cat([part.flatten(0, -2) for part in parts])
