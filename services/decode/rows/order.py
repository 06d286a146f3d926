"""Which row gives way when pages run out, and which preempted row comes back first. Pure; time is an argument.

Without priorities: the newest gives way, the oldest comes back. With them: the lowest level gives way and the highest
comes back, ties as without. A row's level is the priority of its request. It gains one for each `AGEING_S` that the row
waits preempted, and keeps it, so no row is preempted for ever. A row that came back keeps its pages for `MIN_TOKENS`
tokens, as long as another row can give way.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol, TypeVar

AGEING_S = 2.0
MIN_TOKENS = 32


class LeveledRow(Protocol):
    """A row as the order sees it. `resumed_with`: its output tokens when it last came back."""

    arrival_number: int
    level: float
    preempted_at: float
    resumed_with: int | None

    @property
    def num_output_tokens(self) -> int: ...


R = TypeVar("R", bound=LeveledRow)


@dataclass(frozen=True, slots=True)
class RowOrder:
    """The order of one worker's rows."""

    by_priority: bool = False

    def victim(self, running: Sequence[R], fits: Callable[[R], bool] = lambda _: True) -> R:
        """The row that gives way; `running` is in order of arrival and not empty.

        `fits`: host memory has room for the row. A row without room, which would be sent back, is spared if another
        has room that ranks like it. The oldest row never steps in: so one always goes on.
        """
        worst = min(running, key=self._rank)
        if fits(worst):
            return worst
        ties = [row for row in running[1:] if self._rank(row)[:2] == self._rank(worst)[:2] and fits(row)]
        return min(ties, key=self._rank, default=worst)

    def next_back(self, preempted: Sequence[R], now: float) -> R:
        """The row that comes back first; `preempted` is in order of arrival and not empty."""
        if not self.by_priority:
            return preempted[0]
        return max(preempted, key=lambda row: (row.level + _gained(row, now), -row.arrival_number))

    def on_resumed(self, row: LeveledRow, now: float) -> None:
        """Gives a row that comes back the level that it has waited for."""
        row.level += _gained(row, now)
        row.resumed_with = row.num_output_tokens

    def _rank(self, row: LeveledRow) -> tuple[bool, float, int]:
        """The smallest gives way."""
        if not self.by_priority:
            return False, 0.0, -row.arrival_number
        return _is_protected(row), row.level, -row.arrival_number


def _gained(row: LeveledRow, now: float) -> int:
    return int((now - row.preempted_at) / AGEING_S)


def _is_protected(row: LeveledRow) -> bool:
    return row.resumed_with is not None and row.num_output_tokens - row.resumed_with < MIN_TOKENS
