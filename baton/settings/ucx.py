"""Environment variables of NIXL and UCX, which read them once, when they are loaded.

Called before NIXL is imported. The rest of NIXL's use is in `baton.transfer`.
"""

from __future__ import annotations

import ctypes
import os
import sys
from collections.abc import Mapping
from pathlib import Path

from baton.domain.errors import Broken

# Both libraries log to standard output. With UCX's default 8 KiB segments a READ over TCP is five times slower. Its
# default CMA segments of 512 KiB make a copy on one host an eighth slower than one segment a post.
DEFAULTS: Mapping[str, str] = {
    "NIXL_LOG_LEVEL": "WARN",
    "UCX_LOG_LEVEL": "error",
    "UCX_CMA_SEG_SIZE": "16m",
    "UCX_TCP_TX_SEG_SIZE": "256k",
    "UCX_TCP_RX_SEG_SIZE": "256k",
}
_HOST_ONLY: Mapping[str, str] = {"UCX_MEM_EVENTS": "n"}
"""Defaults on a host without such devices. To see unmapped memory, UCX patches functions of the C library, for which it
waits 0.4 s, a core busy; only registrations with these devices are kept and need it."""
_DEVICES = (Path("/sys/class/infiniband"), Path("/proc/driver/nvidia"), Path("/dev/kfd"))
"""There with an adapter for RDMA, or with a GPU of NVIDIA or AMD."""
_LOG_FILE = "UCX_LOG_FILE"
_OWN_FILES = "/proc/self/fd/"
_LIBRARIES = ("nixl_cu12", "nixl_cu13")


def defaults() -> Mapping[str, str]:
    """The variables that are set on this host, unless they are set already."""
    return DEFAULTS if any(device.exists() for device in _DEVICES) else {**DEFAULTS, **_HOST_ONLY}


def prepare_environment(overrides: Mapping[str, str]) -> None:
    """Sets the variables of NIXL and UCX: `overrides` first, then the existing environment, then the defaults.

    `UCX_NET_DEVICES` has no default: UCX then uses every network device.
    Raises `Broken` if a loaded library would not see a change.
    """
    wanted = {name: value for name, value in defaults().items() if name not in os.environ} | dict(overrides)
    changed = {name: value for name, value in wanted.items() if os.environ.get(name) != value}
    loaded = [library for library in _LIBRARIES if library in sys.modules]
    if changed and loaded:
        raise Broken(f"{loaded[0]} was loaded before {', '.join(sorted(changed))} could be set")
    os.environ.update(changed)


def open_report() -> None:
    """Has UCX report its protocols into a file in memory, unless the operator chose a log file. Call it before loading.

    The file belongs to this process and ends with it. An inherited name is that of another process's file.
    """
    inherited = os.environ.get(_LOG_FILE, _OWN_FILES).startswith(_OWN_FILES)
    if inherited and not any(library in sys.modules for library in _LIBRARIES):
        file = os.memfd_create(_report_name())
        os.environ.update({_LOG_FILE: f"{_OWN_FILES}{file}", "UCX_PROTO_INFO": "y"})


def read_report(max_bytes: int) -> str:
    """The end of UCX's report in this process; "" if there is none."""
    path = os.environ.get(_LOG_FILE, "")
    try:
        if not path.startswith(_OWN_FILES) or _report_name() not in os.readlink(path):
            return ""
        ctypes.CDLL(None).fflush(None)  # UCX writes through a buffered stream
        with open(path, "rb") as file:
            file.seek(max(0, file.seek(0, os.SEEK_END) - max_bytes))
            return file.read(max_bytes).decode(errors="replace")
    except OSError:
        return ""


def _report_name() -> str:
    return f"ucx-report-{os.getpid()}-"
