"""Why the router gives a known worker nothing. A value."""

from __future__ import annotations

import enum


class WorkerAbsence(enum.Enum):
    """Reason why a known worker gets nothing: it is not announced, a call to it failed, or it is stuck in a step."""

    NONE = ""
    SILENT = "silent"
    SUSPECTED = "suspected"
    STUCK = "stuck"
