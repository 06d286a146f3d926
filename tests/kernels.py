"""Which levels of the native kernels tests can run here: all that are built and that this CPU has, or none."""

from __future__ import annotations

from baton.model.kernels.build import IsaLevel
from baton.model.kernels.library import KernelsUnavailable, available_levels


def kernel_levels() -> tuple[IsaLevel, ...]:
    try:
        return available_levels()
    except KernelsUnavailable:
        return ()
