"""Reads UCX's own report of the protocols that it chose: the only true source of a link's transport.

UCX prints one table for each kind of endpoint and operation when it chooses a protocol (`UCX_PROTO_INFO`), into a file
in memory that `baton.settings.ucx` gives it. NIXL's API does not tell. Times are no proof: a small read over TCP
on one host may be as fast as a kernel copy.
"""

from __future__ import annotations

import re

_READ_TITLE = re.compile(r"\| remote memory read by ucp_get")
_ROW = re.compile(r"\|\s*(?P<range>\d+\S*)\s*\|(?P<description>[^|]*)\|(?P<config>[^|]*)\|")
_TRANSPORT = re.compile(r"\b([a-z][a-z0-9_]*)/[\w.:-]+")
MAX_REPORT_BYTES = 4 * 1024 * 1024


def read_transport(report: str) -> str | None:
    """The one transport that reads take in this process, such as `cma`, `tcp` or `rc_mlx5`.

    None if the report names none, or several: it does not tell which peer a table is for.
    """
    found: set[str] = set()
    in_read = False
    for line in report.splitlines():
        if _READ_TITLE.search(line):
            in_read = True
        elif (row := _ROW.search(line)) is not None:
            if in_read:
                names = _TRANSPORT.findall(row["config"])
                found.update(names or ["?"])
        elif "| remote memory" in line or "| active message" in line or "| tagged" in line or "cfg#" in line:
            in_read = False
    return found.pop() if len(found) == 1 and "?" not in found else None
