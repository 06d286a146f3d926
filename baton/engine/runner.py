"""Runs a batch on the real model: page copies, one flat forward pass, sampling. Owned by the engine thread.

Turns a batch into tensors; does not know the scheduler.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch

from baton.domain.errors import Broken
from baton.domain.request import SampledToken
from baton.engine.batch import Batch, DraftedHistory, Row, SampleSpec, StepOutput, WantedDrafts
from baton.engine.drafts.base import num_matching
from baton.engine.drafts.trees import walk_trees
from baton.engine.masks import MaskFiller, StepMasks, check_rows
from baton.engine.media.step_inputs import EmbeddingSource, row_blocks, step_embeds, step_positions
from baton.engine.overlap.device_tokens import SentTokens, fill_futures
from baton.model.attention.base import Segment, plan_step
from baton.model.attention.row_inputs import RowInputBuffers, RowTensors
from baton.model.attention.window_slots import with_window_slots
from baton.model.decoders.cuda_graphs import CudaGraphDecoder, with_cuda_graphs
from baton.model.drafts.chains import DraftRow, PageDrafts
from baton.model.drafts.slot_moves import move_slots
from baton.model.drafts.tree_support import tree_refusal
from baton.model.loading.loader import LoadedModel
from baton.model.sampling.prompt_scorer import PromptScorer
from baton.model.sampling.sampler import Samples, sample_tokens
from baton.model.storage import PageStorage
from baton.model.to_device import int64_tensor
from baton.model.vision.embedding import Embeds


@dataclass(frozen=True, slots=True)
class ModelStep:
    """A `StepInFlight` of the `ModelRunner`; `sample_result` is None where there were no rows.

    `batch` has the drafts that were made, if `has_made`. `drafts` None: nothing drafts from pages. `sent`: the samples,
    where a step behind this one may start before its result is taken; None: nothing is behind it.
    """

    batch: Batch
    sample_result: Samples | None
    masks: StepMasks
    scorer: PromptScorer | None
    storage: PageStorage
    has_made: bool = False
    drafts: PageDrafts | None = None
    sent: SentTokens | None = None

    def result(self) -> StepOutput:
        """Waits for the device, also without samples. After it the written pages may be digested and read by peers."""
        if self.sent is not None:
            return self.masks.output(self.batch, self.sent.read())
        sampled = () if self.sample_result is None else self.sample_result.read()
        scores = {} if self.scorer is None else self.scorer.read()
        batch, masks, trees = self.batch, self.masks, dict[int, tuple[int, ...]]()
        if has_trees := any(row.parents for row in batch.rows):
            walk = walk_trees(batch, sampled, masks)
            batch, sampled, masks, trees = walk.batch, walk.sampled, walk.masks, dict(walk.kept)
            move_slots(self.storage, walk.moves)
        output = masks.output(batch, sampled)
        if self.drafts is not None and any(row.drafted for row in batch.rows):
            pairs = enumerate(zip(batch.rows, output.sampled, strict=True))
            self.drafts.settle([trees.get(index) or range(_num_kept(*pair)) for index, pair in pairs])
        self.storage.synchronize()
        if scores or self.has_made or has_trees:
            output = replace(output, scores=scores, batch=batch if self.has_made or has_trees else None)
        return output


class ModelRunner:
    """A `Runner` over a loaded model and a pool that it shares with the transfer."""

    def __init__(
        self,
        model: LoadedModel,
        storage: PageStorage,
        max_graph_rows: int = 0,
        masks: MaskFiller | None = None,
        embeddings: EmbeddingSource | None = None,
    ) -> None:
        """`max_graph_rows`: most rows of a decode step that runs as a CUDA graph; 0: no graphs.

        `masks` None: a row with a constraint is an error. `embeddings`: of the images that rows show.
        """
        decoder = model.decoder(storage)
        self._decoder = with_cuda_graphs(decoder, storage, max_graph_rows) if max_graph_rows else decoder
        self._drafts = model.drafting(storage)
        self._tree_refusal = tree_refusal(model)
        self._storage = storage
        self._sampler = model.sampler()
        self._masks = masks
        self._embeddings = embeddings
        self._has_blocks = model.config.media is not None and model.config.media.block_rows is not None
        # No other part of such a step keeps or changes its inputs: on a device they are copied, and drafts keep them.
        reuses = storage.device.type == "cpu" and self._drafts is None
        self._buffers = RowInputBuffers(storage.geometry.page_size) if reuses else None
        self._last: tuple[Batch, torch.Tensor] | None = None  # the step before, and its samples
        self.overlaps = False
        """Set where steps start before the result of the one before is taken: `OverlapScheduler`."""

    @property
    def tree_refusal(self) -> str:
        """Why steps cannot verify trees of drafts with this model; empty: they can."""
        return self._tree_refusal

    @property
    def graph_sizes(self) -> tuple[int, ...]:
        """Row counts that have a graph."""
        return self._decoder.sizes if isinstance(self._decoder, CudaGraphDecoder) else ()

    @property
    def device(self) -> str:
        """Type of the device: "cpu" or "cuda"."""
        return self._storage.device.type

    @property
    def is_async(self) -> bool:
        """True if `start` returns before the step is done: on a GPU."""
        return self.device != "cpu"

    def run(self, batch: Batch) -> StepOutput:
        """Runs one step to its end. Rows attend to pages written before the step and to their own new tokens."""
        return self.start(batch).result()

    def start(self, batch: Batch) -> ModelStep:
        """Starts a step. Unless `overlaps`, the caller takes its result before it starts another one.

        Raises `Broken` for a future token that the step before did not sample.
        """
        self._copy(batch)
        if not batch.rows:
            return ModelStep(batch, None, StepMasks(), None, self._storage)
        has_made = any(row.wanted is not None for row in batch.rows)
        if has_made:
            batch = self._with_drafts(batch)
        scorer = self._scorer(batch.rows)
        sample_result, masks = self._extend(batch.rows, scorer)
        sent = None
        if self.overlaps:
            self._last = batch, sample_result.tokens
            if self.is_async and scorer is None and sample_result.logprobs is None and self._drafts is None:
                sent = SentTokens.of(sample_result.tokens)
        return ModelStep(batch, sample_result, masks, scorer, self._storage, has_made, self._drafts, sent)

    def _with_drafts(self, batch: Batch) -> Batch:
        """The batch with the drafts that its rows want. Raises `Broken` without a draft model."""
        if self._drafts is None:
            raise Broken("a row wants drafts, and there is no draft model")
        rows = {
            index: _draft_row(row, row.wanted, self._drafts.vocab_size)
            for index, row in enumerate(batch.rows)
            if row.wanted is not None
        }
        return batch.with_made(dict(zip(rows, self._drafts.make(list(rows.values())), strict=True)))

    def _copy(self, batch: Batch) -> None:
        for copy in batch.copies:
            if copy.to_host:
                self._storage.copy_to_host(copy.pages, copy.slots, copy.window_slots)
            else:
                self._storage.copy_from_host(copy.slots, copy.pages, copy.window_slots)

    def _scorer(self, rows: tuple[Row, ...]) -> PromptScorer | None:
        """A scorer of the rows that ask for it; None if none does."""
        if all(row.score is None for row in rows):
            return None
        scorer, at = PromptScorer(self._storage.device), 0
        for index, row in enumerate(rows):
            if row.score is not None:
                scorer.add_row(index, at, row.start, row.score)
            at += len(row.tokens)
        return scorer

    def _extend(self, rows: tuple[Row, ...], scorer: PromptScorer | None) -> tuple[Samples, StepMasks]:
        """Forward pass over the new tokens of all rows; samples for the rows with `sample`, in order, at all places.

        On a GPU the masks are filled while the pass runs.
        """
        specs: list[SampleSpec] = []
        ids: list[int] = []
        segments: list[Segment] = []
        keep: list[int] = []
        for row in rows:
            blocks = row_blocks(row) if self._has_blocks and row.media else ()
            segments.append(Segment(len(ids), row.start, len(row.tokens), row.pages, blocks, row.token_parents))
            ids.extend(row.tokens)
            if row.sample is not None:
                specs.append(row.sample)
                specs += row.drafted
                keep += range(len(ids) - 1 - len(row.drafted), len(ids))
        # Not every model accepts an output head over zero rows, so at least one row is kept.
        inputs = self._inputs(rows, ids, segments, keep or [len(ids) - 1])
        step = with_window_slots(inputs.step, self._storage)
        if any(row.future is not None for row in rows):
            fill_futures(inputs.ids, rows, self._last)
        embeds = self._embeds(rows)
        capture = None if self._drafts is None else self._drafts.new_capture()
        logits = self._decoder.forward(inputs.ids, inputs.positions, step, inputs.keep, scorer, embeds, capture)
        if self._drafts is not None:
            own_positions = int64_tensor([at for row in rows for at in row.positions()], self._storage.device)
            self._drafts.write(inputs.ids, own_positions, step, capture, embeds)
        masks = StepMasks() if self._masks is None else self._masks.fill(rows)
        specs = check_rows(specs, masks, logits.shape[-1])
        return sample_tokens(logits if keep else logits[:0], specs, self._sampler, masks.rows), masks

    def _inputs(
        self, rows: tuple[Row, ...], ids: list[int], segments: list[Segment], keep: Sequence[int]
    ) -> RowTensors:
        """The inputs of the forward pass; those of a step of decode on the CPU are written where the last ones were.

        Positions are [tokens], or [3, tokens] where the axes of a model with three differ.
        """
        positions, device = step_positions(rows), self._storage.device
        if isinstance(positions, list):
            if self._buffers is not None and len(rows) == len(ids) == len(keep):
                return self._buffers.fill(ids, positions, segments)
            places = int64_tensor(positions, device)
        else:
            places = torch.stack([int64_tensor(axis, device) for axis in positions])
        step = plan_step(segments, self._storage.geometry.page_size, device)
        return RowTensors(int64_tensor(ids, device), places, int64_tensor(keep, device), step)

    def _embeds(self, rows: tuple[Row, ...]) -> Embeds | None:
        return step_embeds(rows, self._embeddings, self._storage.device)


def _num_kept(row: Row, sampled: Sequence[SampledToken]) -> int:
    """Tokens of the row that are known now: its own, and the drafts that were drawn."""
    drafts = row.tokens[row.num_known_tokens :]
    return row.num_known_tokens + num_matching(drafts, sampled)


def _draft_row(row: Row, wanted: WantedDrafts, vocab_size: int) -> DraftRow:
    sample = row.sample
    if sample is None or len(row.tokens) != 1:
        raise Broken(f"{row.id}: drafts follow one token that is sampled after")

    def spec(drafts: Sequence[int], sharpness: float) -> SampleSpec:
        """How the next draft is drawn: as the token at its place, but without a mask and log probabilities.

        The masks of the step do the rest: a draft that is not allowed ends what the row emits.
        """
        plain = SampleSpec.of(wanted.request, DraftedHistory(sample.history, drafts)) if drafts else sample
        temperature = plain.sampling.temperature / sharpness
        sampling = replace(plain.sampling, temperature=temperature, logprobs=None, logprob_token_ids=())
        return check_rows([replace(plain, sampling=sampling, mask=None)], StepMasks(), vocab_size)[0]

    return DraftRow(row.tokens[0], row.start, row.pages, wanted.count, spec, wanted.parents)
