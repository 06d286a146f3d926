"""Times of the attempts that ended on this worker recently. Filled by the outbox, read by `WorkerServicer`."""

from __future__ import annotations

import time
from collections import deque
from dataclasses import dataclass, field

from baton.domain.ids import AttemptId, RequestId
from baton.domain.timing.attempt_times import DecodeTimes, ImportTimes, PrefillTimes

MAX_ATTEMPTS = 2048

monotonic_s = time.monotonic


@dataclass(frozen=True, slots=True)
class RecentAttempt:
    """One part of an attempt: its seal, import or end. `end_code`: error code; empty after a regular end."""

    id: AttemptId
    times: PrefillTimes | ImportTimes | DecodeTimes | None
    end_code: str = ""
    at: float = field(default_factory=lambda: monotonic_s())


class RecentAttempts:
    """Ring of parts; a new part replaces the oldest one."""

    def __init__(self, max_parts: int = MAX_ATTEMPTS) -> None:
        self._parts: deque[RecentAttempt] = deque(maxlen=max_parts)

    def __len__(self) -> int:
        return len(self._parts)

    def add(
        self, id: AttemptId, times: PrefillTimes | ImportTimes | DecodeTimes | None = None, end_code: str = ""
    ) -> None:
        """Adds a part of an attempt."""
        self._parts.append(RecentAttempt(id, times, end_code))

    def find(self, request_id: RequestId | None = None) -> dict[AttemptId, list[RecentAttempt]]:
        """Parts by attempt, oldest first, of one request or of all."""
        found: dict[AttemptId, list[RecentAttempt]] = {}
        for part in self._parts:
            if request_id is None or part.id.request_id == request_id:
                found.setdefault(part.id, []).append(part)
        return found
