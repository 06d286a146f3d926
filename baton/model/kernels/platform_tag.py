"""The platform tag of a wheel with native libraries: the oldest systems that have every symbol which they import.

Imports the standard library only, as `build` does: the build hook calls it. Source: PEP 600, and the symbol versions
that auditwheel allows for each tag.
"""

from __future__ import annotations

import re
import sysconfig
from collections.abc import Iterable
from pathlib import Path

OLDEST_GLIBC = 17
"""Minor version of manylinux2014, which every supported pip knows."""

_GLIBC = re.compile(rb"(?<![\w.])GLIBC_2\.(\d+)")
# Symbol versions of the C++ library: the highest that systems have, with the minor version of their glibc.
_CXX: tuple[tuple[re.Pattern[bytes], tuple[tuple[int, int], ...]], ...] = (
    (
        re.compile(rb"(?<![\w.])GLIBCXX_3\.4\.(\d+)"),
        ((19, 17), (22, 24), (24, 27), (28, 31), (29, 34), (30, 35), (33, 39)),
    ),
    (
        re.compile(rb"(?<![\w.])CXXABI_1\.3\.(\d+)"),
        ((7, 17), (10, 24), (11, 27), (12, 31), (13, 34), (15, 39)),
    ),
)


def platform_tag(libraries: Iterable[Path], system: str | None = None) -> str:
    """`manylinux_2_N_x86_64` for libraries of Linux on x86-64, otherwise the tag of this machine alone.

    Also this machine's where the libraries import what no known tag allows, or nothing of glibc. Raises `OSError`.
    """
    own = (system or sysconfig.get_platform()).replace("-", "_").replace(".", "_")
    if own != "linux_x86_64":
        return own
    needed = OLDEST_GLIBC
    for path in libraries:
        minor = _needed_glibc(path.read_bytes())
        if minor is None:
            return own
        needed = max(needed, minor)
    return f"manylinux_2_{needed}_x86_64"


def _needed_glibc(library: bytes) -> int | None:
    """Minor version of the oldest glibc whose systems can load a library; None if unknown."""
    needed = [int(minor) for minor in _GLIBC.findall(library)]
    if not needed:
        return None
    for pattern, table in _CXX:
        highest = max((int(number) for number in pattern.findall(library)), default=0)
        glibc = next((glibc for has, glibc in table if highest <= has), None)
        if glibc is None:
            return None
        needed.append(glibc)
    return max(needed)
