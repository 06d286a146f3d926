"""The pullers of one worker, one for each transport that it may use, as one object. Each source is read over one.

A link that turns out bad over a transport can go on over the next one (`rule_out`), for as long as its source's process
lives. Called by the links, and with their pulls by the engine thread; any thread may call.
"""

from __future__ import annotations

from collections.abc import Sequence

from baton.domain.errors import LinkBroken
from baton.domain.ids import Incarnation, WorkerId
from baton.transfer.base import OnPullEvent, Pull, SourceInfo
from baton.transfer.puller import ThreadedPuller


class PullerSet:
    """Owns its pullers: `close` closes them."""

    def __init__(self, pullers: Sequence[ThreadedPuller]) -> None:
        """`pullers`: best transport first, at least one."""
        self._pullers = {puller.transport: puller for puller in pullers}
        self._best = pullers[0]
        self._used: dict[WorkerId, ThreadedPuller] = {}
        self._ruled_out: dict[WorkerId, tuple[Incarnation, frozenset[str]]] = {}

    @property
    def transports(self) -> tuple[str, ...]:
        """All transports, best first."""
        return tuple(self._pullers)

    def offered(self, source: WorkerId, incarnation: Incarnation) -> tuple[str, ...]:
        """Transports to link to this process of a source, best first; never none."""
        excluded = self._excluded(source, incarnation)
        return tuple(name for name in self._pullers if name not in excluded)

    def rule_out(self, source: WorkerId, incarnation: Incarnation, transport: str) -> bool:
        """Takes a transport from those offered to this process. False, without effect, if no other is left."""
        if set(self.offered(source, incarnation)) <= {transport}:
            return False
        self._ruled_out[source] = incarnation, self._excluded(source, incarnation) | {transport}
        return True

    def readmit(self, source: WorkerId) -> None:
        """Forgets what was ruled out for a source. Idempotent."""
        self._ruled_out.pop(source, None)

    def connect(self, source: SourceInfo) -> None:
        """Links to a source over its transport. Blocks, bounded. Raises `LinkBroken`, also if it was not offered."""
        offered = self.offered(source.worker_id, source.incarnation)
        if source.transport not in offered:
            raise LinkBroken(f"{source.worker_id} speaks {source.transport}, not {' or '.join(offered)}")
        puller = self._pullers[source.transport]
        before = self._used.get(source.worker_id)
        if before is not None and before is not puller:
            before.disconnect(source.worker_id)
        puller.connect(source)
        self._used[source.worker_id] = puller

    def transport(self, source: WorkerId) -> str:
        """Transport of a source's link; the best one for a source that is not linked."""
        return self._of(source).transport

    def path(self, source: WorkerId) -> str:
        """Path of bytes from `source`, as far as its transport knows; for display."""
        return self._of(source).path(source)

    def submit(self, pull: Pull) -> None:
        """See `ThreadedPuller.submit`."""
        self._of(pull.source).submit(pull)

    def submit_to(self, pull: Pull, on_event: OnPullEvent) -> None:
        """See `ThreadedPuller.submit_to`."""
        self._of(pull.source).submit_to(pull, on_event)

    def disconnect(self, source: WorkerId) -> None:
        """Removes a source once its reads have ended. Idempotent; never blocks."""
        puller = self._used.pop(source, None)
        if puller is not None:
            puller.disconnect(source)

    def close(self) -> None:
        """Ends all transfer threads. Idempotent."""
        for puller in self._pullers.values():
            puller.close()

    def _of(self, source: WorkerId) -> ThreadedPuller:
        return self._used.get(source, self._best)

    def _excluded(self, source: WorkerId, incarnation: Incarnation) -> frozenset[str]:
        process, excluded = self._ruled_out.get(source, (incarnation, frozenset()))
        return excluded if process == incarnation else frozenset()
