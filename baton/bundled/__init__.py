"""The models that ship with Baton: tiny ones for chats and for images, so that the first request needs no download.

Owns nothing but paths. ``scripts/train_bundled_*.py`` wrote the directories; settings name the first as the default.
Standard library only: the router imports this module and must stay small.
"""

from pathlib import Path

MODEL_DIR: Path = Path(__file__).resolve().parent / "model"
"""A Hugging Face model directory: config, bfloat16 safetensors, tokenizer, chat template, model card."""

HEAD_DIR: Path = Path(__file__).resolve().parent / "head"
"""Its EAGLE-3 head, written by ``scripts/train_bundled_head.py``: config, bfloat16 safetensors, card."""

VISION_DIR: Path = Path(__file__).resolve().parent / "vision"
"""A LLaVA that names the shape in a picture, written by ``scripts/train_bundled_vision_model.py``."""
