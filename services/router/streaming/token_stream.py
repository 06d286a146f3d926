"""Runs all choices of one request as one stream of token events: a task a choice, one queue, one reader.

A `ChunkSource` brings tokens: `generation_source` from workers, `takeover.journal_reader` from the journal. Each task
has a `ChoiceReader`, which turns the chunks of its choice into text, and queues one event a token; while a task waits,
its source may call the reader itself. Tasks that read workers do not wait for the reader of the stream: rows and
admission slots are free when decode is done. Beyond `MAX_QUEUED_EVENTS` their events wait packed, in an `UnreadBuffer`;
a reader that leaves too much is hung up (`too_slow`). A choice ends with the event that has a `finish`; the first error
ends the stream. When another router takes the request over, the stream continues from a second source, after the events
that it has given: they must be the same there. It counts those events, keeps a digest of their tokens, and counts
tokens for `usage`.
"""

from __future__ import annotations

import asyncio
import math
from collections import deque
from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
from contextlib import aclosing
from types import TracebackType
from typing import Protocol

import structlog
from msgspec import UNSET, UnsetType

from baton.domain.errors import BatonError, Broken, DeadlineExceeded, Superseded
from baton.domain.request import FinishReason
from baton.domain.scores.prompt_scores import PromptScores
from baton.services.router.edge.disconnect import ClientTooSlow, join_tasks
from baton.services.router.generation import TakeChunk, TokenChunk
from baton.services.router.openai.schemas import CompletionTokensDetails, PromptTokensDetails, Usage
from baton.services.router.openai.valid_request import ValidRequest
from baton.services.router.streaming.answer_parser import answer_parser
from baton.services.router.streaming.choice_reader import ChoiceReader
from baton.services.router.streaming.prompt_scoring import PromptScoring
from baton.services.router.streaming.unread_buffer import UnreadBudget, UnreadBuffer
from baton.services.router.text.choice_text import ChoiceText, DroppedText, TokenEvent, add_token
from baton.services.router.text.text_model import TextModel

MAX_QUEUED_EVENTS = 64
"""Events that wait as objects. Further ones of workers are packed; the journal is read no further."""

DEADLINE_GRACE_S = 5.0
"""The stream ends this much later than the dispatcher."""

DISCONNECT_GRACE_S = 5.0
"""A response is cancelled this much later than its stream."""

log = structlog.get_logger(__name__)


class ChunkSource(Protocol):
    """Tokens of the choices of one request. Acquired by the constructor, released by `close`."""

    @property
    def choices(self) -> Sequence[int]:
        """The choices that it has tokens of."""
        ...

    @property
    def holds_workers(self) -> bool:
        """True: it is read at once, since its choices hold rows of workers. False: it waits for the reader."""
        ...

    async def open(self, choice: int, take: TakeChunk | None = None) -> AsyncGenerator[TokenChunk, None]:
        """Chunks of one choice but those that `take` takes; called once. May wait for its turn."""
        ...

    def on_first_chunk(self, choice: int) -> None:
        """The choice has its first chunk, or ended without one."""
        ...

    def complete(self, choice: int) -> None:
        """The text of the choice is complete, even if chunks remain."""
        ...

    def close(self, *, finished: bool) -> None:
        """Releases everything. `finished`: every choice has its last event."""
        ...


class TokenStream:
    """Entered, read and left by one task. Read `next` while `num_running`."""

    def __init__(
        self,
        text: TextModel,
        request: ValidRequest,
        source: ChunkSource,
        on_superseded: Callable[[Superseded], ChunkSource] | None = None,
        unread: UnreadBudget | None = None,
        scoring: PromptScoring | None = None,
    ) -> None:
        """`on_superseded` returns the source to continue from; None: `Superseded` is raised like any other error.

        `unread` bounds what waits for all readers of the router; None: for a reader that never waits. `scoring`: of the
        prompts, whose scores are there before the first event of a choice; None: the reader needs none.
        """
        self._text = text
        self._request = request
        self._scoring = scoring
        self._source = source
        self._on_superseded = on_superseded
        self._switched = False
        self._loop = asyncio.get_running_loop()
        sequences = request.sequences
        self.timeout_s = (sequences[0].deadline_s if sequences else 0.0) + DEADLINE_GRACE_S  # one deadline for all
        self.deadline = self._loop.time() + self.timeout_s  # on the loop's clock
        self.on_news: Callable[[bool], None] | None = None  # there is an event to `take`, or an error; True: the last
        self.counts = [0] * len(request.choices)
        self.digests = [0] * len(request.choices)  # of the tokens of each choice's given events
        self.num_running = len(self.counts) if not request.sequences else len(source.choices)
        self._num_output_tokens = 0
        self._num_reasoning_tokens = 0
        self._num_cached_tokens: dict[int, int] = {}  # leading choice of a prompt -> tokens
        self._complete: set[int] = set()  # choices whose text is complete, queued or not
        self._finished: set[int] = set()  # choices whose last event is given
        self._ended: set[int] = set()  # choices whose last event is queued; their tasks close by themselves
        self._queue: deque[TokenEvent] = deque()
        self._unread = UnreadBuffer(UnreadBudget() if unread is None else unread, self._on_overflow)
        self.too_slow: asyncio.Future[None] = self._loop.create_future()  # done: the reader must be hung up
        self._error: BatonError | None = None  # raised after the events before it
        self._abort_error: BatonError | None = None
        self._reader: asyncio.Future[None] | None = None
        self._read_until = 0.0
        self._waiting_for_room: deque[asyncio.Future[None]] = deque()
        self._timer: asyncio.TimerHandle | None = None
        self._timer_at = math.inf
        self._tasks: dict[int, asyncio.Task[None]] = {}
        if not request.sequences:  # only an echo: no worker runs it
            self._queue.extend(TokenEvent(choice, None, "", 0, FinishReason.LENGTH) for choice in request.choices)
            self._complete.update(request.choices)

    async def __aenter__(self) -> TokenStream:
        self._start()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._timer is not None:
            self._timer.cancel()
        self._unread.clear()
        try:
            await self._stop(finished=not self.num_running)
        finally:
            self._unread.close()  # a task may have added events while it ended
            self._on_superseded = None  # it has the response, which has this stream: both are freed at once

    @property
    def prompt_scores(self) -> Mapping[int, PromptScores]:
        """Scores of the prompts that are there."""
        return {} if self._scoring is None else self._scoring.scores

    @property
    def generated(self) -> bool:
        """True if the text of every choice is complete: nothing is left to generate."""
        return len(self._complete) == len(self.counts)

    def usage(self) -> Usage:
        """Tokens given so far. A prompt counts once; its cached tokens are those of its leading choice."""
        prompt, output = self._request.num_prompt_tokens, self._num_output_tokens
        cached = PromptTokensDetails(sum(self._num_cached_tokens.values()))
        reasoning: CompletionTokensDetails | UnsetType = UNSET
        if self._request.reasoning is not None:
            reasoning = CompletionTokensDetails(self._num_reasoning_tokens)
        return Usage(prompt, output, prompt + output, cached, reasoning)

    def abort(self, error: BatonError) -> None:
        """Makes `next` raise `error`, even before queued events. No effect after `on_superseded`."""
        if self._abort_error is None and not self._switched:
            self._abort_error = error
            self._wake()

    async def next(self, timeout_s: float) -> TokenEvent | None:
        """The next event of any choice; None after `timeout_s` without one.

        Raises the error that ended a choice too early, or `DeadlineExceeded`.
        """
        now = self._loop.time()
        if now >= self.deadline:
            raise DeadlineExceeded("the answer was not complete at the deadline")
        if not self._has_next:
            self._read_until = min(now + timeout_s, self.deadline)
            if self._read_until < self._timer_at:
                self._set_timer(self._read_until)
            self._reader = self._loop.create_future()
            await self._reader
            if not self._has_next:
                return None
        event = self.take()
        if event is None:
            error = self._abort_error or self._error
            assert error is not None  # `_has_next`
            await self._switch(error)
            return await self.next(timeout_s)
        return event

    @property
    def has_error(self) -> bool:
        """True if `next` would raise an error, or continue from the second source."""
        is_empty = not (self._queue or self._unread.num_events)
        return self._abort_error is not None or (self._error is not None and is_empty)

    def take(self) -> TokenEvent | None:
        """The next event, without a wait; None if there is none, or an error comes before it."""
        if self._abort_error is not None:
            return None
        if not self._queue:
            if not self._unread.num_events:
                return None
            self._queue.extend(self._unread.pop(MAX_QUEUED_EVENTS))
        event = self._queue.popleft()
        if self._waiting_for_room:
            self._wake_writers()
        choice = event.choice
        self.counts[choice] += 1
        self.digests[choice] = add_token(self.digests[choice], event)
        self._num_output_tokens += event.token is not None
        self._num_reasoning_tokens += event.is_reasoning
        if choice % self._request.num_choices == 0:
            self._num_cached_tokens[choice] = event.num_cached_tokens
        if event.finish is not None:
            self._finished.add(choice)
            self.num_running -= 1
        return event

    @property
    def _has_next(self) -> bool:
        return bool(self._queue) or self.has_error or self._unread.num_events > 0

    def _start(self) -> None:
        for choice in self._source.choices:
            if choice not in self._finished:
                self._tasks[choice] = asyncio.create_task(self._run_choice(self._source, choice))

    async def _stop(self, *, finished: bool) -> None:
        try:
            for choice in self._tasks.keys() - self._ended:
                self._tasks[choice].cancel()
            await join_tasks(self._tasks.values())
        finally:
            self._source.close(finished=finished)

    async def _switch(self, error: BatonError) -> None:
        """Continues from the second source if the request was superseded; otherwise raises `error`."""
        if self._switched or self._on_superseded is None or not isinstance(error, Superseded):
            raise error
        self._switched = True
        await self._stop(finished=False)
        self._source = self._on_superseded(error)
        self._abort_error = self._error = None
        for state in (self._tasks, self._ended, self._queue, self._unread):
            state.clear()
        self._start()

    async def _run_choice(self, source: ChunkSource, choice: int) -> None:
        """Root task of one choice. Queues its error after its events."""
        try:
            await self._read_choice(source, choice)
        except BatonError as error:
            self._fail(error)
        except Exception as error:
            log.exception("choice_failed", request_id=self._request.id)
            self._fail(Broken(str(error)))
        finally:
            source.on_first_chunk(choice)

    async def _read_choice(self, source: ChunkSource, choice: int) -> None:
        text, num_given, started = self._choice_text(choice), self.counts[choice], False
        reader = ChoiceReader(text, self._add, num_given, self.digests[choice])
        scoring = None if num_given else self._scoring
        if self._request.sequences[choice].emitted and self._resume(source, choice, text):
            return
        async with aclosing(await source.open(choice, reader.take)) as chunks:
            async for chunk in chunks:
                if self._scoring is not None:
                    self._scoring.offer(choice, chunk.prompt_scores)
                if not started:
                    source.on_first_chunk(choice)
                    started = True
                for event in reader.read(chunk) if reader.is_pending else text.events(chunk):
                    if scoring is not None:
                        await scoring.wait(choice)
                        scoring = None
                    if event.finish is not None:
                        self._complete.add(choice)
                        source.complete(choice)
                    while not source.holds_workers and len(self._queue) >= MAX_QUEUED_EVENTS:
                        await self._wait_for_room()
                    self._add(event)
                    if event.finish is not None:
                        self._ended.add(choice)
                        return
                reader.takes = scoring is None
        raise Broken(f"choice {choice} ended without a finish reason")

    def _resume(self, source: ChunkSource, choice: int, text: ChoiceText | DroppedText) -> bool:
        """Queues the events of tokens from earlier attempts. True if they contain the end of the choice."""
        sequence = self._request.sequences[choice]
        events = text.events(TokenChunk(sequence.emitted, sequence.num_cached_tokens))
        for event in events:
            self._add(event)
        if events[-1].finish is None:
            return False
        self._complete.add(choice)
        self._ended.add(choice)
        source.complete(choice)
        return True

    def _choice_text(self, choice: int) -> ChoiceText | DroppedText:
        request, sequence = self._request, self._request.sequences[choice]
        if request.drops_output:
            return DroppedText(choice)
        context = sequence.prompt_tokens if request.continues_prompt else ()
        detokenizer = self._text.detokenizer(skip_special_tokens=request.skip_special_tokens, context=context)
        parser, include_stop = answer_parser(request, self._text), request.include_stop
        return ChoiceText(
            choice, sequence.stop, detokenizer, request.stop_strings, include_stop=include_stop, parser=parser
        )

    def _add(self, event: TokenEvent) -> None:
        """Queues an event. Drops one after an error: the second source brings it again."""
        if self._error is not None:
            return
        if len(self._queue) < MAX_QUEUED_EVENTS and not self._unread.num_events:
            self._queue.append(event)
            if self.on_news is not None:
                self.on_news(event.finish is not None and self.num_running == 1)
            else:
                self._wake()
        else:
            self._unread.push(event)

    def _fail(self, error: BatonError) -> None:
        self._error = self._error or error
        self._wake()

    def _on_overflow(self) -> None:
        self._fail(ClientTooSlow("the client left too much of the answer unread"))
        if not self.too_slow.done():
            self.too_slow.set_result(None)

    async def _wait_for_room(self) -> None:
        room = self._loop.create_future()
        self._waiting_for_room.append(room)
        await room

    def _wake_writers(self) -> None:
        """Wakes all writers: one that was cancelled must not keep the room."""
        while self._waiting_for_room:
            room = self._waiting_for_room.popleft()
            if not room.done():
                room.set_result(None)

    def _wake(self) -> None:
        if self.on_news is not None:
            self.on_news(False)
        elif self._reader is not None and not self._reader.done():
            self._reader.set_result(None)

    def _set_timer(self, at: float) -> None:
        """Sets the timer. One timer serves many reads: it is set again only when it fires too early."""
        if self._timer is not None:
            self._timer.cancel()
        self._timer, self._timer_at = self._loop.call_at(at, self._on_timer), at

    def _on_timer(self) -> None:
        self._timer, self._timer_at = None, math.inf
        if self._reader is None or self._reader.done():
            return
        if self._loop.time() < self._read_until:
            self._set_timer(self._read_until)
        else:
            self._wake()
