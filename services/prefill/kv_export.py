"""Exports: prefill's side of a handoff. Which pages of which attempt are pinned, and until when. Pure.

An export's life (the table is `baton.domain.handoff.EXPORT_TRANSITIONS`):

1. `open` when the request is added: a newer attempt of the same request ends the older one (fencing).
2. `publish` pins each finished chunk's pages; the lease runs from here and every `renew` starts it afresh.
3. `seal` after the last chunk.
4. It ends by `commit` (decode has everything), `release` (decode reads no more), `abort` (the attempt is over for its
   router), or `expire` (nobody renewed): the pins are dropped at once. Full pages stay in the prefix cache, the partial
   tail goes back to the free list.

`commit` answers valid iff the pins were held from every publish to that moment, which is exactly: the export is still
open. With `grants_leases` a renewal is more than a delay of the end: it lets decode trust what it reads until the lease
is over without asking again (V2). An `abort` of a renewed export then only *abandons* it: its pins stay until decode's
word, or the lease's end. Time is an argument; the engine thread owns this.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass, field

from baton.domain.errors import Superseded
from baton.domain.handoff import ExportEvent, ExportState, advance_export
from baton.domain.ids import AttemptId, PageId, RequestId
from baton.engine.transition_log import log_transition
from baton.kv.pages import Hold, PagePool

_MAX_REMEMBERED = 4096
"""Ended exports whose outcome is still known, to answer a repeated or late `commit`."""


@dataclass(slots=True)
class KvExport:
    """One handoff being sent. Internal to the table; tests may read it."""

    id: AttemptId
    lease_ends_at: float | None = None  # None until the first publish
    state: ExportState = ExportState.PINNED
    pages: list[PageId] = field(default_factory=list)
    renewed: bool = False

    def advance(self, event: ExportEvent) -> None:
        """Changes the state. Raises `Broken` for an event that the state does not allow."""
        before, self.state = self.state, advance_export(self.state, event)
        if self.state is not before:
            log_transition("export", self.id, event.value, self.state)

    @property
    def abandoned(self) -> bool:
        return self.state is ExportState.ABANDONED


class ExportTable:
    """All exports of one prefill worker. `grants_leases`: pages are not checked by digest, so leases must be kept."""

    def __init__(self, pool: PagePool, lease_s: float, grants_leases: bool = False) -> None:
        self._pool = pool
        self._lease_s = lease_s
        self._grants_leases = grants_leases
        self._open: dict[AttemptId, KvExport] = {}
        self._ended: OrderedDict[AttemptId, ExportState] = OrderedDict()
        self._newest: OrderedDict[RequestId, int] = OrderedDict()

    def __len__(self) -> int:
        return len(self._open)

    def open(self, id: AttemptId) -> AttemptId | None:
        """Begins an export; returns the older attempt's, if that was still open and has been ended by this.

        Raises `Superseded` unless `id` is newer than every attempt seen of its request.
        """
        newest = self._newest.get(id.request_id, 0)
        if id.attempt <= newest:
            raise Superseded(f"{id}: attempt {newest} was seen already")
        older = AttemptId(id.request_id, newest)
        was_open = self.abort(older)
        self._newest[id.request_id] = id.attempt
        self._newest.move_to_end(id.request_id)
        while len(self._newest) > _MAX_REMEMBERED + len(self._open):
            self._newest.popitem(last=False)
        self._open[id] = KvExport(id)
        return older if was_open else None

    def publish(self, id: AttemptId, pages: Sequence[PageId], now: float) -> None:
        """Pins `pages` (which the caller still holds) for the export and starts its lease if it does not run yet."""
        export = self._open[id]
        export.advance(ExportEvent.PUBLISH)
        self._pool.hold(pages, Hold.PINNED)
        export.pages += pages
        if export.lease_ends_at is None:
            export.lease_ends_at = now + self._lease_s

    def seal(self, id: AttemptId) -> None:
        """Nothing more will be published."""
        export = self._open[id]
        export.advance(ExportEvent.SEAL)

    def renew(self, ids: Sequence[AttemptId], now: float) -> list[AttemptId]:
        """Starts the leases of `ids` afresh; returns those whose pins are not held any more."""
        ended = []
        for id in ids:
            export = self._open.get(id)
            if export is None or export.abandoned:
                ended.append(id)
            elif export.lease_ends_at is not None:
                export.advance(ExportEvent.RENEW)
                export.lease_ends_at = now + self._lease_s
                export.renewed = True
        return ended

    def commit(self, id: AttemptId) -> bool:
        """Whether everything that was read under this export was pinned all the while. Idempotent."""
        export = self._open.get(id)
        if export is None:
            return self._ended.get(id) is ExportState.COMMITTED
        if export.abandoned:
            self._end(export, ExportEvent.ABORT)
            return False
        if export.state is not ExportState.SEALED:
            return False
        self._end(export, ExportEvent.COMMIT)
        return True

    def abort(self, id: AttemptId) -> bool:
        """The attempt is over for its router: unpins now, unless decode was granted a lease. Idempotent; False when
        there was nothing to end. Legal in every state."""
        export = self._open.get(id)
        if export is None or export.abandoned:
            return False
        if self._grants_leases and export.renewed:
            export.advance(ExportEvent.ABANDON)
        else:
            self._end(export, ExportEvent.ABORT)
        return True

    def release(self, id: AttemptId) -> bool:
        """Decode reads no more: unpins now. Idempotent; False when there was nothing to end. Legal in every state."""
        export = self._open.get(id)
        if export is not None:
            self._end(export, ExportEvent.ABORT)
        return export is not None

    def expire(self, now: float) -> list[AttemptId]:
        """Ends the exports whose lease has run out."""
        late = [o for o in self._open.values() if o.lease_ends_at is not None and o.lease_ends_at <= now]
        for export in late:
            self._end(export, ExportEvent.LEASE_END)
        return [export.id for export in late]

    def next_deadline(self) -> float | None:
        """When the first lease runs out."""
        return min((o.lease_ends_at for o in self._open.values() if o.lease_ends_at is not None), default=None)

    def _end(self, export: KvExport, event: ExportEvent) -> None:
        export.advance(event)
        self._pool.drop(export.pages, Hold.PINNED)
        del self._open[export.id]
        self._ended[export.id] = export.state
        while len(self._ended) > _MAX_REMEMBERED:
            self._ended.popitem(last=False)
