"""Checks a client's answer against the output of one model alone (I2, I4, I9, I10).

`client` feeds it the bytes of one connection after the other. It knows the format of events and nothing of routers.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from baton.domain.errors import IntegrityFailure
from baton.engine.fake_runner import fake_scores, fake_slots, fake_token
from baton.grammar.matcher import ConstraintMatcher, MaskTable
from baton.services.router.openai.parameters import choice_seed
from baton.services.router.streaming.cursor import Cursor
from simulation.checks.invariants import Violation
from simulation.nodes.grammar import compiled_regex
from simulation.scenario import END_TOKEN, VERSIONS, VOCAB_SIZE, ClientPlan
from simulation.vision.images import seen_prompt

DONE = "[DONE]"


@dataclass(frozen=True, slots=True)
class StreamError:
    """An error event, which ends a connection."""

    code: str
    message: str


def expected_tokens(plan: ClientPlan, version: int = VERSIONS[0]) -> list[list[int]]:
    """Tokens of a version of the model alone, choice by choice."""
    return [_expected_tokens(plan, choice_seed(plan.seed, choice) + version) for choice in range(plan.num_choices)]


def _expected_tokens(plan: ClientPlan, seed: int) -> list[int]:
    output: list[int] = []
    for _ in range(plan.max_tokens):
        output.append(_next_token(plan, output, seed))
        if output[-1] == (END_TOKEN if plan.regex else plan.stop_token):
            break
    return output


def _next_token(plan: ClientPlan, output: Sequence[int], seed: int) -> int:
    """The fake model's token after `output`, of those that the plan leaves."""
    mask = None
    if plan.regex:
        mask = ConstraintMatcher.of(compiled_regex(plan.regex), output).fill(MaskTable(1, 1), 0, {END_TOKEN})
    return fake_token([*seen_prompt(plan), *output], VOCAB_SIZE, seed, mask=mask, allowed=plan.allowed)


def _expected_scores(plan: ClientPlan) -> list[Any]:
    """The `prompt_logprobs` of the plan, without the first entry: logprob and rank by token."""
    if plan.prompt_logprobs is None:
        return []
    scores = fake_scores(fake_slots(plan.prompt)[1:], 1, plan.prompt_logprobs, VOCAB_SIZE)
    entries = []
    for token, scored in zip(plan.prompt[1:], scores.tokens(plan.prompt_logprobs), strict=True):
        entry = {str(token): (scored.logprob, scored.rank)}
        for rank, (best, logprob) in enumerate(scored.top, start=1):
            entry.setdefault(str(best), (logprob, rank))
        entries.append(entry)
    return entries


@dataclass(slots=True)
class ClientAnswer:
    """`expected`: tokens of each version of the model, choice by choice. `received`: tokens of each choice.
    `finished`: when a choice ended. `last_event_id`: where to resume after a lost connection."""

    plan: ClientPlan
    expected: list[list[list[int]]] = field(init=False)
    received: list[list[int]] = field(init=False)
    finished: dict[int, float] = field(default_factory=dict)
    is_complete: bool = False
    last_event_id: str = ""
    failure: StreamError | None = None
    _buffer: bytes = b""

    def __post_init__(self) -> None:
        self.expected = [expected_tokens(self.plan, version) for version in VERSIONS]
        self.received = [[] for _ in range(self.plan.num_choices)]

    @property
    def can_resume(self) -> bool:
        """True if there is an event to resume from."""
        return bool(self.last_event_id)

    def broken_rule(self, choice: int, tokens: Sequence[int]) -> str:
        """The rule that `tokens` break, which may continue after the choice's end; "" if one version made them."""
        if self._is_expected(choice, tokens, may_continue=True):
            return ""
        seed = choice_seed(self.plan.seed, choice)
        for index, token in enumerate(tokens):
            if token not in {_next_token(self.plan, tokens[:index], seed + version) for version in VERSIONS}:
                return "I2"
        return "I10"

    def reset_connection(self) -> None:
        """Starts another connection and drops half an event of the last one."""
        self._buffer, self.failure = b"", None

    def feed(self, part: bytes) -> None:
        """Adds received bytes. Raises `Violation` for wrong events."""
        *events, self._buffer = (self._buffer + part).split(b"\n\n")
        for event in events:
            lines = dict(line.split(": ", 1) for line in event.decode().split("\n"))
            if "data" in lines:
                self._event(lines.get("id", ""), lines["data"])

    def check_complete(self) -> None:
        """The stream has ended without an error."""
        if not self.is_complete:
            raise Violation("I9", f"the stream ended after {self.received}", self.plan.name)

    def _event(self, id: str, data: str) -> None:
        if self.is_complete or self.failure is not None:
            raise Violation("I9", "something is said after the end", self.plan.name)
        if data == DONE:
            self._done()
            return
        message = json.loads(data)
        if "error" in message:
            self._fail(message["error"])
            return
        self._token(id, message["choices"][0])
        self.last_event_id = id

    def _token(self, id: str, event: dict[str, Any]) -> None:
        choice, (token,) = event["index"], event["token_ids"]
        received = self.received[choice]
        index, tokens = len(received), [*received, token]
        self._check_scores(index, event.get("prompt_logprobs"))
        if Cursor.parse(id).counts[choice] != index + 1:
            raise Violation("I4", f"event {id} comes where {index + 1} is next", self.plan.name)
        if not self._is_expected(choice, tokens):
            rule = self.broken_rule(choice, tokens) or "I2"
            raise Violation(rule, f"token {token} at {index}: not what one model says", self.plan.name)
        if choice in self.finished:
            raise Violation("I9", "tokens came after the end", self.plan.name)
        received.append(token)
        if event["finish_reason"] is not None:
            self.finished[choice] = asyncio.get_running_loop().time()

    def _check_scores(self, index: int, listed: list[Any] | None) -> None:
        """The first event of a choice has the scores of the prompt, and no other one."""
        wanted = self.plan.prompt_logprobs is not None and index == 0
        if (listed is not None) != wanted:
            raise Violation("I4", f"event {index} has scores of the prompt: {listed is not None}", self.plan.name)
        if listed is not None:
            found = [{id: (each["logprob"], each["rank"]) for id, each in entry.items()} for entry in listed[1:]]
            if listed[0] is not None or found != _expected_scores(self.plan):
                raise Violation("I2", f"scores {listed} are not those of the prompt", self.plan.name)

    def _done(self) -> None:
        complete = all(
            any(tokens == expected[choice] for expected in self.expected) for choice, tokens in enumerate(self.received)
        )
        if not complete or len(self.finished) != len(self.received):
            raise Violation("I9", f"is said to be complete with {self.received}", self.plan.name)
        self.is_complete = True

    def _is_expected(self, choice: int, tokens: Sequence[int], *, may_continue: bool = False) -> bool:
        """True if the tokens are a prefix of one version's. With `may_continue` they may exceed the choice's end."""
        for expected in (version[choice] for version in self.expected):
            begins = tokens[: len(expected)] if may_continue else tokens
            if list(begins) == expected[: len(tokens)]:
                return True
        return False

    def _fail(self, error: dict[str, Any]) -> None:
        self.failure = StreamError(error["code"], error["message"])
        if self.failure.code == IntegrityFailure.code and "output token" in self.failure.message:
            raise Violation("I4", f"a worker repeats or skips tokens: {self.failure.message}", self.plan.name)
