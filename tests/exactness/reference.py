"""The model's own greedy tokens, which the cluster's are compared with."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property, partial
from pathlib import Path
from typing import Any

import torch
import transformers

from tests.exactness.answers.reference_answers import checkpoint_digest, remembered


class Reference:
    """A stock Hugging Face model in float32, one prompt at a time, its own cache, greedy.

    It is loaded for the first answer that no test of the run has asked for yet. Its files must stay until then.
    """

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._digest = checkpoint_digest(directory)

    def generate(self, prompt: Sequence[int], num_tokens: int) -> list[int]:
        """Exactly `num_tokens` greedy tokens after `prompt`, end tokens included."""
        compute = partial(self._generate, prompt, num_tokens)
        return remembered("reference", self._digest, prompt, num_tokens, compute)

    @cached_property
    def _model(self) -> Any:
        model = transformers.AutoModelForCausalLM.from_pretrained(self._directory, dtype=torch.float32).eval()
        # generate() fills None from here, and would then ban the end-of-sequence token.
        model.generation_config = transformers.GenerationConfig(pad_token_id=0)
        return model

    def _generate(self, prompt: Sequence[int], num_tokens: int) -> list[int]:
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
