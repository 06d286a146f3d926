"""LLaVA: every image is resized to one size, so all of them have as many rows (transformers' `LlavaProcessor`)."""

from __future__ import annotations

from dataclasses import dataclass

from baton.services.router.vision.expansion.config_reader import Json, UnknownProcessor, positive, side_lengths
from baton.services.router.vision.expansion.image_tokens import ImageTokens, one_run


@dataclass(frozen=True, slots=True)
class FixedRules:
    """`num_rows` for an image of any size."""

    placeholder: int
    num_rows: int

    def expand(self, width: int, height: int, *, low_detail: bool = False) -> ImageTokens:
        """See `ImageRules`. There is no pixel bound to halve."""
        return one_run(self.placeholder, self.num_rows)


def read_llava(placeholder: int, image: Json, processor: Json, config: Json) -> FixedRules:
    """`image`, `processor`: configs of the processors; what an old one lacks is in the model's `config`.

    Raises `UnknownProcessor`.
    """
    crops = image.get("do_center_crop", False)
    height, width = side_lengths(image, "crop_size" if crops else "size")
    vision = config.get("vision_config") or {}
    patch_size = positive(processor if processor.get("patch_size") else vision, "patch_size")
    strategy = processor.get("vision_feature_select_strategy") or config.get(
        "vision_feature_select_strategy", "default"
    )
    extra = processor.get("num_additional_image_tokens")
    if extra is None:  # a processor of before there was this field: CLIP has a class token
        extra = 1 if vision.get("model_type") == "clip_vision_model" else 0
    if strategy not in ("default", "full") or extra not in (0, 1):
        raise UnknownProcessor(f"its processor selects features by {strategy!r}, with {extra!r} more tokens")
    num_rows = (height // patch_size) * (width // patch_size) + extra - (strategy == "default")
    if num_rows < 1:
        raise UnknownProcessor("its images have no rows")
    return FixedRules(placeholder, num_rows)
