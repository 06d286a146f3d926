"""Digests the files that turn text into tokens and back: tokenizer, chat template, special tokens, defaults.

Routers and workers compare it: a router places requests only on workers with its own tokenizer. Called once at start.
"""

from __future__ import annotations

import json
from hashlib import blake2b
from pathlib import Path

from baton.settings.base import SettingsError

TEMPLATE_FILE = "chat_template.jinja"
TEXT_FILES = ("tokenizer.json", "tokenizer_config.json", TEMPLATE_FILE, "generation_config.json")
_TOKEN_FIELDS = ("bos_token_id", "eos_token_id", "pad_token_id")


def text_digest(directory: Path, chat_template: Path | None = None) -> str:
    """BLAKE2b-128 of the text files in `directory`, and of the special token ids of its config.

    `chat_template` is read in place of the model's own. A missing file differs from an empty one.
    Raises `SettingsError` for a file that cannot be read.
    """
    digest = blake2b(digest_size=16)
    try:
        for name in TEXT_FILES:
            path = chat_template if chat_template is not None and name == TEMPLATE_FILE else directory / name
            content = path.read_bytes() if path.is_file() else None
            digest.update(f"{name}:{'none' if content is None else len(content)}:".encode())
            digest.update(content or b"")
        config = json.loads((directory / "config.json").read_bytes())
        text_config = config.get("text_config")
        merged = {**config, **text_config} if isinstance(text_config, dict) else config
        ids = {name: merged.get(name) for name in _TOKEN_FIELDS}
        digest.update(json.dumps(ids, sort_keys=True).encode())
    except (OSError, ValueError, AttributeError) as error:
        why = f"its text files cannot be read ({error})"
        raise SettingsError(f"model {directory}", why=why, hint="Download the model again.") from error
    return digest.hexdigest()
