"""One write of a chain, and the sync that it is for. Made by the syncs, run by `Flusher`."""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec

from baton.store.store import SequenceRecord
from baton.store.write_chain import ChainedWrite

if TYPE_CHECKING:
    from baton.store.write_behind.call_sync import CallSync
    from baton.store.write_behind.record_sync import RecordSync


class PlannedWrite(msgspec.Struct, frozen=True, eq=False):
    """`after`: the record that the store has once a sequence's write is accepted; None for other writes."""

    write: ChainedWrite
    sync: RecordSync | CallSync
    after: SequenceRecord | None = None
