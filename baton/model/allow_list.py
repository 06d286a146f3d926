"""Model types that gave the stock model's tokens, all of them, on paged attention (float32, tiny random models).

Written by `scripts/probe_model_families.py` with transformers 5.23.0; do not edit.
"""

from __future__ import annotations

TOKEN_EXACT: frozenset[str] = frozenset(
    {
        "gemma2",
        "gemma3_text",
        "gpt_oss",
        "llama",
        "mistral",
        "phi3",
        "qwen2",
        "qwen3",
        "qwen3_moe",
    }
)
