"""A step-time model that knows what steps take: no clock passes while a simulated step runs."""

from __future__ import annotations

from collections.abc import Callable

from baton.domain.timing.step_time import StepShape, StepTimeModel


class ScriptedStepTime(StepTimeModel):
    """Predicts `seconds(shape)` from the first step on, and learns nothing."""

    def __init__(self, seconds: Callable[[StepShape], float]) -> None:
        super().__init__()
        self._seconds = seconds

    @property
    def reliable(self) -> bool:
        return True

    def predict(self, shape: StepShape) -> float:
        return self._seconds(shape)

    def observe(self, shape: StepShape, seconds: float, *, has_prompt: bool = True) -> None:
        pass


def attentive(shape: StepShape) -> float:
    """Seconds on a machine on which attention to a token costs as much as all else of one."""
    return 1.0 + shape.num_tokens + shape.chunk_pairs
