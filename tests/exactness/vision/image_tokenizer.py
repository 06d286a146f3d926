"""Gives a tiny vision-language model a tokenizer with a token for images, and a chat template that places it."""

from __future__ import annotations

import json
from pathlib import Path

from tests.exactness.vision.families import IMAGE
from tests.tiny_models import add_tokenizer

TOKEN = "<image>"
TEMPLATE = """{%- for message in messages %}
    {{- '<|im_start|>' + message.role + '\\n' }}
    {%- if message.content is string %}{{- message.content }}{%- else %}
        {%- for part in message.content %}
            {{- part.text if part.type == 'text' else '<image>' }}
        {%- endfor %}
    {%- endif %}
    {{- '<|im_end|>\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{%- endif %}"""


def add_image_tokenizer(directory: Path) -> Path:
    """Writes the bundled tokenizer, whose last token becomes the one of images, and returns `directory`."""
    add_tokenizer(directory)
    path = directory / "tokenizer.json"
    tokenizer = json.loads(path.read_text())
    model = tokenizer["model"]
    old = next(token for token, id in model["vocab"].items() if id == IMAGE)
    model["vocab"] = {token: id for token, id in model["vocab"].items() if token != old} | {TOKEN: IMAGE}
    pairs = [merge if isinstance(merge, list) else merge.split(" ") for merge in model["merges"]]
    kept = [merge for merge, pair in zip(model["merges"], pairs, strict=True) if old not in ("".join(pair), *pair)]
    model["merges"] = kept
    added = dict(tokenizer["added_tokens"][0])
    tokenizer["added_tokens"].append(added | {"id": IMAGE, "content": TOKEN, "special": True})
    path.write_text(json.dumps(tokenizer))
    (directory / "chat_template.jinja").write_text(TEMPLATE)
    return directory
