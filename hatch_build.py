"""The package's build hook: compiles the native kernels; the package is built without them where that fails.

With REQUIRE_KERNELS set the build fails instead: images are built with it. Called by hatchling for wheels and editable
installs. A wheel with kernels is for one platform and every Python: the libraries take addresses and numbers only.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface


class KernelsHook(BuildHookInterface):  # type: ignore[type-arg]
    """Builds the libraries in the source tree, where an editable install finds them, and adds them to the wheel."""

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        sys.path.insert(0, self.root)
        try:
            from baton.model.kernels.build import BUILT_DIR, build_all
            from baton.model.kernels.platform_tag import platform_tag
        finally:
            sys.path.remove(self.root)
        built, missing = [], []
        for result in build_all(os.environ.get("CXX")):
            if result.failure is None:
                built.append(result.spec.path)
                build_data["artifacts"].append(f"/{result.spec.path.relative_to(Path(self.root).resolve())}")
            else:
                missing.append(result.spec.name)
                self.app.display_warning(f"no {result.spec.name}, slower code runs instead: {result.failure}")
        if missing and os.environ.get("REQUIRE_KERNELS"):
            raise RuntimeError(f"REQUIRE_KERNELS is set, and these are missing: {', '.join(missing)}; see above")
        self._missing = missing
        if built and version != "editable":
            build_data["pure_python"] = False
            build_data["tag"] = f"py3-none-{platform_tag(built)}"
        self.app.display_info(f"{len(built)} libraries of native kernels in {BUILT_DIR.name}/")

    def finalize(self, version: str, build_data: dict[str, Any], artifact_path: str) -> None:
        """The last lines of a build say what it lacks."""
        if self._missing:
            self.app.display_warning(f"WARNING: built without {', '.join(self._missing)}; workers are slower")
