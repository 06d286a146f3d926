"""Chooses the native kernels of this process: the highest level that is built, supported and correct.

Called at load. The result holds for the process and is cached.
"""

from __future__ import annotations

import enum
import functools
from dataclasses import dataclass

import torch

from baton.model.kernels.library import Kernels, KernelsUnavailable, available_levels, load_kernels
from baton.model.loading.kernel_check import first_wrong_kernel


class KernelUse(enum.Enum):
    """Use of native kernels. `AUTO`: wherever correct ones are available."""

    AUTO = "auto"
    NEVER = "never"


@dataclass(frozen=True, slots=True)
class KernelChoice:
    """Kernels in use, if any. `note` names them for the log, or the reason why there are none or no higher level."""

    kernels: Kernels | None
    note: str


def choose_kernels(use: KernelUse, device: str) -> KernelChoice:
    """The kernels for `device`, set to torch's number of threads."""
    if use is KernelUse.NEVER:
        return KernelChoice(None, "no native kernels: switched off")
    if device != "cpu":
        return KernelChoice(None, f"no native kernels on {device}")
    chosen = best_kernels()
    if chosen.kernels is not None:
        chosen.kernels.set_threads(torch.get_num_threads())
    return chosen


@functools.cache
def best_kernels() -> KernelChoice:
    """The kernels for CPUs, with as many threads as they have: one at first."""
    try:
        levels = available_levels()
    except KernelsUnavailable as error:
        return KernelChoice(None, f"no native kernels: {error}")
    refused: list[str] = []
    for level in reversed(levels):
        kernels = load_kernels(level)
        wrong = first_wrong_kernel(kernels)
        if wrong is None:
            return KernelChoice(kernels, "; ".join([f"{level.value} kernels", *refused]))
        refused.append(f"not {level.value}: {wrong}")
    return KernelChoice(None, "; ".join(["no native kernels", *refused]))
