"""Reads settings: explicit values first, then `BATON_*` environment variables, then defaults.

`baton.services.cli` reads them once at process start; other code receives a frozen settings object.
"""

from __future__ import annotations

import ast
import difflib
import functools
import inspect
import itertools
import os
import sys
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, ClassVar

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
        validate_default=True,
        defer_build=True,  # a process validates its own settings, and knows those of all services
    )

    @classmethod
    def __pydantic_init_subclass__(cls, **_: Any) -> None:
        """Describes fields by their docstrings.

        Pydantic's own way (`use_attribute_docstrings`) reads and looks for the source anew for each class, among all
        modules of the process.
        """
        texts = _field_docs(cls.__module__).get(cls.__qualname__, {})
        for name, field in cls.model_fields.items():
            if field.description is None:
                field.description = texts.get(name)


@functools.cache
def _field_docs(module: str) -> Mapping[str, Mapping[str, str]]:
    """Docstrings of fields by class and field, of the classes of a module; none where there is no source."""
    path = getattr(sys.modules.get(module), "__file__", None)
    try:
        tree = ast.parse(Path(path or "").read_bytes())
    except (OSError, SyntaxError):
        return {}
    return {node.name: dict(_docs_in(node.body)) for node in tree.body if isinstance(node, ast.ClassDef)}


def _docs_in(body: Iterable[ast.stmt]) -> Iterator[tuple[str, str]]:
    """Name and text of each annotated name that a text follows."""
    for field, text in itertools.pairwise(body):
        match field, text:
            case ast.AnnAssign(target=ast.Name(id=name)), ast.Expr(value=ast.Constant(value=str(doc))):
                yield name, inspect.cleandoc(doc)


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
