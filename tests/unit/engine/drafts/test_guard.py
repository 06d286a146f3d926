"""A drafter that lies about ids, raises or is slow costs its own drafts, and nothing else."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import pytest

from baton.domain.ids import AttemptId, RequestId
from baton.engine.drafts.base import NO_PROPOSAL, Proposal
from baton.engine.drafts.guard import MAX_MEAN_CALL_S, NUM_CALLS, GuardedDrafter

ID = AttemptId(RequestId("r"), 1)
VOCAB_SIZE = 10


@dataclass
class Clock:
    now: float = 0.0

    def __call__(self) -> float:
        return self.now


@dataclass
class ScriptedDrafter:
    """Proposes `tokens`; takes `seconds`; raises `error`."""

    clock: Clock = field(default_factory=Clock)
    tokens: tuple = ()
    seconds: float = 0.0
    error: Exception | None = None
    num_calls: int = 0

    def _called(self) -> None:
        self.num_calls += 1
        self.clock.now += self.seconds
        if self.error is not None:
            raise self.error

    def begin(self, id: AttemptId, tokens: Sequence[int], salt: str = "") -> None:
        self._called()

    def propose(self, id: AttemptId, max_tokens: int) -> Proposal:
        self._called()
        return Proposal(self.tokens, 2)

    def accepted(self, id: AttemptId, tokens: Sequence[int]) -> None:
        self._called()

    def end(self, id: AttemptId) -> None:
        self._called()


def guarded(drafter: ScriptedDrafter) -> tuple[GuardedDrafter, list[str]]:
    reasons: list[str] = []
    return GuardedDrafter(drafter, VOCAB_SIZE, reasons.append, drafter.clock), reasons


@pytest.mark.parametrize(
    ("proposed", "kept"),
    [
        ((1, 2, 3), (1, 2, 3)),
        ((1, 2, 3, 4, 5, 6), (1, 2, 3, 4)),
        ((1, -1, 3), (1,)),
        ((10, 1), ()),
        ((1, 2.0), (1,)),
        ((True, 2), ()),
        ((1, None), (1,)),
    ],
)
def test_a_proposal_is_cut_to_what_a_step_can_verify(proposed: tuple, kept: tuple[int, ...]):
    drafter, reasons = guarded(ScriptedDrafter(tokens=proposed))
    assert drafter.propose(ID, 4) == Proposal(kept, 2)
    assert reasons == []


@pytest.mark.parametrize(
    ("proposed", "kept"),
    [((-1,) * 3, (-1,) * 3), ((-1,) * 6, (-1,) * 4), ((-1, 2), ()), ((2, -1), (2,)), ((-2,), ()), ((), ())],
)
def test_placeholders_pass_where_the_runner_makes_drafts(proposed: tuple[int, ...], kept: tuple[int, ...]):
    drafter = GuardedDrafter(ScriptedDrafter(tokens=proposed), VOCAB_SIZE, pytest.fail, allows_placeholders=True)
    assert drafter.propose(ID, 4) == Proposal(kept, 2)


@pytest.mark.parametrize("call", ["begin", "propose", "accepted", "end"])
def test_a_drafter_that_raises_is_turned_off(call: str):
    broken = ScriptedDrafter(tokens=(1,), error=ValueError("no"))
    drafter, reasons = guarded(broken)
    arguments = {"begin": (ID, [1]), "propose": (ID, 1), "accepted": (ID, [1]), "end": (ID,)}
    assert getattr(drafter, call)(*arguments[call]) in (None, NO_PROPOSAL)
    assert reasons == ["it raised ValueError('no')"]
    broken.error = None
    assert drafter.propose(ID, 4) == NO_PROPOSAL
    assert (broken.num_calls, len(reasons)) == (1, 1)


def test_something_that_is_no_proposal_turns_it_off():
    drafter, reasons = guarded(ScriptedDrafter(tokens=None))  # type: ignore[arg-type]
    assert drafter.propose(ID, 4) == NO_PROPOSAL
    assert len(reasons) == 1


@pytest.mark.parametrize(("factor", "is_off"), [(0.9, False), (1.1, True)])
def test_a_slow_drafter_is_turned_off(factor: float, is_off: bool):
    slow = ScriptedDrafter(tokens=(1,), seconds=factor * MAX_MEAN_CALL_S)
    drafter, reasons = guarded(slow)
    for _ in range(2 * NUM_CALLS):
        drafter.propose(ID, 1)
    assert bool(reasons) == is_off
    assert slow.num_calls == (NUM_CALLS if is_off else 2 * NUM_CALLS)
