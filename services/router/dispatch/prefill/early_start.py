"""Decides whether a prompt may start at prefill before decode has reserved room for it. Used by `reserve`; pure.

A start that finds no room costs prefill a part of a prompt and the request an attempt. So it needs room for twice the
request in what the router knows of decode, and is off for a while when that view was wrong too often, and for a decode
worker that owes an answer for long: it may hang.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass

from baton.domain.arithmetic import ceil_div
from baton.domain.ids import AttemptId, Incarnation
from baton.services.router.dispatch.placement.pair import Pair

WINDOW_S = 10
MAX_WITHOUT_ROOM = 0.02
"""Share of the early starts of a window that may find no room; one always may."""

OFF_S = 30.0
MAX_SILENCE_S = 1.0
"""How long a decode worker may owe an answer. It answers between two steps of its engine."""


def has_room_twice(pair: Pair, num_tokens: int) -> bool:
    """True if `pair.decode`, with the router's own placements added, has rows and pages for two such prompts.

    A reservation has a row of its own before it runs, and may have a bound of its own.
    """
    load, budgets = pair.decode.load, pair.decode.budgets
    if load.running_rows + load.waiting_requests + 2 > budgets.rows:
        return False
    if budgets.reservations is not None and load.waiting_requests + 2 > budgets.reservations:
        return False
    return load.available_pages >= 2 * ceil_div(num_tokens + 1, pair.decode.page_size)


@dataclass(slots=True)
class _StartCounts:
    """Of one second."""

    number: int
    num_started: int = 0
    num_without_room: int = 0


class EarlyStartLimit:
    """Counts early starts and those without room, by the second, and knows who owes answers. Times are in seconds."""

    def __init__(self) -> None:
        self._seconds: deque[_StartCounts] = deque()
        self._off_until = 0.0
        self._asked: dict[Incarnation, dict[AttemptId, float]] = {}  # decode workers that owe answers; the oldest first

    def allows(self, now: float, decode: Incarnation) -> bool:
        """False for `OFF_S` after too many starts found no room, and while `decode` owes an answer for too long."""
        asked_at = next(iter(self._asked.get(decode, {}).values()), now)
        return now >= self._off_until and now - asked_at <= MAX_SILENCE_S

    def on_asked(self, decode: Incarnation, id: AttemptId, now: float) -> None:
        """A decode worker is asked for a reservation."""
        self._asked.setdefault(decode, {})[id] = now

    def on_answered(self, decode: Incarnation, id: AttemptId) -> None:
        """It has answered, or is asked no more. Idempotent."""
        asked = self._asked.get(decode, {})
        asked.pop(id, None)
        if not asked:
            self._asked.pop(decode, None)

    def on_started(self, now: float) -> None:
        """A prompt starts before its reservation."""
        self._second(now).num_started += 1

    def on_without_room(self, now: float) -> None:
        """No decode worker had room for such a prompt."""
        self._second(now).num_without_room += 1
        num_started = sum(one.num_started for one in self._seconds)
        if sum(one.num_without_room for one in self._seconds) > max(1.0, MAX_WITHOUT_ROOM * num_started):
            self._off_until = now + OFF_S
            self._seconds.clear()

    def _second(self, now: float) -> _StartCounts:
        """That of `now`. Forgets those before the window."""
        number, seconds = int(now), self._seconds
        while seconds and seconds[0].number <= number - WINDOW_S:
            seconds.popleft()
        if not seconds or seconds[-1].number != number:
            seconds.append(_StartCounts(number))
        return seconds[-1]
