"""Which kernels this process computes with: the best level that is built, that the CPU has, and that computes rightly.

Called at load. What is found holds for the process, so it is found once.
"""

from __future__ import annotations

import enum
import functools
from dataclasses import dataclass

import torch

from baton.model.kernels.library import Kernels, KernelsUnavailable, available_levels, load_kernels
from baton.model.loading.kernel_check import first_wrong_kernel


class KernelUse(enum.Enum):
    """Whether to compute with native kernels. `AUTO`: wherever there are right ones."""

    AUTO = "auto"
    NEVER = "never"


@dataclass(frozen=True, slots=True)
class KernelChoice:
    """The kernels in use, if any. `note` names them, or says why there are none or no better ones, for the log."""

    kernels: Kernels | None
    note: str


def choose_kernels(use: KernelUse, device: str) -> KernelChoice:
    """What to compute with on `device`; the kernels compute with as many threads as torch does."""
    if use is KernelUse.NEVER:
        return KernelChoice(None, "no native kernels: switched off")
    if device != "cpu":
        return KernelChoice(None, f"no native kernels on {device}")
    chosen = _best_level()
    if chosen.kernels is not None:
        chosen.kernels.set_threads(torch.get_num_threads())
    return chosen


@functools.cache
def _best_level() -> KernelChoice:
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
