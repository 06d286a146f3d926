"""Prefill's part of one attempt, from its start to the seal: in a session or a call. Started by `reserve` or `attempt`.

    PrefillRun(spec) --(images first)--> Prefill --> accepted --> scores ... --> sealed
                            `--------------------------`------------`-------> a failure, in `sealed`

`reserve` starts it beside `Reserve` where decode probably has room; else `attempt` does, with the reservation. The
session hands it each event; a task reads a call to its end. Nothing of it reaches a client before `attempt` has a
reservation.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import grpc

from baton.domain.errors import BatonError, WorkerLost
from baton.domain.ids import AttemptId, Incarnation, PageKey
from baton.domain.request import EngineRequest
from baton.domain.worker import WorkerRecord, WorkerRole
from baton.rpc.codec import decode_failure, decode_scores, fill_request
from baton.rpc.gen import common_pb2, prefill_pb2
from baton.rpc.request_metadata import Metadata
from baton.services.router.dispatch.media.uploader import MediaUploader
from baton.services.router.dispatch.placement.pair import Pair
from baton.services.router.dispatch.prefill.coming import ComingPrompts
from baton.services.router.dispatch.scores.collector import ScoreCollector
from baton.services.router.dispatch.sessions.session_or_call import PrefillCall, open_prefill
from baton.services.router.dispatch.sessions.session_stream import SessionStream
from baton.services.router.dispatch.worker_errors import (
    GRACE_S,
    AttemptFailure,
    FaultSource,
    classify_reported,
    classify_rpc_error,
    damaged,
    guarded,
    lost_worker,
)
from baton.services.router.dispatch.workers import WorkerSet
from baton.services.router.generation import MediaFile

PREFILL = WorkerRole.PREFILL


@dataclass(frozen=True, slots=True)
class PrefillSpec:
    """A prompt to compute on `pair.prefill`. `keys`: of its full pages. `deadline`: on the loop's clock.

    `decode_prefix_len`: leading tokens that decode has, whose pages are not announced to it; 0 before decode has told.
    It ignores announcements of pages that it has. `files`: of the prompt's images, which go first. `known`: leading
    tokens that workers have cached, whatever their events say.
    """

    pair: Pair
    request: EngineRequest
    keys: Sequence[PageKey]
    deadline: float
    metadata: Metadata
    decode_prefix_len: int = 0
    files: Sequence[MediaFile] = ()
    known: Mapping[Incarnation, int] = field(default_factory=dict)


StartPrefill = Callable[[PrefillSpec], "PrefillRun"]


class PrefillRun:
    """A prompt that prefill computes, from now on. `close` it, and send an abort unless it sealed and decode committed.

    `sealed` ends with the seal, or with the failure of the attempt; it is also set by `fail`. `num_predicted`: tokens
    that prefill probably has cached.
    """

    def __init__(
        self, workers: WorkerSet, uploader: MediaUploader, spec: PrefillSpec, *, coming: ComingPrompts | None = None
    ) -> None:
        """`coming`: requests that are about to be sent; the worker is told how many others there are."""
        loop, worker = asyncio.get_running_loop(), spec.pair.prefill
        self._num_coming = 0
        if coming is not None:
            coming.discard(spec.request.id.request_id)
            self._num_coming = coming.count(loop.time())
        self.worker = worker
        self.sealed: asyncio.Future[prefill_pb2.Sealed] = loop.create_future()
        self.scores = ScoreCollector(spec.request, worker.vocab_size)
        self.accepted = False
        self._spec = spec
        self._workers = workers
        self._uploader = uploader
        self._accepted_at = 0.0
        self._encode_s = 0.0
        self._on_accepted: Callable[[float, float], None] | None = None
        self._task: asyncio.Task[None] | None = None
        self._undo: list[Callable[[], object]] = []
        try:
            message = self._message(max(0.0, spec.deadline - loop.time()))
            self.encoded = message.request
            self.num_predicted = workers.known_pages.predict_tokens(worker, len(spec.request.tokens), spec.keys)
            reading = self._upload(message) if spec.files else self._start(message)
            if reading is not None:
                self._task = loop.create_task(reading, name=f"prefill-{spec.request.id}")
            self._undo.append(workers.watch(worker.incarnation, self._on_lost))
        except BaseException:
            self.close()
            raise

    def when_accepted(self, call: Callable[[float, float], None]) -> None:
        """Calls `call` when prefill has the request, perhaps now, with the seconds for which it has had it.

        And with those before, for which its images were on their way over encode workers.
        """
        self._on_accepted = call
        if self.accepted:
            call(asyncio.get_running_loop().time() - self._accepted_at, self._encode_s)

    @property
    def failure(self) -> BaseException | None:
        """What ended it before the seal; None while it runs, and after the seal."""
        return self.sealed.exception() if self.sealed.done() and not self.sealed.cancelled() else None

    def fail(self, error: Exception) -> None:
        """Ends the wait for the seal, which raises `error`. No effect after it."""
        if not self.sealed.done():
            self.sealed.set_exception(error)

    def close(self) -> None:
        """Ends the call, and the reading of it. Idempotent."""
        for undo in self._undo:
            undo()
        self._undo = []
        if not self.sealed.cancel() and not self.sealed.cancelled():
            self.sealed.exception()  # asyncio warns about an exception that is never retrieved
        if self._task is not None:
            self._task.cancel()

    async def wait_closed(self) -> None:
        """Waits until nothing runs any more, after `close`."""
        if self._task is not None:
            await asyncio.gather(self._task, return_exceptions=True)

    def _message(self, timeout_s: float) -> prefill_pb2.PrefillRequest:
        """Names the worker that has more of the prompt cached than prefill, if one is known."""
        spec = self._spec
        message = prefill_pb2.PrefillRequest(
            decode_prefix_len=spec.decode_prefix_len, deadline_s=timeout_s, num_coming=self._num_coming
        )
        fill_request(message.request, spec.request)
        num_tokens = len(spec.request.tokens)
        choice = self._workers.find_page_source(spec.pair, num_tokens, spec.keys, spec.known)
        if choice is not None:
            message.page_source.worker_id = choice.worker.id
            message.page_source.incarnation = choice.worker.incarnation
            message.page_source.num_pages = choice.num_pages
        return message

    def _start(self, message: prefill_pb2.PrefillRequest) -> Coroutine[None, None, None] | None:
        """Starts the prompt. Returns what reads it, None where its session calls."""
        spec, timeout_s = self._spec, message.deadline_s + GRACE_S
        events = open_prefill(self._workers, spec.pair.prefill, message, timeout_s, spec.metadata)
        self._undo.append(events.cancel)
        if not isinstance(events, SessionStream):
            return self._read(events)
        events.listen(partial(self._take_ready, events))
        if events.is_ready:
            self._take_ready(events)
        return None

    async def _upload(self, message: prefill_pb2.PrefillRequest) -> None:
        """Brings the images to prefill, then computes the prompt there."""
        spec = self._spec
        try:
            self._encode_s = await self._uploader.put(
                spec.pair.prefill, spec.files, spec.request.salt, spec.deadline, spec.metadata
            )
        except (AttemptFailure, BatonError) as error:
            self.fail(suspect_lost(self._workers, spec.pair.prefill, error, spec.request.id))
            return
        except BaseException:
            self.fail(lost_worker(PREFILL, "did not get the images"))
            raise
        message.deadline_s = max(0.0, spec.deadline - asyncio.get_running_loop().time())
        reading = self._start(message)
        if reading is not None:
            await reading

    async def _read(self, events: PrefillCall) -> None:
        """Reads Prefill to its end. Ignores what follows the seal."""
        error: AttemptFailure | BatonError | None = None
        try:
            async for event in events:
                self._on_event(event)
        except AttemptFailure as failure:
            error = failure
        except grpc.aio.AioRpcError as rpc_error:
            worker, id = self._spec.pair.prefill, self._spec.request.id
            error = suspect_lost(self._workers, worker, classify_rpc_error(rpc_error, PREFILL), id)
        finally:
            self.fail(error or lost_worker(PREFILL, "ended its stream early"))

    def _take_ready(self, stream: SessionStream) -> None:
        """As `_read`, of what has come in a session."""
        try:
            while stream.is_ready:
                event: Any = stream.read_now()  # the stream brings nothing but events of a prompt
                if event is None:
                    if not self.sealed.done():
                        self.fail(lost_worker(PREFILL, "ended its stream early"))
                    return
                self._on_event(event)
        except WorkerLost as lost:  # its session was lost
            worker, broken = self._spec.pair.prefill, AttemptFailure(lost, FaultSource.PREFILL)
            self.fail(suspect_lost(self._workers, worker, broken, self._spec.request.id))
        except Exception as error:  # it is the attempt's: the session must not fail
            stream.listen(None)
            self.fail(error)

    def _on_event(self, event: prefill_pb2.PrefillEvent) -> None:
        match event.WhichOneof("event"):
            case "accepted":
                self.accepted, self._accepted_at = True, asyncio.get_running_loop().time()
                if self._on_accepted is not None:
                    self._on_accepted(0.0, self._encode_s)
            case "scores" if not self.sealed.done():
                self._add_scores(event.scores)
            case "sealed" if not self.sealed.done():
                self.sealed.set_result(event.sealed)
            case "failed":
                self.fail(classify_reported(decode_failure(event.failed), PREFILL))
            case None if not self.sealed.done():
                raise damaged("an empty event of prefill", FaultSource.PREFILL)

    def _add_scores(self, message: common_pb2.PromptScores) -> None:
        """Raises `AttemptFailure` for scores that were damaged or do not fit."""
        guarded(self.scores.add, guarded(decode_scores, message))

    def _on_lost(self) -> None:
        self.fail(lost_worker(PREFILL, "restarted, fell silent or is stuck"))


def suspect_lost(
    workers: WorkerSet, worker: WorkerRecord, failure: AttemptFailure | BatonError, id: AttemptId
) -> AttemptFailure | BatonError:
    """The failure of a broken stream. Suspects a worker that cannot be reached."""
    if isinstance(failure, AttemptFailure) and isinstance(failure.error, WorkerLost):
        workers.suspect(worker, failure.error, id)
    return failure
