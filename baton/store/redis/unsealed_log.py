"""Counts what does not open or cannot be read, and logs it once an id. Owned by `RedisStore`.

Such a record is missing for its call and never an outage: others stay visible.
"""

from __future__ import annotations

from collections import OrderedDict

import structlog

from baton.store.seal import SealedKind, SealFault
from baton.telemetry.metrics import STORE_UNSEALED_TOTAL

MAX_IDS = 1024
"""Ids that are remembered; beyond it the oldest is forgotten and may be logged again."""

_log = structlog.get_logger(__name__)


class UnsealedLog:
    """For one event loop."""

    def __init__(self) -> None:
        self._ids: OrderedDict[tuple[SealedKind, str], SealFault] = OrderedDict()
        for fault in SealFault:
            STORE_UNSEALED_TOTAL.labels(fault.value)

    @property
    def num_calls(self) -> int:
        """Calls among the remembered ids."""
        return sum(kind is SealedKind.CALL for kind, _ in self._ids)

    def record(self, kind: SealedKind, id: str, fault: SealFault) -> None:
        """Counts a blob that is not used; logs it unless that happened for this kind and id."""
        STORE_UNSEALED_TOTAL.labels(fault.value).inc()
        if (kind, id) not in self._ids:
            _log.warning("store_record_unsealed", kind=kind.value, id=id[:256], reason=fault.value)
        self._ids[kind, id] = fault
        if len(self._ids) > MAX_IDS:
            self._ids.popitem(last=False)
