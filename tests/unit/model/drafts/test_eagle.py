"""Heads over pages draft what the published formula drafts, whatever steps computed the pages."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from baton.domain.ids import AttemptId, PageId, RequestId
from baton.domain.request import EngineRequest, SamplingParams, StopParams
from baton.engine.batch import Batch, Row, SampleSpec, StepOutput
from baton.engine.drafts.base import DRAFT_PLACEHOLDER
from baton.engine.runner import ModelRunner
from baton.model.attention.base import Segment, plan_step
from baton.model.drafts import eagle
from baton.model.drafts.chains import DraftRow, LogitsAfter, make_chains
from baton.model.drafts.eagle import SHARPNESS
from baton.model.loading.loader import DecoderChoice, LoadedModel, load_model
from baton.model.sampling.sampler import SamplerBackend
from baton.model.storage import PageStorage
from tests.tiny_models import VOCAB_SIZE, save_random_model
from tests.unit.model.drafts.tiny_heads import HIDDEN, KINDS, NUM_DEPTHS, HeadReference, random_head, save_head

PAGE_SIZE, COUNT = 4, 3
GENERATOR = torch.Generator().manual_seed(1)
PROMPTS = [torch.randint(3, VOCAB_SIZE, (size,), generator=GENERATOR).tolist() for size in (11, 1, 8)]
TABLES = [[PageId(page) for page in row] for row in ([7, 2, 5, 11, 12], [1, 4, 13, 14, 15], [3, 8, 9, 10, 16])]


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_random_model("llama", tmp_path_factory.mktemp("target"))


@pytest.fixture(scope="module")
def models(target: Path) -> dict[DecoderChoice, LoadedModel]:
    choices = DecoderChoice.AUTO, DecoderChoice.STOCK
    return {choice: load_model(target, page_size=PAGE_SIZE, decoder=choice) for choice in choices}


class Sequences:
    """Greedy sequences on one runner. Their pages are given."""

    def __init__(self, model: LoadedModel) -> None:
        self.storage = PageStorage.allocate(model.geometry, 20)
        self.storage.page_bytes().fill_(0x7F)  # what earlier owners left
        self.runner = ModelRunner(model, self.storage)
        self.tokens = [list(prompt) for prompt in PROMPTS]

    def prefill(self, *edges: tuple[int, ...]) -> None:
        """Computes the prompts in chunks that end at `edges`, side by side."""
        for step in range(max(map(len, edges))):
            rows, begun = [], []
            for index, ends in enumerate(edges):
                if step < len(ends):
                    rows.append(self._row(index, ends[step - 1] if step else 0, ends[step]))
                    begun.append(index)
            self._take(begun, self.runner.run(Batch(tuple(rows))))

    def decode(self, count: int, drafts: tuple[int, ...] = ()) -> list[tuple[int, ...]]:
        """One step with so many drafts for each; `drafts` in place of the head's own. Returns those that were made."""
        rows = []
        for index, tokens in enumerate(self.tokens):
            row = self._row(index, len(tokens) - 1, len(tokens))
            rows.append(row.with_drafts(self._request(index), drafts or (DRAFT_PLACEHOLDER,) * count))
        output = self.runner.run(Batch(tuple(rows)))
        self._take(range(len(rows)), output)
        return [] if output.batch is None else [tuple(row.tokens[1:]) for row in output.batch.rows]

    def _take(self, indices: object, output: StepOutput) -> None:
        assert isinstance(indices, list | range)
        rows = None if output.batch is None else output.batch.rows
        for place, index in enumerate(indices):
            drafts = () if rows is None else rows[place].tokens[1:]
            for number, sampled in enumerate(output.sampled[place]):
                self.tokens[index].append(sampled.token)
                if number >= len(drafts) or drafts[number] != sampled.token:
                    break

    def _request(self, index: int) -> EngineRequest:
        prompt = PROMPTS[index]
        id = AttemptId(RequestId(str(index)), 1)
        return EngineRequest(id, tuple(prompt), len(prompt), SamplingParams(temperature=0.0), StopParams(40))

    def _row(self, index: int, start: int, end: int) -> Row:
        request, tokens = self._request(index), self.tokens[index]
        sample = SampleSpec.of(request, list(tokens)) if end == len(tokens) else None
        return Row(request.id, tokens[start:end], start, TABLES[index], sample)


def test_heads_draft_more_surely_than_they_are(
    target: Path, models: dict[DecoderChoice, LoadedModel], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen = list[float]()

    def spy(rows: Sequence[DraftRow], after: LogitsAfter, sampler: SamplerBackend, sharpness: float = 1.0) -> Any:
        seen.append(sharpness)
        return make_chains(rows, after, sampler, sharpness)

    monkeypatch.setattr(eagle, "make_chains", spy)
    sequences = Sequences(models[DecoderChoice.AUTO].with_head(save_head(random_head("eagle"), tmp_path)))
    sequences.prefill(*CHUNKS["whole"])
    sequences.decode(COUNT)
    assert seen == [SHARPNESS]
    assert SHARPNESS > 1.0


CHUNKS = {"whole": ((11,), (1,), (8,)), "page edges": ((4, 8, 11), (1,), (8,)), "inside": ((3, 5, 11), (1,), (7, 8))}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("choice", [DecoderChoice.AUTO, DecoderChoice.STOCK])
@pytest.mark.parametrize("chunks", CHUNKS)
def test_drafts_are_those_of_the_published_formula(
    target: Path,
    models: dict[DecoderChoice, LoadedModel],
    tmp_path: Path,
    kind: str,
    choice: DecoderChoice,
    chunks: str,
) -> None:
    head = random_head(kind, num_drafted_ids=500)
    model = models[choice].with_head(save_head(head, tmp_path))
    reference, sequences = HeadReference.of(kind, head, target), Sequences(model)
    sequences.prefill(*CHUNKS[chunks])
    for step in range(3):
        before = [list(tokens) for tokens in sequences.tokens]
        made = sequences.decode(COUNT if step != 1 else 1)
        assert made == [reference.greedy_drafts(tokens, len(made[0])) for tokens in before]


@pytest.mark.parametrize("kind", KINDS)
def test_accepted_drafts_leave_the_state_of_plain_steps(
    target: Path, models: dict[DecoderChoice, LoadedModel], tmp_path: Path, kind: str
) -> None:
    """Right drafts, then wrong ones: the tail is that of the last accepted slot, wherever pages begin."""
    head = random_head(kind)
    model = models[DecoderChoice.AUTO].with_head(save_head(head, tmp_path))
    plain = Sequences(model)
    plain.prefill(*CHUNKS["whole"])
    for _ in range(8):
        plain.decode(0)
    whole = plain.tokens
    for num_right in range(5):
        drafted = Sequences(model)
        drafted.prefill(*CHUNKS["whole"])
        rows = []
        for index, tokens in enumerate(drafted.tokens):
            right = whole[index][len(tokens) : len(tokens) + num_right]
            row = drafted._row(index, len(tokens) - 1, len(tokens))
            rows.append(row.with_drafts(drafted._request(index), [*right, *[3] * (5 - num_right)]))
        output = drafted.runner.run(Batch(tuple(rows)))
        for tokens, row, sampled in zip(drafted.tokens, rows, output.sampled, strict=True):
            kept = [token.token for token in sampled[: num_right + 1]]
            assert kept[:num_right] == list(row.tokens[1 : 1 + num_right])
            tokens += kept
        reference = HeadReference.of(kind, head, target)
        before = [list(tokens) for tokens in drafted.tokens]
        assert drafted.decode(COUNT) == [reference.greedy_drafts(tokens, COUNT) for tokens in before]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("num_cached", [1, 2])
def test_a_prefix_hit_goes_on_from_any_page_of_a_chunk(
    target: Path, models: dict[DecoderChoice, LoadedModel], tmp_path: Path, kind: str, num_cached: int
) -> None:
    """The pages of a prompt that was computed in one step are the beginning of another one's."""
    head = random_head(kind)
    sequences = Sequences(models[DecoderChoice.AUTO].with_head(save_head(head, tmp_path)))
    sequences.prefill(*CHUNKS["whole"])
    cut = num_cached * PAGE_SIZE
    request, tokens = sequences._request(0), [*PROMPTS[0][:cut], 40, 41, 42]
    pages = [*TABLES[0][:num_cached], *(PageId(page) for page in (6, 17, 18))]
    runner, spec = sequences.runner, SampleSpec.of(request, tokens)
    (first,) = runner.run(Batch((Row(request.id, tokens[cut:], cut, pages, spec),))).sampled[0]
    tokens = [*tokens, first.token]
    row = Row(request.id, tokens[-1:], len(tokens) - 1, pages, SampleSpec.of(request, tokens))
    output = runner.run(Batch((row.with_drafts(request, (DRAFT_PLACEHOLDER,) * COUNT),)))
    assert output.batch is not None
    expected = HeadReference.of(kind, head, target).greedy_drafts(tokens, COUNT)
    assert tuple(output.batch.rows[0].tokens[1:]) == expected


@pytest.mark.parametrize("kind", KINDS)
def test_pages_hold_the_layers_of_a_head_and_features(
    models: dict[DecoderChoice, LoadedModel], tmp_path: Path, kind: str
) -> None:
    plain = models[DecoderChoice.AUTO]
    model = plain.with_head(save_head(random_head(kind), tmp_path))
    num_layers = NUM_DEPTHS if kind == KINDS[3] else 1
    per_token = num_layers * 2 * 2 * 16 * 4
    assert model.geometry.num_bytes_per_token == plain.geometry.num_bytes_per_token + per_token
    assert model.geometry.group.tail_elements == num_layers * HIDDEN
    assert model.geometry.layer_offsets() == plain.geometry.layer_offsets()
    assert len(model.geometry.part_ends) == len(plain.geometry.part_ends) + 1, "digests cover it as a part"


@pytest.mark.parametrize("kind", ["eagle3", KINDS[3]])
def test_a_head_is_not_run_without_its_target(
    models: dict[DecoderChoice, LoadedModel], tmp_path: Path, kind: str
) -> None:
    model = models[DecoderChoice.AUTO].with_head(save_head(random_head(kind), tmp_path))
    drafts = model.drafting(PageStorage.allocate(model.geometry, 2))
    assert drafts is not None
    with pytest.raises(ValueError, match="no step"):
        drafts.settle([[0]])
    with pytest.raises(ValueError, match="hidden states of its target"):
        drafts.write(torch.tensor([5]), torch.tensor([0]), plan_step([Segment(0, 0, 1, [0])], PAGE_SIZE), None)
