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

from tokenizers import Tokenizer

from baton.bundled import MODEL_DIR
from baton.domain.ids import AttemptId
from baton.domain.request import SampledToken
from baton.engine.batch import Batch, Row, StepOutput
from baton.engine.drafts.base import Proposal
from baton.engine.runner import ModelRunner

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
    """A model runner whose draws are those of the rows' transcripts."""

    def __init__(self, runner: ModelRunner) -> None:
        self._runner = runner
        self.texts: dict[AttemptId, tuple[int, ...]] = {}

    def run(self, batch: Batch) -> StepOutput:
        """The model's step, with other draws."""
        output = self._runner.run(batch)
        rows = zip(batch.rows, output.sampled, strict=True)
        return replace(output, sampled=tuple(self._recorded(row, len(sampled)) for row, sampled in rows))

    def _recorded(self, row: Row, num_draws: int) -> tuple[SampledToken, ...]:
        first = row.start + row.num_known_tokens
        text = self.texts[row.id]
        return tuple(SampledToken(text[place] if place < len(text) else 0) for place in range(first, first + num_draws))


class TranscriptDrafter:
    """Proposes the recorded tokens; each is right with a chance of `acceptance`."""

    def __init__(self, texts: dict[AttemptId, tuple[int, ...]], acceptance: float, seed: int) -> None:
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
        for place, token in enumerate(tokens):
            if self._rng.random() >= self._acceptance:
                tokens[place] = token + 1 if token == 0 else token - 1
        return Proposal(tuple(tokens))
