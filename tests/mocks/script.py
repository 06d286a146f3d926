"""What a scripted worker does instead of the usual, and when."""

from __future__ import annotations

import enum
from dataclasses import dataclass

from baton.domain.ids import AttemptId


class Phase(enum.Enum):
    """Phases for actions: before each of these, and once after the seal."""

    RESERVE = "reserve"
    ACCEPT = "accept"
    SCORE = "score"
    SEAL = "seal"
    SEALED = "sealed"
    IMPORT = "import"
    DECODE = "decode"


@dataclass(frozen=True, slots=True)
class Hold:
    """Stop here until `release`, or until the peer ends the call."""


@dataclass(frozen=True, slots=True)
class Fail:
    """Report a failure by its code. `seen`: the newer attempt of a `superseded`; its request does not matter."""

    code: str
    seen: AttemptId | None = None


@dataclass(frozen=True, slots=True)
class Busy:
    """Refuse a reservation for now. `no_prompts`: because the prompt was to be computed there."""

    retry_after_s: float = 0.01
    no_prompts: bool = False


@dataclass(frozen=True, slots=True)
class Crash:
    """Stop the server at once, breaking every call."""


@dataclass(frozen=True, slots=True)
class Skip:
    """Leave out one token index."""


Action = Hold | Fail | Busy | Crash | Skip


@dataclass(slots=True)
class ScriptedAction:
    """Do `action` on reaching `phase`, `times` times; DECODE is reached before each token, this before `index`."""

    phase: Phase
    action: Action
    times: int = 1
    index: int | None = None
