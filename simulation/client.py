"""A simulated client: asks once, listens to the end or hangs up, and knows what the model says when it runs alone."""

from __future__ import annotations

import asyncio
import enum
from contextlib import aclosing
from functools import cached_property

from baton.domain.errors import BatonError, IntegrityFailure, Refused
from baton.domain.lifecycle import RequestState
from baton.domain.request import FinishReason, OutputToken, SamplingParams, StopParams
from baton.engine.fake_runner import fake_token
from services.router.generation import GenerationChunk, GenerationJob
from simulation.oracle import Violation
from simulation.router import SimRouter
from simulation.scenario import VOCAB_SIZE, ClientPlan
from simulation.trace import Trace

GRACE_S = 0.25
"""How much later than its deadline a client may hear."""


class Outcome(enum.Enum):
    """How it ended for the client."""

    FINISHED = "finished"
    FAILED = "failed"
    REFUSED = "refused"
    HUNG_UP = "hung up"
    LOST = "lost"  # the router died, and with it the connection


RECORDED_AS = {
    Outcome.FINISHED: RequestState.FINISHED,
    Outcome.FAILED: RequestState.FAILED,
    Outcome.HUNG_UP: RequestState.CANCELLED,
}
"""Where the book must have a request that ended so."""


class Client:
    """One request. `outcome` is None until it has ended; then it never changes."""

    def __init__(self, plan: ClientPlan, trace: Trace) -> None:
        self.plan = plan
        self.outcome: Outcome | None = None
        self.code = ""
        self.router: SimRouter | None = None
        self.ended = asyncio.Event()
        self._trace = trace
        self._received: list[int] = []
        self._finish: FinishReason | None = None
        self._task: asyncio.Task[None] | None = None

    @cached_property
    def alone(self) -> list[int]:
        """What the model says after the prompt when nobody else is there."""
        tokens = list(self.plan.prompt)
        for _ in range(self.plan.max_tokens):
            tokens.append(fake_token(tokens, VOCAB_SIZE, self.plan.seed))
        return tokens[len(self.plan.prompt) :]

    def arrive(self, router: SimRouter) -> None:
        """Asks `router`."""
        self.router = router
        if not router.process.alive:
            self._end(Outcome.REFUSED, "no router")
            return
        self._task = router.process.spawn(self._ask(router), f"client {self.plan.name}")
        if self.plan.patience_s is not None:
            asyncio.get_running_loop().call_later(self.plan.patience_s, self._hang_up)

    def must_have_ended(self) -> None:
        """Its deadline is over. Raises `Violation` if it has heard nothing."""
        if self.outcome is None:
            raise Violation("I8", "nothing was heard by the deadline", self.plan.name)

    async def _ask(self, router: SimRouter) -> None:
        plan = self.plan
        sampling, stop = SamplingParams(temperature=1.0, seed=plan.seed), StopParams(plan.max_tokens)
        job = GenerationJob(plan.name, plan.prompt, sampling, stop, "", plan.deadline_s)
        try:
            async with aclosing(router.dispatcher.run(router.dispatcher.admit(job))) as chunks:
                async for chunk in chunks:
                    self._hear(chunk)
            self._finished()
        except Refused as error:
            self._end(Outcome.REFUSED, error.code)
        except BatonError as error:
            self._failed(error)
        except asyncio.CancelledError:
            self._end(Outcome.HUNG_UP if router.process.alive else Outcome.LOST, "")
            raise

    def _hang_up(self) -> None:
        if self._task is not None and not self._task.done():
            self._trace.note("client", "hangs up", self.plan.name)
            self._task.cancel()

    def _hear(self, chunk: GenerationChunk) -> None:
        if self._finish is not None:
            raise Violation("I9", "tokens came after the end", self.plan.name)
        for token in chunk.tokens:
            self._check(token)
            self._received.append(token.token)
        self._finish = chunk.finish

    def _check(self, token: OutputToken) -> None:
        place = len(self._received)
        if token.index != place:
            raise Violation("I4", f"the client hears index {token.index} where {place} comes next", self.plan.name)
        if place >= len(self.alone) or token.token != self.alone[place]:
            raise Violation("I2", f"token {token.token} at {place}: not what the model says", self.plan.name)

    def _finished(self) -> None:
        if self._finish is None or len(self._received) != len(self.alone):
            raise Violation("I9", f"the stream ended after {len(self._received)} tokens", self.plan.name)
        self._end(Outcome.FINISHED, "")

    def _failed(self, error: BatonError) -> None:
        if isinstance(error, IntegrityFailure) and "output token" in str(error):
            raise Violation("I4", f"a worker repeats or skips tokens: {error}", self.plan.name)
        self._end(Outcome.FAILED, error.code)

    def _end(self, outcome: Outcome, code: str) -> None:
        if self.outcome is not None:
            raise Violation("I9", f"ends twice: {self.outcome.value}, {outcome.value}", self.plan.name)
        self.outcome, self.code = outcome, code
        self._trace.note("client", f"{outcome.value} {code}", self.plan.name)
        self.ended.set()
