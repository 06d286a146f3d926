"""Checks of the parameters of a quantization config. Used by the formats."""

from __future__ import annotations

from typing import Any

from baton.model.errors import UnsupportedModel


def require_one_of(where: str, name: str, value: Any, choices: tuple[Any, ...]) -> Any:
    """`value`. Raises `UnsupportedModel` unless it is one of `choices`, of the same type (True is not 1)."""
    if not any(type(value) is type(choice) and value == choice for choice in choices):
        supported = ", ".join(map(str, choices))
        raise UnsupportedModel(f"{where}: {name} {value!r} is not supported; supported: {supported}")
    return value


def read_group_size(where: str, value: Any) -> int | None:
    """The size of groups; None for one group, which configs give as -1. Raises `UnsupportedModel`."""
    if type(value) is not int or not (value == -1 or value > 0):
        raise UnsupportedModel(f"{where}: group_size {value!r} is no positive number and not -1")
    return None if value == -1 else value
