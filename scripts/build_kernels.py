"""Builds the native kernels that are out of date, and says what it built or could not: `make kernels`, `make install`.

Ends with 0 all the same: where kernels are missing torch computes.
"""

from __future__ import annotations

import os

from baton.model.kernels.build import build_all


def main() -> None:
    for result in build_all(os.environ.get("CXX")):
        level = result.spec.level.value
        if result.is_new:
            print(f"built the {level} kernels")
        elif result.failure is not None:
            print(f"no {level} kernels, torch computes instead: {result.failure}")


if __name__ == "__main__":
    main()
