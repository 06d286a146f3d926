"""Builds outdated native kernels and prints what was built or failed: `make kernels`, `make install`.

Exits with 0 in either case: torch computes where kernels are missing.
"""

from __future__ import annotations

import os

from baton.model.kernels.build import build_all


def main() -> None:
    failed = []
    for result in build_all(os.environ.get("CXX")):
        name = result.spec.name
        if result.is_new:
            print(f"built the {name}")
        elif result.failure is not None:
            failed.append(name)
            print(f"no {name}: {result.failure}")
    if failed:
        print(f"WARNING: missing: {', '.join(failed)}; workers that need them are several times slower.")
        print("Once the reason above is gone: make kernels")


if __name__ == "__main__":
    main()
