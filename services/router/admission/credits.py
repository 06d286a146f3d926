"""Tells whether a request that starts now finds room in both phases. Owned by `AdmissionQueue`; pure.

Workers announce free rows, free pages and the prompts that wait. Until the next announcement a router counts down what
it starts itself. What other routers start, and what ends at the workers, it learns from that announcement, so a credit
is a good guess and no promise: `Reserve` decides.
"""

from __future__ import annotations

import enum
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from baton.domain.timing.row_limit import RowObjective
from baton.services.router.admission.slot import Slot, SlotSpec


class Shortage(enum.Enum):
    """What a request lacks: pages at prefill; a row or pages at decode; time in decode's step."""

    PREFILL = "prefill"
    DECODE = "decode"
    STEP = "step"


@dataclass(slots=True)
class PrefillRoom:
    """`num_tokens`: prompt tokens that free pages hold beyond those of the `num_waiting` prompts that wait.

    A worker without prompts that wait takes any.
    """

    num_tokens: float
    num_waiting: int = 0

    def add(self, num_prompts: int, num_tokens: int) -> None:
        """Counts prompts of `num_tokens` each that start; negative: that end."""
        self.num_waiting = max(0, self.num_waiting + num_prompts)
        self.num_tokens -= num_prompts * num_tokens


@dataclass(slots=True)
class DecodeRoom:
    """Free rows and pages of a decode worker of `total_pages` pages. `prefills`: those that it takes prompts from.

    `local`: it computes prompts itself, too. `objective` None: its steps may take any time.
    """

    num_rows: int
    num_pages: int
    total_pages: int
    page_size: int
    prefills: Sequence[PrefillRoom] = ()
    local: bool = False
    objective: RowObjective | None = None

    def pages_of(self, num_tokens: int) -> int:
        """Pages of a reservation: the prompt and its first output token."""
        return num_tokens // self.page_size + 1

    def prefill_for(self, num_tokens: int) -> PrefillRoom | None:
        """The linked prefill worker that takes the prompt and has most room."""
        best: PrefillRoom | None = None
        for one in self.prefills:
            takes = not one.num_waiting or num_tokens <= one.num_tokens
            if takes and (best is None or one.num_tokens > best.num_tokens):
                best = one
        return best

    def add(self, num_rows: int, num_tokens: int) -> None:
        """Counts rows with prompts of `num_tokens` tokens that start; negative: that end."""
        self.num_rows -= num_rows
        self.num_pages -= num_rows * self.pages_of(num_tokens)
        if self.objective is not None:
            self.objective.add(num_rows, num_tokens)


_Answer = tuple[Shortage | None, DecodeRoom | None, PrefillRoom | None]
"""What is short, and the workers that a request takes room of."""


class Credits:
    """Rooms of the last announcements, less what was started since. Without announcements every request has credit."""

    def __init__(self) -> None:
        self._rooms: Sequence[DecodeRoom] = ()
        self._taken: dict[Slot, tuple[DecodeRoom, PrefillRoom | None]] = {}
        self._answers: dict[int, _Answer] = {}  # by prompt tokens, until a room changes

    def update(self, rooms: Sequence[DecodeRoom], unplaced: Iterable[Slot] = ()) -> None:
        """Takes announced rooms; () if none are known. `unplaced`: slots that started and are not in announcements."""
        self._rooms = rooms
        self._taken.clear()
        self._answers.clear()
        for slot in unplaced:
            self.take(slot)

    def shortage(self, spec: SlotSpec) -> Shortage | None:
        """What no pair of workers has for this request; None: it has credit. One token is computed by prefill alone."""
        if not self._rooms or spec.max_tokens <= 1:
            return None
        answer = self._answers.get(spec.num_tokens)
        if answer is None:
            answer = self._answers[spec.num_tokens] = self._find(spec.num_tokens)
        return answer[0]

    def may_ever_fit(self, spec: SlotSpec) -> bool:
        """True if some decode worker would have the pages if it were empty."""
        return any(room.pages_of(spec.num_tokens) <= room.total_pages for room in self._rooms)

    def take(self, slot: Slot) -> None:
        """Counts a slot that starts. Placement will choose its workers; here they are the ones with most pages."""
        self.shortage(slot.spec)
        _, decode, prefill = self._answers.get(slot.spec.num_tokens, (None, None, None))
        if decode is None or slot in self._taken or slot.spec.max_tokens <= 1:
            return
        decode.add(1, slot.spec.num_tokens)
        if prefill is not None:
            prefill.add(1, slot.spec.num_tokens)
        self._taken[slot] = decode, prefill
        self._answers.clear()

    def on_first_token(self, slot: Slot) -> bool:
        """Prefill has computed the prompt. True if that gives credit back."""
        decode, prefill = self._taken.get(slot, (None, None))
        if decode is None or prefill is None:
            return False
        prefill.add(-1, slot.spec.num_tokens)
        self._taken[slot] = decode, None
        self._answers.clear()
        return True

    def give_back(self, slot: Slot) -> None:
        """Counts a slot that has left, if it was counted since the last announcement. Idempotent."""
        taken = self._taken.pop(slot, None)
        if taken is None:
            return
        decode, prefill = taken
        decode.add(-1, slot.spec.num_tokens)
        if prefill is not None:
            prefill.add(-1, slot.spec.num_tokens)
        self._answers.clear()

    def _find(self, num_tokens: int) -> _Answer:
        """The best of what each room is short of."""
        best: _Answer = Shortage.DECODE, None, None
        for room in self._rooms:
            if room.num_rows <= 0 or room.pages_of(num_tokens) > room.num_pages:
                continue
            prefill = None if room.local else room.prefill_for(num_tokens)
            shortage = None if room.local or prefill is not None else Shortage.PREFILL
            if room.objective is not None and not room.objective.allows(1, num_tokens):
                shortage = Shortage.STEP
            rank, best_rank = _RANKS.index(shortage), _RANKS.index(best[0])
            if rank < best_rank or (rank == best_rank and (best[1] is None or room.num_pages > best[1].num_pages)):
                best = shortage, room, prefill
        return best


_RANKS = (None, Shortage.PREFILL, Shortage.STEP, Shortage.DECODE)
