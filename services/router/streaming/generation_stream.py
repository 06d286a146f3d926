"""Drives the choices of one request: tokens come from the dispatcher, texts go to the client's answer.

1. `admit_all` admits every choice, or none.
2. `async with GenerationStream(...)` starts a task a choice. The first choice of a prompt leads: the others start once
it has
   given its first token, so that they find the prompt in the prefix cache.
3. `next` hands out the choices' events as they come, mixed; each is one token and the text that became certain with it.
4. Leaving the block closes every generator (which aborts what still runs) and releases the admitted requests that never
ran.

`respond` runs it for a client and `takeover` for nobody: there some choices have ended already, and the others begin
with what earlier attempts emitted. The relay knows text and stop strings, but neither HTTP nor workers.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Iterable, Mapping
from contextlib import aclosing
from types import TracebackType

from baton.domain.errors import BatonError, DeadlineExceeded
from services.router.generation import AdmittedRequest, Dispatcher, TokenChunk
from services.router.openai.valid_request import ValidRequest
from services.router.streaming.merged_stream import MergedStream
from services.router.text.choice_text import ChoiceText, TokenEvent
from services.router.text.text_model import TextModel

DEADLINE_GRACE_S = 5.0
"""The dispatcher ends a request at its deadline; this much later the relay does."""


def admit_all(
    dispatcher: Dispatcher, request: ValidRequest, choices: Iterable[int] | None = None
) -> dict[int, AdmittedRequest]:
    """Admits each of the choices (all that have sequences by default). Raises the first `Refused`, having released
    the others."""
    admitted: dict[int, AdmittedRequest] = {}
    try:
        for choice in range(len(request.sequences)) if choices is None else choices:
            admitted[choice] = dispatcher.admit(request.sequences[choice])
    except BaseException:
        for each in admitted.values():
            dispatcher.release(each)
        raise
    return admitted


def choice_text(text: TextModel, request: ValidRequest, choice: int) -> ChoiceText:
    """The text of one choice, before its first token."""
    detokenizer = text.detokenizer(skip_special_tokens=request.skip_special_tokens, context=request.context(choice))
    return ChoiceText(choice, request.sequences[choice].stop, detokenizer, request.stop_strings)


def max_duration_s(request: ValidRequest) -> float:
    """How long after its admission a request may take, at most."""
    return max((sequence.deadline_s for sequence in request.sequences), default=0.0) + DEADLINE_GRACE_S


class GenerationStream:
    """The running choices of one request, an `TokenEventSource`. `admitted`: choice -> its admitted request."""

    def __init__(
        self, dispatcher: Dispatcher, text: TextModel, request: ValidRequest, admitted: Mapping[int, AdmittedRequest]
    ) -> None:
        self._dispatcher = dispatcher
        self._text = text
        self._request = request
        self._not_run = dict(admitted)  # those that were never run
        self._leaders = {choice: self._leader(choice) for choice in admitted}
        self._leader_started = {leader: asyncio.Event() for leader in self._leaders.values()}
        self._deadline = asyncio.get_running_loop().time() + max_duration_s(request)
        self._stream = MergedStream({choice: self._generate(choice) for choice in admitted}, self._deadline)

    @property
    def finished(self) -> bool:
        """Whether `next` has given every choice's last event."""
        return self._stream.finished

    async def __aenter__(self) -> GenerationStream:
        await self._stream.__aenter__()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            await self._stream.__aexit__(kind, error, trace)
        finally:
            for admitted in self._not_run.values():
                self._dispatcher.release(admitted)
            self._not_run.clear()

    async def next(self, timeout_s: float) -> TokenEvent | None:
        """The next event of any choice; None after `timeout_s` without one.

        Raises what ended a choice before its time: `Interrupted`, `DeadlineExceeded`, `Refused` or `Broken`.
        """
        return await self._stream.next(timeout_s)

    def abort(self, error: BatonError) -> None:
        """From now on `next` raises `error`."""
        self._stream.abort(error)

    async def _generate(self, choice: int) -> AsyncGenerator[TokenEvent, None]:
        """One choice's events. What its text ends, a stop string, is told to the admitted request before its run is
        closed."""
        leader = self._leaders[choice]
        leader_started = self._leader_started[leader]
        if leader != choice:
            await self._wait_for_leader(leader_started)
        state, admitted = choice_text(self._text, self._request, choice), self._not_run[choice]
        for event in state.events(_emitted_chunk(admitted)):
            _complete_if_finished(admitted, event)
            yield event
        del self._not_run[choice]
        async with aclosing(self._dispatcher.run(admitted)) as chunks:
            async for chunk in chunks:
                leader_started.set()
                for event in state.events(chunk):
                    _complete_if_finished(admitted, event)
                    yield event

    def _leader(self, choice: int) -> int:
        """Who leads a choice here: nobody else, if its leader has ended before."""
        leader = self._request.leader(choice)
        return leader if leader in self._not_run else choice

    async def _wait_for_leader(self, leader_started: asyncio.Event) -> None:
        try:
            async with asyncio.timeout_at(self._deadline):
                await leader_started.wait()
        except TimeoutError:
            raise DeadlineExceeded("no first token before the deadline") from None


def _complete_if_finished(admitted: AdmittedRequest, event: TokenEvent) -> None:
    if event.finish is not None:
        admitted.complete()


def _emitted_chunk(admitted: AdmittedRequest) -> TokenChunk:
    """What earlier attempts gave: the text is a function of all tokens from the first one on."""
    return TokenChunk(admitted.sequence.emitted, admitted.sequence.num_cached_tokens)
