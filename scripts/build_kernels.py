"""Builds the native kernels that are out of date, and says what it built or could not: `make kernels`, `make install`.

Ends with 0 all the same: where kernels are missing torch computes.
"""

from __future__ import annotations

import os

from baton.model.kernels.build import build_all


def main() -> None:
    for outcome in build_all(os.environ.get("CXX")):
        level = outcome.recipe.level.value
        if outcome.is_new:
            print(f"built the {level} kernels")
        elif outcome.failure is not None:
            print(f"no {level} kernels, torch computes instead: {outcome.failure}")


if __name__ == "__main__":
    main()
