"""The undisturbed answer, and whether a disturbed one is it, token for token.

Answers are learned from the same cluster before anything is done to it (`tests/exactness` compares those with an
unpaged model). A client may see a pause; it may not see a gap, a repetition, another token, or nothing at all.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable
from dataclasses import dataclass

from chaos.client import Client, End, Question, Transcript


@dataclass(frozen=True, slots=True)
class Choice:
    """One choice's answer; `finish` is "" while it has none."""

    tokens: tuple[int, ...] = ()
    text: str = ""
    finish: str = ""

    def begins(self, whole: Choice) -> bool:
        """Whether this is how `whole` begins."""
        return self.tokens == whole.tokens[: len(self.tokens)] and whole.text.startswith(self.text)


@dataclass(frozen=True, slots=True)
class Answer:
    """By choice."""

    choices: tuple[Choice, ...]


def answer_in(transcript: Transcript) -> Answer:
    """What was heard, put together."""
    choices: dict[int, Choice] = {}
    for event in transcript.events:
        before = choices.get(event.choice, Choice())
        tokens, text = before.tokens + event.tokens, before.text + event.text
        choices[event.choice] = Choice(tokens, text, before.finish or event.finish)
    return Answer(tuple(choices.get(index, Choice()) for index in range(max(choices, default=-1) + 1)))


class Oracle:
    """Knows the answer to every question that it was taught."""

    def __init__(self) -> None:
        self._answers: dict[str, Answer] = {}

    async def learn(self, client: Client, url: str, questions: Iterable[Question]) -> None:
        """Asks each once, undisturbed, all at once. Raises `ValueError` when an answer did not come."""
        asked = list(questions)
        answers = await asyncio.gather(*(client.ask(question.salted("oracle"), [url]) for question in asked))
        for question, heard in zip(asked, answers, strict=True):
            if heard.end is not End.DONE:
                raise ValueError(f"{question.name}: {heard.end} {heard.code} without any fault")
            self._answers[question.name] = answer_in(heard)

    def answer(self, question: Question) -> Answer:
        """The undisturbed one."""
        return self._answers[question.name]

    def judge(self, transcript: Transcript, codes: frozenset[str] = frozenset()) -> list[str]:
        """What is wrong with an answer. It must be complete, or have been hung up on, or have ended with an error of
        one of `codes`; as far as it goes it must be the undisturbed one."""
        return list(compare(transcript, self._answers[transcript.question.name], codes))


def compare(transcript: Transcript, expected: Answer, codes: frozenset[str]) -> Iterable[str]:
    """See `Oracle.judge`."""
    name, heard = transcript.question.name, answer_in(transcript)
    match transcript.end:
        case End.DONE:
            if heard != expected:
                yield f"{name}: another answer: {_difference(heard, expected)}"
            return
        case End.FAILED | End.REFUSED if transcript.code not in codes:
            yield f"{name}: {transcript.end.value} with {transcript.code} (HTTP {transcript.status})"
        case End.LOST | End.LATE | None:
            yield f"{name}: no end was heard ({transcript.end and transcript.end.value}, {transcript.code})"
    for index, choice in enumerate(heard.choices):
        if index >= len(expected.choices) or not choice.begins(expected.choices[index]):
            yield f"{name}: what was heard is not how the answer begins: {_difference(heard, expected)}"


def _difference(heard: Answer, expected: Answer) -> str:
    if len(heard.choices) != len(expected.choices):
        return f"{len(heard.choices)} choices instead of {len(expected.choices)}"
    for index, (ours, theirs) in enumerate(zip(heard.choices, expected.choices, strict=True)):
        for at, (token, right) in enumerate(zip(ours.tokens, theirs.tokens, strict=False)):
            if token != right:
                return f"choice {index}, token {at} is {token} instead of {right}"
        if len(ours.tokens) != len(theirs.tokens):
            return f"choice {index} has {len(ours.tokens)} tokens instead of {len(theirs.tokens)}"
        if ours != theirs:
            return f"choice {index}: {ours.text[-40:]!r} {ours.finish} instead of {theirs.text[-40:]!r} {theirs.finish}"
    return "none"
