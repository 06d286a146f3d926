"""The interface of a drafter: it proposes tokens behind a row, and a step verifies them by drawing.

A draft counts if it equals the token that the sampler draws at its place, with the seed and position of plain decoding.
So a drafter changes how many tokens a step gives, never which. Pure: the decode scheduler calls it in every step.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from baton.domain.ids import AttemptId
from baton.domain.request import SampledToken, StopParams, finish_reason


@dataclass(frozen=True, slots=True)
class Proposal:
    """A chain of tokens that may follow a row. `grade` groups proposals that are equally likely to be accepted.

    Its tokens are all known, or all `DRAFT_PLACEHOLDER`.
    """

    tokens: tuple[int, ...] = ()
    grade: int = 0


NO_PROPOSAL = Proposal()
DRAFT_PLACEHOLDER = -1
"""Stands for a draft that the runner makes at the start of the step that verifies it."""


class Drafter(Protocol):
    """Proposes tokens for the rows of one worker. Used from the engine thread; keeps nothing after `end`."""

    def begin(self, id: AttemptId, tokens: Sequence[int], salt: str = "") -> None:
        """A row joins with `tokens`, prompt and output. They must be copied: the caller's list grows.

        Rows of another `salt` must not profit from them: it tells tenants apart. One negative token stands for the
        rows of an image, another for those of the next one: proposals are cut before it.
        """
        ...

    def propose(self, id: AttemptId, max_tokens: int) -> Proposal:
        """At most `max_tokens` tokens to verify behind the row's last one."""
        ...

    def accepted(self, id: AttemptId, tokens: Sequence[int]) -> None:
        """The row has `tokens` more, drafted or not."""
        ...

    def end(self, id: AttemptId) -> None:
        """The row has ended. Idempotent."""
        ...


def emitted_tokens(
    drafts: Sequence[int], sampled: tuple[SampledToken, ...], stop: StopParams, num_output_tokens: int
) -> tuple[SampledToken, ...]:
    """The part of `sampled`, drawn after each of `drafts` and before them, that a row with so many outputs emits.

    It ends with the first token that differs from the draft at its place, or that ends the row.
    """
    count = 1
    for draft, drawn in zip(drafts, sampled, strict=False):
        if drawn.token != draft or finish_reason(stop, drawn.token, num_output_tokens + count) is not None:
            break
        count += 1
    return sampled[:count]


def num_matching(drafts: Sequence[int], sampled: Sequence[SampledToken]) -> int:
    """Number of leading `drafts` that are the tokens drawn at their places."""
    count = 0
    for draft, drawn in zip(drafts, sampled, strict=False):
        if drawn.token != draft:
            break
        count += 1
    return count
