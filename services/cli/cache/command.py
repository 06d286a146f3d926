"""`baton cache list` and `baton cache gc`: files of ready weights and builds of kernels.

A file that a process maps is never removed. Registered by `baton.services.cli.main`.
"""

from __future__ import annotations

import json as json_format
import sys
import time
from pathlib import Path
from typing import Annotated

from cyclopts import App, Parameter

from baton.model.weight_file.inventory import EXPIRY_S, CacheEntry, kernel_entries, removable, remove, weight_entries
from baton.settings.model_source import resolve_model, weight_cache_directories

DAY_S = 24 * 3600.0
_MIB = 1024**2

Model = Annotated[str, Parameter(help="The model beside which weights are kept: 'bundled', a directory or a Hub id.")]
Directory = Annotated[Path | None, Parameter(help="Look at this --weight-cache-dir instead.")]
AsJson = Annotated[bool, Parameter(negative=(), help="Print one JSON object.")]

cache_app = App(name="cache", help="Show what this machine's caches hold, or remove what nobody uses.")


@cache_app.command(name="list")
def list_entries(*, model: Model = "bundled", weight_cache_dir: Directory = None, json: AsJson = False) -> int:
    """Show files of ready weights and kernel builds: size, age, and the processes that use them."""
    entries = find_entries(model, weight_cache_dir)
    if json:
        print(json_format.dumps({"entries": [as_object(entry) for entry in entries]}))
        return 0
    for entry in entries:
        print(line(entry))
    print(f"{len(entries)} entries, {sum(entry.num_bytes for entry in entries) / _MIB:.1f} MiB")
    return 0


@cache_app.command
def gc(
    *,
    model: Model = "bundled",
    weight_cache_dir: Directory = None,
    older_than_days: Annotated[float, Parameter(help="Spare what was used since.")] = EXPIRY_S / DAY_S,
    dry_run: Annotated[bool, Parameter(negative=(), help="Only show what would be removed.")] = False,
    json: AsJson = False,
) -> int:
    """Remove weights and kernel builds that no process maps and nobody used for a while. Exit with 1 if one stays."""
    chosen = [entry for entry in find_entries(model, weight_cache_dir) if removable(entry, older_than_days * DAY_S)]
    failed: dict[str, str] = {}
    for entry in [] if dry_run else chosen:
        try:
            if not remove(entry):
                failed[str(entry.path)] = "it is being written, or another user's"
        except OSError as error:
            failed[str(entry.path)] = str(error.strerror)
    removed = [entry for entry in chosen if str(entry.path) not in failed]
    if json:
        found = {"removed": [as_object(entry) for entry in removed], "failed": failed, "dry_run": dry_run}
        print(json_format.dumps(found))
    else:
        _print_removed(removed, dry_run=dry_run)
        for path, why in failed.items():
            print(f"baton: {path} stays: {why}", file=sys.stderr)
    return 1 if failed else 0


def find_entries(model: str, weight_cache_dir: Path | None) -> list[CacheEntry]:
    """Entries of all caches of a model. Raises `SettingsError` for one that is not on this machine."""
    now = time.time()
    directories = [weight_cache_dir]
    if weight_cache_dir is None:
        directories = [*weight_cache_directories(resolve_model(model, download=False))]
    weights = [entry for directory in directories if directory for entry in weight_entries(directory, now)]
    return [*weights, *kernel_entries(now)]


def as_object(entry: CacheEntry) -> dict[str, object]:
    """An entry for scripts."""
    return {
        "path": str(entry.path),
        "kind": entry.kind,
        "bytes": entry.num_bytes,
        "age_s": round(entry.age_s),
        "users": entry.users,
        "current": entry.is_current,
    }


def line(entry: CacheEntry) -> str:
    """An entry for people."""
    state = (
        f"in use by {', '.join(map(str, entry.users))}" if entry.users else "current" if entry.is_current else "unused"
    )
    return f"{entry.num_bytes / _MIB:9.1f} MiB {entry.age_s / DAY_S:6.1f} d  {entry.kind}  {state}  {entry.path}"


def _print_removed(removed: list[CacheEntry], *, dry_run: bool) -> None:
    for entry in removed:
        print(line(entry))
    size = sum(entry.num_bytes for entry in removed) / _MIB
    print(f"{'would remove' if dry_run else 'removed'} {len(removed)} entries, {size:.1f} MiB")
