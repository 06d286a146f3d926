"""Performs a batch on the real model: page copies, one flat forward pass, sampling. Owned by the engine thread.

Knows how a batch becomes tensors and nothing of why it was made.
"""

from __future__ import annotations

from dataclasses import dataclass

from baton.engine.batch import Batch, Row, StepOutput
from baton.model.attention.base import Segment, plan_step
from baton.model.graphs import GraphedDecoder, with_graphs
from baton.model.loading import LoadedModel
from baton.model.placing import int64_tensor
from baton.model.sampler import Choice, choose
from baton.model.storage import PageStorage


@dataclass(frozen=True, slots=True)
class ModelStep:
    """A `StepInFlight` of the `ModelRunner`; `choice` is None where there were no rows."""

    batch: Batch
    choice: Choice | None
    storage: PageStorage

    def result(self) -> StepOutput:
        """Waits for the device, sampled or not: after it what was written may be digested and read by peers."""
        sampled = iter(() if self.choice is None else self.choice.read())
        self.storage.finish()
        return StepOutput(tuple(None if row.sample is None else next(sampled) for row in self.batch.rows))


class ModelRunner:
    """A `Runner` over a loaded model and the pool it shares with the transfer."""

    def __init__(self, model: LoadedModel, storage: PageStorage, max_graph_rows: int = 0) -> None:
        """`max_graph_rows`: up to how many rows a decode step may be a CUDA graph; 0 makes none."""
        decoder = model.on(storage)
        self._decoder = with_graphs(decoder, storage, max_graph_rows) if max_graph_rows else decoder
        self._storage = storage
        self._chooser = model.chooser()

    @property
    def graph_sizes(self) -> tuple[int, ...]:
        """The numbers of rows for which there is a graph."""
        return self._decoder.sizes if isinstance(self._decoder, GraphedDecoder) else ()

    @property
    def returns_early(self) -> bool:
        """Whether `start` returns before the step is done: on a GPU."""
        return self._storage.device.type != "cpu"

    def run(self, batch: Batch) -> StepOutput:
        """One step to its end. Rows attend to pages written before the step and to their own new tokens."""
        return self.start(batch).result()

    def start(self, batch: Batch) -> ModelStep:
        """Begins a step. No other may be begun before its result was taken."""
        self._copy(batch)
        choice = self._extend(batch.rows) if batch.rows else None
        return ModelStep(batch, choice, self._storage)

    def _copy(self, batch: Batch) -> None:
        for copy in batch.copies:
            if copy.to_host:
                self._storage.copy_to_host(copy.pages, copy.slots)
            else:
                self._storage.copy_from_host(copy.slots, copy.pages)

    def _extend(self, rows: tuple[Row, ...]) -> Choice:
        """Forward pass over all rows' new tokens; the tokens of the rows that asked, in order."""
        specs = [row.sample for row in rows if row.sample is not None]
        ids: list[int] = []
        positions: list[int] = []
        segments: list[Segment] = []
        keep: list[int] = []
        for row in rows:
            segments.append(Segment(len(ids), row.start, len(row.tokens), row.pages))
            ids.extend(row.tokens)
            positions.extend(range(row.start, row.start + len(row.tokens)))
            if row.sample is not None:
                keep.append(len(ids) - 1)
        device = self._storage.device
        step = plan_step(segments, self._storage.geometry.page_size, device)
        # An output head over no rows at all is not something every model accepts, so one row is always kept.
        places = keep or [len(ids) - 1]
        flat_ids, flat_positions, flat_places = (int64_tensor(x, device) for x in (ids, positions, places))
        logits = self._decoder.forward(flat_ids, flat_positions, step, flat_places)
        return choose(logits[: len(keep)], specs, self._chooser)
