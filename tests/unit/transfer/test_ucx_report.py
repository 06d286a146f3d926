"""The transport of a link is UCX's own report, or unknown; proven over two network and process namespaces."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest

from baton.settings import ucx
from baton.transfer.nixl_agent import nixl_available
from baton.transfer.ucx_report import read_transport
from tests.unit.transfer import namespace_pair
from tests.unit.transfer.namespace_pair import MOUNT, UNSHARE

REPORT = """\
[1.0] [vm:1:0]   +--------+-------------+------------------------------------------------------------------+
[1.0] [vm:1:0]   | dst self cfg#0                                                                            |
[1.0] [vm:1:0]   | remote memory write by ucp_put* from host memory to host                                  |
[1.0] [vm:1:0]   +--------+-------------+------------------------------------------------------------------+
[1.0] [vm:1:0]   | 0..inf | zero-copy   | sysv/memory                                                      |
[1.0] [vm:1:1]   | dst {where} cfg#1                                                                         |
[1.0] [vm:1:1]   | remote memory read by ucp_get*(multi) into host memory from host |
[1.0] [vm:1:1]   +--------+--------------------+------------------------------------+
[1.0] [vm:1:1]   | Range  |    Description     |               Config               |
[1.0] [vm:1:1]   +--------+--------------------+------------------------------------+
{rows}
[1.0] [vm:1:1]   +--------+--------------------+------------------------------------+
[1.0] [vm:1:1]   | dst {where} cfg#1                                                |
[1.0] [vm:1:1]   | active message by ucp_am_send* from host memory |
[1.0] [vm:1:1]   |           0 | short                | shm/memory |
"""


def report(*rows: str) -> str:
    return REPORT.format(where="intra-node", rows="\n".join(f"[1.0] [vm:1:1]   | {row} |" for row in rows))


@pytest.mark.parametrize(
    ("rows", "transport"),
    [
        (["0..inf | zero-copy | cma/memory"], "cma"),
        (["0..inf | software emulation | tcp/lo"], "tcp"),
        (["0..8256 | zero-copy | rc_mlx5/mlx5_0:1", "8257..inf | zero-copy | 50% on rc_mlx5/mlx5_0:1"], "rc_mlx5"),
        (["0..inf | zero-copy | 53% on tcp/eth0 and 47% on tcp/eth1"], "tcp"),
        (["0..4096 | zero-copy | cma/memory", "4097..inf | software emulation | tcp/lo"], None),
        (["0..inf | zero-copy | something new"], None),
        ([], None),
    ],
)
def test_only_the_tables_of_reads_count_and_only_if_they_agree(rows: list[str], transport: str | None):
    assert read_transport(report(*rows)) == transport


def test_peers_with_different_transports_leave_the_path_unknown():
    both = report("0..inf | zero-copy | cma/memory") + report("0..inf | software emulation | tcp/eth0")
    assert read_transport(both) is None


def test_an_inherited_report_of_another_process_is_not_read(monkeypatch: pytest.MonkeyPatch):
    other = os.memfd_create("ucx-report-1-")
    os.write(other, report("0..inf | zero-copy | cma/memory").encode())
    monkeypatch.setenv("UCX_LOG_FILE", f"/proc/self/fd/{other}")
    assert ucx.read_report(1 << 20) == ""
    monkeypatch.setenv("UCX_LOG_FILE", "/nowhere/ucx.log")
    assert ucx.read_report(1 << 20) == ""
    os.close(other)


def can_unshare() -> bool:
    """True where this user may create network and process namespaces."""
    test = [*UNSHARE, "sh", "-c", MOUNT, "sh", "ip", "link", "show", "lo"]
    try:
        return subprocess.run(test, capture_output=True, check=False, timeout=10).returncode == 0
    except (OSError, subprocess.TimeoutExpired):
        return False


@pytest.mark.timeout(120)
@pytest.mark.skipif(nixl_available() is not None, reason="NIXL is not installed")
@pytest.mark.parametrize(("separate", "path"), [(False, "nixl/ucx (cma)"), (True, "nixl/ucx (tcp)")])
def test_the_path_over_namespaces_is_tcp_and_on_one_host_cma(separate: bool, path: str, tmp_path: Path):
    """Two containers are two network and process namespaces: the kernel then refuses to copy between processes."""
    if separate and not can_unshare():
        pytest.skip("this user may not create namespaces")
    assert namespace_pair.main(tmp_path, separate) == path
