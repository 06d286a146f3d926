"""Tracks one admitted sequence: its slot, its state and its tokens. Owned by `dispatcher`.

Drives `baton.domain.lifecycle` and stamps the sequence's timer. Hands every transition and token to the `StoreWriter`,
which never waits. Does no I/O.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Sequence
from functools import partial

from baton.domain.errors import BatonError, Cancelled, IntegrityFailure, Interrupted, SentBack, Superseded
from baton.domain.ids import Incarnation
from baton.domain.lifecycle import TABLE, TERMINAL, RequestEvent, RequestState
from baton.domain.request import EngineRequest, FinishReason, OutputToken, finish_reason
from baton.rpc.request_metadata import request_metadata
from baton.services.router.admission.slot import Slot
from baton.services.router.dispatch.placement.pair import Pair
from baton.services.router.dispatch.placement.query import Avoided
from baton.services.router.dispatch.reserve import PairReservation
from baton.services.router.dispatch.worker_errors import AttemptFailure, FaultSource
from baton.services.router.generation import SequenceSpec, TokenChunk
from baton.store.store import SequenceRecord
from baton.store.write_behind.writer import StoreWriter
from baton.telemetry.logs import get_logger, shows_debug
from baton.telemetry.metrics import ABORTS_TOTAL, REQUESTS_IN_STATE, RETRIES_TOTAL
from baton.telemetry.sequence_timer import SequenceTimer

_NUM_IN_STATE = dict.fromkeys(RequestState, 0)  # of this process; the metric reads it when it is asked for
for _state in RequestState:
    REQUESTS_IN_STATE.labels(_state.value).set_function(partial(_NUM_IN_STATE.__getitem__, _state))

log = get_logger(__name__)


class TrackedRequest:
    """Implements `generation.AdmittedRequest`. `deadline`: on the loop's clock. `granted`: set when it may run.

    `record` is its first state in the store: RECEIVED, or QUEUED for a takeover under a later attempt.
    """

    def __init__(
        self,
        sequence: SequenceSpec,
        slot: Slot,
        record: SequenceRecord,
        deadline: float,
        records: StoreWriter,
        timer: SequenceTimer,
    ) -> None:
        self.sequence = sequence
        self.slot = slot
        self.deadline = deadline
        self.timer = timer
        self.granted = asyncio.Event()
        self.taken = False  # run, or released
        self.has_left = False  # its slot is free again
        self.avoided = Avoided()
        self.last_error: Interrupted | None = None
        self.refused = False  # by a worker, with an error that the router has ruled out
        self.num_need_media = 0  # attempts whose prefill worker lacked images
        self.without_files: set[Incarnation] = set()  # prefill workers that lack images which this router lacks, too
        self.num_failures = 0  # counted failures since decode last computed a token
        self.id = record.attempt_id
        self.metadata = request_metadata(self.id, timer.request.context)
        self.state = record.state
        self._pair: Pair | None = None
        self._records = records
        self._fingerprint = sequence.fingerprint
        self._emitted: list[int] = []
        self._made: EngineRequest | None = None  # the newest input
        self._unreached_since = math.inf
        self._left_at: Incarnation | None = None  # the worker that has just sent the row back
        self._num_cached_tokens = sequence.num_cached_tokens
        self._wants_scores = sequence.prompt_logprobs is not None
        self._logs_states = shows_debug()  # to ask takes a microsecond, and a short request has six
        _NUM_IN_STATE[self.state] += 1
        if record.state is RequestState.RECEIVED:
            records.create(record)
            self._advance(RequestEvent.ENQUEUE)
        else:
            records.adopt(record)
        if sequence.emitted:
            self._write_journal(sequence.emitted)
            self._emitted.extend(token.token for token in sequence.emitted)

    @property
    def pair(self) -> Pair | None:
        """The workers of the latest attempt; None before the first reservation."""
        return self._pair

    @property
    def num_emitted(self) -> int:
        """Output tokens so far, of all attempts."""
        return len(self._emitted)

    @property
    def num_cached_tokens(self) -> int:
        """Prompt tokens that were in a prefix cache."""
        return self._num_cached_tokens

    @property
    def required_fingerprint(self) -> str:
        """Fingerprint that the next attempt's workers must have: the one of the workers that computed the first token.

        A takeover requires the one of its record. "" while no client can have seen a token.
        """
        return self._fingerprint if self._emitted or self.sequence.fingerprint else ""

    def waits_for_workers(self, now: float, worker_wait_s: float) -> bool:
        """True while a request waits for workers to come back: until its first token for `worker_wait_s` in all."""
        if self._emitted:
            return True
        self._unreached_since = min(self._unreached_since, now)
        return now < self._unreached_since + worker_wait_s

    def engine_request(self) -> EngineRequest:
        """The current attempt's input: the prompt and all tokens emitted so far."""
        sequence, made = self.sequence, self._made
        scores = sequence.prompt_logprobs if self._wants_scores else None
        num_tokens = len(sequence.prompt_tokens) + len(self._emitted)
        is_current = made is not None and made.id is self.id and len(made.tokens) == num_tokens
        if made is None or not is_current or made.prompt_logprobs != scores:
            tokens = (*sequence.prompt_tokens, *self._emitted)
            made = self._made = EngineRequest(
                self.id, tokens, len(sequence.prompt_tokens), sequence.sampling, sequence.stop, sequence.salt,
                sequence.constraint, scores, self.slot.spec.priority, sequence.media,
            )  # fmt: skip
        return made

    def known_prefixes(self, reservation: PairReservation) -> dict[Incarnation, int]:
        """Leading tokens of the current attempt that decode workers have cached: as one told, or left there just now.

        The latter may be fewer. The worker that is asked for them knows.
        """
        left = {} if self._left_at is None else {self._left_at: len(self.sequence.prompt_tokens) + len(self._emitted)}
        return {reservation.pair.decode.incarnation: reservation.decode_prefix_len} | left

    def on_reserved(self, reservation: PairReservation) -> None:
        """Records the workers of the attempt."""
        pair = self._pair = reservation.pair
        self._fingerprint = pair.decode.fingerprint
        self._advance(RequestEvent.RESERVE, fingerprint=self._fingerprint)
        if not pair.local:
            self._advance(RequestEvent.PREFILL)
        if not self._emitted:
            self._num_cached_tokens = reservation.decode_prefix_len
        self.timer.attempt(self.id.attempt, pair.prefill, pair.decode, reservation.num_busy_replies)

    def on_reserve_failure(self, pair: Pair) -> None:
        """Records a pair that may hold a reservation whose reply was lost."""
        self._pair = pair
        self._advance(RequestEvent.RESERVE)

    def on_sealed(self, token: OutputToken, num_cached_tokens: int, finish: FinishReason | None) -> TokenChunk:
        """Records the seal and its token. Prefill had `num_cached_tokens` of the prompt cached."""
        if not self._emitted:
            num_cached = max(self._num_cached_tokens, num_cached_tokens)
            self._num_cached_tokens = min(num_cached, len(self.sequence.prompt_tokens))
        self._advance(RequestEvent.SEAL)
        return self.emit((token,), finish)

    def on_scored(self) -> None:
        """Records that all scores of the prompt have come: later attempts do not ask again."""
        self._wants_scores = False

    def on_decoding(self) -> None:
        """Records that decode has the pages of the prompt."""
        self._advance(RequestEvent.DECODE)

    def emit(self, tokens: tuple[OutputToken, ...], finish: FinishReason | None) -> TokenChunk:
        """Records the next tokens. Raises `AttemptFailure` when their indices leave a gap or repeat one."""
        for index, token in enumerate(tokens, start=len(self._emitted)):
            if token.index != index:
                gap = IntegrityFailure(f"output token {token.index} arrived where {index} comes next")
                raise AttemptFailure(gap, FaultSource.LINK)
        for token in tokens:
            self._emitted.append(token.token)
        self._records.write_tokens(self.id, tokens, num_cached_tokens=self._num_cached_tokens, finish=finish)
        if finish is not None:
            self._advance(RequestEvent.FINISH)
        return TokenChunk(tokens, self._num_cached_tokens, finish)

    def on_attempt_failure(self, failure: AttemptFailure, may_retry: bool) -> None:
        """Starts the next attempt. Raises the failure's error unless `may_retry`, and a refusal that is confirmed."""
        confirmed = failure.refusal is not None and self.refused
        may_retry = may_retry and not confirmed
        self.timer.lost(failure.error.code, self.state.value)
        RETRIES_TOTAL.labels(self.state.value, failure.error.code, "retried" if may_retry else "given_up").inc()
        if not may_retry:
            raise failure.refusal or failure.error
        self.refused = self.refused or failure.refusal is not None
        self._advance(RequestEvent.INTERRUPT, failure.error.code)
        self.id = self.id.next()
        self.metadata = request_metadata(self.id, self.timer.request.context)
        self.num_failures += failure.counted
        self._advance(RequestEvent.RETRY)
        self._left_at = None
        if self._pair is not None:
            self.avoided = failure.avoid(self.avoided, self._pair)
            self._left_at = self._pair.decode.incarnation if isinstance(failure.error, SentBack) else None
        self.last_error = failure.error

    def on_superseded(self, error: Superseded) -> None:
        """Starts the attempt after the one that a worker has seen, if that is this owner's. Raises `error` otherwise.

        A worker remembers it when the store has lost the attempts that this router made before.
        """
        seen = error.seen
        if seen is None or seen.ballot != self.id.ballot or seen.attempt < self.id.attempt:
            raise error
        if seen.next().ballot != seen.ballot:
            raise error
        self.timer.lost(error.code, self.state.value)
        RETRIES_TOTAL.labels(self.state.value, error.code, "retried").inc()
        while self.id.attempt <= seen.attempt:
            if self.state is RequestState.QUEUED:
                self._advance(RequestEvent.RESERVE)
            self._advance(RequestEvent.INTERRUPT, error.code)
            self.id = self.id.next()
            self._advance(RequestEvent.RETRY)
        self.metadata = request_metadata(self.id, self.timer.request.context)

    def complete(self) -> None:
        """See `AdmittedRequest.complete`. Cancels a sequence without an attempt here; its journal is complete."""
        if self.state not in TERMINAL:
            self._write_journal((), finish=FinishReason.STOP)
            may_finish = (self.state, RequestEvent.FINISH) in TABLE
            self._advance(RequestEvent.FINISH if may_finish else RequestEvent.CANCEL)

    def finish_if_complete(self) -> TokenChunk | None:
        """Ends a sequence that is complete with its emitted tokens; None if tokens are missing."""
        emitted = self.sequence.emitted
        finish = finish_reason(self.sequence.stop, emitted[-1].token, len(emitted)) if emitted else None
        if finish is None:
            return None
        self._write_journal((), finish=finish)
        self._advance(RequestEvent.CANCEL)
        return TokenChunk((), self._num_cached_tokens, finish)

    def fail(self, error: BatonError) -> None:
        """Ends the sequence with an error. No effect after the end.

        `Superseded` ends it here only: the store keeps it as it is, for the owner that continues it.
        """
        if self.state not in TERMINAL:
            if isinstance(error, Superseded):
                self._records.give_up(self.sequence.id)
            else:
                self._write_journal((), failure_code=error.code)
            self._advance(RequestEvent.FAIL, error.code)

    def cancel(self) -> None:
        """Ends the sequence because its client is gone. No effect after the end."""
        if self.state not in TERMINAL:
            ABORTS_TOTAL.labels(self.state.value).inc()
            self._advance(RequestEvent.CANCEL, Cancelled.code)

    def _write_journal(
        self, tokens: Sequence[OutputToken], *, finish: FinishReason | None = None, failure_code: str = ""
    ) -> None:
        cached = self._num_cached_tokens
        self._records.write_tokens(self.id, tokens, num_cached_tokens=cached, finish=finish, failure_code=failure_code)

    def _advance(self, event: RequestEvent, failure_code: str = "", fingerprint: str = "") -> None:
        before, num_emitted = self.state, len(self._emitted)
        self.state = self._records.advance(
            self.id, event, num_emitted=num_emitted, failure_code=failure_code, fingerprint=fingerprint
        )
        _NUM_IN_STATE[before] -= 1
        if self.state not in TERMINAL:
            _NUM_IN_STATE[self.state] += 1
        if self._logs_states:
            log.debug(
                "request_state",
                request_id=self.id.request_id,
                attempt=self.id.attempt,
                before=before.value,
                state=self.state.value,
            )
