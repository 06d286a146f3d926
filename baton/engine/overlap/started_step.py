"""A step that a loop has started and whose result it has not taken."""

from __future__ import annotations

from dataclasses import dataclass

from baton.engine.batch import Batch, StepInFlight


@dataclass(frozen=True, slots=True)
class StartedStep:
    """A batch, the runner's step of it, and the time of its start."""

    batch: Batch
    step: StepInFlight
    started_at: float
