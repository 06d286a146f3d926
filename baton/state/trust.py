"""How far an errand may trust what it believes the book holds. Owned by an errand; knows no record."""

from __future__ import annotations

from collections.abc import Awaitable
from dataclasses import dataclass

import structlog

from baton.domain.errors import Broken, Superseded
from baton.domain.ids import RequestId
from baton.state.base import StateUnavailable

_log = structlog.get_logger(__name__)
_MAX_SURPRISES = 3


@dataclass(slots=True)
class Trust:
    """`doubtful`: ask the book before the next step. `forsaken`: the record is left to its retention, for good;
    `superseded`: because somebody else has carried it on.

    `num_surprises` counts how often in a row the book contradicted us: once is a record that was lost with its
    server, more is a fault.
    """

    doubtful: bool = False
    forsaken: bool = False
    superseded: bool = False
    num_surprises: int = 0

    async def keep(self, id: RequestId, step: Awaitable[None]) -> None:
        """Awaits a step and learns from its error. Raises `StateUnavailable` when the book does not answer."""
        try:
            await step
            self.num_surprises = 0
        except StateUnavailable:
            self.doubtful = True
            raise
        except Superseded as error:
            self.superseded = True
            self.forsake(id, error)
        except Broken as error:
            self.doubtful = True
            self.num_surprises += 1
            if self.num_surprises >= _MAX_SURPRISES:
                self.forsake(id, error)

    def forsake(self, id: RequestId, reason: Exception) -> None:
        """Gives the record up."""
        self.forsaken = True
        _log.warning("request_record_forsaken", request_id=id, reason=str(reason))
