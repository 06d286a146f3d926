"""Who may start without credit, and who may pass whom. Owned by `AdmissionQueue`; pure, time is an argument.

Credits may be wrong, so a request without one may start to ask the workers: one at a time, the next one when the one
before has its room, or `ASK_S` later, `MAX_ASKING` in all. Requests with credit pass those without, but nobody is
passed for good: after `MAX_OVERTAKES` starts past the first in line all others are held until that one has its room,
for `HOLD_S` at most, the second time for twice as long, and so on. Between two holds others pass it, so none is held
for good either.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from baton.services.router.admission.credits import Credits, DecodeRoom, Shortage
from baton.services.router.admission.slot import Slot

MAX_OVERTAKES = 64
"""As many prompts pass one that lacks pages at prefill, by default."""

MAX_ASKING = 4
"""Half of those that `reserve` lets ask at once, so that requests with credit can always ask."""

ASK_S = 2.0
HOLD_S = 10.0
SEEN_S = 1.0
"""A slot that asks does so several times in this while. With room for it all the time, it waits for something else."""


@dataclass(slots=True)
class _Request:
    """A slot that asks: what was short when it started, when that was, and since when there seems to be room for it."""

    shortage: Shortage
    started_at: float
    room_since: float | None = None


class StartRules:
    """The credits, the slots that started without and ask, and the slot that all others are held for."""

    def __init__(self) -> None:
        self._credits = Credits()
        self._asking: dict[Slot, _Request] = {}  # oldest first
        self._held_for: Slot | None = None
        self._held_until = 0.0

    def may_start(self, slot: Slot, now: float) -> bool:
        """True if a waiting slot may start."""
        if self._held_for is not None and self._is_held(now) and not self._is_held_for(slot):
            return False
        shortage = self._credits.shortage(slot.spec)
        return shortage is None or self._may_ask(shortage, now)

    def on_start(self, slot: Slot, first: Slot, now: float) -> Shortage | None:
        """Counts a slot that starts, before `first` in line if that is another one. Returns what it starts without."""
        shortage = self._credits.shortage(slot.spec)
        passed = [first] if first is not slot else []
        if self._asking:
            passed += [one for one, request in self._asking.items() if request.shortage is Shortage.DECODE][:1]
        for one in passed:
            one.num_overtakes += 1
            if one.num_overtakes >= MAX_OVERTAKES and not self._is_held(now) and self._credits.may_ever_fit(one.spec):
                one.num_overtakes, one.num_holds = 0, one.num_holds + 1
                self._held_for, self._held_until = one, now + HOLD_S * one.num_holds
        if shortage is None:
            self._credits.take(slot)
        else:
            self._asking[slot] = _Request(shortage, now)
        return shortage

    def on_rooms(self, rooms: Sequence[DecodeRoom], unplaced: Iterable[Slot], now: float) -> None:
        """Takes what workers announce; () if nothing is known. `unplaced`: running slots without room.

        A slot that asks, and for which there is room for `SEEN_S` or can be none, waits for something else.
        """
        self._credits.update(rooms, (slot for slot in unplaced if slot not in self._asking))
        for slot, request in list(self._asking.items()):
            if self._credits.shortage(slot.spec) is not None:
                request.room_since = None
            elif request.room_since is None:
                request.room_since = now
            seen = request.room_since is not None and now - request.room_since >= SEEN_S
            if seen or not self._credits.may_ever_fit(slot.spec):
                self._settle(slot)
        if not rooms:
            self._held_for = None

    def on_room(self, slot: Slot) -> bool:
        """The workers have room for a running slot. True if others may start because of it."""
        request = self._asking.get(slot)
        if request is not None and request.shortage is Shortage.PREFILL:
            return False  # it may wait for pages there
        return (request is not None or self._held_for is slot) and self._settle(slot)

    def on_first_token(self, slot: Slot) -> bool:
        """Prefill has done its part. True if others may start because of it."""
        given_back = self._credits.on_first_token(slot)
        return (slot in self._asking and self._settle(slot)) or given_back

    def on_gone(self, slot: Slot) -> bool:
        """It has left, waiting or running. True if others may start because of it. Idempotent."""
        self._credits.give_back(slot)
        return (slot in self._asking or self._held_for is slot) and self._settle(slot)

    def _settle(self, slot: Slot) -> bool:
        """It asks no more, and nobody is held for it."""
        asked, held = self._asking.pop(slot, None) is not None, self._held_for is slot
        if held:
            self._held_for = None
        return asked or held

    def _may_ask(self, shortage: Shortage, now: float) -> bool:
        """A step's time is known from announcements alone: no worker refuses a row for it."""
        if shortage is Shortage.STEP:
            return False
        asking = [request for request in self._asking.values() if request.shortage is shortage]
        return len(asking) < MAX_ASKING and all(now - one.started_at >= ASK_S for one in asking)

    def _is_held_for(self, slot: Slot) -> bool:
        """Within a tenant its own order holds, so one of higher priority may come first."""
        held = self._held_for
        if held is None or held is slot:
            return True
        return held.started_at is None and held.spec.tenant == slot.spec.tenant and slot.order < held.order

    def _is_held(self, now: float) -> bool:
        return self._held_for is not None and now < self._held_until
