"""Digests the files that turn an image into the tensors of a vision tower. Called once at start.

Routers and workers compare it, since a router counts the rows of an image that a worker encodes. The rules of counting
and resizing are the code's: `RULES` changes with them.
"""

from __future__ import annotations

from hashlib import blake2b
from pathlib import Path

from baton.settings.base import SettingsError

RULES = "pil/1"
"""Pillow's resizing, whatever else is installed."""
PROCESSOR_FILES = ("preprocessor_config.json", "processor_config.json", "config.json")


def processor_digest(directory: Path) -> str:
    """BLAKE2b-128 of the processor's files in `directory`, as 32 hexadecimal digits. "" if it has no image processor.

    Raises `SettingsError` for a file that cannot be read.
    """
    if not any((directory / name).is_file() for name in PROCESSOR_FILES[:2]):
        return ""
    digest = blake2b(RULES.encode(), digest_size=16)
    try:
        for name in PROCESSOR_FILES:
            path = directory / name
            content = path.read_bytes() if path.is_file() else None
            digest.update(f"{name}:{'none' if content is None else len(content)}:".encode())
            digest.update(content or b"")
    except OSError as error:
        why = f"its image processor's files cannot be read ({error})"
        raise SettingsError(f"model {directory}", why=why, hint="Download the model again.") from error
    return digest.hexdigest()
