"""CUDA graphs of decode steps: one launch for a step instead of hundreds.

A step of single tokens is padded to the next of a few batch sizes and replayed on fixed buffers. Every other step runs
eagerly. Padding rows write to the storage's scratch page, attend to one slot of it, and are cut off the logits. The
runner uses `CudaGraphDecoder` in place of its decoder. Only `CudaGraphCapturer` touches CUDA: with a capturer that
computes again, everything else runs on any machine.
"""

from __future__ import annotations

import bisect
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Protocol

import torch

from baton.domain.arithmetic import ceil_div
from baton.domain.errors import Broken
from baton.model.attention.base import AttentionBackend, Segment, StepMetadata
from baton.model.attention.flashinfer_backend import FlashinferAttention
from baton.model.decoders.base import Decoder, LogitsReader
from baton.model.decoders.capture import HiddenCapture
from baton.model.decoders.lean import LeanDecoder
from baton.model.storage import PageStorage
from baton.model.to_device import int64_tensor
from baton.model.vision.embedding import Embeds

SMALL_SIZES = (1, 2, 4, 8, 16, 24, 32, 48, 64)
SIZE_STEP = 32
WARM_UPS = 2
"""Runs before a capture. Libraries allocate and compile in the first ones, which a capture must not contain."""

Compute = Callable[[], torch.Tensor]


class GraphCapturer(Protocol):
    """Turns a computation on fixed tensors into a repeatable one."""

    def capture(self, compute: Compute) -> Compute:
        """Returns a callable that repeats `compute` on the inputs' current contents. It overwrites its last result."""
        ...


class CudaGraphCapturer:
    """Captures CUDA graphs. They share one memory pool, since they never run concurrently."""

    def __init__(self, device: torch.device) -> None:
        self._pool = torch.cuda.graph_pool_handle()
        self._stream = torch.cuda.Stream(device)

    def capture(self, compute: Compute) -> Compute:
        """See `GraphCapturer.capture`. Other threads may use the device meanwhile."""
        here = torch.cuda.current_stream(self._stream.device)
        self._stream.wait_stream(here)
        with torch.cuda.stream(self._stream):
            for _ in range(WARM_UPS):
                compute()
        here.wait_stream(self._stream)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, self._pool, self._stream, capture_error_mode="thread_local"):
            output = compute()

        def replay() -> torch.Tensor:
            graph.replay()
            return output

        return replay


class FixedBatchAttention(Protocol):
    """Attention that can also serve a fixed batch size from buffers of its own."""

    def for_batch_size(self, num_rows: int, max_row_pages: int) -> AttentionBackend:
        """A backend for steps of exactly `num_rows` single tokens with tables of at most `max_row_pages` pages."""
        ...


def graph_sizes(max_rows: int) -> tuple[int, ...]:
    """Batch sizes that steps of at most `max_rows` rows are padded to, ascending; the last is `max_rows`."""
    sizes = [*SMALL_SIZES, *range(SMALL_SIZES[-1] + SIZE_STEP, max_rows, SIZE_STEP)]
    return (*(size for size in sizes if size < max_rows), max_rows)


def with_cuda_graphs(
    decoder: Decoder, storage: PageStorage, max_rows: int, capturer: GraphCapturer | None = None
) -> Decoder:
    """`decoder` with graphs for steps of at most `max_rows` rows; itself where its steps cannot be captured.

    Takes a second or two for each size. Call it before other threads use the storage.
    """
    if not isinstance(decoder, LeanDecoder) or decoder.has_experts or storage.scratch_page is None:
        return decoder
    if not isinstance(decoder.backend, FlashinferAttention):  # torch's plans change shape from step to step
        return decoder
    capturer = CudaGraphCapturer(storage.device) if capturer is None else capturer
    max_row_pages = ceil_div(decoder.max_positions, storage.geometry.page_size)
    return CudaGraphDecoder(decoder, decoder.backend, storage, graph_sizes(max_rows), max_row_pages, capturer)


class CudaGraphDecoder:
    """A `Decoder` that replays steps where it can. `sizes` ascend; `storage` has a scratch page."""

    def __init__(
        self,
        decoder: LeanDecoder,
        attention: FixedBatchAttention,
        storage: PageStorage,
        sizes: Sequence[int],
        max_row_pages: int,
        capturer: GraphCapturer,
    ) -> None:
        self._decoder = decoder
        self.sizes = tuple(sizes)
        # Largest first: smaller graphs then fit into the memory that it allocated.
        graphs = [
            DecodeGraph(decoder, attention.for_batch_size(size, max_row_pages), storage, size, capturer)
            for size in reversed(self.sizes)
        ]
        self._graphs = graphs[::-1]

    def forward(
        self,
        input_ids: torch.Tensor,
        positions: torch.Tensor,
        step: StepMetadata,
        keep: torch.Tensor,
        reader: LogitsReader | None = None,
        embeds: Embeds | None = None,
        capture: HiddenCapture | None = None,
    ) -> torch.Tensor:
        """See `Decoder.forward`."""
        place = bisect.bisect_left(self.sizes, len(step.segments))
        plain = step.is_decode_only and reader is None and embeds is None and positions.dim() == 1 and capture is None
        if place == len(self.sizes) or not plain:
            return self._decoder.forward(input_ids, positions, step, keep, reader, embeds, capture)
        return self._graphs[place].forward(input_ids, positions, step).index_select(0, keep)


class DecodeGraph:
    """The captured step of `size` rows, and its input buffers."""

    def __init__(
        self, decoder: LeanDecoder, backend: AttentionBackend, storage: PageStorage, size: int, capturer: GraphCapturer
    ) -> None:
        if storage.scratch_page is None:
            raise Broken("rows that fill up a step need a scratch page")
        self._decoder = decoder.with_backend(backend)
        self._backend = backend
        self._page_size = storage.geometry.page_size
        self._padding = tuple(Segment(row, 0, 1, (storage.scratch_page,)) for row in range(size))
        # Token, position, page and slot of every row: [4, size].
        self._padding_inputs = int64_tensor([0, 0, storage.scratch_page, 0], storage.device)[:, None].expand(4, size)
        self._inputs = self._padding_inputs.clone()
        self._keep = torch.arange(size, device=storage.device)
        nothing = int64_tensor([], storage.device)
        self._step = StepMetadata(self._padding, self._page_size, self._inputs[2], self._inputs[3], nothing)
        backend.begin(self._step)
        self._replay = capturer.capture(self._compute)

    def forward(self, input_ids: torch.Tensor, positions: torch.Tensor, step: StepMetadata) -> torch.Tensor:
        """Returns logits [rows of the step, vocab_size]. The next step overwrites them."""
        num_rows = len(step.segments)
        self._decoder.clear_partial_pages(step)
        self._inputs[:, :num_rows] = torch.stack((input_ids, positions, step.token_pages, step.token_slots))
        self._inputs[:, num_rows:] = self._padding_inputs[:, num_rows:]
        self._backend.begin(replace(self._step, segments=(*step.segments, *self._padding[num_rows:])))
        return self._replay()[:num_rows]

    def _compute(self) -> torch.Tensor:
        return self._decoder.compute(self._inputs[0], self._inputs[1], self._step, self._keep)
