"""DEBUG lines of state transitions. Called by the owners of states; costs one level check if DEBUG is off."""

from __future__ import annotations

import enum
import logging

from baton.domain.ids import AttemptId
from baton.telemetry.logs import get_logger

log = get_logger()
_root = logging.getLogger()


def log_transition(machine: str, id: AttemptId, event: str, state: enum.Enum | str) -> None:
    """Logs that `event` took the attempt to `state` of `machine`."""
    if _root.isEnabledFor(logging.DEBUG):
        to = state.value if isinstance(state, enum.Enum) else state
        log.debug("state", machine=machine, request_id=id.request_id, attempt=id.attempt, transition=event, state=to)
