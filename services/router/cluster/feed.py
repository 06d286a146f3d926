"""Sends the cluster to viewers: at most four frames a second, built and encoded once for all who see the same.

    no viewer: nothing runs        viewer: snapshot -> frame, event, request, ... -> snapshot (each 15 s) -> ...

A frame holds the parts that changed. A viewer has one slot: one that is slower than the frames gets a snapshot when it
reads again, which replaces everything it has. So does one that joins others, instead of its first frame: what changed
between its first snapshot and the last frame is in neither, or in both. One event loop owns it.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import AsyncGenerator, Callable
from dataclasses import dataclass, field

import msgspec

from baton.domain.errors import Overloaded
from baton.services.router.cluster.event_log import is_visible
from baton.services.router.cluster.view import ClusterView
from baton.services.router.edge.sse import named_event
from baton.telemetry.logs import get_logger

FRAME_INTERVAL_S = 0.25
SNAPSHOT_INTERVAL_S = 15.0
QUIET_FRAME_S = 1.0
"""Longest time without a frame: viewers see that the router lives."""
MAX_VIEWERS = 16
RETRY_AFTER_S = 5.0
MAX_TOLD_EVENTS = 64
WATCHED_S = 5.0
"""Readers that poll more often than this keep the other routers sharing."""

_LISTS = frozenset({"events", "recent"})
"""Parts that frames leave out: their news come as events of their own."""

log = get_logger(__name__)


class TooManyViewers(Overloaded):
    """The router serves as many viewers as it may."""

    code = "too_many_viewers"


@dataclass(slots=True)
class _EncodedParts:
    """One build for one scope."""

    parts: dict[str, bytes]

    def snapshot(self) -> bytes:
        return _join(self.parts)

    def changes(self, before: _EncodedParts) -> bytes | None:
        """The changed parts and the time; None if only the time did."""
        changed = {
            name: part
            for name, part in self.parts.items()
            if name not in _LISTS and name != "now_ms" and before.parts.get(name) != part
        }
        return _join({"now_ms": self.parts["now_ms"], **changed}) if changed else None


@dataclass(eq=False, slots=True)
class _Viewer:
    tenant: str | None
    slot: bytes | None = None
    is_new: bool = True  # its first snapshot was not made with the frames
    wake: asyncio.Event = field(default_factory=asyncio.Event)


class ClusterFeed:
    """`close` ends all viewers; they go to another router."""

    def __init__(
        self, view: ClusterView, interval_s: float = FRAME_INTERVAL_S, clock: Callable[[], float] | None = None
    ) -> None:
        self.view = view
        self._interval_s = interval_s
        self._clock = clock or asyncio.get_running_loop().time
        self._viewers: set[_Viewer] = set()
        self._builds: dict[str | None, tuple[float, _EncodedParts]] = {}
        self._task: asyncio.Task[None] | None = None
        self._closed = False
        self._read_at = -math.inf
        self.on_watch: Callable[[], None] = lambda: None
        """Called when somebody begins to watch."""

    @property
    def watched(self) -> bool:
        """True while there are viewers, and for `WATCHED_S` after a snapshot."""
        return bool(self._viewers) or self._clock() - self._read_at < WATCHED_S

    @property
    def num_viewers(self) -> int:
        return len(self._viewers)

    @property
    def running(self) -> bool:
        """True while frames are made."""
        return self._task is not None

    def snapshot(self, tenant: str | None) -> bytes:
        """The snapshot in JSON, at most one frame interval old: readers that poll cost one build an interval."""
        now = self._clock()
        self._note_reader()
        built = self._builds.get(tenant)
        if built is None or now - built[0] >= self._interval_s:
            self._builds = {scope: kept for scope, kept in self._builds.items() if now - kept[0] < self._interval_s}
            built = self._builds[tenant] = (now, self._build(tenant))
        return built[1].snapshot()

    async def follow(self, tenant: str | None) -> AsyncGenerator[bytes, None]:
        """Messages in SSE for one viewer, until `close`. Raises `TooManyViewers`.

        Close the iterator: it holds one of the `MAX_VIEWERS` places.
        """
        if len(self._viewers) >= MAX_VIEWERS:
            raise TooManyViewers(f"this router has {MAX_VIEWERS} viewers already", retry_after_s=RETRY_AFTER_S)
        self._note_reader()
        viewer = _Viewer(tenant)
        self._viewers.add(viewer)
        try:
            self._start()
            yield named_event(b"snapshot", self.snapshot(tenant))
            while not self._closed:
                await viewer.wake.wait()
                viewer.wake.clear()
                message, viewer.slot = viewer.slot, None
                if message is not None:
                    yield message
        finally:
            self._viewers.discard(viewer)

    async def close(self) -> None:
        """Ends all viewers and the task; idempotent."""
        self._closed = True
        for viewer in self._viewers:
            viewer.wake.set()
        task, self._task = self._task, None
        if task is not None:
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)

    def _note_reader(self) -> None:
        before, self._read_at = self.watched, self._clock()
        if not before:
            self.on_watch()

    def _start(self) -> None:
        if self._task is None and not self._closed:
            self._task = asyncio.get_running_loop().create_task(self._run(), name="cluster-feed")

    async def _run(self) -> None:
        """Makes frames while there are viewers."""
        state = _FeedState(self.view)
        try:
            while self._viewers:
                await asyncio.sleep(self._interval_s)
                try:
                    self._send(state)
                except Exception:  # the page must not end the router; the next frame may be right
                    log.exception("cluster_frame_failed")
        finally:
            self._task = None

    def _send(self, state: _FeedState) -> None:
        now, scopes = self._clock(), {viewer.tenant for viewer in self._viewers}
        messages = {scope: state.message(scope, self._build(scope), now) for scope in scopes}
        state.told()
        for viewer in self._viewers:
            message, build = messages[viewer.tenant]
            if viewer.slot is not None or viewer.is_new:
                message = named_event(b"snapshot", build.snapshot())  # it has missed a frame, or does not know which
            if message:
                viewer.slot, viewer.is_new = message, False
                viewer.wake.set()

    def _build(self, tenant: str | None) -> _EncodedParts:
        snapshot = self.view.snapshot(tenant)
        return _EncodedParts({name: _encode(getattr(snapshot, name)) for name in snapshot.__struct_fields__})


class _FeedState:
    """What was sent last, by scope, and which events and requests were."""

    def __init__(self, view: ClusterView) -> None:
        self._view = view
        self._sent: dict[str | None, tuple[_EncodedParts, float, float]] = {}  # build, time of a frame, of a snapshot
        self._seq = view.events.last_seq
        self._num_ended = view.ends.count

    def message(self, scope: str | None, build: _EncodedParts, now: float) -> tuple[bytes, _EncodedParts]:
        """What viewers of one scope get now; may be nothing."""
        last = self._sent.get(scope)
        if last is None or now - last[2] >= SNAPSHOT_INTERVAL_S:
            self._sent[scope] = (build, now, now)
            return named_event(b"snapshot", build.snapshot()), build
        frame = build.changes(last[0])
        if frame is None and now - last[1] >= QUIET_FRAME_S:
            frame = _join({"now_ms": build.parts["now_ms"]})
        parts = [] if frame is None else [named_event(b"frame", frame)]
        news = [event for event in self._view.events.after(self._seq) if is_visible(event, scope)]
        parts += [named_event(b"event", _encode(event)) for event in news[-MAX_TOLD_EVENTS:]]
        parts += [named_event(b"request", _encode(row)) for row in self._view.ends.after(self._num_ended, scope)]
        self._sent[scope] = (build, now if frame is not None else last[1], last[2])
        return b"".join(parts), build

    def told(self) -> None:
        """All events and requests up to now were sent."""
        self._seq, self._num_ended = self._view.events.last_seq, self._view.ends.count


_encode = msgspec.json.Encoder().encode


def _join(parts: dict[str, bytes]) -> bytes:
    return b"{" + b",".join([b'"%b":%b' % (name.encode(), part) for name, part in parts.items()]) + b"}"
