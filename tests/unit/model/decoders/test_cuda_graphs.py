"""Padded steps on fixed buffers equal eager steps; the capturer of these tests recomputes."""

from __future__ import annotations

import random
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch

from baton.domain.errors import Broken
from baton.model.attention.base import Segment, plan_step
from baton.model.attention.torch_backend import TorchAttention
from baton.model.decoders.cuda_graphs import Compute, CudaGraphDecoder, DecodeGraph, graph_sizes, with_cuda_graphs
from baton.model.decoders.lean import LeanDecoder
from baton.model.decoders.lean_weights import LeanModel
from baton.model.linears.packing import WeightLayout
from baton.model.loading.config import DtypeChoice
from baton.model.loading.kernel_choice import KernelUse
from baton.model.loading.loader import LoadedModel, load_model
from baton.model.storage import PageStorage
from baton.model.vision.embedding import Embeds
from tests import tiny_models

PAGE_SIZE = 4
NUM_PAGES = 60
SIZES = (1, 2, 4, 8)


class RecomputingCapturer:
    """A `GraphCapturer` that recomputes and overwrites each result at the next replay, as graphs do."""

    def __init__(self) -> None:
        self.shapes: list[tuple[int, ...]] = []
        self.num_replays = 0

    def capture(self, compute: Compute) -> Compute:
        output = compute().clone()
        self.shapes.append(tuple(output.shape))

        def replay() -> torch.Tensor:
            self.num_replays += 1
            return output.copy_(compute())

        return replay


class TorchRows:
    """`FixedBatchAttention` in plain torch; records its requests."""

    def __init__(self, storage: PageStorage) -> None:
        self._storage = storage
        self.made: list[tuple[int, int]] = []

    def for_batch_size(self, num_rows: int, max_row_pages: int) -> TorchAttention:
        self.made.append((num_rows, max_row_pages))
        return TorchAttention(self._storage)


class World:
    """Two pools of equal content: one decoder computes eagerly, the other replays."""

    def __init__(self, model: LoadedModel) -> None:
        self.capturer = RecomputingCapturer()
        self.eager_storage, self.storage = (
            PageStorage.allocate(model.geometry, NUM_PAGES, has_scratch=True) for _ in range(2)
        )
        self.eager = model.decoder(self.eager_storage)
        decoder = model.decoder(self.storage)
        assert isinstance(decoder, LeanDecoder)
        self.rows = TorchRows(self.storage)
        self.graphed = CudaGraphDecoder(decoder, self.rows, self.storage, SIZES, 9, self.capturer)

    def step(self, segments: Sequence[Segment], ids: list[int], keep: Sequence[int]) -> tuple[torch.Tensor, ...]:
        """Logits of both decoders."""
        positions = torch.tensor([position for s in segments for position in range(s.start, s.end)])
        step = plan_step(segments, PAGE_SIZE)
        arguments = torch.tensor(ids), positions, step, torch.tensor(keep)
        return self.eager.forward(*arguments), self.graphed.forward(*arguments)


@pytest.fixture(scope="module", params=["llama", "gemma3_text"])
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> LoadedModel:
    directory = tiny_models.save_random_model(request.param, tmp_path_factory.mktemp(request.param))
    return load_model(
        directory, dtype=DtypeChoice.FLOAT32, page_size=PAGE_SIZE, layout=WeightLayout.PLAIN, kernels=KernelUse.NEVER
    )


def test_batch_sizes_are_dense_where_steps_are_small():
    assert graph_sizes(1) == (1,)
    assert graph_sizes(8) == (1, 2, 4, 8)
    assert graph_sizes(20) == (1, 2, 4, 8, 16, 20)
    assert graph_sizes(64) == (1, 2, 4, 8, 16, 24, 32, 48, 64)
    assert graph_sizes(160) == (1, 2, 4, 8, 16, 24, 32, 48, 64, 96, 128, 160)


def test_graphs_are_captured_largest_first(model: LoadedModel):
    world = World(model)
    assert world.rows.made == [(8, 9), (4, 9), (2, 9), (1, 9)]
    assert [shape[0] for shape in world.capturer.shapes] == [8, 4, 2, 1]


def test_a_replayed_step_gives_the_eager_logits_and_pages(model: LoadedModel):
    world, rng = World(model), random.Random(3)
    free = list(range(NUM_PAGES))
    rng.shuffle(free)
    lengths = [1, 3, 4, 9, 12, 5, 7]
    tables = [[free.pop() for _ in range(8)] for _ in lengths]
    for length, table in zip(lengths, tables, strict=True):  # prompts: chunks, except the first
        ids = [rng.randrange(tiny_models.VOCAB_SIZE) for _ in range(length)]
        wanted, got = world.step([Segment(0, 0, length, table)], ids, [length - 1])
        torch.testing.assert_close(got, wanted)
    for num_rows in (7, 3, 1, 6, 2, 7, 4):  # fewer rows after more: stale buffer contents must not matter
        chosen = rng.sample(range(len(lengths)), num_rows)
        segments = [Segment(place, lengths[row], 1, tables[row]) for place, row in enumerate(chosen)]
        keep = sorted(rng.sample(range(num_rows), rng.randint(1, num_rows)))
        wanted, got = world.step(segments, [rng.randrange(tiny_models.VOCAB_SIZE) for _ in chosen], keep)
        torch.testing.assert_close(got, wanted, rtol=1e-4, atol=1e-4)
        for row in chosen:
            lengths[row] += 1
        torch.testing.assert_close(*(s.page_bytes().view(torch.float32) for s in (world.storage, world.eager_storage)))
    assert world.storage.keys(0)[NUM_PAGES].any()
    assert not world.eager_storage.keys(0)[NUM_PAGES].any()


def test_returned_logits_survive_the_next_step(model: LoadedModel):
    world = World(model)
    _, kept = world.step([Segment(0, 0, 1, [3])], [5], [0])
    before = kept.clone()
    world.step([Segment(0, 0, 1, [4])], [6], [0])
    assert torch.equal(kept, before)


def test_larger_and_mixed_steps_run_eagerly(model: LoadedModel):
    world = World(model)
    replays = world.capturer.num_replays
    many = [Segment(row, 0, 1, [row]) for row in range(SIZES[-1] + 1)]
    assert torch.equal(*world.step(many, list(range(9)), range(9)))
    mixed = [Segment(0, 0, 1, [20]), Segment(1, 0, 3, [21])]
    assert torch.equal(*world.step(mixed, [1, 2, 3, 4], [0, 3]))
    assert world.capturer.num_replays == replays
    assert not world.storage.keys(0)[NUM_PAGES][:, :, 1:].any()  # padding rows touch one slot of the scratch page


def test_without_a_scratch_page_there_is_no_graph(model: LoadedModel):
    storage = PageStorage.allocate(model.geometry, 4)
    decoder = model.decoder(storage)
    assert isinstance(decoder, LeanDecoder)
    with pytest.raises(Broken, match="scratch"):
        DecodeGraph(decoder, TorchAttention(storage), storage, 2, RecomputingCapturer())


def test_an_unsupported_decoder_is_returned_unchanged(model: LoadedModel, tmp_path: Path):
    storage = PageStorage.allocate(model.geometry, 4, has_scratch=True)
    decoder = model.decoder(storage)  # torch's attention
    assert with_cuda_graphs(decoder, storage, 8, RecomputingCapturer()) is decoder
    experts = load_model(tiny_models.save_random_model("qwen3_moe", tmp_path), page_size=PAGE_SIZE)
    storage = PageStorage.allocate(experts.geometry, 4, has_scratch=True)
    decoder = experts.decoder(storage)
    assert isinstance(decoder, LeanDecoder)
    assert decoder.has_experts
    assert with_cuda_graphs(decoder, storage, 8, RecomputingCapturer()) is decoder


def test_steps_with_rows_of_images_run_eagerly(model: LoadedModel):
    world = World(model)
    replays, step = world.capturer.num_replays, plan_step([Segment(0, 0, 1, [3])], PAGE_SIZE)
    rows = torch.ones(1, model.impl.embedding.shape[1]) if isinstance(model.impl, LeanModel) else torch.empty(0)
    place = torch.tensor([0])
    given = torch.tensor([5]), place, step, place
    shown = [one.forward(*given, embeds=Embeds(place, rows)) for one in (world.eager, world.graphed)]
    assert torch.equal(*shown)
    assert not torch.equal(shown[0], world.eager.forward(*given))
    assert world.capturer.num_replays == replays
