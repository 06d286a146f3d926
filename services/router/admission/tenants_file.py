"""Reads the limits of tenants from a TOML file, once, at process start. Called by the router's `app`.

[default]                  # every tenant without a table of its own
max_priority = 0

[tenants.alice]            # the tenant of the API key file
weight = 2.0               # twice the tokens of a tenant of weight 1, while both compete
max_slots = 16
requests_per_minute = 600
tokens_per_minute = 200000
"""

from __future__ import annotations

import tomllib
from collections.abc import Mapping
from pathlib import Path

import msgspec

from baton.services.router.admission.tenants import MAX_PRIORITY, MIN_PRIORITY, TenantLimits, TenantTable
from baton.settings.base import SettingsError

_LARGEST = 1e12
_RANGES: Mapping[str, tuple[float, float]] = {
    "weight": (0.001, 1000.0),
    "max_slots": (1, _LARGEST),
    "requests_per_minute": (0.001, _LARGEST),
    "tokens_per_minute": (1.0, _LARGEST),
    "max_priority": (MIN_PRIORITY, MAX_PRIORITY),
}
_HINT = "Correct the file; its form is in docs/operations.md."


class _File(msgspec.Struct, forbid_unknown_fields=True):
    """The tables of the file."""

    default: dict[str, object] = {}
    tenants: dict[str, dict[str, object]] = {}


def read_tenants(path: Path) -> TenantTable:
    """The limits by tenant. Raises `SettingsError`, which names the file, the table and the field."""
    try:
        content = tomllib.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise _bad(path, error.strerror or "cannot be read") from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise _bad(path, f"is not TOML: {error}") from None
    try:
        tables = msgspec.convert(content, _File)
    except msgspec.ValidationError as error:
        raise _bad(path, f"has another form: {error}") from None
    default = _limits(path, "default", tables.default, {})
    by_name = {name: _limits(path, f"tenants.{name}", own, tables.default) for name, own in tables.tenants.items()}
    return TenantTable(default, by_name)


def _limits(path: Path, table: str, own: Mapping[str, object], default: Mapping[str, object]) -> TenantLimits:
    """Limits of one table; absent fields are those of `default`."""
    for name, value in own.items():
        if name not in _RANGES:
            raise _bad(path, f"[{table}] has the unknown field {name}")
        low, high = _RANGES[name]
        whole = name in ("max_slots", "max_priority")
        is_number = isinstance(value, int if whole else int | float) and not isinstance(value, bool)
        if not is_number or not low <= value <= high:  # type: ignore[operator]
            kind = "an integer" if whole else "a number"
            raise _bad(path, f"[{table}] {name} must be {kind} from {low:g} to {high:g}")
    return msgspec.convert({**default, **own}, TenantLimits)


def _bad(path: Path, why: str) -> SettingsError:
    return SettingsError(f"tenants_file {path}", why=why, hint=_HINT)
