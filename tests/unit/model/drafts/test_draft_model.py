"""A draft model beside a target: what does not fit is refused, and vocabularies may be padded to other sizes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import pytest
import torch

from baton.domain.request import SamplingParams
from baton.engine.batch import SampleSpec
from baton.kv.geometry import KVGeometry, LayerGeometry
from baton.model.attention.base import Segment, StepMetadata, plan_step
from baton.model.decoders.base import LogitsReader
from baton.model.drafts.chains import DraftRow
from baton.model.drafts.draft_model import DraftModel
from baton.model.errors import UnsupportedModel
from baton.model.loading.loader import LoadedModel, load_model
from baton.model.sampling.sampler import TorchSampler
from baton.model.storage import PageStorage
from tests.tiny_models import save_random_model

GEOMETRY = KVGeometry.of_layers((LayerGeometry(1, 4, 4),), "float32", 4)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> LoadedModel:
    return load_model(save_random_model("llama", tmp_path_factory.mktemp("llama")), page_size=4)


def test_a_page_grows_by_the_draft_layers_and_by_nothing_else(model: LoadedModel) -> None:
    both = model.with_draft(model)
    assert both.geometry.num_bytes_per_token == 2 * model.geometry.num_bytes_per_token
    assert both.geometry.layer_offsets() == model.geometry.layer_offsets()
    assert len(both.geometry.part_ends) == len(model.geometry.part_ends) + 1


def test_what_does_not_fit_the_target_is_refused(model: LoadedModel) -> None:
    for geometry in (
        KVGeometry.of_layers(model.geometry.layers, "float32", 8),
        KVGeometry.of_layers(model.geometry.layers, "bfloat16", 4),
        KVGeometry.of_layers(model.geometry.layers, "float32", 4, head_groups=2),
    ):
        with pytest.raises(UnsupportedModel, match="other pages"):
            model.with_draft(replace(model, geometry=geometry))
    with pytest.raises(UnsupportedModel, match="another device"):
        model.with_draft(replace(model, device="cuda"))
    short = replace(model, config=replace(model.config, max_model_len=100))
    with pytest.raises(UnsupportedModel, match="context is 100 tokens, the model's 1024"):
        model.with_draft(short)
    assert short.with_draft(model).draft is model


class CountingDecoder:
    """Says the id after the last token; notes what it is asked."""

    def __init__(self, vocab_size: int) -> None:
        self.vocab_size = vocab_size
        self.calls: list[tuple[list[int], list[int], list[int]]] = []

    def forward(
        self,
        input_ids: torch.Tensor,
        positions: torch.Tensor,
        step: StepMetadata,
        keep: torch.Tensor,
        reader: LogitsReader | None = None,
        embeds: object | None = None,
        capture: object | None = None,
    ) -> torch.Tensor:
        assert step.partial_pages.numel() == 0, "the target's layers are in the same pages"
        self.calls.append((input_ids.tolist(), positions.tolist(), step.token_pages.tolist()))
        return torch.nn.functional.one_hot((input_ids[keep] + 1) % self.vocab_size, self.vocab_size).float()


def draft_row(token: int, start: int, pages: Sequence[int], count: int) -> DraftRow:
    return DraftRow(
        token, start, pages, count, lambda drafts, _: SampleSpec(SamplingParams(temperature=0.0), [token, *drafts], 1)
    )


def drafting(own_vocab_size: int, vocab_size: int) -> tuple[DraftModel, CountingDecoder, PageStorage]:
    decoder, storage = CountingDecoder(own_vocab_size), PageStorage.allocate(GEOMETRY, 6)
    storage.keys(0).fill_(9.0)
    return DraftModel(decoder, storage, TorchSampler(), own_vocab_size, vocab_size), decoder, storage


def test_rows_are_drafted_side_by_side_at_their_own_slots() -> None:
    model, decoder, storage = drafting(50, 50)
    assert model.make([draft_row(7, 3, [1, 2], 3), draft_row(20, 8, [0, 3, 4], 1)]) == [(8, 9, 10), (21,)]
    assert decoder.calls == [
        ([7, 20], [3, 8], [1, 4]),
        ([8], [4], [2]),
        ([9], [5], [2]),
    ]
    cleared = [page for page in range(6) if not storage.keys(0)[page].any()]
    assert cleared == [2, 4], "pages that drafts begin keep nothing of their last owner"


def test_a_page_that_drafts_begin_and_fill_is_cleared_as_well() -> None:
    """Passes before the last one see it partly filled: what its last owner left must not be NaN there."""
    model, _, storage = drafting(50, 50)
    model.make([draft_row(7, 3, [1, 2], 4), draft_row(20, 4, [5, 3], 3)])
    cleared = [page for page in range(6) if not storage.keys(0)[page].any()]
    assert cleared == [2, 3]


@pytest.mark.parametrize("own_vocab_size", [6, 10, 14])
def test_vocabularies_may_be_padded_to_other_sizes(own_vocab_size: int) -> None:
    """The draft never names an id that the target lacks, and reads one that it lacks itself as its last."""
    model, decoder, _ = drafting(own_vocab_size, 10)
    (drafts,) = model.make([draft_row(9, 0, [1, 2], 2)])
    assert all(0 <= draft < 10 for draft in drafts)
    assert decoder.calls[0][0] == [min(9, own_vocab_size - 1)]


def test_a_step_is_written_whole() -> None:
    model, decoder, _ = drafting(50, 50)
    step = plan_step([Segment(0, 2, 3, [1, 2])], 4)
    model.write(torch.tensor([4, 5, 6]), torch.tensor([2, 3, 4]), step)
    assert decoder.calls == [([4, 5, 6], [2, 3, 4], [1, 1, 2])]
