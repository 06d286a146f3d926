"""The image processor of a checkpoint: from pixels to the tensors of the vision tower, and how many rows these give.

Transformers' own, always with Pillow's resizing: another backend that happens to be installed resizes otherwise. Pixels
are decoded elsewhere.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from baton.domain.media.identity import LOW_DETAIL
from baton.domain.media.span import MediaGrid
from baton.model.errors import UnsupportedModel
from baton.model.vision.spec import VisionSpec

Inputs = Mapping[str, torch.Tensor]

NO_INPUTS = frozenset({"num_crops", "num_patches", "pixel_attention_mask", "rows", "cols"})
"""What processors make beside the inputs of a tower. Tiles of Idefics3 have one size, so their mask masks nothing."""


@dataclass(frozen=True, slots=True)
class PreparedImage:
    """`inputs` of the tower for one image, and the rows that it makes of them. `grid`: for three axes of positions."""

    inputs: Inputs
    num_rows: int
    grid: MediaGrid | None

    @property
    def num_bytes(self) -> int:
        """Of all tensors."""
        return sum(tensor.nbytes for tensor in self.inputs.values())


class ImageProcessor:
    """The processor of one model. May be called from any thread."""

    def __init__(self, directory: Path, spec: VisionSpec) -> None:
        """Raises `UnsupportedModel` for a checkpoint without one, or with one that is not known."""
        from transformers import AutoConfig, AutoImageProcessor

        self._spec = spec
        try:
            self._processor: Any = AutoImageProcessor.from_pretrained(
                directory, backend="pil", trust_remote_code=False, local_files_only=True
            )
        except (OSError, ValueError, ImportError) as error:
            raise UnsupportedModel(f"its image processor cannot be loaded: {error}") from error
        self._config: Any = AutoConfig.from_pretrained(directory, local_files_only=True)
        self._files = _processor_config(directory)

    def prepare(self, width: int, height: int, pixels: bytes, detail: str = "") -> PreparedImage:
        """Tensors of an image of RGB `pixels`. Raises `ValueError` for one that the processor does not take."""
        from PIL import Image

        image = Image.frombytes("RGB", (width, height), pixels)
        made = self._processor(images=[image], return_tensors="pt", **self._options(detail == LOW_DETAIL))
        inputs = {name: tensor for name, tensor in made.items() if name not in NO_INPUTS}
        return PreparedImage(inputs, *self._count(inputs))

    def _options(self, low: bool) -> dict[str, Any]:
        """What the checkpoint's processor for text and images passes on, and half of the pixels with `low`."""
        options: dict[str, Any] = {}
        size = self._processor.size
        match self._spec.model_type:
            case "gemma3":
                options["do_pan_and_scan"] = False
            case "internvl":
                options["crop_to_patches"] = True
            case "idefics3" | "smolvlm" if low:
                longest, tile = size.longest_edge, self._processor.max_image_size["longest_edge"]
                options["size"] = {"longest_edge": min(longest, max(tile, math.isqrt(longest**2 // 2)))}
            case "mistral3":
                options["patch_size"] = self._line_side
                if low:
                    longest = max(self._line_side, math.isqrt(size.longest_edge**2 // 2))
                    options["size"] = {"longest_edge": longest}
            case _ if self._spec.has_grid and low:
                bounds = size.shortest_edge, size.longest_edge
                options["size"] = {"shortest_edge": bounds[0], "longest_edge": max(bounds[0], bounds[1] // 2)}
        return options

    @property
    def _line_side(self) -> int:
        """Pixels of a merged patch in Pixtral's images."""
        return int(self._files.get("patch_size", 16)) * int(self._files.get("spatial_merge_size", 1))

    def _count(self, inputs: Inputs) -> tuple[int, MediaGrid | None]:
        """Rows that the tower makes of `inputs`, and their grid."""
        config = self._config
        if self._spec.has_grid:
            frames, height, width = inputs["image_grid_thw"][0].tolist()
            merge = config.vision_config.spatial_merge_size
            grid = MediaGrid(height // merge, width // merge)
            return frames * grid.height * grid.width, grid
        pixels = inputs["pixel_values"]
        match self._spec.model_type:
            case "gemma3":
                return len(pixels) * config.mm_tokens_per_image, None
            case "idefics3" | "smolvlm":
                side = config.vision_config.patch_size
                per_tile = (pixels.shape[-2] // side) * (pixels.shape[-1] // side) // config.scale_factor**2
                return int(pixels[0].flatten(1).any(1).sum()) * per_tile, None  # the tower leaves out tiles of zeros
            case "internvl":
                side = config.vision_config.patch_size[0]
                per_tile = (pixels.shape[-2] // side) * (pixels.shape[-1] // side) * config.downsample_ratio**2
                return round(len(pixels) * per_tile), None
            case "mistral3":
                height, width = inputs["image_sizes"][0].tolist()
                side = config.vision_config.patch_size * config.spatial_merge_size
                return (height // side) * (width // side), None
        side = config.vision_config.patch_size
        whole = (pixels.shape[-2] // side) * (pixels.shape[-1] // side)
        has_class = config.vision_config.model_type == "clip_vision_model"
        return whole + has_class - (config.vision_feature_select_strategy == "default"), None


def _processor_config(directory: Path) -> dict[str, Any]:
    path = directory / "processor_config.json"
    return dict(json.loads(path.read_text(encoding="utf-8"))) if path.is_file() else {}
