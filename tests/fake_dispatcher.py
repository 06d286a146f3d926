"""A scripted `Dispatcher` for tests of the HTTP side.

A script lists the steps of a sequence. Afterwards the fake knows which sequences were admitted, released, started,
aborted and finished.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable, Sequence
from dataclasses import dataclass, field

from msgspec import structs

from baton.domain.errors import BatonError, Broken, Refused
from baton.domain.ids import RequestId
from baton.domain.request import FinishReason, OutputToken
from baton.domain.scores.prompt_scores import PromptScores
from baton.engine.fake_runner import fake_scores, fake_slots
from baton.services.router.generation import AdmittedRequest, SequenceSpec, TakeChunk, TokenChunk
from baton.telemetry.sequence_timer import SequenceTimer


@dataclass(frozen=True, slots=True)
class EmitChunk:
    """Yields one chunk."""

    chunk: TokenChunk


@dataclass(frozen=True, slots=True)
class WaitForGate:
    """Waits for `gate`."""

    gate: asyncio.Event


@dataclass(frozen=True, slots=True)
class RaiseError:
    """Raises the error."""

    error: Exception


SCORED_VOCAB_SIZE = 256
"""Best tokens in the scores of a prompt are below it."""

ScriptStep = EmitChunk | WaitForGate | RaiseError
DispatchScript = Callable[[SequenceSpec], Sequence[ScriptStep]]


@dataclass(slots=True, eq=False)
class FakeAdmittedRequest:
    """An admitted request. `completed`: its text ended before its tokens."""

    sequence: SequenceSpec
    completed: bool = False

    def complete(self) -> None:
        """See `AdmittedRequest`."""
        self.completed = True


@dataclass(slots=True)
class FakeDispatcher:
    """Runs `script` for every sequence; the first chunk also has the scores of the prompt, if they are asked for.

    `refusals`: errors of the next admissions; None admits.

    `full_error`: raised by `refuse_if_full`.
    """

    script: DispatchScript
    refusals: list[Refused | None] = field(default_factory=list)
    full_error: Refused | None = None
    rate_refusals: list[Refused] = field(default_factory=list)
    forgone: list[RequestId] = field(default_factory=list)
    admitted: list[SequenceSpec] = field(default_factory=list)
    released: list[RequestId] = field(default_factory=list)
    started: list[RequestId] = field(default_factory=list)
    aborted: list[RequestId] = field(default_factory=list)
    finished: list[RequestId] = field(default_factory=list)
    outstanding: set[AdmittedRequest] = field(default_factory=set)
    changed: asyncio.Event = field(default_factory=asyncio.Event)

    def refuse_if_full(self, deadline_s: float, tenant: str = "") -> None:
        """Raises `full_error`."""
        if self.full_error is not None:
            raise self.full_error

    async def reserve_rates(self, tenant: str, sequences: Sequence[SequenceSpec]) -> None:
        """Raises the next of `rate_refusals`."""
        if self.rate_refusals:
            raise self.rate_refusals.pop(0)

    def forgo(self, sequences: Sequence[SequenceSpec]) -> None:
        """Records the ids."""
        self.forgone.extend(sequence.id for sequence in sequences)

    def admit(self, sequence: SequenceSpec, timer: SequenceTimer) -> AdmittedRequest:
        """Admits the sequence, or raises the next of `refusals`."""
        refusal = self.refusals.pop(0) if self.refusals else None
        if refusal is not None:
            raise refusal
        admitted = FakeAdmittedRequest(sequence)
        self.admitted.append(sequence)
        self.outstanding.add(admitted)
        return admitted

    def release(self, admitted: AdmittedRequest) -> None:
        """Releases an admitted sequence that was never run; idempotent."""
        if admitted.sequence.id in self.started:
            raise Broken(f"{admitted.sequence.id} was run and may not be released")
        if admitted in self.outstanding:
            self.outstanding.remove(admitted)
            self.released.append(admitted.sequence.id)
            self.changed.set()

    async def run(self, admitted: AdmittedRequest, take: TakeChunk | None = None) -> AsyncGenerator[TokenChunk, None]:
        """Runs the script. An end before `finish` is an abort, unless the script failed or the text was complete."""
        id = admitted.sequence.id
        if admitted not in self.outstanding or id in self.started:
            raise Broken(f"{id} may be run once")
        self.started.append(id)
        ended = self.aborted
        scores = _scores(admitted.sequence)
        try:
            for step in self.script(admitted.sequence):
                match step:
                    case EmitChunk(chunk):
                        ended = self.finished if chunk.finish is not None else self.aborted
                        yield chunk if scores is None else structs.replace(chunk, prompt_scores=scores)
                        scores = None
                    case WaitForGate(gate):
                        self.changed.set()
                        await gate.wait()
                    case RaiseError(error):
                        ended = self.finished
                        raise error
        finally:
            self.outstanding.remove(admitted)
            (self.finished if isinstance(admitted, FakeAdmittedRequest) and admitted.completed else ended).append(id)
            self.changed.set()

    async def until(self, condition: Callable[[FakeDispatcher], bool], timeout_s: float = 5.0) -> None:
        """Waits for a condition. Raises `TimeoutError`."""
        async with asyncio.timeout(timeout_s):
            while not condition(self):
                self.changed.clear()
                await self.changed.wait()


def one_token_chunks(
    tokens: Sequence[int], finish: FinishReason = FinishReason.STOP, *, num_cached_tokens: int = 0
) -> list[ScriptStep]:
    """One chunk for each token; the last one has `finish`."""
    last = len(tokens) - 1
    return [
        EmitChunk(TokenChunk((OutputToken(i, token),), num_cached_tokens, finish if i == last else None))
        for i, token in enumerate(tokens)
    ]


def _scores(sequence: SequenceSpec) -> PromptScores | None:
    if sequence.prompt_logprobs is None:
        return None
    return fake_scores(fake_slots(sequence.prompt_tokens)[1:], 1, sequence.prompt_logprobs, SCORED_VOCAB_SIZE)


def failing(error: BatonError) -> DispatchScript:
    """A script that fails every sequence before its first token."""
    return lambda sequence: [RaiseError(error)]
