"""The package's build hook: compiles the native kernels; the package is built without them where that fails.

Called by hatchling for wheels and editable installs. A wheel with kernels is for one platform and every Python: the
libraries take addresses and numbers only.
"""

from __future__ import annotations

import os
import sys
import sysconfig
from pathlib import Path
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface


class KernelsHook(BuildHookInterface):  # type: ignore[type-arg]
    """Builds the libraries in the source tree, where an editable install finds them, and adds them to the wheel."""

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        sys.path.insert(0, self.root)
        try:
            from baton.model.kernels.build import BUILT_DIR, build_all
        finally:
            sys.path.remove(self.root)
        built = 0
        for result in build_all(os.environ.get("CXX")):
            if result.failure is None:
                built += 1
                build_data["artifacts"].append(f"/{result.spec.path.relative_to(Path(self.root).resolve())}")
            else:
                self.app.display_warning(f"no {result.spec.name}, slower code runs instead: {result.failure}")
        if built and version != "editable":
            build_data["pure_python"] = False
            build_data["tag"] = f"py3-none-{_platform()}"
        self.app.display_info(f"{built} libraries of native kernels in {BUILT_DIR.name}/")


def _platform() -> str:
    return sysconfig.get_platform().replace("-", "_").replace(".", "_")
