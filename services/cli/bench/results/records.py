"""Records of a run: planned requests and measured answers. Every figure is computed from them.

Made by `plan` and `load_generator`, saved by `run_file`, read by `summary`. Times are seconds of one monotonic clock.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import NamedTuple


@dataclass(frozen=True, slots=True)
class PlannedRequest:
    """One request to be sent `arrival_s` after the start. `prompt`: token ids."""

    index: int
    arrival_s: float
    prompt: tuple[int, ...] = field(repr=False)
    max_tokens: int


class Delivery(NamedTuple):
    """An event that brought tokens, `at_s` after its request was sent."""

    at_s: float
    num_tokens: int


@dataclass(frozen=True, slots=True)
class MeasuredAnswer:
    """A server's answer to one request. `failure`: why the answer does not count, None if it does.

    `ended_s`: from sending to the event with the finish reason, or to the failure. `num_prompt_tokens` is the server's
    own count, None when it gave none.
    """

    sent_at_s: float
    ended_s: float
    deliveries: tuple[Delivery, ...]
    num_output_tokens: int
    num_prompt_tokens: int | None = None
    finish_reason: str | None = None
    failure: str | None = None


@dataclass(frozen=True, slots=True)
class RequestRow:
    """One request of a run file. `arrival_s`, `due_s` and `sent_s` since the run's start, the others since sending.

    `due_s` is when the client was free to send: the arrival, or later if `--max-concurrency` delayed it.
    """

    index: int
    arrival_s: float
    due_s: float
    sent_s: float
    ended_s: float
    max_tokens: int
    num_prompt_tokens: int
    num_output_tokens: int
    deliveries: tuple[Delivery, ...]
    finish_reason: str | None
    failure: str | None

    @property
    def lag_s(self) -> float:
        """Lateness of the client itself."""
        return max(0.0, self.sent_s - self.due_s)

    @property
    def ttft_s(self) -> float:
        """From sending to the first event with content. Raises `IndexError` for a row without one."""
        return self.deliveries[0].at_s

    @property
    def e2el_s(self) -> float:
        """From sending to the end."""
        return self.ended_s

    @property
    def tpot_s(self) -> float | None:
        """Mean time of a token after the first; None for answers of a single token."""
        if self.num_output_tokens < 2:
            return None
        return (self.e2el_s - self.ttft_s) / (self.num_output_tokens - 1)

    @property
    def itls_s(self) -> list[float]:
        """Gaps between tokens; an event of n tokens after a gap counts as n gaps of an n-th."""
        return inter_token_gaps(self.deliveries)


def inter_token_gaps(deliveries: Sequence[Delivery]) -> list[float]:
    """The gap before every token of every event but the first."""
    gaps: list[float] = []
    for before, after in pairwise(deliveries):
        gaps += [(after.at_s - before.at_s) / after.num_tokens] * after.num_tokens
    return gaps


def row_of(request: PlannedRequest, answer: MeasuredAnswer, *, due_s: float, start_s: float) -> RequestRow:
    """Joins plan and answer. `start_s`: the run's start on the answer's clock."""
    prompt = answer.num_prompt_tokens
    return RequestRow(
        index=request.index,
        arrival_s=request.arrival_s,
        due_s=due_s,
        sent_s=answer.sent_at_s - start_s,
        ended_s=answer.ended_s,
        max_tokens=request.max_tokens,
        num_prompt_tokens=len(request.prompt) if prompt is None else prompt,
        num_output_tokens=answer.num_output_tokens,
        deliveries=answer.deliveries,
        finish_reason=answer.finish_reason,
        failure=answer.failure,
    )
