"""KV exports: the giving side of a handoff. Tracks the pinned pages of each attempt and their lease. Pure.

Prefill exports the prompts that it computes; every worker exports cached pages (`cached_exports`).

An export's life (the table is `baton.domain.handoff.EXPORT_TRANSITIONS`):

1. `open` when the request is added. A newer attempt of the same request ends the older one (fencing).
2. `publish` pins the pages of each finished chunk. The first one starts the lease, every `renew` restarts it.
3. `seal` after the last chunk.
   `publish` and `seal` keep the announced digests, so that suspects can be compared with them.
4. The export ends by `commit` (decode has all pages), `release` (decode reads no more), `abort` (the router ended the
   attempt) or `expire` (the lease ran out). The pins are dropped at once. Full pages stay in the prefix cache; the
   partial tail goes to the free list.

`commit` is valid iff the pins were held from every publish until now, that is, iff the export is still open. With
`grants_leases` decode may trust what it reads until the lease ends, without an answer to `commit` (V2). `abort` then
only *abandons* a renewed export: its pins stay until decode commits or releases it, or until the lease ends. Time is an
argument. Owned by the engine thread.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType

from baton.domain.errors import Superseded
from baton.domain.handoff import ExportEvent, ExportState, advance_export
from baton.domain.ids import AttemptId, PageId, RequestId
from baton.engine.handoff.attempt_fence import AttemptFence
from baton.engine.transition_log import log_transition
from baton.kv.pages import Hold, PagePool

_MAX_REMEMBERED = 4096
"""Ended exports whose outcome is remembered, to answer a repeated or late `commit`."""
_NONE: Mapping[PageId, int] = MappingProxyType({})


@dataclass(slots=True)
class KvExport:
    """One handoff being sent. Internal to `ExportTable`; tests may read it."""

    id: AttemptId
    lease_ends_at: float | None = None  # None until the first publish
    state: ExportState = ExportState.PINNED
    pages: list[PageId] = field(default_factory=list)
    digests: dict[PageId, int] = field(default_factory=dict)  # of the announced pages, the partial tail included
    windowed: list[PageId] = field(default_factory=list)  # pages whose window parts are held, where those are apart
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
    """The exports of one worker. `grants_leases`: a renewed lease is kept even if the attempt ends."""

    def __init__(self, pool: PagePool, lease_s: float, grants_leases: bool = False) -> None:
        self._pool = pool
        self._lease_s = lease_s
        self._grants_leases = grants_leases
        self._open: dict[AttemptId, KvExport] = {}
        self._ended: OrderedDict[AttemptId, ExportState] = OrderedDict()
        self._fence = AttemptFence()

    def __len__(self) -> int:
        return len(self._open)

    def open(self, id: AttemptId) -> AttemptId | None:
        """Opens an export. Returns the older attempt if this ended its open export.

        Raises `Superseded` unless `id` is the newest attempt of its request.
        """
        older = self._fence.newest(id.request_id)
        if older is not None and id.order <= older.order:
            raise Superseded(f"{id}: attempt {older.attempt} was seen already", older)
        was_open = older is not None and self.abort(older)
        self._fence.pass_newest(id, len(self._open))
        self._open[id] = KvExport(id)
        return older if was_open else None

    def publish(
        self,
        id: AttemptId,
        pages: Sequence[PageId],
        now: float,
        digests: Mapping[PageId, int] = _NONE,
        windowed: Sequence[PageId] = (),
    ) -> None:
        """Pins `pages`, which the caller holds, and keeps `digests`, as announced. The first call starts the lease.

        `windowed`: those that are read with their window parts, which the caller holds as well.
        """
        export = self._open[id]
        export.advance(ExportEvent.PUBLISH)
        self._pool.hold(pages, Hold.PINNED)
        if self._pool.windows is not None:
            self._pool.windows.hold(windowed)
            self._pool.windows.reserve(len(windowed), forced=True)
            export.windowed += windowed
        export.pages += pages
        export.digests |= digests
        if export.lease_ends_at is None:
            export.lease_ends_at = now + self._lease_s

    def has_open(self, request: RequestId) -> bool:
        """True while an export of the request's newest attempt has not ended."""
        newest = self._fence.newest(request)
        return newest is not None and newest in self._open

    def is_open(self, id: AttemptId) -> bool:
        """True while the export has not ended."""
        return id in self._open

    def announced(self, id: AttemptId) -> Mapping[PageId, int]:
        """Announced pages of an open export and their digests; none if it has ended."""
        export = self._open.get(id)
        return _NONE if export is None else export.digests

    def condemned(self) -> list[AttemptId]:
        """Open exports with a condemned page."""
        digests = self._pool.digests
        return [one.id for one in self._open.values() if any(map(digests.is_condemned, one.pages))]

    def seal(self, id: AttemptId) -> None:
        """Ends publishing."""
        export = self._open[id]
        export.advance(ExportEvent.SEAL)

    def renew(self, ids: Sequence[AttemptId], now: float) -> list[AttemptId]:
        """Restarts the leases of `ids`; returns those whose pins are not held any more."""
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
        """Ends a sealed export; True if its pages were pinned all the time. Idempotent."""
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
        """Ends an export on behalf of the router: unpins now, or at the end of a granted lease.

        Idempotent and legal in every state. False if there was nothing to end."""
        export = self._open.get(id)
        if export is None or export.abandoned:
            return False
        if self._grants_leases and export.renewed:
            export.advance(ExportEvent.ABANDON)
        else:
            self._end(export, ExportEvent.ABORT)
        return True

    def release(self, id: AttemptId) -> bool:
        """Ends an export on behalf of decode: unpins now. Idempotent, legal in every state; False if there was none."""
        export = self._open.get(id)
        if export is not None:
            self._end(export, ExportEvent.ABORT)
        return export is not None

    def expire(self, now: float) -> list[AttemptId]:
        """Ends the exports whose lease has run out, and returns them."""
        late = [o for o in self._open.values() if o.lease_ends_at is not None and o.lease_ends_at <= now]
        for export in late:
            self._end(export, ExportEvent.LEASE_END)
        return [export.id for export in late]

    def next_deadline(self) -> float | None:
        """Time at which the first lease runs out."""
        return min((o.lease_ends_at for o in self._open.values() if o.lease_ends_at is not None), default=None)

    def _end(self, export: KvExport, event: ExportEvent) -> None:
        export.advance(event)
        if self._pool.windows is not None:
            self._pool.windows.drop(export.windowed)
            self._pool.windows.reserve(-len(export.windowed))
        self._pool.drop(export.pages, Hold.PINNED)
        del self._open[export.id]
        self._ended[export.id] = export.state
        while len(self._ended) > _MAX_REMEMBERED:
            self._ended.popitem(last=False)
