"""Levels of the native kernels that tests can run here: all that are built and that this CPU supports."""

from __future__ import annotations

from baton.model.kernels.build import IsaLevel
from baton.model.kernels.library import KernelsUnavailable, available_levels


def kernel_levels() -> tuple[IsaLevel, ...]:
    try:
        return available_levels()
    except KernelsUnavailable:
        return ()
