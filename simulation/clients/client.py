"""A simulated client: sends a request, reads to the end, hangs up or loses its connection, and resumes."""

from __future__ import annotations

import asyncio
import enum
import json
from collections.abc import Callable, Coroutine, Sequence
from typing import Any

from starlette.responses import Response

from baton.domain.errors import BatonError, Draining, IntegrityFailure, Overloaded, Refused
from baton.domain.ids import RequestId
from baton.services.router.edge.http_errors import RequestNotFound
from baton.services.router.openai.request_parser import COMPLETION, RawRequest
from baton.services.router.openai.validation import RequestMetadata
from baton.services.router.resume import LookupUnavailable
from simulation.checks.invariants import Violation
from simulation.clients.answer import ClientAnswer
from simulation.clients.connection import ClientConnection, ConnectionLost
from simulation.clients.text_model import token_text
from simulation.nodes.router import SimRouter
from simulation.policies import MODEL
from simulation.runtime.trace import Trace
from simulation.scenario import END_TOKEN, NO_ROUTER, ClientPlan
from simulation.vision.image_parser import FIELD, images_field

GRACE_S = 0.25
"""Bound on the delay of a client's end after its deadline."""

RESUME_INTERVAL_S = 0.2
"""Pause of a client before a retry."""


class ClientOutcome(enum.Enum):
    """Ends of a call for the client."""

    FINISHED = "finished"
    FAILED = "failed"
    REFUSED = "refused"
    HUNG_UP = "hung up"
    LOST = "lost"  # the router died, and with it the connection
    NOT_FOUND = "not found"  # it resumed, and no router knew its call


class SimClient:
    """One call. `outcome` is None until it has ended; then it never changes. `on_violation` receives violations."""

    def __init__(self, plan: ClientPlan, trace: Trace, on_violation: Callable[[Violation], None]) -> None:
        self.plan = plan
        self.answer = ClientAnswer(plan)
        self.outcome: ClientOutcome | None = None
        self.code = ""
        self.num_connections = 0
        self.num_posts = 0
        self.router: SimRouter | None = None
        self.ended = asyncio.Event()
        self.began_at_s: float | None = None
        self.lost_at_s = 0.0
        self.connected_at_s = plan.at_s  # when a router accepted its connection
        self.ended_at_s = 0.0
        self._trace = trace
        self._on_violation = on_violation
        self._connection: ClientConnection | None = None
        self._has_hung_up = False
        self._task: asyncio.Task[None] | None = None

    @property
    def call_id(self) -> RequestId:
        """Id of its latest call; a redirected client has made another one."""
        return RequestId(f"{self.plan.name}_{self.num_posts}") if self.num_posts > 1 else self.plan.name

    def start(self, routers: Sequence[Callable[[], SimRouter]]) -> None:
        """Sends its request to the first of `routers` that accepts it."""
        loop = asyncio.get_running_loop()
        self._task = loop.create_task(self._run(routers), name=f"client {self.plan.name}")
        if self.plan.patience_s is not None:
            loop.call_later(self.plan.patience_s, self._hang_up)

    def check_ended(self) -> None:
        """Raises `Violation` if it has not received an end."""
        if self.outcome is None:
            raise Violation("I8", "no end was received by the deadline", self.plan.name)

    async def wait_closed(self) -> None:
        """Waits until its task has ended after a cancel."""
        if self._task is not None:
            self._task.cancel()
            await asyncio.wait([self._task])

    async def _run(self, routers: Sequence[Callable[[], SimRouter]]) -> None:
        try:
            if not await self._post(routers):
                await self._resume_until_end(routers)
        except Violation as violation:
            self._on_violation(violation)

    async def _post(self, routers: Sequence[Callable[[], SimRouter]]) -> bool:
        """False if its connection is lost."""
        code = NO_ROUTER
        for router in (find() for find in routers):
            await router.listen()
            if self.outcome is not None:
                return True  # it has hung up meanwhile
            if not router.process.alive:
                continue
            self.connected_at_s = asyncio.get_running_loop().time()
            self.num_posts += 1
            try:
                return await self._listen(router, router.post(self._request()))
            except Draining as refusal:
                code = refusal.code
        if self.outcome is None:
            self._end(ClientOutcome.REFUSED, code)
        return True

    async def _resume_until_end(self, routers: Sequence[Callable[[], SimRouter]]) -> None:
        """Tries routers in turn until one completes the answer."""
        if not self.plan.returns or not self.answer.can_resume:
            return self._end(ClientOutcome.HUNG_UP if self._has_hung_up else ClientOutcome.LOST, "")
        while True:
            for router in (find() for find in reversed(routers)):
                await asyncio.sleep(RESUME_INTERVAL_S)
                if router.process.alive and await self._resume(router):
                    return

    async def _resume(self, router: SimRouter) -> bool:
        """True if the call has ended."""
        self.answer.reset_connection()
        self._trace.note("client", f"comes back to {router.process.name}", self.plan.name)
        try:
            return await self._listen(router, router.resume(self.call_id, self.answer.last_event_id, self.plan.tenant))
        except (Draining, LookupUnavailable):
            return False
        except RequestNotFound:
            self._end(ClientOutcome.NOT_FOUND, "")
            return True

    async def _listen(self, router: SimRouter, request: Coroutine[Any, Any, Response]) -> bool:
        """Reads one connection; False if it is lost. Raises errors that require another router."""
        self.num_connections += 1
        self.router = router
        self._connection = ClientConnection(router, request, self._receive, f"client {self.plan.name}")
        try:
            await self._connection.ended()
            self._finish()
        except (Draining, LookupUnavailable, RequestNotFound):
            raise
        except Refused as refusal:
            self._refused(refusal)
        except BatonError as error:
            self._failed(error)
        except ConnectionLost:
            self.lost_at_s = asyncio.get_running_loop().time()
            return self.outcome is not None
        return True

    def _request(self) -> RawRequest:
        plan = self.plan
        body: dict[str, Any] = {
            "model": MODEL,
            "prompt": list(plan.prompt),
            "max_tokens": plan.max_tokens,
            "n": plan.num_choices,
            "seed": plan.seed,
            "temperature": 1.0,
            "stream": True,
            "return_token_ids": True,
            "stop": None if plan.stop_token is None else [token_text(plan.stop_token)],
            "allowed_token_ids": list(plan.allowed) or None,
            "prompt_logprobs": plan.prompt_logprobs,
            "priority": plan.priority,
        }
        if plan.regex:
            body |= {"structured_outputs": {"regex": plan.regex}, "stop_token_ids": [END_TOKEN]}
        if plan.images:
            body[FIELD] = images_field(plan)
        metadata = RequestMetadata(self.call_id, 0, plan.seed, plan.tenant)
        return RawRequest(COMPLETION, json.dumps(body).encode(), metadata)

    def _hang_up(self) -> None:
        if self.answer.is_complete or self.outcome is not None or self._connection is None:
            return
        self._has_hung_up = True
        self._trace.note("client", "loses its connection" if self.plan.returns else "hangs up", self.plan.name)
        if not self.plan.returns:
            self._end(ClientOutcome.HUNG_UP, "")
        self._connection.hang_up()

    def _receive(self, part: bytes) -> None:
        if self.began_at_s is None:
            self.began_at_s = asyncio.get_running_loop().time()
        try:
            self.answer.feed(part)
        except Violation as violation:
            self._on_violation(violation)

    def _finish(self) -> None:
        failure = self.answer.failure
        if failure is None:
            self.answer.check_complete()
            self._end(ClientOutcome.FINISHED, "")
        else:
            self._end(ClientOutcome.FAILED, failure.code)

    def _refused(self, refusal: Refused) -> None:
        if isinstance(refusal, Overloaded) and not refusal.retry_after_s:
            raise Violation("I9", "is refused without a time to retry", self.plan.name)
        self._end(ClientOutcome.REFUSED, refusal.code)

    def _failed(self, error: BatonError) -> None:
        if isinstance(error, IntegrityFailure) and "output token" in str(error):
            raise Violation("I4", f"a worker repeats or skips tokens: {error}", self.plan.name)
        self._end(ClientOutcome.FAILED, error.code)

    def _end(self, outcome: ClientOutcome, code: str) -> None:
        if self.outcome is not None:
            raise Violation("I9", f"ends twice: {self.outcome.value}, {outcome.value}", self.plan.name)
        self.outcome, self.code = outcome, code
        self.ended_at_s = asyncio.get_running_loop().time()
        self._trace.note("client", f"{outcome.value} {code}", self.plan.name)
        self.ended.set()
