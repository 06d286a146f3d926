"""Common state of record syncs and call syncs: how far the stored copy can be trusted. Owned by a sync."""

from __future__ import annotations

import enum
from dataclasses import dataclass

import structlog

from baton.domain.errors import Broken, Superseded
from baton.domain.ids import RequestId
from baton.store.store import RecordLost

_log = structlog.get_logger(__name__)
_MAX_CONFLICTS = 3


class SyncPhase(enum.Enum):
    """Next step of a sync: write its record at once, or with the next journals; wait for journals to be written; none
    until the next change.
    """

    WRITE = "write"
    HOLD = "hold"
    JOURNAL = "journal"
    DONE = "done"


@dataclass(slots=True)
class SyncStatus:
    """`stale`: read the stored record before the next write. `given_up`: never write the record again. `refused`: the
    store refused its write in a chain; the next one is alone, and tells why.

    `superseded`: given up because another router has taken over. `num_conflicts` counts contradictions by the store in
    a row: one is a record that the server lost, more are a fault.
    """

    stale: bool = False
    refused: bool = False
    given_up: bool = False
    superseded: bool = False
    num_conflicts: int = 0

    @property
    def alone(self) -> bool:
        """There is a next write, which is no part of a chain."""
        return not self.given_up and (self.stale or self.refused)

    def failed(self, id: RequestId, error: Exception) -> None:
        """Records a failed run: a conflict makes the sync stale, other errors and repeated conflicts give it up."""
        self.superseded = isinstance(error, Superseded)
        if isinstance(error, (Broken, RecordLost)) and self.num_conflicts + 1 < _MAX_CONFLICTS:
            self.stale = True
            self.num_conflicts += 1
            return
        self.given_up = True
        _log.warning("request_record_abandoned", request_id=id, reason=str(error))
