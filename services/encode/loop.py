"""The encode engine's loop: take commands, encode a batch of images, answer pulls. Runs in the engine thread."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import Any

from baton.domain.worker import Activity, WorkerLoad, WorkerRole
from baton.engine.mailbox import Mailbox
from baton.engine.media.encoder import MediaEncoder
from baton.engine.media.exported_embedding import ExportedEmbedding
from baton.engine.media.store import HeldMedia
from baton.engine.reply import Reply
from baton.engine.step_metrics import monotonic_s
from baton.services.encode.commands import ClosePull, EncodeCommand, OpenPull
from baton.services.encode.scheduler import EncodeEffect, EncodeScheduler, GiveEmbedding
from baton.telemetry import metrics
from baton.worker.media.media_receiver import FindMedia, HoldMedia, RoomQuery


class EncodeLoop:
    """Owns scheduler and store. `on_idle` is called after a turn that leaves nothing to do."""

    def __init__(
        self,
        mailbox: Mailbox[EncodeCommand],
        scheduler: EncodeScheduler,
        encoder: MediaEncoder,
        on_idle: Callable[[], None],
    ) -> None:
        self._mailbox = mailbox
        self._scheduler = scheduler
        self._encoder = encoder
        self._on_idle = on_idle
        self._waiting = metrics.WAITING_REQUESTS.labels(WorkerRole.ENCODE.value)
        self._step_s = metrics.STEP_SECONDS.labels(WorkerRole.ENCODE.value)
        self._replies: dict[int, Reply[HeldMedia[Any, ExportedEmbedding]]] = {}
        self._step_began_at: float | None = None
        self._load = WorkerLoad()
        self._num_rows = 0
        self.num_requests = 0
        """Open pulls and images that wait; 0 when the process may exit."""

    def turn(self) -> bool:
        """Runs one turn; waits for commands when there is nothing to encode. False once the mailbox is closed."""
        commands = self._mailbox.take_all(self._wait_s())
        if self._mailbox.closed:
            return False
        for command in commands:
            self._handle(command)
        self._perform(self._scheduler.expire(monotonic_s()))
        self._encode()
        self._publish()
        if self.num_requests == 0:
            self._on_idle()
        return True

    def close(self) -> None:
        """Ends the loop after the current turn. Thread-safe."""
        self._mailbox.close()

    def load(self) -> WorkerLoad:
        """Waiting images and rows after the last turn, with the age of the current step. Thread-safe."""
        began_at = self._step_began_at
        return replace(self._load, step_age_s=0.0 if began_at is None else monotonic_s() - began_at)

    def activity(self) -> Activity:
        """Totals for the status line: rows that were encoded. Thread-safe."""
        return Activity(self._num_rows)

    def _handle(self, command: EncodeCommand) -> None:
        scheduler, now = self._scheduler, monotonic_s()
        match command:
            case FindMedia(key, found):
                item = scheduler.store.find(key)  # used now; the time for which it is kept does not begin anew
                found.send(None if item is None else (item.num_rows, item.grid))
            case HoldMedia(key, item, held):
                num_evicted = scheduler.store.num_evicted
                held.send(scheduler.hold(key, item, now))
                metrics.MEDIA_EVICTED_TOTAL.inc(scheduler.store.num_evicted - num_evicted)
            case RoomQuery(num_bytes, has_room):
                has_room.send(scheduler.store.has_room(num_bytes, now))
            case OpenPull(lease, key, deadline_s, reply):
                self._replies[lease], num_damaged = reply, scheduler.num_damaged
                self._perform(scheduler.open(lease, key, now + deadline_s))
                metrics.INTEGRITY_FAILURES_TOTAL.labels("embedding").inc(scheduler.num_damaged - num_damaged)
            case ClosePull(lease):
                scheduler.close(lease)
                self._replies.pop(lease, None)

    def _encode(self) -> None:
        batch = self._scheduler.next_batch()
        if not batch:
            return
        began_at = self._step_began_at = monotonic_s()
        failed = [key for key, _ in self._encoder.encode(batch)]
        self._step_began_at = None
        metrics.ENCODE_SECONDS.observe(seconds := monotonic_s() - began_at)
        self._step_s.observe(seconds)
        self._num_rows += sum(item.num_rows for key, item in batch if key not in failed)
        self._perform(self._scheduler.commit([key for key, _ in batch], failed))

    def _perform(self, effects: Iterable[EncodeEffect]) -> None:
        for effect in effects:
            reply = self._replies.pop(effect.lease, None)
            if reply is not None:
                reply.send(effect.item if isinstance(effect, GiveEmbedding) else effect.error)

    def _publish(self) -> None:
        scheduler = self._scheduler
        self._load = WorkerLoad(
            waiting_requests=scheduler.num_waiting,
            waiting_tokens=scheduler.num_waiting_rows,
            activity=self.activity(),
            media=scheduler.store.counts,
        )
        self.num_requests = scheduler.num_waiting + scheduler.num_leases
        self._waiting.set(scheduler.num_waiting)
        metrics.MEDIA_HELD.set(len(scheduler.store))
        metrics.MEDIA_HELD_BYTES.set(scheduler.store.num_bytes)

    def _wait_s(self) -> float | None:
        if self._scheduler.num_waiting:
            return 0.0
        wakeup = self._scheduler.next_wakeup()
        return None if wakeup is None else max(0.0, wakeup - monotonic_s())
