"""Captured hidden states are those of transformers in both decoders, whatever else is in the step."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import transformers

from baton.engine.batch import ScoreSpec
from baton.model.attention.base import Segment, plan_step
from baton.model.decoders.capture import CaptureSpec, HiddenCapture
from baton.model.decoders.lean import LeanDecoder
from baton.model.decoders.stock import StockDecoder
from baton.model.loading.loader import DecoderChoice, LoadedModel, load_model
from baton.model.sampling.prompt_scorer import PromptScorer
from baton.model.storage import PageStorage
from tests.tiny_models import save_random_model

PAGE_SIZE = 4
PROMPTS = [[5, 9, 11, 8, 200, 31, 7, 44, 3, 18, 90], [300, 12, 77, 5, 4]]
STEPS = [[(0, 0, 4), (1, 0, 3)], [(0, 4, 9), (1, 3, 4)], [(0, 9, 10), (1, 4, 5)], [(0, 10, 11)]]
"""(prompt, start, end) of the chunks of each step: chunks beside single tokens, edges inside pages."""
TABLES = [[7, 2, 5], [1, 4]]
SPECS = [CaptureSpec((0, 1, 2)), CaptureSpec(final=True), CaptureSpec((1,), final=True)]


@pytest.fixture(scope="module", params=["gemma3_text", "llama", "deepseek_v2"])
def directory(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_random_model(request.param, tmp_path_factory.mktemp(request.param))


def run_steps(model: LoadedModel, spec: CaptureSpec | None) -> tuple[list[torch.Tensor], torch.Tensor]:
    """Captured states of each prompt, and the logits of all steps."""
    storage = PageStorage.allocate(model.geometry, 9)
    decoder = model.decoder(storage)
    states: list[list[torch.Tensor]] = [[] for _ in PROMPTS]
    logits = []
    for chunks in STEPS:
        ids: list[int] = []
        segments: list[Segment] = []
        positions: list[int] = []
        for prompt, start, end in chunks:
            segments.append(Segment(len(ids), start, end - start, TABLES[prompt]))
            ids += PROMPTS[prompt][start:end]
            positions += range(start, end)
        capture = None if spec is None else HiddenCapture(spec)
        step, keep = plan_step(segments, PAGE_SIZE), torch.tensor([len(ids) - 1])
        given = torch.tensor(ids), torch.tensor(positions), step, keep
        logits.append(decoder.forward(*given, capture=capture))
        if capture is not None:
            for (prompt, _, _), segment in zip(chunks, segments, strict=True):
                states[prompt].append(capture.read()[segment.offset : segment.offset + segment.num_tokens])
    return [torch.cat(parts) for parts in states if parts], torch.cat(logits)


def expected_states(directory: Path, spec: CaptureSpec) -> list[torch.Tensor]:
    module = transformers.AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32)
    expected = []
    for prompt in PROMPTS:
        with torch.inference_mode():
            hidden = module(input_ids=torch.tensor([prompt]), output_hidden_states=True).hidden_states
        wanted = [*spec.after, *([len(hidden) - 1] if spec.final else [])]
        expected.append(torch.cat([hidden[index][0] for index in wanted], dim=-1))
    return expected


@pytest.mark.parametrize("choice", [DecoderChoice.AUTO, DecoderChoice.STOCK])
def test_states_are_those_of_transformers_across_chunks_and_rows(directory: Path, choice: DecoderChoice) -> None:
    model = load_model(directory, page_size=PAGE_SIZE, decoder=choice)
    is_lean = choice is DecoderChoice.AUTO and not model.report.stock_note
    assert isinstance(model.decoder(PageStorage.allocate(model.geometry, 1)), LeanDecoder if is_lean else StockDecoder)
    _, plain = run_steps(model, None)
    for spec in SPECS:
        if max(spec.after, default=0) >= len(model.layers):
            spec = CaptureSpec((0, 1))
        states, logits = run_steps(model, spec)
        torch.testing.assert_close(logits, plain, atol=1e-6, rtol=1e-6)
        for found, wanted in zip(states, expected_states(directory, spec), strict=True):
            torch.testing.assert_close(found, wanted, atol=3e-5, rtol=1e-4)


@pytest.mark.parametrize("choice", [DecoderChoice.AUTO, DecoderChoice.STOCK])
def test_prompts_are_scored_beside_a_capture(directory: Path, choice: DecoderChoice) -> None:
    """Scored prompts take another path through the stock module, which runs its head several times."""
    model = load_model(directory, page_size=PAGE_SIZE, decoder=choice)
    decoder = model.decoder(PageStorage.allocate(model.geometry, 9))
    spec, ids = CaptureSpec((1,), final=True), torch.tensor(PROMPTS[0])
    capture, scorer = HiddenCapture(spec), PromptScorer(torch.device("cpu"))
    scorer.add_row(0, 0, 0, ScoreSpec(1, PROMPTS[0][1:]))
    step = plan_step([Segment(0, 0, len(ids), TABLES[0])], PAGE_SIZE)
    decoder.forward(ids, torch.arange(len(ids)), step, torch.tensor([len(ids) - 1]), scorer, capture=capture)
    torch.testing.assert_close(capture.read(), expected_states(directory, spec)[0], atol=3e-5, rtol=1e-4)


def test_what_cannot_be_captured_is_refused() -> None:
    for wrong in ((2, 1), (1, 1), (-1, 0)):
        with pytest.raises(ValueError, match="ascend"):
            CaptureSpec(wrong)
    with pytest.raises(ValueError, match="nothing"):
        CaptureSpec()
    capture = HiddenCapture(CaptureSpec((0, 2)))
    capture.add(torch.zeros(2, 3))
    with pytest.raises(ValueError, match="1 of 2"):
        capture.read()
