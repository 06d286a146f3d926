"""Runs calls that this router has claimed, because their router died or their client came back.

`OwnerLease` hands over orphans and lost claims, `journal_reader` abandoned calls. Sequences are rebuilt from the store
(raw request, attempt of the claim, journalled tokens) and run without a client: a stop string still ends a choice, and
clients read the journal. When the last reader of a claimed call disconnects, the call is aborted. An orphan taken over
without a reader runs to its end; its deadline bounds it.
"""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from dataclasses import dataclass, replace

import structlog

from baton.domain.errors import (
    AnswerLost,
    BatonError,
    Broken,
    Cancelled,
    ContextOverflow,
    Refused,
    Superseded,
    WorkerLost,
    from_code,
)
from baton.domain.ids import AttemptId, Ballot, RequestId, first_attempt
from baton.domain.lifecycle import RequestState
from baton.services.router.edge.disconnect import join_tasks
from baton.services.router.edge.http_errors import ForeignCall
from baton.services.router.generation import Dispatcher, SequenceSpec
from baton.services.router.openai.request_parser import RequestParser
from baton.services.router.openai.valid_request import ValidRequest
from baton.services.router.streaming.generation_source import GenerationSource
from baton.services.router.streaming.token_stream import TokenStream
from baton.services.router.takeover.call_media import CallMedia
from baton.services.router.takeover.call_ownership import CallOwnership, OwnershipHandle
from baton.services.router.takeover.claim_policy import CallClaim, ClaimPolicy, ClaimStep
from baton.services.router.takeover.foreign_calls import STORE_RETRY_S, ForeignCalls, fail_sequences
from baton.services.router.takeover.prompt_digest import PromptReplaced
from baton.services.router.takeover.stored_call import parse_stored
from baton.services.router.takeover.supersede_listener import SupersedeListener
from baton.services.router.text.text_model import TextModel
from baton.store.ownership import OwnerLease
from baton.store.store import CallRecord, CallStatus, JournalPart, SequenceRecord, StateStore, StoreUnavailable
from baton.telemetry.metrics import TAKEOVERS_TOTAL
from baton.telemetry.request_timer import RequestOrigin, RequestTimer

FOREIGN_WAIT_S = 0.4
"""How long a call of another tokenizer may stay abandoned. Below the grace of headers: its client gets a status."""

FOREIGN_RETRY_S = 1.0
"""Retry-After of such a call: the next try may reach a router of its tokenizer."""

EVENT_WAIT_S = 60.0
"""Longest wait for one event; a timeout has no effect."""

log = structlog.get_logger(__name__)


@dataclass(frozen=True, slots=True)
class TakeoverContext:
    """The parts that a takeover needs."""

    store: StateStore
    parser: RequestParser
    dispatcher: Dispatcher
    text: TextModel
    call_ownership: CallOwnership
    supersede_listener: SupersedeListener
    patience_s: float
    media: CallMedia


@dataclass(slots=True)
class _Takeover:
    """One call that runs here. `abandoned`: its last reader has disconnected. `reclaimed`: the same call, claimed again
    under a later epoch, and the cause; the later claim has fenced off this run.
    """

    task: asyncio.Task[BaseException | None]
    ballot: Ballot
    abandoned: bool = False
    reclaimed: tuple[CallRecord, str] | None = None


@dataclass(frozen=True, slots=True)
class _SequenceState:
    """State of a sequence in the store. The claim has fenced off the attempt of its record."""

    sequence: SequenceSpec
    journal: JournalPart
    record: SequenceRecord | None

    @property
    def failure_code(self) -> str:
        """The code that it failed with; "" if it did not fail."""
        if self.journal.finish is not None:
            return ""
        code = self.journal.failure_code
        if not code and self.record is not None and self.record.state.terminal:
            code = self.record.failure_code or WorkerLost.code  # its journal is lost
        return "" if code == Superseded.code else code  # no end: an older router wrote it

    def is_superseded(self, ballot: Ballot) -> bool:
        """True if its call was claimed again after the claim that made `ballot`."""
        return self.record is not None and self.record.attempt_id.ballot > ballot

    def resumed(self, ballot: Ballot) -> SequenceSpec:
        """The sequence as it runs here. One without a record may run elsewhere: its attempt number fences it off."""
        first = AttemptId(self.sequence.id, first_attempt(ballot[0]), ballot[1])
        id = first if self.record is None else max(first, self.record.attempt_id, key=lambda attempt: attempt.order)
        return replace(
            self.sequence,
            attempt=id.attempt,
            owner_tag=id.owner_tag,
            emitted=self.journal.tokens,
            num_cached_tokens=self.journal.num_cached_tokens,
            fingerprint="" if self.record is None else self.record.fingerprint,
            prompt_logprobs=None,  # the journal has no scores; a reader that needs them asks for itself
        )


class Takeovers:
    """Owned by one event loop. Close it before the dispatcher and the store."""

    def __init__(self, context: TakeoverContext) -> None:
        self._context = context
        self._foreign = ForeignCalls(context.text.digest, context.store, context.call_ownership)
        self._takeovers: dict[RequestId, _Takeover] = {}
        self._claims: dict[RequestId, asyncio.Task[None]] = {}
        self._num_readers: Counter[RequestId] = Counter()
        self._policies: dict[RequestId, ClaimPolicy] = {}  # of the calls with readers
        self._lease: OwnerLease | None = None
        self._draining = False
        self._closed = False

    def follow(self, lease: OwnerLease) -> None:
        """`lease`: claims orphans for `take_over`, and gets the claims made here whose answers are lost."""
        self._lease = lease

    @property
    def draining(self) -> bool:
        """True if no further call is taken over."""
        return self._draining

    async def attend(self, id: RequestId, record: CallRecord | None) -> bool:
        """Takes the next step for a call that a client follows: claims it if no router answers it (`ClaimPolicy`).

        `record`: the call as the reader found it; None: the store does not have it. Returns True when its journal
        cannot grow any more. Claims nothing while this router drains, and no call of another tokenizer or prompt: its
        text would be wrong here. Raises `AnswerLost`, `ForeignCall` and `StoreUnavailable`.
        """
        if record is not None and (foreign := self._foreign.error(record, FOREIGN_RETRY_S)) is not None:
            await self._check_attended(record, foreign)
            return record.status is CallStatus.ENDED
        if self._draining:
            return record is not None and record.status is CallStatus.ENDED
        policy, call_ownership = self._policies[id], self._context.call_ownership
        is_ours = record is not None and record.owner == call_ownership.owner
        is_claiming = self._lease is not None and self._lease.is_claiming(id)
        held = is_ours and (call_ownership.holds(id) or is_claiming)
        runs_here = held or id in self._takeovers or id in self._claims
        step = policy.decide(record, runs_here=runs_here, now=_now())
        if step is ClaimStep.GIVE_UP:
            raise AnswerLost(f"the answer to {id} is lost: send the request again")
        if step is ClaimStep.CLAIM:
            claiming = self._claim(id, policy, record, policy.claim(record))
            self._claims[id] = asyncio.create_task(claiming, name=f"claim-{id}")
        if id in self._claims:
            await asyncio.shield(self._claims[id])  # a claim must be followed by a takeover, even without a reader
        return step is ClaimStep.FINISH

    def on_outage(self, id: RequestId) -> None:
        """The store did not answer a reader of the call: its absence is not known."""
        self._policies[id].on_outage()

    async def take_over(self, record: CallRecord) -> None:
        """Starts an orphan that this router has claimed; returns at once."""
        self._start(record, "orphan")

    async def error_for(self, record: CallRecord, error: PromptReplaced) -> BatonError:
        """What a client of a call with another prompt gets. See `ForeignCalls`. Raises `StoreUnavailable`."""
        return await self._foreign.error_by_deadline(record, error)

    def add_reader(self, id: RequestId, seed: CallRecord | None, superseded: Superseded | None) -> None:
        """Adds a client that reads the call. `seed`: a copy of the call. `superseded`: how its run here ended."""
        self._num_readers[id] += 1
        owner = self._context.call_ownership.owner
        policy = self._policies.setdefault(id, ClaimPolicy(owner, self._context.patience_s, seed))
        if superseded is not None:
            policy.on_superseded(_seen(superseded), _now())

    def remove_reader(self, id: RequestId, *, finished: bool) -> None:
        """Removes a client. The last one to leave an unfinished call aborts it."""
        self._num_readers[id] -= 1
        if self._num_readers[id] == 0:
            del self._num_readers[id], self._policies[id]
            if not finished:
                self._abandon(id)

    def drain(self) -> None:
        """Takes over no further call."""
        self._draining = True

    async def close(self) -> None:
        """Cancels every takeover; the calls stay open in the store for the next router."""
        self._draining = True
        await join_tasks(self._claims.values())
        await self._foreign.close()
        self._closed = True
        tasks = [takeover.task for takeover in self._takeovers.values()]
        for task in tasks:
            task.cancel()
        await join_tasks(tasks)

    async def _check_attended(self, record: CallRecord, foreign: ForeignCall) -> None:
        """Raises `foreign` or `AnswerLost` if a call is abandoned, and no router claims it in `FOREIGN_WAIT_S`."""
        if record.status is CallStatus.ABANDONED:
            await asyncio.sleep(FOREIGN_WAIT_S)
            later = await self._context.store.get_call(record.id)
            if later is not None and later.status is CallStatus.ABANDONED:
                raise await self._foreign.error_by_deadline(later, foreign)

    async def _claim(self, id: RequestId, policy: ClaimPolicy, found: CallRecord | None, claim: CallClaim) -> None:
        """Claims a call once. The lease follows a claim whose answer is lost, until the call is claimed again here."""
        granted, owner, lease = None, self._context.call_ownership.owner, self._lease
        is_unknown = lease is not None and lease.forget(id)  # an earlier claim of it was lost
        try:
            granted = await self._context.store.claim_call(id, claim.ballot, owner, floor=claim.floor, seed=claim.seed)
        except StoreUnavailable:
            is_unknown = True
            raise
        finally:
            del self._claims[id]
            policy.on_answer(None if granted is None else granted.ballot, _now())
            if lease is not None and granted is None and is_unknown and (before := found or claim.seed) is not None:
                lease.confirm(before, self._on_confirmed, floor=claim.floor)
        if granted is not None:
            if lease is not None:
                lease.forget(id)  # it may have claimed the call meanwhile
            self._start_unread(granted, "client")

    async def _on_confirmed(self, record: CallRecord) -> None:
        self._start_unread(record, "client")

    def _start_unread(self, record: CallRecord, cause: str) -> None:
        """Starts a call; aborts it if its readers have left meanwhile."""
        self._start(record, cause)
        if not self._num_readers[record.id]:
            self._abandon(record.id)

    def _start(self, record: CallRecord, cause: str) -> None:
        if self._closed:  # the call stays open in the store for the next router
            return
        running = self._takeovers.get(record.id)
        if running is not None:
            if record.ballot > running.ballot:  # else the same claim, confirmed once more
                running.reclaimed = record, cause
            return
        if self._context.call_ownership.has_ended(record):  # two claims were sent, and one grant was found twice
            return
        handle = self._context.call_ownership.adopt(record)
        log.info("takeover_started", request_id=record.id, epoch=record.epoch, cause=cause)
        TAKEOVERS_TOTAL.labels(cause).inc()
        task = asyncio.create_task(self._run(record), name=f"takeover-{record.id}")
        task.add_done_callback(lambda done: self._on_done(record.id, handle, done))
        self._takeovers[record.id] = _Takeover(task, record.ballot)

    def _abandon(self, id: RequestId) -> None:
        takeover = self._takeovers.get(id)
        if takeover is not None:
            takeover.abandoned = True
            takeover.task.cancel()

    def _on_done(self, id: RequestId, handle: OwnershipHandle, task: asyncio.Task[BaseException | None]) -> None:
        takeover = self._takeovers.pop(id)
        if not task.cancelled():
            handle.end(task.result())
            if isinstance(error := task.result(), Superseded) and id in self._policies:
                self._policies[id].on_superseded(_seen(error), _now())
        else:
            handle.end(Cancelled("its last reader disconnected") if takeover.abandoned else asyncio.CancelledError())
        if takeover.reclaimed is not None and not self._draining:  # otherwise the call would never end
            self._start(*takeover.reclaimed)
            if takeover.abandoned:
                self._abandon(id)

    async def _run(self, record: CallRecord) -> BaseException | None:
        """Root task of a takeover. Returns the error that it ended with."""
        try:
            call, source, unfinished = await self._resume(record)
            await self._generate_rest(call, source, unfinished)
        except BatonError as failure:
            log.warning("takeover_failed", request_id=record.id, code=failure.code, reason=str(failure))
            return failure
        except Exception as failure:
            log.exception("takeover_failed", request_id=record.id)
            return failure
        return None

    async def _resume(self, record: CallRecord) -> tuple[ValidRequest, GenerationSource, list[int]]:
        """The call, a source of its tokens, and its unfinished choices.

        An error that ends the call is recorded at its sequences, which no dispatcher knows yet.
        """
        try:
            return await self._admit(record)
        except (Cancelled, Superseded):
            raise  # another router may continue it
        except Exception as failure:
            code = failure.code if isinstance(failure, BatonError) else Broken.code
            await fail_sequences(self._context.store, self._context.call_ownership, record, code)
            raise

    async def _admit(self, record: CallRecord) -> tuple[ValidRequest, GenerationSource, list[int]]:
        context = self._context
        try:
            parsed = await parse_stored(context.parser, record)
        except PromptReplaced as error:
            self._foreign.add(record.id)
            raise Cancelled(str(error)) from None  # a router that makes its prompt may continue it
        if parsed.request.stream_options is None and not self._num_readers[record.id]:
            raise Cancelled("a client that does not stream cannot read the rest")
        call, unfinished = await self._rebuild(parsed.request, record.ballot)
        if unfinished:  # else no worker needs its files
            call = await context.media.restored(call)
            context.media.keep(call)
        timer = RequestTimer(RequestOrigin(record.endpoint, record.tenant), time.monotonic())
        timer.private = record.private
        timer.begin(record.id, len(call.sequences), call.num_prompt_tokens, stream=call.stream_options is not None)
        try:
            source = GenerationSource(context.dispatcher, call, timer.sequences, unfinished)
        except ContextOverflow:
            raise
        except Refused as refusal:
            raise Cancelled(f"not admitted: {refusal}") from None
        return call, source, unfinished

    async def _generate_rest(self, call: ValidRequest, source: GenerationSource, unfinished: list[int]) -> None:
        context = self._context
        stream = TokenStream(context.text, call, source)
        with context.supersede_listener.listening([call.sequences[choice] for choice in unfinished], stream.abort):
            async with stream:
                while stream.num_running:
                    await stream.next(EVENT_WAIT_S)

    async def _rebuild(self, call: ValidRequest, ballot: Ballot) -> tuple[ValidRequest, list[int]]:
        """The call with its sequences as the store has them, and its unfinished choices.

        A store that does not answer is read again until the deadline of the call.

        Raises the error of a failed choice, after recording the others as failed. Raises `Superseded` if the call has a
        new owner.
        """
        deadline = _now() + max((sequence.deadline_s for sequence in call.sequences), default=0.0)
        states = [await self._load_state(sequence, deadline) for sequence in call.sequences]
        if any(state.is_superseded(ballot) for state in states):
            raise Superseded(f"call {call.id} has been claimed again")  # its attempts belong to another claim
        code = next((state.failure_code for state in states if state.failure_code), "")
        for state in states:
            self._settle(state, code)
        if code:
            raise from_code(code, f"request {call.id} has failed before")
        unfinished = [choice for choice, state in enumerate(states) if state.journal.finish is None]
        return replace(call, sequences=tuple(state.resumed(ballot) for state in states)), unfinished

    async def _load_state(self, sequence: SequenceSpec, deadline: float) -> _SequenceState:
        """The sequence as the store has it. Raises `Cancelled` if the store does not answer until `deadline`."""
        while True:
            try:
                journal = await self._context.store.read_journal(sequence.id, 0, 0.0)
                return _SequenceState(sequence, journal, await self._context.store.get(sequence.id))
            except StoreUnavailable as error:
                if _now() >= deadline:
                    raise Cancelled(f"the store is unavailable: {error}") from None
                log.info("takeover_waits_for_store", request_id=sequence.id, reason=str(error))
            await asyncio.sleep(STORE_RETRY_S)

    def _settle(self, state: _SequenceState, failure_code: str) -> None:
        """Records the end of a sequence that the previous owner did not record."""
        record, journal = state.record, state.journal
        if record is None or record.state.terminal:
            return
        if journal.finish is not None:
            self._context.call_ownership.record_end(record, RequestState.FINISHED, len(journal.tokens))
        elif failure_code:
            self._context.call_ownership.record_end(record, RequestState.FAILED, len(journal.tokens), failure_code)


def _seen(error: Superseded) -> Ballot | None:
    return None if error.seen is None else error.seen.ballot


def _now() -> float:
    return asyncio.get_running_loop().time()
