"""What a client has heard of its answer, held against what the model says when it runs alone (I2, I4, I9).

`client` feeds it the bytes of one connection after the other; it knows the events' format and nothing of routers.
"""

from __future__ import annotations

import asyncio
import json
from dataclasses import dataclass, field
from typing import Any

from baton.domain.errors import IntegrityFailure
from baton.engine.fake_runner import fake_token
from services.router.api.cursor import Cursor
from services.router.api.parameters import seed_of_choice
from simulation.oracle import Violation
from simulation.scenario import VOCAB_SIZE, ClientPlan

DONE = "[DONE]"


@dataclass(frozen=True, slots=True)
class Failure:
    """An error that came as an event: the end of a connection."""

    code: str
    message: str


def alone(plan: ClientPlan) -> list[list[int]]:
    """What the model says to the prompt when nobody else is there, choice by choice."""
    return [_alone(plan, seed_of_choice(plan.seed, choice)) for choice in range(plan.num_choices)]


def _alone(plan: ClientPlan, seed: int) -> list[int]:
    tokens = list(plan.prompt)
    for _ in range(plan.max_tokens):
        tokens.append(fake_token(tokens, VOCAB_SIZE, seed))
        if tokens[-1] == plan.stop_token:
            break
    return tokens[len(plan.prompt) :]


@dataclass(slots=True)
class Answer:
    """`received`: tokens of each choice. `finished`: when a choice's end was heard. `last_event_id`: where to go on
    after a connection is lost."""

    plan: ClientPlan
    expected: list[list[int]] = field(init=False)
    received: list[list[int]] = field(init=False)
    finished: dict[int, float] = field(default_factory=dict)
    is_complete: bool = False
    last_event_id: str = ""
    failure: Failure | None = None
    _rest: bytes = b""

    def __post_init__(self) -> None:
        self.expected = alone(self.plan)
        self.received = [[] for _ in self.expected]

    @property
    def has_begun(self) -> bool:
        """Whether there is anything to go on from."""
        return bool(self.last_event_id)

    def reconnect(self) -> None:
        """Another connection: half an event of the last one is nothing."""
        self._rest, self.failure = b"", None

    def hear(self, part: bytes) -> None:
        """The next bytes. Raises `Violation` for what should not be said."""
        *events, self._rest = (self._rest + part).split(b"\n\n")
        for event in events:
            lines = dict(line.split(": ", 1) for line in event.decode().split("\n"))
            if "data" in lines:
                self._event(lines.get("id", ""), lines["data"])

    def must_be_complete(self) -> None:
        """The stream has ended without an error."""
        if not self.is_complete:
            raise Violation("I9", f"the stream ended after {self.received}", self.plan.name)

    def _event(self, id: str, data: str) -> None:
        if self.is_complete or self.failure is not None:
            raise Violation("I9", "something is said after the end", self.plan.name)
        if data == DONE:
            self._done()
            return
        said = json.loads(data)
        if "error" in said:
            self._fail(said["error"])
            return
        self._token(id, said["choices"][0])
        self.last_event_id = id

    def _token(self, id: str, said: dict[str, Any]) -> None:
        choice, (token,) = said["index"], said["token_ids"]
        received, expected = self.received[choice], self.expected[choice]
        place = len(received)
        if Cursor.parse(id).counts[choice] != place + 1:
            raise Violation("I4", f"event {id} comes where {place + 1} is next", self.plan.name)
        if place >= len(expected) or token != expected[place]:
            raise Violation("I2", f"token {token} at {place}: not what the model says", self.plan.name)
        if choice in self.finished:
            raise Violation("I9", "tokens came after the end", self.plan.name)
        received.append(token)
        if said["finish_reason"] is not None:
            self.finished[choice] = asyncio.get_running_loop().time()

    def _done(self) -> None:
        if self.received != self.expected or len(self.finished) != len(self.expected):
            raise Violation("I9", f"is said to be complete with {self.received}", self.plan.name)
        self.is_complete = True

    def _fail(self, error: dict[str, Any]) -> None:
        self.failure = Failure(error["code"], error["message"])
        if self.failure.code == IntegrityFailure.code and "output token" in self.failure.message:
            raise Violation("I4", f"a worker repeats or skips tokens: {self.failure.message}", self.plan.name)
