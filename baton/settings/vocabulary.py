"""Compares the tokens of two models: a draft of a model that numbers them otherwise would be about other words."""

from __future__ import annotations

from pathlib import Path

from baton.settings.base import SettingsError


def require_same_tokens(directory: Path, draft: Path) -> None:
    """Raises `SettingsError` unless the tokenizers in both directories have the same tokens under the same ids."""
    ours, theirs = _tokens(directory), _tokens(draft)
    if ours != theirs:
        first = min(ours.items() ^ theirs.items(), key=lambda item: item[::-1])
        why = f"its tokenizer differs from the model's, first in id {first[1]}"
        raise SettingsError(f"draft_model {draft}", why=why, hint="Take a draft model of the same family.")


def _tokens(directory: Path) -> dict[str, int]:
    from tokenizers import Tokenizer  # slow to import

    path = directory / "tokenizer.json"
    try:
        tokens: dict[str, int] = Tokenizer.from_file(str(path)).get_vocab()
    except Exception as error:  # the library raises nothing narrower
        why = f"{path.name} cannot be read ({error})"
        raise SettingsError(f"model {directory}", why=why, hint="Download the model again.") from error
    return tokens
