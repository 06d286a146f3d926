"""Tenants of a cluster under test: their names, keys and limits, and the two files that routers read.

The load asks as all of them. Two stay within their shares, one floods.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from baton.services.router.edge.api_keys import make_entry, new_key


@dataclass(frozen=True, slots=True)
class LoadTenant:
    """A tenant with one key. `burst`: requests that each of its clients sends at once. `max_slots`: on each router."""

    name: str
    key: str
    weight: float = 1.0
    max_slots: int | None = None
    burst: int = 1

    @property
    def is_steady(self) -> bool:
        """True if it asks for less than its share, so that it may lose almost nothing."""
        return self.burst == 1

    @property
    def headers(self) -> dict[str, str]:
        """Of its requests."""
        return {"authorization": f"Bearer {self.key}"}

    def limits(self) -> str:
        """Its table of the tenants file."""
        slots = "" if self.max_slots is None else f"max_slots = {self.max_slots}\n"
        return f"[tenants.{self.name}]\nweight = {self.weight}\n{slots}"


def make_tenants() -> tuple[LoadTenant, ...]:
    """Two steady tenants of unlike weights, and one that floods: it has three requests of each client wait for one."""
    return (
        LoadTenant("steady", new_key(), weight=2.0),
        LoadTenant("even", new_key()),
        LoadTenant("flood", new_key(), max_slots=1, burst=3),
    )


def write_files(tenants: Sequence[LoadTenant], folder: Path) -> dict[str, object]:
    """Writes the key file and the tenants file into `folder`; returns the flags of a router that reads them."""
    keys, limits = folder / "api-keys", folder / "tenants.toml"
    keys.write_text("".join(f"{make_entry(one.name, one.key).line()}\n" for one in tenants))
    limits.write_text("\n".join(one.limits() for one in tenants))
    return {"api-keys-file": keys, "tenants-file": limits}
