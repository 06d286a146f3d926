"""A device without a device: `FakeRunner` behind a queue, for tests of overlap scheduling. Imports no torch.

What the host gives to a step is copied at `start`, as a device's inputs are. A step then runs at some moment before its
`result` returns: `advance` runs the oldest that waits. It takes future tokens from the step before it at that moment
and checks every row against its pages, so a wrong token, position or page raises `Broken`.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, replace

from baton.domain.errors import Broken
from baton.domain.ids import PageId
from baton.engine.batch import Batch, Row, SampleSpec, StepOutput
from baton.engine.fake_runner import FakeRunner
from baton.engine.overlap.future import FutureToken, UnreadHistory


@dataclass(slots=True, eq=False)
class FakeStep:
    """A `StepInFlight` of a `FakeAsyncRunner`. `output` None: it has not run."""

    device: FakeAsyncRunner
    batch: Batch
    window_slots: Sequence[int] | None = None
    output: StepOutput | None = None

    def result(self) -> StepOutput:
        """Runs what has not run up to this step. Raises `Broken` if an earlier step's result was not taken."""
        return self.device.take(self)


class FakeAsyncRunner:
    """Runs steps in the order of their start, late. Owned by one thread."""

    def __init__(self, runner: FakeRunner) -> None:
        self._runner = runner
        self._waiting: deque[FakeStep] = deque()  # started, not run
        self._in_flight: deque[FakeStep] = deque()  # started, their results not taken
        self._last: FakeStep | None = None  # started
        self._output: StepOutput | None = None  # of the last step that ran
        self.max_in_flight = 0
        self.num_future_tokens = 0

    @property
    def pages(self) -> frozenset[PageId]:
        """Pages that steps in flight may read or write."""
        return frozenset(page for step in self._in_flight for row in step.batch.rows for page in row.pages)

    @property
    def written_pages(self) -> frozenset[PageId]:
        """Pages that steps in flight write: their bytes are not final."""
        size, pages = self._runner.page_size, set[PageId]()
        for row in (row for step in self._in_flight for row in step.batch.rows):
            pages.update(row.pages[row.start // size : (row.start + len(row.tokens) - 1) // size + 1])
        return frozenset(pages)

    def start(self, batch: Batch) -> FakeStep:
        """Takes a copy of a step's inputs. Raises `Broken` for a future token that the step before does not sample."""
        before = None if self._last is None else self._last.batch
        for row in batch.rows:
            if row.future is not None:
                self._check(row, row.future, before)
        step = FakeStep(self, replace(batch, rows=tuple(map(_frozen, batch.rows))), self._runner.window_slots())
        self._waiting.append(step)
        self._in_flight.append(step)
        self._last = step
        self.max_in_flight = max(self.max_in_flight, len(self._in_flight))
        return step

    def advance(self) -> bool:
        """Runs the oldest step that waits; False if there is none."""
        if not self._waiting:
            return False
        step = self._waiting.popleft()
        self._runner.fixed_slots = step.window_slots
        self._output = step.output = self._runner.run(_resolved(step.batch, self._output))
        return True

    def take(self, step: FakeStep) -> StepOutput:
        """The result of the oldest step in flight, which has ended then."""
        if not self._in_flight or self._in_flight[0] is not step:
            raise Broken("results are taken in the order of the steps")
        while step.output is None:
            if not self.advance():
                raise Broken("the step has failed")
        self._in_flight.popleft()
        return step.output

    def _check(self, row: Row, future: FutureToken, before: Batch | None) -> None:
        source = None if before is None or future.row >= len(before.rows) else before.rows[future.row]
        if source is None or source.sample is None or source.drafted or source.id != row.id:
            raise Broken(f"{row.id}: row {future.row} of the step before does not sample its token")
        self.num_future_tokens += 1


def _frozen(row: Row) -> Row:
    """The row with copies of what the host may change."""
    spec, pages = row.sample, tuple(row.pages)
    if spec is not None:
        history = spec.history if isinstance(spec.history, UnreadHistory) else tuple(spec.history)
        spec = replace(spec, history=history)
    return replace(row, tokens=tuple(row.tokens), pages=pages, sample=spec)


def _resolved(batch: Batch, before: StepOutput | None) -> Batch:
    """The batch with the tokens that the step before has sampled."""
    return replace(
        batch, rows=tuple([row if row.future is None else _known(row, row.future, before) for row in batch.rows])
    )


def _known(row: Row, future: FutureToken, before: StepOutput | None) -> Row:
    sampled = () if before is None else before.sampled[future.row]
    if len(sampled) != 1 or row.sample is None or not isinstance(row.sample.history, UnreadHistory):
        raise Broken(f"{row.id}: {len(sampled)} tokens where one was to come")
    token = sampled[0].token
    sample: SampleSpec = replace(row.sample, history=(*row.sample.history.known, token))
    return replace(row, tokens=(token,), sample=sample, future=None)
