"""Sampling parameters for clients that set none, from the model's `generation_config.json`, as in vLLM."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class SamplingDefaults:
    """OpenAI's defaults, unless the model has its own."""

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    repetition_penalty: float = 1.0

    @classmethod
    def read(cls, generation_config: Mapping[str, object]) -> SamplingDefaults:
        """Reads a decoded `generation_config.json`. A value that is missing or out of range is OpenAI's."""
        return cls(
            temperature=_number(generation_config, "temperature", 1.0, 0.0, 2.0),
            top_p=_number(generation_config, "top_p", 1.0, 0.01, 1.0),
            top_k=int(_number(generation_config, "top_k", 0, 0, 1_000_000)),
            min_p=_number(generation_config, "min_p", 0.0, 0.0, 1.0),
            repetition_penalty=_number(generation_config, "repetition_penalty", 1.0, 0.01, 2.0),
        )


OPENAI_DEFAULTS = SamplingDefaults()


def _number(values: Mapping[str, object], name: str, default: float, low: float, high: float) -> float:
    value = values.get(name)
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    return float(value) if is_number and low <= value <= high else default  # type: ignore[arg-type,operator]
