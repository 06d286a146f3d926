"""How much memory this process may still use: by the host, and by the memory cgroups that it is in (v2 and v1)."""

from __future__ import annotations

from pathlib import Path

UNLIMITED_V1 = 1 << 60
"""Cgroup v1 has no word for no limit, only a number of this size or above."""


def memory_left(root: Path = Path("/")) -> int | None:
    """Bytes below the lowest limit; None if none can be read. `root`: holds `proc` and `sys`.

    Pages of files that are not in use count as left: the kernel takes them back before it refuses memory.
    """
    found = [_available(root / "proc/meminfo")]
    mount = root / "sys/fs/cgroup"
    for line in _lines(root / "proc/self/cgroup"):
        _, controllers, path = line.split(":", 2)
        if not controllers:
            names = ("memory.max", "memory.current", "inactive_file")
            found += [_group_left(group, *names) for group in _ancestors(mount, path)]
        elif "memory" in controllers.split(","):
            names = ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file")
            found += [_group_left(group, *names) for group in _ancestors(mount / "memory", path)]
    return min((left for left in found if left is not None), default=None)


def _ancestors(mount: Path, path: str) -> list[Path]:
    """The cgroup at `path` and those above. In a container `path` may be the host's; then only `mount` is there."""
    group = mount / path.strip("/")
    return [group, *(parent for parent in group.parents if parent.is_relative_to(mount))]


def _group_left(group: Path, limit_name: str, usage_name: str, reclaimable: str) -> int | None:
    limit, usage = _number(_lines(group / limit_name)), _number(_lines(group / usage_name))
    if limit is None or usage is None or limit >= UNLIMITED_V1:
        return None
    fields = dict(line.split(" ", 1) for line in _lines(group / "memory.stat") if " " in line)
    return max(0, limit - usage + (_number([fields.get(reclaimable, "")]) or 0))


def _available(meminfo: Path) -> int | None:
    for line in _lines(meminfo):
        name, _, value = line.partition(":")
        if name == "MemAvailable":
            kib = _number([value.removesuffix("kB")])
            return None if kib is None else 1024 * kib
    return None


def _number(lines: list[str]) -> int | None:
    """That of the first line; None for anything else, such as `max`."""
    text = lines[0].strip() if lines else ""
    return int(text) if text.isdecimal() else None


def _lines(path: Path) -> list[str]:
    try:
        return path.read_text().splitlines()
    except OSError:
        return []
