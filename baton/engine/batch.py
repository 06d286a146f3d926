"""The values that pass between a scheduler and the runner: one `Batch` in, one `StepOutput` back. No tensors here."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from baton.domain.ids import AttemptId, PageId
from baton.domain.request import SampledToken, SamplingParams


@dataclass(frozen=True, slots=True)
class SampleSpec:
    """How to sample the token after a row's last one.

    `history` holds every token so far, prompt first, *including* this step's; it belongs to the scheduler and is only
    read. The sampled token's position in the sequence is `len(history)`: with `sampling.seed` it keys the randomness.
    """

    sampling: SamplingParams
    history: Sequence[int]
    num_prompt_tokens: int
    banned: frozenset[int] = frozenset()


@dataclass(frozen=True, slots=True)
class Row:
    """New tokens of one request: positions [start, start + len(tokens)).

    `pages` is the request's page table; it covers at least `start + len(tokens)` token slots, and the slots below
    `start` are already filled. `sample` is None for a chunk that does not end the prompt.
    """

    id: AttemptId
    tokens: Sequence[int]
    start: int
    pages: Sequence[PageId]
    sample: SampleSpec | None

    @property
    def num_prompt_tokens(self) -> int:
        """How many of the new tokens belong to the prompt."""
        end = self.start + len(self.tokens)
        return len(self.tokens) if self.sample is None else max(0, min(end, self.sample.num_prompt_tokens) - self.start)


@dataclass(frozen=True, slots=True)
class HostCopy:
    """Pages to copy to host slots (preemption) or back, page by page, before the step's forward pass."""

    pages: tuple[PageId, ...]
    slots: tuple[int, ...]
    to_host: bool


@dataclass(frozen=True, slots=True)
class Batch:
    """One step. `copies` are performed in order before any row writes a page; `rows` may be empty if they are not."""

    rows: tuple[Row, ...]
    copies: tuple[HostCopy, ...] = ()

    @property
    def num_tokens(self) -> int:
        return sum(len(row.tokens) for row in self.rows)

    @property
    def num_prompt_tokens(self) -> int:
        """Tokens of this step that belong to a prompt; a decode worker that only ever continues has none."""
        return sum(row.num_prompt_tokens for row in self.rows)


@dataclass(frozen=True, slots=True)
class StepOutput:
    """`sampled[i]` belongs to `batch.rows[i]`; None where the row asked for no token."""

    sampled: tuple[SampledToken | None, ...]


class StepInFlight(Protocol):
    """A step that was started."""

    def result(self) -> StepOutput:
        """Waits until the step is done; the pages' bytes are final then."""
        ...


class Runner(Protocol):
    """Performs a batch's copies, then its forward pass, then its sampling. Owned by the engine thread."""

    def run(self, batch: Batch) -> StepOutput:
        """Runs one step to its end; the pages' bytes are final when it returns."""
        ...
