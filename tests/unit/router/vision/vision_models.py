"""Model directories of vision-language models, as a router reads them: no weights."""

from __future__ import annotations

import json
from pathlib import Path

from tokenizers import AddedToken, Tokenizer

from baton.bundled import MODEL_DIR
from baton.services.router.text.text_model import TextModel
from baton.services.router.vision.image_model import ImageModel, read_image_model

PARTS_TEMPLATE = (
    "{% for m in messages %}[{{ m.role }}]"
    "{% for part in m.content %}{% if part.type == 'image' %}<image>{% else %}{{ part.text }}{% endif %}{% endfor %}"
    "{% endfor %}{% if add_generation_prompt %}[assistant]{% endif %}"
)
"""Reads parts only, as that of LLaVA 1.5."""

BOTH_TEMPLATE = PARTS_TEMPLATE.replace(
    "{% for part in", "{% if m.content is string %}{{ m.content }}{% else %}{% for part in"
).replace("{% endif %}{% endfor %}", "{% endif %}{% endfor %}{% endif %}")
"""Reads strings, too."""

NUM_ROWS = 16
"""Of an image, for the LLaVA type."""


def save_vision_model(directory: Path, kind: str = "llava", template: str = PARTS_TEMPLATE) -> None:
    """Writes a directory: LLaVA or Gemma 3 with 16 rows an image, or Qwen2-VL with merged patches of 28 pixels."""
    tokenizer = Tokenizer.from_file(str(MODEL_DIR / "tokenizer.json"))
    names = ("<start_of_image>", "<end_of_image>", "<image_soft_token>") if kind == "gemma3" else ("<image>",)
    tokenizer.add_special_tokens([AddedToken(name, special=True, normalized=False) for name in names])
    tokenizer.save(str(directory / "tokenizer.json"))
    (directory / "tokenizer_config.json").write_text((MODEL_DIR / "tokenizer_config.json").read_text())
    (directory / "chat_template.jinja").write_text(template)
    placeholder = tokenizer.token_to_id(names[-1])
    assert placeholder is not None
    config = {
        "model_type": kind, "vision_config": {}, "image_token_id": placeholder, "mm_tokens_per_image": NUM_ROWS,
        "text_config": {"vocab_size": placeholder + 1, "max_position_embeddings": 1024, "eos_token_id": 2},
    }  # fmt: skip
    llava = {"do_center_crop": True, "crop_size": {"height": 56, "width": 56}}
    qwen = {"size": {"shortest_edge": 56 * 56, "longest_edge": 28 * 28 * 64}}
    processor = {"patch_size": 14, "vision_feature_select_strategy": "default", "num_additional_image_tokens": 1}
    files = {
        "config.json": config,
        "preprocessor_config.json": {"llava": llava, "gemma3": {"size": 224}}.get(kind, qwen),
        **({"processor_config.json": processor} if kind == "llava" else {}),
        **({"processor_config.json": {"image_seq_length": NUM_ROWS}} if kind == "gemma3" else {}),
    }
    for name, value in files.items():
        (directory / name).write_text(json.dumps(value))


def load_vision_model(directory: Path) -> tuple[TextModel, ImageModel]:
    """What a router reads at its start."""
    text = TextModel.load(directory)
    return text, read_image_model(directory, text.added_token, text.encode)
