"""Locates a model's files: bundled, a directory, or the Hugging Face hub. Called by every service at start."""

from __future__ import annotations

import os
import re
from contextlib import suppress
from enum import Enum
from pathlib import Path

from baton.settings.base import SettingsError

BUNDLED = "bundled"
BUNDLED_VISION = "bundled-vision"
"""The bundled model for images."""
BUNDLED_HEAD = "bundled-head"
"""The EAGLE-3 head of the bundled model, for what drafts."""
PACKAGE = Path(__file__).resolve().parents[1]
_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[\w.-]+")
_TEXT_PATTERNS = ("*.json", "*.jinja", "*.txt", "*.model")


class ModelFiles(Enum):
    """Patterns of the files that a service needs: TEXT for the router, ALL for workers.

    DRAFT: of what drafts. A head has no tokenizer.
    """

    TEXT = _TEXT_PATTERNS
    ALL = (*_TEXT_PATTERNS, "*.safetensors")
    DRAFT = ("*.safetensors", *_TEXT_PATTERNS)


def resolve_model(name: str, files: ModelFiles = ModelFiles.ALL, *, download: bool = True) -> Path:
    """The directory that holds model `name`. Downloads a Hugging Face id (blocks), unless `download` is False.

    Raises `SettingsError`.
    """
    if name in (BUNDLED, BUNDLED_VISION) or (name == BUNDLED_HEAD and files is ModelFiles.DRAFT):
        return _bundled(name, files)
    directory = Path(name).expanduser()
    if directory.is_dir():
        return _checked(directory, name, files)
    if _HUB_ID.fullmatch(name):
        return _checked(_download(name, files, local_only=not download), name, files)
    raise SettingsError(f"model {name!r}", why="there is no such directory", hint=_CHOICES)


def weight_cache_directories(directory: Path) -> list[Path]:
    """Where ready weights of the model in `directory` are kept by default: beside it, else in the user's cache.

    Never in the package: what an installation did not write stays when it is removed.
    """
    found = [] if directory.is_relative_to(PACKAGE) else [directory / ".baton"]
    cache = user_cache()
    return found if cache is None else [*found, cache / "weights"]


def user_cache() -> Path | None:
    """Where what can be made again is kept; None for a user without a home."""
    with suppress(RuntimeError):
        return Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser() / "baton"
    return None


def model_name(name: str) -> str:
    """Default name of a model for clients: a directory's last part, otherwise `name`."""
    return Path(name).expanduser().resolve().name if Path(name).expanduser().is_dir() else name


_CHOICES = (
    "Give 'bundled', 'bundled-vision', a directory with config.json, or a Hugging Face id such as Qwen/Qwen3-0.6B."
)


def _bundled(name: str, files: ModelFiles) -> Path:
    """Workers find the weights, or a draft's; routers are told of a broken installation, too."""
    from baton.bundled import HEAD_DIR, MODEL_DIR, VISION_DIR

    directory = {BUNDLED: MODEL_DIR, BUNDLED_VISION: VISION_DIR, BUNDLED_HEAD: HEAD_DIR}[name]
    return _checked(directory, name, files if files is ModelFiles.DRAFT else ModelFiles.ALL)


def _checked(directory: Path, name: str, files: ModelFiles) -> Path:
    if not (directory / "config.json").is_file():
        raise SettingsError(f"model {name!r}", why=f"{directory} has no config.json", hint=_CHOICES)
    if files is not ModelFiles.DRAFT and not (directory / "tokenizer.json").is_file():
        why = f"{directory} has no tokenizer.json"
        raise SettingsError(f"model {name!r}", why=why, hint="Save it there with a fast tokenizer's save_pretrained().")
    if files is not ModelFiles.TEXT and not any(directory.glob("*.safetensors")):
        why = f"{directory} has no *.safetensors"
        raise SettingsError(f"model {name!r}", why=why, hint="Convert the weights with save_pretrained().")
    return directory


def _download(name: str, files: ModelFiles, *, local_only: bool) -> Path:
    # Slow to import, and not needed for local models.
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import GatedRepoError, HfHubHTTPError, HFValidationError, RepositoryNotFoundError

    try:
        return Path(snapshot_download(name, allow_patterns=list(files.value), local_files_only=local_only))
    except GatedRepoError:
        why, hint = "its owner must grant you access", "Ask for it on huggingface.co, then run `hf auth login`."
    except (RepositoryNotFoundError, HFValidationError):
        why, hint = "the Hugging Face hub has no such model, nor is there such a directory", _CHOICES
    except (HfHubHTTPError, OSError) as error:  # LocalEntryNotFoundError and ConnectionError are OSErrors
        way = "is not downloaded here" if local_only else "cannot be downloaded"
        why = f"it is not in the local cache and {way} ({type(error).__name__})"
        hint = "Check the network and HF_HUB_OFFLINE, or download it elsewhere and give its directory."
    raise SettingsError(f"model {name!r}", why=why, hint=hint)
