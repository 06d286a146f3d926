"""The model's own greedy tokens, which the cluster's are compared with."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import torch
import transformers


class Reference:
    """A stock Hugging Face model in float32, one prompt at a time, its own cache, greedy."""

    def __init__(self, directory: Path) -> None:
        loaded = transformers.AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32)
        self._model = loaded.eval()
        # generate() fills None from here, and would then ban the end-of-sequence token.
        self._model.generation_config = transformers.GenerationConfig(pad_token_id=0)

    def generate(self, prompt: Sequence[int], num_tokens: int) -> list[int]:
        """Exactly `num_tokens` greedy tokens after `prompt`, end tokens included."""
        ids = torch.tensor([list(prompt)])
        with torch.inference_mode():
            out = self._model.generate(
                ids,
                attention_mask=torch.ones_like(ids),
                generation_config=transformers.GenerationConfig(
                    max_new_tokens=num_tokens, do_sample=False, pad_token_id=0, eos_token_id=None
                ),
            )
        return [int(token) for token in out[0, len(prompt) :]]
