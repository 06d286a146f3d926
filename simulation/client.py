"""A simulated client: asks, listens to the end, hangs up or loses its connection, and comes back for the rest."""

from __future__ import annotations

import asyncio
import enum
import json
from collections.abc import Callable, Coroutine, Sequence
from typing import Any

from starlette.responses import Response

from baton.domain.errors import BatonError, Draining, IntegrityFailure, Overloaded, Refused
from baton.domain.ids import RequestId
from services.router.api.custody import Posting
from services.router.api.http_errors import RequestNotFound
from services.router.api.reader import COMPLETION
from services.router.api.resume import BookAway
from services.router.api.validation import Origin
from simulation.answer import Answer
from simulation.connection import Connection, Lost
from simulation.oracle import Violation
from simulation.parts import MODEL
from simulation.router import SimRouter
from simulation.scenario import NO_ROUTER, ClientPlan
from simulation.texts import word
from simulation.trace import Trace

GRACE_S = 0.25
"""How much later than its deadline a client may hear."""

RETURN_S = 0.2
"""How long a client waits before it tries again."""


class Outcome(enum.Enum):
    """How it ended for the client."""

    FINISHED = "finished"
    FAILED = "failed"
    REFUSED = "refused"
    HUNG_UP = "hung up"
    LOST = "lost"  # the router died, and with it the connection
    FORGOTTEN = "forgotten"  # it came back, and nobody knew its call


class Client:
    """One call. `outcome` is None until it has ended; then it never changes. `violated` hears what is wrong."""

    def __init__(self, plan: ClientPlan, trace: Trace, violated: Callable[[Violation], None]) -> None:
        self.plan = plan
        self.answer = Answer(plan)
        self.outcome: Outcome | None = None
        self.code = ""
        self.num_connections = 0
        self.num_posts = 0
        self.router: SimRouter | None = None
        self.ended = asyncio.Event()
        self.began_at_s: float | None = None
        self.lost_at_s = 0.0
        self.ended_at_s = 0.0
        self._trace = trace
        self._violated = violated
        self._connection: Connection | None = None
        self._has_hung_up = False
        self._task: asyncio.Task[None] | None = None

    @property
    def call_id(self) -> RequestId:
        """Of its latest call: a client that was sent elsewhere has made another one."""
        return RequestId(f"{self.plan.name}_{self.num_posts}") if self.num_posts > 1 else self.plan.name

    def arrive(self, routers: Sequence[Callable[[], SimRouter]]) -> None:
        """Asks the first of `routers` that lives and takes something new."""
        loop = asyncio.get_running_loop()
        self._task = loop.create_task(self._live(routers), name=f"client {self.plan.name}")
        if self.plan.patience_s is not None:
            loop.call_later(self.plan.patience_s, self._hang_up)

    def must_have_ended(self) -> None:
        """Raises `Violation` if it has heard no end."""
        if self.outcome is None:
            raise Violation("I8", "nothing was heard by the deadline", self.plan.name)

    async def gone(self) -> None:
        """Waits until it does nothing any more, for at most as long as it takes to cancel it."""
        if self._task is not None:
            self._task.cancel()
            await asyncio.wait([self._task])

    async def _live(self, routers: Sequence[Callable[[], SimRouter]]) -> None:
        try:
            if not await self._ask(routers):
                await self._return(routers)
        except Violation as violation:
            self._violated(violation)

    async def _ask(self, routers: Sequence[Callable[[], SimRouter]]) -> bool:
        """False when its connection is lost."""
        code = NO_ROUTER
        for router in (find() for find in routers):
            if not router.process.alive:
                continue
            self.num_posts += 1
            try:
                return await self._listen(router, router.post(self._posting()))
            except Draining as refusal:
                code = refusal.code
        self._end(Outcome.REFUSED, code)
        return True

    async def _return(self, routers: Sequence[Callable[[], SimRouter]]) -> None:
        """Goes from router to router until one gives it the end."""
        if not self.plan.returns or not self.answer.has_begun:
            return self._end(Outcome.HUNG_UP if self._has_hung_up else Outcome.LOST, "")
        while True:
            for router in (find() for find in reversed(routers)):
                await asyncio.sleep(RETURN_S)
                if router.process.alive and await self._resume(router):
                    return

    async def _resume(self, router: SimRouter) -> bool:
        """Whether this was the end."""
        self.answer.reconnect()
        self._trace.note("client", f"comes back to {router.process.name}", self.plan.name)
        try:
            return await self._listen(router, router.resume(self.call_id, self.answer.last_event_id))
        except (Draining, BookAway):
            return False
        except RequestNotFound:
            self._end(Outcome.FORGOTTEN, "")
            return True

    async def _listen(self, router: SimRouter, request: Coroutine[Any, Any, Response]) -> bool:
        """Listens to one connection; False when it is lost. Raises what sends it elsewhere."""
        self.num_connections += 1
        self.router = router
        self._connection = Connection(router, request, self._hear, f"client {self.plan.name}")
        try:
            await self._connection.ended()
            self._heard_all()
        except (Draining, BookAway, RequestNotFound):
            raise
        except Refused as refusal:
            self._refused(refusal)
        except BatonError as error:
            self._failed(error)
        except Lost:
            self.lost_at_s = asyncio.get_running_loop().time()
            return self.outcome is not None
        return True

    def _posting(self) -> Posting:
        plan = self.plan
        body = {
            "model": MODEL,
            "prompt": list(plan.prompt),
            "max_tokens": plan.max_tokens,
            "n": plan.num_choices,
            "seed": plan.seed,
            "temperature": 1.0,
            "stream": True,
            "return_token_ids": True,
            "stop": None if plan.stop_token is None else [word(plan.stop_token)],
        }
        return Posting(COMPLETION, json.dumps(body).encode(), Origin(self.call_id, 0, plan.seed))

    def _hang_up(self) -> None:
        if self.answer.is_complete or self.outcome is not None or self._connection is None:
            return
        self._has_hung_up = True
        self._trace.note("client", "loses its connection" if self.plan.returns else "hangs up", self.plan.name)
        if not self.plan.returns:
            self._end(Outcome.HUNG_UP, "")
        self._connection.hang_up()

    def _hear(self, part: bytes) -> None:
        if self.began_at_s is None:
            self.began_at_s = asyncio.get_running_loop().time()
        try:
            self.answer.hear(part)
        except Violation as violation:
            self._violated(violation)

    def _heard_all(self) -> None:
        failure = self.answer.failure
        if failure is None:
            self.answer.must_be_complete()
            self._end(Outcome.FINISHED, "")
        else:
            self._end(Outcome.FAILED, failure.code)

    def _refused(self, refusal: Refused) -> None:
        if isinstance(refusal, Overloaded) and not refusal.retry_after_s:
            raise Violation("I9", "is sent away and not told until when", self.plan.name)
        self._end(Outcome.REFUSED, refusal.code)

    def _failed(self, error: BatonError) -> None:
        if isinstance(error, IntegrityFailure) and "output token" in str(error):
            raise Violation("I4", f"a worker repeats or skips tokens: {error}", self.plan.name)
        self._end(Outcome.FAILED, error.code)

    def _end(self, outcome: Outcome, code: str) -> None:
        if self.outcome is not None:
            raise Violation("I9", f"ends twice: {self.outcome.value}, {outcome.value}", self.plan.name)
        self.outcome, self.code = outcome, code
        self.ended_at_s = asyncio.get_running_loop().time()
        self._trace.note("client", f"{outcome.value} {code}", self.plan.name)
        self.ended.set()
