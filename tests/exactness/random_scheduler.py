"""A scheduler that uses all freedom of the runner's contract: random chunks, pages, order, sharing and swapping.

Drives any `Runner` on a list of prompts until each has its output. Page tables are scattered over the pool. Rows decode
beside chunks of others. Prompts with a common beginning share its full pages. Decoding rows are moved to host slots and
back into other pages.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass, field

from baton.domain.ids import AttemptId, PageId, RequestId
from baton.domain.request import SamplingParams
from baton.engine.batch import Batch, HostCopy, Row, Runner, SampleSpec

MAX_CHUNK_TOKENS = 23


@dataclass(slots=True)
class Progress:
    """A prompt in progress; the KV of `computed` tokens is in `pages`."""

    id: AttemptId
    prompt: tuple[int, ...]
    tokens: list[int]
    max_tokens: int
    pages: list[PageId] = field(default_factory=list)
    computed: int = 0

    @property
    def done(self) -> bool:
        return len(self.tokens) == len(self.prompt) + self.max_tokens

    @property
    def decoding(self) -> bool:
        return len(self.tokens) > len(self.prompt) and not self.done


@dataclass(slots=True)
class Coverage:
    """Counts what a run exercised, so that a test can require it."""

    steps: int = 0
    mixed_steps: int = 0
    chunked_prompts: int = 0
    shared_pages: int = 0
    swapped_rows: int = 0


class RandomScheduler:
    """One run over one pool. Pages are never reused before their last owner is done."""

    def __init__(self, runner: Runner, num_pages: int, page_size: int, num_host_slots: int, seed: int) -> None:
        self._runner = runner
        self._page_size = page_size
        self._rng = random.Random(seed)
        self._free = [PageId(page) for page in range(num_pages)]
        self._rng.shuffle(self._free)
        self._num_host_slots = num_host_slots
        self._shared: dict[tuple[int, ...], PageId] = {}
        self.coverage = Coverage()

    def generate(
        self, prompts: Sequence[Sequence[int]], max_tokens: int, sampling: SamplingParams, max_step_tokens: int = 48
    ) -> list[list[int]]:
        """Output tokens of each prompt."""
        sequences = [
            Progress(AttemptId(RequestId(f"r{index}"), 1), tuple(prompt), list(prompt), max_tokens)
            for index, prompt in enumerate(prompts)
        ]
        while not all(sequence.done for sequence in sequences):
            arrived = sequences[: 1 + self.coverage.steps // 2]
            self._step([sequence for sequence in arrived if not sequence.done], sampling, max_step_tokens)
        return [sequence.tokens[len(sequence.prompt) :] for sequence in sequences]

    def _step(self, live: list[Progress], sampling: SamplingParams, budget: int) -> None:
        if not live:
            self.coverage.steps += 1
            return
        copies = self._swap(live)
        self._rng.shuffle(live)
        chosen: list[tuple[Progress, Row]] = []
        for sequence in live:
            if budget > 0:
                row = self._row(sequence, sampling, budget)
                budget -= len(row.tokens)
                chosen.append((sequence, row))
        output = self._runner.run(Batch(tuple(row for _, row in chosen), copies))
        for (sequence, row), sampled in zip(chosen, output.sampled, strict=True):
            sequence.computed += len(row.tokens)
            assert len(sampled) == (row.sample is not None)
            sequence.tokens += [one.token for one in sampled]
            self._publish(sequence)
        self.coverage.steps += 1
        self.coverage.mixed_steps += len({len(row.tokens) > 1 for _, row in chosen}) == 2

    def _row(self, sequence: Progress, sampling: SamplingParams, budget: int) -> Row:
        if not sequence.pages:
            self._share_prefix(sequence)
        left = len(sequence.tokens) - sequence.computed
        num_tokens = left if left == 1 else min(left, budget, self._rng.randint(1, MAX_CHUNK_TOKENS))
        end = sequence.computed + num_tokens
        self.coverage.chunked_prompts += num_tokens < left and sequence.computed == 0
        while len(sequence.pages) * self._page_size < end:
            sequence.pages.append(self._free.pop())
        spec = SampleSpec(sampling, sequence.tokens, len(sequence.prompt)) if num_tokens == left else None
        tokens = sequence.tokens[sequence.computed : end]
        return Row(sequence.id, tokens, sequence.computed, tuple(sequence.pages), spec)

    def _share_prefix(self, sequence: Progress) -> None:
        """Takes the full pages of an equal prefix and leaves at least one token to compute."""
        for end in range(self._page_size, len(sequence.prompt), self._page_size):
            page = self._shared.get(sequence.prompt[:end])
            if page is None:
                break
            sequence.pages.append(page)
            sequence.computed = end
            self.coverage.shared_pages += 1

    def _publish(self, sequence: Progress) -> None:
        for end in range(self._page_size, min(sequence.computed, len(sequence.prompt)) + 1, self._page_size):
            self._shared.setdefault(sequence.prompt[:end], sequence.pages[end // self._page_size - 1])

    def _swap(self, live: list[Progress]) -> tuple[HostCopy, ...]:
        """Sometimes moves a decoding row's pages to the host, and back into new pages in another order."""
        candidates = [
            sequence for sequence in live if sequence.decoding and len(sequence.pages) <= self._num_host_slots
        ]
        if not candidates or self._rng.random() < 0.7:
            return ()
        sequence = self._rng.choice(candidates)
        slots = self._rng.sample(range(self._num_host_slots), len(sequence.pages))
        fresh = [self._free.pop() for _ in sequence.pages]
        out = HostCopy(tuple(sequence.pages), tuple(slots), to_host=True)
        back = HostCopy(tuple(fresh), tuple(slots), to_host=False)
        sequence.pages[:] = fresh
        self.coverage.swapped_rows += 1
        return (out, back)
