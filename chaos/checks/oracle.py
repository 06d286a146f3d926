"""Compares a disturbed answer with the undisturbed one, token for token.

Answers are learned from the same cluster before any fault (`tests/exactness` compares those with an
unpaged model). A client may see a pause, but no gap, repetition, other token, or silence.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable
from dataclasses import dataclass, field, replace

from chaos.clients.client import ChaosClient, ClientRequest, Event, ReceivedUsage, StreamEnd, Transcript


@dataclass(frozen=True, slots=True)
class GeneratedChoice:
    """One choice's answer; `finish` is "" while it has none."""

    tokens: tuple[int, ...] = ()
    text: str = ""
    finish: str = ""

    def is_prefix_of(self, whole: GeneratedChoice) -> bool:
        """True if this is a prefix of `whole`."""
        return self.tokens == whole.tokens[: len(self.tokens)] and whole.text.startswith(self.text)


@dataclass(frozen=True, slots=True)
class GeneratedAnswer:
    """Answers by choice, and what the whole answer said that it cost."""

    choices: tuple[GeneratedChoice, ...]
    usage: ReceivedUsage | None = field(default=None, compare=False)


def collect_answer(events: Iterable[Event]) -> GeneratedAnswer:
    """The answers in the events of a call."""
    choices: dict[int, GeneratedChoice] = {}
    for event in events:
        before = choices.get(event.choice, GeneratedChoice())
        tokens, text = before.tokens + event.tokens, before.text + event.text
        choices[event.choice] = GeneratedChoice(tokens, text, before.finish or event.finish)
    return GeneratedAnswer(
        tuple(choices.get(index, GeneratedChoice()) for index in range(max(choices, default=-1) + 1))
    )


class Oracle:
    """Holds the undisturbed answer of every learned request."""

    def __init__(self) -> None:
        self._answers: dict[str, GeneratedAnswer] = {}

    async def record_answers(self, client: ChaosClient, url: str, requests: Iterable[ClientRequest]) -> None:
        """Sends each request once, undisturbed, all at once. Raises `ValueError` if an answer is missing."""
        sent = list(requests)
        answers = await asyncio.gather(*(client.ask(request.with_salt("oracle"), [url]) for request in sent))
        for request, received in zip(sent, answers, strict=True):
            if received.end is not StreamEnd.DONE:
                raise ValueError(f"{request.name}: {received.end} {received.code} without any fault")
            answer = replace(collect_answer(received.events), usage=received.usage)
            if problems := list(compare(received, answer, frozenset())):
                raise ValueError(f"{problems[0]} without any fault")
            self._answers[request.name] = answer

    def answer(self, request: ClientRequest) -> GeneratedAnswer:
        """The undisturbed answer."""
        return self._answers[request.name]

    def check(self, transcript: Transcript, codes: frozenset[str] = frozenset()) -> list[str]:
        """Returns what is wrong with an answer, if anything.

        It must be complete, hung up on, or ended by an error with one of `codes`, and equal the undisturbed answer as
        far as it goes.
        """
        return list(compare(transcript, self._answers[transcript.request.name], codes))


def compare(transcript: Transcript, expected: GeneratedAnswer, codes: frozenset[str]) -> Iterable[str]:
    """See `Oracle.check`."""
    name, received = transcript.request.name, collect_answer(transcript.events)
    for dropped in transcript.dropped:  # these tokens were read, too, before the call was sent again
        yield from _differences_so_far(f"{name}, dropped", collect_answer(dropped), expected)
    match transcript.end:
        case StreamEnd.DONE:
            if received != expected:
                yield f"{name}: another answer: {_difference(received, expected)}"
            else:
                yield from _wrong_usage(transcript, expected)
            return
        case StreamEnd.FAILED | StreamEnd.REFUSED if transcript.code not in codes:
            yield f"{name}: {transcript.end.value} with {transcript.code} (HTTP {transcript.status})"
        case StreamEnd.LOST | StreamEnd.TIMED_OUT | None:
            end, stored = transcript.end and transcript.end.value, "stored" if transcript.stored else "not stored"
            yield f"{name}: no end was received ({end}, {transcript.code or 'no code'}, announced as {stored})"
    yield from _differences_so_far(name, received, expected)


def _wrong_usage(transcript: Transcript, expected: GeneratedAnswer) -> Iterable[str]:
    """Checks what a complete answer says that it cost: what was received, whatever was computed again."""
    name, usage = transcript.request.name, transcript.usage
    if usage is None:
        yield f"{name}: the answer does not tell its usage"
        return
    num_prompt_tokens = expected.usage.num_prompt_tokens if expected.usage else usage.num_prompt_tokens
    right = ReceivedUsage(
        num_prompt_tokens, num := transcript.num_tokens(), num_prompt_tokens + num, usage.num_cached_tokens
    )
    if usage != right or not 0 <= usage.num_cached_tokens <= num_prompt_tokens:
        yield f"{name}: {usage} instead of {right}"


def _differences_so_far(name: str, received: GeneratedAnswer, expected: GeneratedAnswer) -> Iterable[str]:
    for index, choice in enumerate(received.choices):
        if index >= len(expected.choices) or not choice.is_prefix_of(expected.choices[index]):
            yield f"{name}: what was received does not begin the answer: {_difference(received, expected)}"


def _difference(received: GeneratedAnswer, expected: GeneratedAnswer) -> str:
    if len(received.choices) != len(expected.choices):
        return f"{len(received.choices)} choices instead of {len(expected.choices)}"
    for index, (ours, theirs) in enumerate(zip(received.choices, expected.choices, strict=True)):
        for at, (token, right) in enumerate(zip(ours.tokens, theirs.tokens, strict=False)):
            if token != right:
                return f"choice {index}, token {at} is {token} instead of {right}"
        if len(ours.tokens) != len(theirs.tokens):
            return f"choice {index} has {len(ours.tokens)} tokens instead of {len(theirs.tokens)}"
        if ours != theirs:
            return f"choice {index}: {ours.text[-40:]!r} {ours.finish} instead of {theirs.text[-40:]!r} {theirs.finish}"
    return "none"
