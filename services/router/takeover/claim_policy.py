"""Decides when a router claims a call that it follows. Owned by `takeover`, one a call; pure, time is an argument.

Follows `baton.domain.ownership`. A call that the store has lost, or that it shows below a ballot that was seen, is
claimed only after the patience: its owner, if it lives, puts it again within that time.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass

from baton.domain.ids import Ballot, OwnerId
from baton.domain.ownership import CallRole, RoleEvent, change_role
from baton.store.store import NO_BALLOT, CallRecord, CallStatus

CLAIM_BACKOFF_S = (0.5, 1.0, 2.0, 4.0)
"""Pauses after a claim that was denied, or that workers have overruled; the last one repeats."""


class ClaimStep(enum.Enum):
    """The next step of a router that follows a call."""

    FOLLOW = "follow"
    CLAIM = "claim"
    FINISH = "finish"  # the journal cannot grow any more
    GIVE_UP = "give_up"  # nobody has the call


@dataclass(frozen=True, slots=True)
class CallClaim:
    """Arguments of `CallStore.claim_call`."""

    ballot: Ballot
    floor: int
    seed: CallRecord | None


class ClaimPolicy:
    """State of one call on this router. `seed`: a copy of the call, to enter it again."""

    def __init__(self, owner: OwnerId, patience_s: float, seed: CallRecord | None = None) -> None:
        self.role = CallRole.READER
        self.seed = seed
        self._owner = owner
        self._patience_s = patience_s
        self._seen = NO_BALLOT
        self._impatient_since: float | None = None
        self._num_denied = 0
        self._claims_from = 0.0
        self._decided_at = 0.0

    def on_superseded(self, seen: Ballot | None, now: float) -> None:
        """This router ran the call, and its attempt was refused. `seen`: the ballot that refused it, if known."""
        was_granted, is_newer = self.role is CallRole.OWNER, seen is not None and seen > self._seen
        self.role = change_role(CallRole.OWNER, RoleEvent.WORKER_NEWER if is_newer else RoleEvent.STORE_NEWER)
        self._seen = max(self._seen, seen or NO_BALLOT)
        self._impatient_since = None
        if was_granted:
            self._back_off(now)

    def on_outage(self) -> None:
        """The store did not answer: the patience begins again."""
        self._impatient_since = None

    def decide(self, record: CallRecord | None, *, runs_here: bool, now: float) -> ClaimStep:
        """The next step for the call as the store shows it; None: the store does not have it."""
        if now - self._decided_at > self._patience_s:  # this process stood still: what it saw before proves nothing
            self._impatient_since = None
        self._decided_at = now
        if record is not None and record.body:
            self.seed = record
        if record is not None and record.status is CallStatus.ENDED:
            self.role = CallRole.OVER
            return ClaimStep.FINISH
        if runs_here or self.role is CallRole.CLAIMING:
            self._impatient_since = None
            return ClaimStep.FOLLOW
        if self.role is CallRole.OWNER:  # its run has ended, and the call has not
            self.role = CallRole.READER
        if record is not None and record.ballot >= self._seen:
            self._impatient_since = None
            self.role = CallRole.READER
            unattended = record.status is CallStatus.ABANDONED or record.owner == self._owner
            return self._claim(RoleEvent.UNATTENDED, now) if unattended else ClaimStep.FOLLOW
        if self._impatient_since is None:
            self._impatient_since = now
        if now - self._impatient_since < self._patience_s:
            return ClaimStep.FOLLOW
        if record is None and self.seed is None:
            self.role = CallRole.OVER
            return ClaimStep.GIVE_UP
        return self._claim(RoleEvent.PATIENCE, now)

    def claim(self, record: CallRecord | None) -> CallClaim:
        """The claim that `decide` asked for, of the same record."""
        if record is None:
            return CallClaim(NO_BALLOT, self._seen[0], self.seed)
        return CallClaim(record.ballot, self._seen[0], None)

    def on_answer(self, granted: Ballot | None, now: float) -> None:
        """The answer to a claim; None: denied, or none came."""
        self.role = change_role(self.role, RoleEvent.DENIED if granted is None else RoleEvent.GRANTED)
        self._impatient_since = None
        if granted is None:
            self._back_off(now)
        else:
            self._seen = max(self._seen, granted)

    def _claim(self, event: RoleEvent, now: float) -> ClaimStep:
        if now < self._claims_from:
            return ClaimStep.FOLLOW
        self.role = change_role(self.role, event)
        return ClaimStep.CLAIM

    def _back_off(self, now: float) -> None:
        self._claims_from = now + CLAIM_BACKOFF_S[min(self._num_denied, len(CLAIM_BACKOFF_S) - 1)]
        self._num_denied += 1
