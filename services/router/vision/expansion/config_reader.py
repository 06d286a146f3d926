"""Reads numbers of a model's processor files. A missing or absurd one is a reason not to serve images."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

Json = Mapping[str, Any]


class UnknownProcessor(ValueError):
    """A processor whose images the router cannot count. The message says why."""


def positive(config: Json, name: str, default: int | None = None) -> int:
    """The positive integer `name`. Raises `UnknownProcessor`."""
    value = config.get(name)
    value = default if value is None else value
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise UnknownProcessor(f"its processor's {name} is {value!r}")
    return value


def side_lengths(config: Json, name: str) -> tuple[int, int]:
    """Height and width that `name` gives: an integer for both, or an object. Raises `UnknownProcessor`."""
    value = config.get(name)
    if isinstance(value, int):
        return positive(config, name), positive(config, name)
    if isinstance(value, dict) and {"height", "width"} <= value.keys():
        return positive(value, "height"), positive(value, "width")
    raise UnknownProcessor(f"its processor's {name} has no height and width")
