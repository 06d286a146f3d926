"""Performs a batch on the real model: page copies, one flat forward pass, sampling. Owned by the engine thread.

Knows how a batch becomes tensors and nothing of why it was made.
"""

from __future__ import annotations

from dataclasses import dataclass

from baton.engine.batch import Batch, Row, StepOutput
from baton.model.attention.base import Segment, plan_step
from baton.model.decoders.cuda_graphs import CudaGraphDecoder, with_cuda_graphs
from baton.model.loading.loader import LoadedModel
from baton.model.sampling.sampler import SampleResult, sample_tokens
from baton.model.storage import PageStorage
from baton.model.to_device import int64_tensor


@dataclass(frozen=True, slots=True)
class ModelStep:
    """A `StepInFlight` of the `ModelRunner`; `sample_result` is None where there were no rows."""

    batch: Batch
    sample_result: SampleResult | None
    storage: PageStorage

    def result(self) -> StepOutput:
        """Waits for the device, sampled or not: after it what was written may be digested and read by peers."""
        sampled = iter(() if self.sample_result is None else self.sample_result.read())
        self.storage.synchronize()
        return StepOutput(tuple(None if row.sample is None else next(sampled) for row in self.batch.rows))


class ModelRunner:
    """A `Runner` over a loaded model and the pool it shares with the transfer."""

    def __init__(self, model: LoadedModel, storage: PageStorage, max_graph_rows: int = 0) -> None:
        """`max_graph_rows`: up to how many rows a decode step may be a CUDA graph; 0 makes none."""
        decoder = model.decoder(storage)
        self._decoder = with_cuda_graphs(decoder, storage, max_graph_rows) if max_graph_rows else decoder
        self._storage = storage
        self._sampler = model.sampler()

    @property
    def graph_sizes(self) -> tuple[int, ...]:
        """The numbers of rows for which there is a graph."""
        return self._decoder.sizes if isinstance(self._decoder, CudaGraphDecoder) else ()

    @property
    def is_async(self) -> bool:
        """Whether `start` returns before the step is done: on a GPU."""
        return self._storage.device.type != "cpu"

    def run(self, batch: Batch) -> StepOutput:
        """One step to its end. Rows attend to pages written before the step and to their own new tokens."""
        return self.start(batch).result()

    def start(self, batch: Batch) -> ModelStep:
        """Begins a step. No other may be begun before its result was taken."""
        self._copy(batch)
        sample_result = self._extend(batch.rows) if batch.rows else None
        return ModelStep(batch, sample_result, self._storage)

    def _copy(self, batch: Batch) -> None:
        for copy in batch.copies:
            if copy.to_host:
                self._storage.copy_to_host(copy.pages, copy.slots)
            else:
                self._storage.copy_from_host(copy.slots, copy.pages)

    def _extend(self, rows: tuple[Row, ...]) -> SampleResult:
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
        return sample_tokens(logits[: len(keep)], specs, self._sampler)
