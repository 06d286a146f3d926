"""Builds outdated native kernels and prints what was built or failed: `make kernels`, `make install`.

Exits with 0 in either case: torch computes where kernels are missing.
"""

from __future__ import annotations

import os

from baton.model.kernels.build import build_all


def main() -> None:
    failed = []
    for result in build_all(os.environ.get("CXX")):
        level = result.spec.level.value
        if result.is_new:
            print(f"built the {level} kernels")
        elif result.failure is not None:
            failed.append(level)
            print(f"no {level} kernels: {result.failure}")
    if failed:
        print(f"WARNING: the {', '.join(failed)} kernels are missing; workers that need them are several times slower.")
        print("Once the reason above is gone: make kernels")


if __name__ == "__main__":
    main()
