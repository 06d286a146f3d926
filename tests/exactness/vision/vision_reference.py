"""A tiny random vision-language model with its image processor, whole: what transformers' `generate()` answers."""

from __future__ import annotations

import io
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Self

import torch
from PIL import Image
from transformers import CLIPImageProcessorPil, GenerationConfig, Qwen2VLImageProcessorPil

from tests.contract.vision import test_router_and_worker as counted
from tests.exactness.vision.families import FAMILIES, IMAGE, MERGE
from tests.unit.model.loading.test_multimodal import save_random

NUM_ROWS = 16
"""Of each picture of the tests of `PROCESSORS`, which are of equal size, in either family."""

PROCESSORS: dict[str, Any] = {
    "llava": lambda: CLIPImageProcessorPil(size={"height": 56, "width": 56}, crop_size={"height": 56, "width": 56}),
    "qwen2_vl": lambda: Qwen2VLImageProcessorPil(patch_size=14),
}
OPTIONS: dict[str, dict[str, Any]] = {"internvl": {"crop_to_patches": True}, "mistral3": {"patch_size": 14 * MERGE}}
"""What a type's processor for text and images passes to that for images."""

TYPES = dict.fromkeys(("qwen2_vl", "qwen2_5_vl", "qwen3_vl"), "mm_token_type_ids") | {"gemma3": "token_type_ids"}
"""The argument that tells rows from text."""


@dataclass
class VisionReference:
    """Model and processor of one family. It computes each answer once."""

    model: Any
    processor: Any
    _answers: dict[tuple[object, ...], list[int]] = field(default_factory=dict, repr=False)

    @classmethod
    def save(cls, family: str, directory: Path) -> Self:
        """Writes both to `directory`, without a tokenizer."""
        make = (counted.PROCESSORS | PROCESSORS)[family]
        reference = cls(save_random(FAMILIES[family].config(), directory), make())
        reference.processor.save_pretrained(directory)
        if family in counted.FILES:
            (directory / "processor_config.json").write_text(counted.FILES[family])
        return reference

    def generate(self, ids: list[int], files: Sequence[bytes], num_tokens: int) -> list[int]:
        """The model's own greedy tokens behind a prompt with these image files."""
        asked = (tuple(ids), tuple(files), num_tokens)
        if asked not in self._answers:
            self._answers[asked] = self._generate(ids, files, num_tokens)
        return [*self._answers[asked]]

    def _generate(self, ids: list[int], files: Sequence[bytes], num_tokens: int) -> list[int]:
        pictures = [Image.open(io.BytesIO(file)).convert("RGB") for file in files]
        kind = self.model.config.model_type
        options = OPTIONS.get(kind, {})
        inputs = dict(self.processor(images=pictures, return_tensors="pt", **options)) if pictures else {}
        for name in ("num_patches", "num_crops"):
            inputs.pop(name, None)
        if pictures and (types := TYPES.get(kind)):
            inputs[types] = torch.tensor([[int(id == IMAGE) for id in ids]])
        self.model.model.rope_deltas = None
        self.model.generation_config = GenerationConfig(do_sample=False, max_new_tokens=num_tokens, pad_token_id=0)
        prompt = torch.tensor([ids])
        output = self.model.generate(prompt, attention_mask=torch.ones_like(prompt), **inputs)
        tokens: list[int] = output[0, len(ids) :].tolist()
        return tokens
