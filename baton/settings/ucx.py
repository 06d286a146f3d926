"""Environment variables of NIXL and UCX, which read them once, when they are loaded.

Called before NIXL is imported. The rest of NIXL's use is in `baton.transfer`.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping

from baton.domain.errors import Broken

# Both libraries log to standard output. With UCX's default 8 KiB segments a READ over TCP is five times slower.
DEFAULTS: Mapping[str, str] = {
    "NIXL_LOG_LEVEL": "WARN",
    "UCX_LOG_LEVEL": "error",
    "UCX_TCP_TX_SEG_SIZE": "256k",
    "UCX_TCP_RX_SEG_SIZE": "256k",
}
_LIBRARIES = ("nixl_cu12", "nixl_cu13")


def prepare_environment(overrides: Mapping[str, str]) -> None:
    """Sets the variables of NIXL and UCX: `overrides` first, then the existing environment, then `DEFAULTS`.

    `UCX_NET_DEVICES` has no default: UCX then uses every network device.
    Raises `Broken` if a loaded library would not see a change.
    """
    wanted = {name: value for name, value in DEFAULTS.items() if name not in os.environ} | dict(overrides)
    changed = {name: value for name, value in wanted.items() if os.environ.get(name) != value}
    loaded = [library for library in _LIBRARIES if library in sys.modules]
    if changed and loaded:
        raise Broken(f"{loaded[0]} was loaded before {', '.join(sorted(changed))} could be set")
    os.environ.update(changed)
