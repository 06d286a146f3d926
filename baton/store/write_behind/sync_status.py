"""How far a sync may trust what it believes the store holds. Owned by a sync; knows no record."""

from __future__ import annotations

from collections.abc import Awaitable
from dataclasses import dataclass

import structlog

from baton.domain.errors import Broken, Superseded
from baton.domain.ids import RequestId
from baton.store.store import StoreUnavailable

_log = structlog.get_logger(__name__)
_MAX_CONFLICTS = 3


@dataclass(slots=True)
class SyncStatus:
    """`stale`: ask the store before the next step. `given_up`: the record is left to its retention, for good;
    `superseded`: because somebody else has carried it on.

    `num_conflicts` counts how often in a row the store contradicted us: once is a record that was lost with its
    server, more is a fault.
    """

    stale: bool = False
    given_up: bool = False
    superseded: bool = False
    num_conflicts: int = 0

    async def track(self, id: RequestId, step: Awaitable[None]) -> None:
        """Awaits a step and learns from its error. Raises `StoreUnavailable` when the store does not answer."""
        try:
            await step
            self.num_conflicts = 0
        except StoreUnavailable:
            self.stale = True
            raise
        except Superseded as error:
            self.superseded = True
            self.give_up(id, error)
        except Broken as error:
            self.stale = True
            self.num_conflicts += 1
            if self.num_conflicts >= _MAX_CONFLICTS:
                self.give_up(id, error)

    def give_up(self, id: RequestId, reason: Exception) -> None:
        """Gives the record up."""
        self.given_up = True
        _log.warning("request_record_abandoned", request_id=id, reason=str(reason))
