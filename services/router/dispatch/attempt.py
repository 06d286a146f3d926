"""Runs one attempt of a sequence on a reserved pair and returns its tokens in order. Called by `dispatcher`.

Generate opens with Prefill (`prefill_run`), or after it where prefill began beside the reservation. Decode gets all
events of the handoff, from the first. A task reads Prefill. `next` reads Generate:

    next() --(before the seal)--> waits for Sealed and holds what Generate sends meanwhile; returns the sealed token
       `----(after the seal)----> the held events, then Generate: Imported, Tokens, Tokens, ...

A sequence that ends with its first token has no Generate: prefill alone serves it. A passed deadline and a lost worker
interrupt the current read. After the seal a lost prefill worker does not matter. Both workers get an abort, unless
decode sent the last token.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Sequence
from functools import partial
from types import TracebackType
from typing import Any, Self

import grpc
from msgspec import structs

from baton.domain.errors import BatonError, DeadlineExceeded, LinkBroken, WorkerLost
from baton.domain.ids import PageKey
from baton.domain.request import OutputToken
from baton.domain.scores.prompt_scores import PromptScores
from baton.domain.worker import WorkerRole
from baton.kv.keys import page_keys
from baton.rpc.codec import decode_failure, decode_finish, decode_scores, decode_token, encode_request
from baton.rpc.gen import common_pb2, decode_pb2, prefill_pb2, session_pb2
from baton.rpc.times_codec import decode_decode_times, decode_import_times, decode_prefill_times
from baton.rpc.tokens.row_codec import decode_row
from baton.rpc.tokens.token_check import verify_check
from baton.services.router.dispatch.aborts import Aborts
from baton.services.router.dispatch.prefill.prefill_run import PrefillRun, PrefillSpec, StartPrefill, suspect_lost
from baton.services.router.dispatch.reserve import PairReservation
from baton.services.router.dispatch.scores.collector import ScoreCollector
from baton.services.router.dispatch.sessions.session_or_call import open_generate
from baton.services.router.dispatch.sessions.session_stream import OnRow, SessionStream
from baton.services.router.dispatch.tracked_request import TrackedRequest
from baton.services.router.dispatch.worker_errors import (
    GRACE_S,
    AttemptFailure,
    FaultSource,
    abort_reason,
    classify_reported,
    classify_rpc_error,
    damaged,
    guarded,
    lost_worker,
)
from baton.services.router.dispatch.workers import WorkerSet
from baton.services.router.generation import TakeChunk, TokenChunk
from baton.telemetry.metrics import INDEX_ERROR

PREFILL, DECODE = WorkerRole.PREFILL, WorkerRole.DECODE

_observe_index_error = INDEX_ERROR.labels().observe

_Read = decode_pb2.GenerateEvent | session_pb2.Joined | session_pb2.TokenRow | TokenChunk | None
"""An event of decode, by its call or in a session, or a row's chunk; None at the end of the stream."""


class Attempt:
    """Async context manager. `next` returns chunks until one has `finish`."""

    def __init__(
        self,
        tracked: TrackedRequest,
        reservation: PairReservation,
        workers: WorkerSet,
        aborts: Aborts,
        start_prefill: StartPrefill,
    ) -> None:
        self._start_prefill = start_prefill
        self._prefill = reservation.prefill  # None for a local prompt, and until it starts
        self._tracked = tracked
        self._reservation = reservation
        self._pair = reservation.pair
        self._prefill_only = reservation.prefill_only
        self._workers = workers
        self._aborts = aborts
        self._request = tracked.engine_request()
        self._abort_reason: str | None = "cancelled"
        self._cause: AttemptFailure | BatonError | None = None
        self._awaits_seal = not self._pair.local
        self._decoding = False
        self._first: tuple[int, int] | None = None  # index and token of the seal
        self._local_scores = ScoreCollector(self._request, self._pair.decode.vocab_size)
        self._held: deque[_Read] = deque()
        self._read_task: asyncio.Task[_Read] | None = None
        self._undo: list[Callable[[], object]] = []

    async def __aenter__(self) -> Self:
        try:
            self._open()
        except BaseException as error:
            await self.__aexit__(type(error), error, error.__traceback__)
            raise
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if isinstance(error, AttemptFailure):
            self._report(error)
        if isinstance(error, AttemptFailure | BatonError):
            self._abort_reason = abort_reason(error)
        if self._abort_reason is not None:
            for worker in (self._pair.prefill,) if self._prefill_only else self._pair.workers:
                self._aborts.send(self._request.id, worker, self._abort_reason)
        for undo in self._undo:
            undo()
        self._undo = []  # they refer to this attempt: without them it is freed at once, not by the garbage collector
        if self._prefill is not None:
            self._prefill.close()
        self._workers.on_ended(self._request.id)
        if self._read_task is not None:
            self._read_task.cancel()
            await asyncio.gather(self._read_task, return_exceptions=True)
        if self._prefill is not None:
            await self._prefill.wait_closed()

    def _open(self) -> None:
        loop, pair, deadline = asyncio.get_running_loop(), self._pair, self._tracked.deadline
        timeout_s = max(0.0, deadline - loop.time())
        if self._prefill is None and not pair.local:
            self._prefill = self._start_prefill(self._prefill_spec())
        prefill = self._prefill
        request = encode_request(self._request) if prefill is None else prefill.encoded
        if not self._prefill_only:
            generate = decode_pb2.GenerateRequest(
                request=request,
                reservation_id=self._reservation.reservation_id,
                prefill_id=pair.prefill.id,
                prefill_incarnation=pair.prefill.incarnation,
                deadline_s=timeout_s,
            )
            self._generate = open_generate(
                self._workers, pair.decode, generate, timeout_s + GRACE_S, self._tracked.metadata
            )
            watch = self._workers.watch(pair.decode.incarnation, self._on_decode_lost)
            self._undo = [self._generate.cancel, watch]
        if prefill is not None:
            prefill.when_accepted(self._tracked.timer.dispatched)
        self._undo.append(loop.call_at(deadline, self._on_late).cancel)

    def _prefill_spec(self) -> PrefillSpec:
        tracked, reservation = self._tracked, self._reservation
        return PrefillSpec(
            self._pair, self._request, reservation.keys, tracked.deadline, tracked.metadata,
            reservation.decode_prefix_len, tracked.sequence.files, tracked.known_prefixes(reservation),
        )  # fmt: skip

    async def next(self, take: TakeChunk | None = None) -> TokenChunk:
        """Returns the next tokens that `take` does not take, in a session. Raises what ends the attempt or request."""
        if self._awaits_seal:
            return self._on_sealed(await self._wait_for_seal())
        on_row = None if take is None else partial(self._offer, take)
        while True:
            if self._held:
                event = self._held.popleft()
            else:
                reading, self._read_task = self._read_task or self._read_decode(on_row), None
                event = await reading
            if event is None:
                raise lost_worker(DECODE, "ended its stream early")
            if isinstance(event, TokenChunk | session_pb2.TokenRow):
                return event if isinstance(event, TokenChunk) else self._on_row(event)
            if isinstance(event, session_pb2.Joined):
                if self._decoding:
                    raise damaged("an event of decode that fits nowhere")
                self._on_imported(event)
                continue
            match event.WhichOneof("event"):
                case "failed":
                    raise self._decode_failure(event.failed)
                case "scores" if self._pair.local and not self._decoding:
                    self._add_scores(event.scores)
                case "imported" if not self._decoding:
                    self._on_imported(event.imported)
                case "tokens":
                    try:
                        verify_check(event.tokens)
                    except LinkBroken as error:
                        raise AttemptFailure(error, FaultSource.LINK) from None
                    return self._on_tokens(tuple(map(decode_token, event.tokens.tokens)), event.tokens)
                case _:
                    raise damaged("an event of decode that fits nowhere")

    async def _wait_for_seal(self) -> prefill_pb2.Sealed:
        """Waits for the seal. Holds what decode sends meanwhile: it may have imported the pages already.

        A failure after such an event is held, too: the seal is on its way.
        """
        prefill = self._prefill
        assert prefill is not None
        if self._prefill_only:
            sealed = await prefill.sealed
        elif isinstance(stream := self._generate, SessionStream):
            stream.listen(partial(self._hold_ready, stream, prefill))
            self._hold_ready(stream, prefill)
            sealed = await prefill.sealed
            stream.listen(None)
        else:
            sealed = await self._hold_until(prefill.sealed)
        self._awaits_seal = False
        return sealed

    def _hold_ready(self, stream: SessionStream, prefill: PrefillRun) -> None:
        """Holds what has come in a session before the seal. What follows the seal is left to `next`."""
        try:
            while stream.is_ready and not prefill.sealed.done():
                event: Any = stream.read_now()
                self._hold(event)
                if event is None:
                    stream.listen(None)
                    return
        except WorkerLost as lost:
            prefill.fail(self._lost_decode(AttemptFailure(lost, FaultSource.DECODE)))
        except Exception as error:  # it is the reader's: the session must not fail
            prefill.fail(error)

    async def _hold_until(self, sealed: asyncio.Future[prefill_pb2.Sealed]) -> prefill_pb2.Sealed:
        """The seal; holds what comes in a call before it. A read that still runs then is the next one's."""
        reading = self._read_task = asyncio.create_task(self._read_decode())
        while not sealed.done():
            waiting = (sealed,) if self._read_task is None else (sealed, reading)
            await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
            if self._read_task is None or not reading.done():
                continue
            event, self._read_task = reading.result(), None
            self._hold(event)
            if event is not None:
                reading = self._read_task = asyncio.create_task(self._read_decode())
        return sealed.result()

    def _hold(self, event: _Read) -> None:
        """Raises a failure before which there was nothing."""
        if isinstance(event, decode_pb2.GenerateEvent) and event.HasField("failed") and not self._held:
            raise self._decode_failure(event.failed)
        self._held.append(event)

    async def _read_decode(self, on_row: OnRow | None = None) -> _Read:
        stream = self._generate
        try:
            event: Any = await (stream.read(on_row) if isinstance(stream, SessionStream) else stream.read())
        except grpc.aio.AioRpcError as error:
            raise self._lost_decode(classify_rpc_error(error, DECODE)) from None
        except WorkerLost as lost:
            raise self._lost_decode(AttemptFailure(lost, FaultSource.DECODE)) from None
        except asyncio.CancelledError:
            task = asyncio.current_task()
            if task is not None and task.cancelling():
                raise
            raise self._cause or lost_worker(DECODE, "was cut off") from None
        return None if event is grpc.aio.EOF else event

    def _on_sealed(self, sealed: prefill_pb2.Sealed) -> TokenChunk:
        self._tracked.timer.sealed(decode_prefill_times(sealed.times) if sealed.HasField("times") else None)
        self._workers.add_cached_pages(self._pair.prefill, self._reservation.keys)
        guarded(verify_check, sealed)
        token, finish = decode_token(sealed.first_token), decode_finish(sealed.finish_reason)
        if finish is None and self._prefill_only:
            raise damaged("a seal without an end, where the first token is the last")
        scores = self._take_scores()
        if self._workers.suspicions.any:
            self._workers.on_answer(self._pair.prefill)
        self._first = token.index, token.token
        num_predicted = 0 if self._prefill is None else self._prefill.num_predicted
        _observe_index_error(abs(num_predicted + sealed.times.imported_tokens - sealed.num_cached_tokens))
        chunk = self._tracked.on_sealed(token, sealed.num_cached_tokens, finish)
        if chunk.finish is not None:
            self._abort_reason = "finished"  # frees the reservation and the pins
        return chunk if scores is None else self._with_scores(chunk, scores)

    def _on_imported(self, imported: decode_pb2.Imported | session_pb2.Joined) -> None:
        """Records the import. Raises `AttemptFailure` if decode continues from another token than the client has."""
        if imported.HasField("first_token"):
            token = decode_token(imported.first_token)
            if (token.index, token.token) != self._first:
                raise damaged(f"decode begins after token {token.token}, prefill sealed with another one")
        self._on_decoding()
        self._workers.on_imported(self._request.id, self._pair)
        self._tracked.timer.imported(decode_import_times(imported.times) if imported.HasField("times") else None)

    def _on_decoding(self) -> None:
        """Records that decode has imported or computed the pages of the prompt."""
        self._decoding = True
        self._tracked.on_decoding()
        self._workers.add_cached_pages(self._pair.decode, self._reservation.keys)

    def _offer(self, take: TakeChunk, row: session_pb2.TokenRow) -> TokenChunk | None:
        chunk = self._on_row(row)
        return None if take(chunk) else chunk

    def _on_row(self, row: session_pb2.TokenRow) -> TokenChunk:
        """The tokens of a step, in a session. Its frame was verified."""
        if not row.tokens or (row.scores and len(row.scores) != len(row.tokens)):
            raise damaged("a row without tokens, or with scores of others")
        return self._on_tokens(decode_row(row), row)

    def _on_tokens(
        self, tokens: tuple[OutputToken, ...], message: decode_pb2.Tokens | session_pb2.TokenRow
    ) -> TokenChunk:
        """Takes the next tokens of `message`, which has their end, too."""
        if not self._decoding and not self._pair.local:
            raise damaged("tokens before the import")
        scores = None
        if not self._decoding:
            scores = self._take_scores() if self._pair.local else None
            self._on_decoding()
        finish = decode_finish(message.finish_reason) if message.finish_reason else None
        chunk = self._tracked.emit(tokens, finish)
        self._tracked.num_failures = 0  # a token from decode proves that the request itself does no harm
        if self._workers.suspicions.any:
            self._workers.on_answer(self._pair.decode)
        if finish is not None:
            self._abort_reason = None
            self._tracked.timer.decoded(decode_decode_times(message.times) if message.HasField("times") else None)
            self._workers.add_cached_pages(self._pair.decode, self._keys_with_kv())
        return chunk if scores is None else self._with_scores(chunk, scores)

    def _keys_with_kv(self) -> Sequence[PageKey]:
        """Those of all full pages of tokens whose KV decode has: the last token has none."""
        known, page_size = self._reservation.keys, self._pair.decode.page_size
        num_tokens = len(self._tracked.sequence.prompt_tokens) + self._tracked.num_emitted - 1
        if num_tokens // page_size <= len(known):
            return known
        request = self._tracked.engine_request()
        return page_keys(request.tokens[:-1], page_size, request.salt, request.media, known)

    def _add_scores(self, message: common_pb2.PromptScores) -> None:
        """Raises `AttemptFailure` for scores that were damaged or do not fit."""
        guarded(self._local_scores.add, guarded(decode_scores, message))

    def _take_scores(self) -> PromptScores | None:
        """The scores of the whole prompt, None if not asked for. Raises `AttemptFailure` if some are missing."""
        scores = self._local_scores if self._prefill is None else self._prefill.scores
        taken: PromptScores | None = guarded(scores.take)
        return taken

    def _with_scores(self, chunk: TokenChunk, scores: PromptScores) -> TokenChunk:
        self._tracked.on_scored()
        return structs.replace(chunk, prompt_scores=scores)

    def _on_late(self) -> None:
        self._interrupt(DeadlineExceeded(f"request {self._request.id.request_id} ran out of time"))

    def _on_decode_lost(self) -> None:
        self._interrupt(lost_worker(DECODE, "restarted, fell silent or is stuck"))

    def _interrupt(self, cause: AttemptFailure | BatonError) -> None:
        """Makes the current read raise `cause`."""
        self._cause = self._cause or cause
        if self._prefill is not None:
            self._prefill.fail(self._cause)
        if not self._prefill_only:
            self._generate.cancel()

    def _lost_decode(self, failure: AttemptFailure | BatonError) -> AttemptFailure | BatonError:
        return suspect_lost(self._workers, self._pair.decode, failure, self._request.id)

    def _decode_failure(self, failed: common_pb2.Failure) -> AttemptFailure | BatonError:
        if failed.HasField("decode"):
            self._tracked.timer.decoded(decode_decode_times(failed.decode))
        return classify_reported(decode_failure(failed), DECODE)

    def _report(self, failure: AttemptFailure) -> None:
        if failure.unready:
            role = PREFILL if failure.fault_source is FaultSource.PREFILL else DECODE
            self._workers.suspect(self._pair.worker(role), failure.error, self._request.id, refuses=True)
        if failure.blames_link:
            failure.counted = self._workers.on_link_failure(self._request.id, self._pair, failure.error)
        # Prefill has the request; of a local prompt decode has it since the reservation.
        accepted = self._pair.local or (self._prefill is not None and self._prefill.accepted)
        failure.unreached = isinstance(failure.error, WorkerLost) and not accepted
