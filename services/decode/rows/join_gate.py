"""Holds a decode step for rows whose prompts are sealed and whose last reads are under way. Pure.

Prompts that prefill computed in one step are sealed together, and their reads end within milliseconds of each other.
Without a wait the first row to join begins a step alone, and the others wait for its end: a whole step.
"""

from __future__ import annotations

MAX_HOLD_S = 0.01
"""Longest wait before a step, in seconds."""

HOLD_SHARE = 0.25
"""Most of the last step's time that a wait may take."""


JOINS_WITHIN_S = 0.05
"""How long after its seal, in seconds, a prompt's last reads are waited for: a source that hangs holds up no more."""


class JoinGate:
    """Bounds the wait of running rows for joining ones, so that it costs all rows together no more than it gains.

    A joining row gains a step. So `num_running` rows wait at most `num_joining / num_running` of one, never more than
    `HOLD_SHARE` of it or `MAX_HOLD_S`. There is one wait a step, and it ends at once when nothing is joining any more.

        steps --(rows are joining)--> holds --(none is joining | the bound has passed)--> steps

    Times are those of the engine's clock, in seconds. Owned by the engine thread.
    """

    def __init__(self) -> None:
        self._began_at: float | None = None
        self._until: float | None = None

    def holds(self, num_joining: int, num_running: int, last_step_s: float, now: float) -> bool:
        """True if the next step waits still. `last_step_s`: time of the last step; 0.0 before the first: no wait."""
        if num_joining == 0 or num_running == 0:
            self._until = None
            return False
        if self._began_at is None:
            self._began_at = now
        bound_s = last_step_s * min(HOLD_SHARE, num_joining / num_running)
        until = self._began_at + min(MAX_HOLD_S, bound_s)
        self._until = until if now < until else None
        return self._until is not None

    def on_step(self) -> None:
        """A step begins: the next one may wait again."""
        self._began_at = self._until = None

    def next_wakeup(self) -> float | None:
        """When the wait ends at the latest; None without one."""
        return self._until
