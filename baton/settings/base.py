"""Reads settings: explicit values first, then `BATON_*` environment variables, then defaults.

`baton.services.cli` reads them once at process start; other code receives a frozen settings object.
"""

from __future__ import annotations

import difflib
import os
from collections.abc import Iterable, Mapping
from typing import ClassVar

from pydantic_settings import BaseSettings, SettingsConfigDict

from baton.domain.errors import BatonError

ENV_PREFIX = "BATON_"


class SettingsError(BatonError):
    """An unusable setting: what is wrong, why, and a hint for the fix. Raised at process start only."""

    code: ClassVar[str] = "bad_settings"

    def __init__(self, what: str, *, why: str, hint: str) -> None:
        super().__init__(f"{what}: {why}. {hint}")
        self.what = what
        self.why = why
        self.hint = hint


class Settings(BaseSettings):
    """Base of all settings: frozen and flat. Unknown names are refused; field docstrings are the help text."""

    model_config = SettingsConfigDict(
        env_prefix=ENV_PREFIX,
        env_ignore_empty=True,
        extra="forbid",
        frozen=True,
        use_attribute_docstrings=True,
        validate_default=True,
    )


def env_name(field: str) -> str:
    """The environment variable that sets `field`."""
    return ENV_PREFIX + field.upper()


def known_variables(models: Iterable[type[Settings]]) -> list[str]:
    """Sorted names of all variables that any of `models` reads."""
    return sorted({env_name(field) for model in models for field in model.model_fields})


def refuse_unknown_variables(models: Iterable[type[Settings]], environ: Mapping[str, str] | None = None) -> None:
    """Raises `SettingsError` for a `BATON_*` variable that none of `models` reads, and suggests the nearest one.

    One environment file often serves all services, so callers pass all their models.
    """
    known = known_variables(models)
    present = os.environ if environ is None else environ
    for name in sorted(present):
        if name.startswith(ENV_PREFIX) and name not in known:
            raise _unknown(name, known)


def _unknown(name: str, known: list[str]) -> SettingsError:
    nearest = difflib.get_close_matches(name, known, n=1, cutoff=0.0)
    hint = f"Did you mean {nearest[0]}? " if nearest else ""
    return SettingsError(
        f"environment variable {name}", why="no setting has this name", hint=f"{hint}Rename it or unset it."
    )
