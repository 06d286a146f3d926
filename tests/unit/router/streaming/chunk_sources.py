"""A scripted `ChunkSource`, and requests for it."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from baton.domain.errors import BatonError
from baton.domain.ids import RequestId
from baton.domain.request import FinishReason, OutputToken, SamplingParams, StopParams
from baton.services.router.generation import SequenceSpec, TakeChunk, TokenChunk
from baton.services.router.openai.valid_request import StreamOptions, ValidRequest
from baton.services.router.text.choice_text import TokenEvent, add_token

SEQUENCE = SequenceSpec(RequestId("call"), (1, 2), SamplingParams(), StopParams(100), "", 5.0)


def request(num_choices: int, **changes: Any) -> ValidRequest:
    """A streamed chat of `num_choices` choices."""
    valid = ValidRequest(
        id=RequestId("call"),
        model="m",
        created_s=0,
        prompts=((1, 2),),
        sequences=tuple(replace(SEQUENCE, id=RequestId(f"call-{i}")) for i in range(num_choices)),
        num_choices=num_choices,
        stop_strings=(),
        skip_special_tokens=True,
        return_token_ids=False,
        stream_options=StreamOptions(),
    )
    return replace(valid, **changes)


def chunks(tokens: Sequence[int], finish: FinishReason | None = FinishReason.LENGTH) -> list[TokenChunk]:
    """One chunk for each token; the last one has `finish`."""
    last = len(tokens) - 1
    return [TokenChunk((OutputToken(i, t),), 0, finish if i == last else None) for i, t in enumerate(tokens)]


@dataclass
class ScriptedSource:
    """Gives the chunks of each choice. Waits for events in a script, raises errors.

    `offers`: chunks are offered before they are yielded, as those of sessions.
    """

    scripts: Mapping[int, Sequence[TokenChunk | asyncio.Event | BatonError]]
    completed: list[int] = field(default_factory=list)
    num_given: int = 0
    closed: bool | None = None
    holds_workers: bool = True
    offers: bool = False
    num_taken: int = 0

    @property
    def choices(self) -> Sequence[int]:
        return tuple(self.scripts)

    async def open(self, choice: int, take: TakeChunk | None = None) -> AsyncGenerator[TokenChunk, None]:
        return self._chunks(choice, take if self.offers else None)

    def on_first_chunk(self, choice: int) -> None: ...

    def complete(self, choice: int) -> None:
        self.completed.append(choice)

    def close(self, *, finished: bool) -> None:
        assert self.closed is None
        self.closed = finished

    async def _chunks(self, choice: int, take: TakeChunk | None) -> AsyncGenerator[TokenChunk, None]:
        for step in self.scripts[choice]:
            if isinstance(step, asyncio.Event):
                await step.wait()
            elif isinstance(step, BatonError):
                raise step
            else:
                self.num_given += 1
                if take is not None and take(step):
                    self.num_taken += 1
                else:
                    yield step


def digest_of(*tokens: int | None) -> int:
    """The digest of a choice's events with these tokens; None: an event without one."""
    digest = 0
    for index, token in enumerate(tokens):
        digest = add_token(digest, TokenEvent(0, None if token is None else OutputToken(index, token), "", 0, None))
    return digest
