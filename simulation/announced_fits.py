"""Step-time fits that simulated workers announce: right, wrong or absurd ones. Routers place prompts by them.

No step of a simulation takes time that an engine could learn from, so fits are drawn. A wrong fit may send prompts to a
worse worker, and must not do more.
"""

from __future__ import annotations

import enum
from random import Random

from baton.domain.timing.step_time import UNITS, StepTimeFit

CHANGE_SHARE = 0.2
"""Of the announcements that come with another fit than the last."""
MANY_S = 1e6
ENDLESS_S = 1e300
"""JSON has neither infinity nor NaN, so no worker can announce these."""


class FitKind(enum.Enum):
    """Kinds of fits."""

    NONE = "none"  # the worker has learned too little
    RIGHT = "right"  # within a factor of two
    WRONG = "wrong"  # by up to a thousand times
    ABSURD = "absurd"  # free or endless prompts, prompts that get cheaper, too few numbers


class AnnouncedFits:
    """The fits of one worker, one after another."""

    def __init__(self, rng: Random, mean_step_s: float) -> None:
        self._rng = rng
        self._mean_step_s = mean_step_s
        self._fit = self._draw()

    def next(self) -> StepTimeFit | None:
        """The fit of the next announcement."""
        if self._rng.random() < CHANGE_SHARE:
            self._fit = self._draw()
        return self._fit

    def _draw(self) -> StepTimeFit | None:
        match self._rng.choice(list(FitKind)):
            case FitKind.RIGHT:
                return self._scaled(self._rng.uniform(0.5, 2.0))
            case FitKind.WRONG:
                return self._scaled(10 ** self._rng.uniform(-3.0, 3.0))
            case FitKind.ABSURD:
                return self._absurd()
        return None

    def _scaled(self, factor: float) -> StepTimeFit:
        """A step's constant part, and a little for each token, pair and context."""
        weights = (1.0, *(self._rng.uniform(0.0, 0.5) for _ in UNITS[1:]))
        return StepTimeFit(tuple(factor * self._mean_step_s * weight for weight in weights), self._mean_step_s / 10)

    def _absurd(self) -> StepTimeFit:
        size = len(UNITS)
        value = self._rng.choice([0.0, -1.0, MANY_S, ENDLESS_S, -ENDLESS_S])
        return self._rng.choice(
            [
                StepTimeFit((value,) * size, 0.0),
                StepTimeFit((0.0,) * size, value),
                StepTimeFit((-MANY_S, *(MANY_S for _ in UNITS[1:])), 0.0),
                StepTimeFit((self._mean_step_s,) * (size - 1), 0.0),
                StepTimeFit((), 0.0),
            ]
        )
