"""The model that ships with Baton: a tiny chat model, so that the first request needs no download.

Owns nothing but the path. ``scripts/train_bundled_model.py`` wrote the directory; settings name it as the default.
Standard library only: the router imports this module and must stay small.
"""

from pathlib import Path

MODEL_DIR: Path = Path(__file__).resolve().parent / "model"
"""A Hugging Face model directory: config, bfloat16 safetensors, tokenizer, chat template, model card."""

HEAD_DIR: Path = Path(__file__).resolve().parent / "head"
"""Its EAGLE-3 head, written by ``scripts/train_bundled_head.py``: config, bfloat16 safetensors, card."""
