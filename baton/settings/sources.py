"""Tells where the value of each setting came from, and shows values without their secrets."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from urllib.parse import urlsplit

from pydantic import SecretStr

from baton.settings.base import ENV_PREFIX, Settings, env_name

MASK = "***"


class ValueSource(StrEnum):
    """Source of a value, the strongest first."""

    FLAG = "flag"
    VARIABLE = "variable"
    DEFAULT = "default"


@dataclass(frozen=True, slots=True)
class EffectiveSetting:
    """A setting as a process would have it. `value`: as text, masked; None if it has none."""

    name: str
    value: str | None
    source: ValueSource


def setting_values(
    settings: Settings, flags: Sequence[str], environ: Mapping[str, str] | None = None
) -> Iterator[EffectiveSetting]:
    """Every field of `settings`, which were made from the command line words `flags` and the environment."""
    present = os.environ if environ is None else environ
    given = {flag.partition("=")[0] for flag in flags if flag.startswith("--")}
    for field in type(settings).model_fields:
        words = field.replace("_", "-")
        source = ValueSource.DEFAULT
        if {f"--{words}", f"--no-{words}"} & given:
            source = ValueSource.FLAG
        elif present.get(env_name(field)):  # an empty variable counts as unset
            source = ValueSource.VARIABLE
        yield EffectiveSetting(field, shown(getattr(settings, field)), source)


def shown(value: object) -> str | None:
    """`value` as text; secrets and the user and password of a URL are masked."""
    if value is None:
        return None
    if isinstance(value, SecretStr):
        return MASK
    text = str(value)
    return ",".join(mask_url(part) for part in text.split(",")) if "://" in text else text


def mask_url(url: str) -> str:
    """The URL without user, password and query."""
    parts = urlsplit(url)
    if "@" not in parts.netloc and not parts.query:
        return url
    host = parts.netloc.rpartition("@")[2]
    credentials = f"{MASK}@" if "@" in parts.netloc else ""
    return f"{parts.scheme}://{credentials}{host}{parts.path}{'?' + MASK if parts.query else ''}"


def set_variables(secret: frozenset[str], environ: Mapping[str, str] | None = None) -> dict[str, str]:
    """The `BATON_*` variables that are set, masked; `secret`: names whose whole value is."""
    present = os.environ if environ is None else environ
    return {
        name: MASK if name in secret else shown(value) or ""
        for name, value in sorted(present.items())
        if name.startswith(ENV_PREFIX)
    }


def secret_variables(models: Sequence[type[Settings]]) -> frozenset[str]:
    """Variables of fields that hold a secret."""
    return frozenset(
        env_name(field)
        for model in models
        for field, info in model.model_fields.items()
        if "SecretStr" in str(info.annotation)
    )
