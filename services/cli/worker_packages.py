"""The packages of the extra `worker`: whether they are here, and a message that names the extra where they are not.

Called before a command imports a model. A router needs none of them.
"""

from __future__ import annotations

import importlib.util

from baton.domain.errors import BatonError

WORKER_PACKAGES = {
    "torch": "torch",
    "transformers": "transformers",
    "safetensors": "safetensors",
    "PIL": "pillow",
    "grpc_health": "grpcio-health-checking",
    "grpc_reflection": "grpcio-reflection",
}
"""Import name -> package."""


class PackagesMissing(BatonError):
    """Packages of an extra are not installed."""

    code = "packages_missing"


def absent(names: tuple[str, ...]) -> frozenset[str]:
    """Those of the import names that cannot be imported here."""
    return frozenset(name for name in names if importlib.util.find_spec(name) is None)


def require_worker_packages(who: str) -> None:
    """Raises `PackagesMissing` if `who` could not be started for want of a package."""
    missing = absent(tuple(WORKER_PACKAGES))
    if missing:
        names = ", ".join(package for name, package in WORKER_PACKAGES.items() if name in missing)
        raise PackagesMissing(
            f"{who} needs {names}: pip install 'baton-serve[worker]'. A router alone needs none of them."
        )
