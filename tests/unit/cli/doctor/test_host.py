"""Checks of the host, each on a machine that fails it and on one that passes."""

from __future__ import annotations

from pathlib import Path

import pytest

from baton.services.cli.doctor.host import (
    check_cpu,
    check_huge_pages,
    check_memlock,
    check_memory,
    check_packages,
    check_python,
    cpu_name,
)
from baton.services.cli.doctor.results import CheckStatus, DoctorResult, as_json

OK, WARN, FAIL = CheckStatus


def machine(root: Path, files: dict[str, str]) -> Path:
    for name, text in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return root


@pytest.mark.parametrize(("version", "status"), [((3, 10), FAIL), ((3, 11), OK), ((3, 14), OK), ((3, 15), WARN)])
def test_python_has_a_tested_version(version, status):
    assert check_python(version).status is status


@pytest.mark.parametrize(
    ("missing", "statuses", "words"),
    [
        ({"torch"}, [FAIL, OK], "baton-serve[worker]"),
        ({"nixl_cu12", "nixl_cu13"}, [OK, WARN], "baton-serve[nixl]"),
        ({"nixl_cu13"}, [OK, OK], ""),
    ],
)
def test_missing_packages_are_named_with_their_extra(missing, statuses, words):
    results = list(check_packages(frozenset(missing)))
    assert [result.status for result in results] == statuses
    assert any(words in result.fix for result in results)


@pytest.mark.parametrize(
    ("flags", "status"), [("fpu sse2 avx", WARN), ("fpu avx2 fma", OK), ("avx2 fma avx512_bf16", OK), (None, WARN)]
)
def test_a_cpu_without_avx2_is_slow(tmp_path, flags, status):
    cpuinfo = {} if flags is None else {"proc/cpuinfo": f"processor\t: 0\nflags\t\t: {flags}\nbugs\t: none\n"}
    result = check_cpu(machine(tmp_path, cpuinfo), "x86_64")
    assert result.status is status
    assert ("avx512_bf16" in result.found) is (flags is not None and "bf16" in flags)
    assert check_cpu(tmp_path, "aarch64").status is OK


def test_a_cpu_has_a_name_where_the_kernel_tells_it(tmp_path):
    assert cpu_name(tmp_path) == ""
    machine(tmp_path, {"proc/cpuinfo": "processor\t: 0\nmodel name\t: A CPU @ 2: fast \nmodel name\t: another\n"})
    assert cpu_name(tmp_path) == "A CPU @ 2: fast"
    machine(tmp_path, {"proc/cpuinfo": "processor\t: 0\nmodel name\t:\nflags\t: fpu\n"})
    assert cpu_name(tmp_path) == ""


@pytest.mark.parametrize(("kib", "status"), [(500_000, FAIL), (8_000_000, OK)])
def test_a_machine_without_memory_fails(tmp_path, kib, status):
    assert check_memory(machine(tmp_path, {"proc/meminfo": f"MemAvailable:   {kib} kB\n"})).status is status
    assert check_memory(tmp_path / "nothing").status is WARN


def test_rdma_needs_locked_memory():
    assert check_memlock(has_rdma=True, limit_bytes=64 * 1024).line() == (
        "FAIL memlock: 64 KiB, but RDMA locks the pool. "
        "Do: ulimit -l unlimited (a container: --ulimit memlock=-1; systemd: LimitMEMLOCK=infinity)"
    )
    assert check_memlock(has_rdma=True, limit_bytes=-1).status is OK
    assert check_memlock(has_rdma=False, limit_bytes=64 * 1024).status is OK


@pytest.mark.parametrize(
    ("modes", "status"),
    [("always madvise [never]", WARN), ("always [madvise] never", OK), ("[always] madvise never", OK), ("", WARN)],
)
def test_huge_pages_must_not_be_switched_off(tmp_path, modes, status):
    assert check_huge_pages(machine(tmp_path, {"sys/kernel/mm/transparent_hugepage/enabled": modes})).status is status


def test_a_result_has_a_fix_unless_it_is_ok():
    with pytest.raises(ValueError, match="has a fix"):
        DoctorResult("x", FAIL, "broken")
    with pytest.raises(ValueError, match="has a fix"):
        DoctorResult("x", OK, "fine", "do it")


def test_json_tells_the_verdict():
    assert '"ok": false' in as_json([check_memlock(has_rdma=True, limit_bytes=1)])
    assert '"ok": true' in as_json([check_memlock(has_rdma=False, limit_bytes=1), check_python((3, 15))])
