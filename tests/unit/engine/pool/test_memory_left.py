"""What is left of a memory limit, by made-up files of the kernel."""

from __future__ import annotations

from pathlib import Path

from baton.engine.pool.memory_left import memory_left

MIB = 1 << 20
MEMINFO = "MemTotal: 8192 kB\nMemFree: 1 kB\nMemAvailable: 4096 kB\n"
NO_LIMIT_V1 = 9223372036854771712


def write(root: Path, **files: object) -> Path:
    """Files of `files` under `root`, with `__` for `/` in their names."""
    for name, content in files.items():
        path = root / name.replace("__", "/")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(f"{content}\n")
    return root


def host(root: Path, cgroup: str) -> Path:
    return write(root, proc__meminfo=MEMINFO, proc__self__cgroup=cgroup)


def group(root: Path, path: str, limit: object, usage: object, stat: str = "anon 1") -> None:
    files = {"memory.max": limit, "memory.current": usage, "memory.stat": stat}
    write(root / "sys/fs/cgroup" / path, **files)


def test_without_limits_it_is_what_the_host_has(tmp_path: Path):
    assert memory_left(tmp_path) is None
    assert memory_left(host(tmp_path, "0::/a")) == 4 * MIB
    group(tmp_path, "a", "max", 5 * MIB)
    assert memory_left(tmp_path) == 4 * MIB


def test_the_lowest_limit_of_all_ancestors_holds(tmp_path: Path):
    host(tmp_path, "0::/a/b/c")
    group(tmp_path, "a/b/c", "max", 0)
    group(tmp_path, "a/b", 5 * MIB, 2 * MIB)
    assert memory_left(tmp_path) == 3 * MIB
    group(tmp_path, "a", 9 * MIB, 7 * MIB)
    assert memory_left(tmp_path) == 2 * MIB
    group(tmp_path, "", 9 * MIB, 8 * MIB)
    assert memory_left(tmp_path) == MIB
    group(tmp_path, "a/b/c", 2 * MIB, 3 * MIB)
    assert memory_left(tmp_path) == 0


def test_a_container_that_sees_its_hosts_path_has_its_own_limit(tmp_path: Path):
    host(tmp_path, "0::/system.slice/of-the-host")
    group(tmp_path, "", 3 * MIB, MIB)
    assert memory_left(tmp_path) == 2 * MIB


def test_unused_pages_of_files_are_left(tmp_path: Path):
    host(tmp_path, "0::/")
    group(tmp_path, "", 3 * MIB, 3 * MIB, f"anon 7\ninactive_file {MIB}\nactive_file 9")
    assert memory_left(tmp_path) == MIB


def test_version_1_of_cgroups_has_other_names(tmp_path: Path):
    host(tmp_path, "5:cpu:/x\n4:memory:/a/b\n0::/")
    memory = tmp_path / "sys/fs/cgroup/memory"
    files = {"memory.limit_in_bytes": 3 * MIB, "memory.usage_in_bytes": 2 * MIB, "memory.stat": "total_inactive_file 5"}
    write(memory / "a/b", **{**files, "memory.limit_in_bytes": NO_LIMIT_V1})
    assert memory_left(tmp_path) == 4 * MIB
    write(memory / "a", **files)
    assert memory_left(tmp_path) == MIB + 5


def test_unreadable_numbers_are_no_limit(tmp_path: Path):
    host(tmp_path, "0::/")
    group(tmp_path, "", "many", "")
    assert memory_left(tmp_path) == 4 * MIB
