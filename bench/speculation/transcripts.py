"""Recorded outputs in place of a model's draws, and a drafter that knows them. Called by `bench.speculation.ratios`.

A model of random weights copies nothing. `copy`: a part of a file of this repository with edits, behind that part;
`prose`: a part of a page of its docs behind the start of another page.
"""

from __future__ import annotations

import functools
import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from tokenizers import Tokenizer

from baton.bundled import MODEL_DIR
from baton.domain.ids import AttemptId
from baton.engine.batch import Batch, Row, StepOutput
from baton.engine.drafts.base import NO_PROPOSAL, ROOT, Proposal, draft_depths
from baton.engine.runner import ModelRunner
from baton.model.sampling.sampler import SampleResult

PROMPT_TOKENS, OUTPUT_TOKENS = 256, 384
EDIT_EVERY = 40
"""Tokens between two edits of a copied text, in the mean."""


@dataclass(frozen=True, slots=True)
class RecordedOutput:
    """A prompt and its recorded output."""

    prompt: tuple[int, ...]
    output: tuple[int, ...]


@functools.cache
def _texts(pattern: str) -> list[list[int]]:
    """The tokens of those files of this repository that are long enough."""
    tokenizer = Tokenizer.from_file(str(MODEL_DIR / "tokenizer.json"))
    paths = sorted(Path(__file__).resolve().parents[2].glob(pattern))
    texts = [tokenizer.encode(path.read_text(encoding="utf-8")).ids for path in paths]
    return [text for text in texts if len(text) >= PROMPT_TOKENS + OUTPUT_TOKENS]


def transcripts(kind: str, vocab_size: int, seed: int) -> Iterator[RecordedOutput]:
    """Endless transcripts of `kind`, from files of this repository."""
    rng = random.Random(f"{kind} {seed}")
    long = _texts("baton/engine/*.py" if kind == "copy" else "docs/[l-s]*.md")
    while True:
        text, other = rng.sample(long, 2)
        start = rng.randrange(len(text) - OUTPUT_TOKENS)
        output = text[start : start + OUTPUT_TOKENS]
        prompt = other[:PROMPT_TOKENS]
        if kind == "copy":
            prompt = output
            output = [rng.randrange(4, vocab_size) if rng.random() < 1 / EDIT_EVERY else token for token in output]
        yield RecordedOutput(
            tuple(token % vocab_size for token in prompt), tuple(token % vocab_size for token in output)
        )


class TranscriptRunner:
    """A model runner whose draws are those of the rows' transcripts. It walks trees as it draws."""

    def __init__(self, runner: ModelRunner) -> None:
        self._runner = runner
        self.texts: dict[AttemptId, tuple[int, ...]] = {}

    def run(self, batch: Batch) -> StepOutput:
        """The model's step, with other draws."""
        step = self._runner.start(batch)
        drawn = [token for row in step.batch.rows if row.sample is not None for token in self._recorded(row)]
        return replace(step, sample_result=SampleResult(torch.tensor(drawn), None)).result()

    def _recorded(self, row: Row) -> list[int]:
        """The tokens at the places of a row's draws: behind its own token, and behind each draft."""
        first, text = row.start + row.num_known_tokens, self.texts[row.id]
        depths = draft_depths(row.parents) if row.parents else range(1, 1 + len(row.drafted))
        places = [first, *(first + depth for depth in depths)]
        return [text[place] if place < len(text) else 0 for place in places]


class NothingDrafter:
    """A `Drafter` that proposes nothing."""

    def begin(self, id: AttemptId, tokens: Sequence[int], salt: str = "") -> None:
        """See `Drafter.begin`."""

    def propose(self, id: AttemptId, max_tokens: int) -> Proposal:
        """See `Drafter.propose`."""
        return NO_PROPOSAL

    def accepted(self, id: AttemptId, tokens: Sequence[int]) -> None:
        """See `Drafter.accepted`."""

    def end(self, id: AttemptId) -> None:
        """See `Drafter.end`."""


class TranscriptDrafter:
    """Proposes the recorded tokens; each is right with a chance of `acceptance`.

    `tree_depth`: so many have a sibling, right with a chance of a half where they are wrong; 0: chains.
    """

    def __init__(
        self, texts: dict[AttemptId, tuple[int, ...]], acceptance: float, seed: int, tree_depth: int = 0
    ) -> None:
        self._tree_depth = tree_depth
        self._texts = texts
        self._acceptance = acceptance
        self._rng = random.Random(seed)
        self._num_tokens: dict[AttemptId, int] = {}

    def begin(self, id: AttemptId, tokens: Sequence[int], salt: str = "") -> None:
        """See `Drafter.begin`."""
        self._num_tokens[id] = len(tokens)

    def accepted(self, id: AttemptId, tokens: Sequence[int]) -> None:
        """See `Drafter.accepted`."""
        self._num_tokens[id] += len(tokens)

    def end(self, id: AttemptId) -> None:
        """See `Drafter.end`."""
        self._num_tokens.pop(id, None)

    def propose(self, id: AttemptId, max_tokens: int) -> Proposal:
        """See `Drafter.propose`."""
        at = self._num_tokens[id]
        tokens = list(self._texts[id][at : at + max_tokens])
        if self._tree_depth:
            return self._tree(tokens)
        for place, token in enumerate(tokens):
            if self._rng.random() >= self._acceptance:
                tokens[place] = token + 1 if token == 0 else token - 1
        return Proposal(tuple(tokens))

    def _tree(self, right: Sequence[int]) -> Proposal:
        """A path that goes on behind the right one of two siblings, or behind the first."""
        tokens, parents, spine = list[int](), list[int](), ROOT
        for depth, token in enumerate(right):
            wrong = token + 1 if token == 0 else token - 1
            children = [token if self._rng.random() < self._acceptance else wrong]
            if depth < self._tree_depth:
                second = children[0] != token and self._rng.random() < 0.5
                children.append(token if second else token + 2 if token < 2 else token - 2)
            first = len(tokens)
            tokens += children
            parents += [spine] * len(children)
            spine = first + (children.index(token) if token in children else 0)
        return Proposal(tuple(tokens), 0, tuple(parents))
