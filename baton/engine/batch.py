"""Values between a scheduler and the runner: one `Batch` in, one `StepOutput` back. No tensors."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Protocol, overload

from baton.domain.constraint import Constraint
from baton.domain.errors import ConstraintFailed
from baton.domain.ids import AttemptId, PageId
from baton.domain.media.span import MediaSpan
from baton.domain.request import EngineRequest, SampledToken, SamplingParams, bad_word_ends, banned_tokens
from baton.domain.scores.prompt_scores import PromptScores
from baton.engine.drafts.base import DRAFT_PLACEHOLDER, draft_depths, draft_path
from baton.engine.overlap.future import FutureToken


@dataclass(frozen=True, slots=True)
class MaskSpec:
    """What a row's mask depends on, beside its output. `stop_token_ids` are allowed where the output may end."""

    constraint: Constraint
    stop_token_ids: frozenset[int] = frozenset()


_NONE: frozenset[int] = frozenset()


@dataclass(frozen=True, slots=True)
class SampleSpec:
    """Sampling of one token of a row.

    `history` holds every token before it, prompt first, *including* this step's. The scheduler owns it; the runner
    reads it. `len(history)` is the position of the sampled token. Position and `sampling.seed` key the randomness. A
    row with a `mask` is never sampled without it.
    """

    sampling: SamplingParams
    history: Sequence[int]
    num_prompt_tokens: int
    banned: frozenset[int] = frozenset()
    mask: MaskSpec | None = None

    @classmethod
    def of(cls, request: EngineRequest, history: Sequence[int]) -> SampleSpec:
        """Sampling after `history`, the prompt and output of `request` so far."""
        num_prompt_tokens, stop = request.num_prompt_tokens, request.stop
        banned = banned_tokens(stop, len(history) - num_prompt_tokens) if stop.min_tokens else _NONE
        if request.sampling.bad_words:
            banned |= bad_word_ends(request.sampling.bad_words, history, num_prompt_tokens)
        mask = None if request.constraint is None else MaskSpec(request.constraint, stop.stop_token_ids)
        return cls(request.sampling, history, num_prompt_tokens, banned, mask)

    @classmethod
    def after_drafts(
        cls, request: EngineRequest, history: Sequence[int], drafts: Sequence[int], parents: Sequence[int] = ()
    ) -> tuple[SampleSpec, ...]:
        """Sampling after each of `drafts`, as it is if they are output: penalties and bans are those of its place.

        `parents`: of a tree (`Proposal`); what follows a node has the node's path as its history.
        """
        if parents:
            paths = [[drafts[each] for each in draft_path(parents, node)] for node in range(len(drafts))]
            return tuple(cls.of(request, DraftedHistory(history, path)) for path in paths)
        return tuple(cls.of(request, DraftedHistory(history, drafts[:count])) for count in range(1, len(drafts) + 1))


class DraftedHistory(Sequence[int]):
    """`tokens`, as long as they are now, and `drafts` behind them: one history, without copying the tokens."""

    __slots__ = ("_drafts", "_num_tokens", "_tokens")

    def __init__(self, tokens: Sequence[int], drafts: Sequence[int]) -> None:
        self._tokens, self._num_tokens, self._drafts = tokens, len(tokens), drafts

    def __len__(self) -> int:
        return self._num_tokens + len(self._drafts)

    @overload
    def __getitem__(self, index: int) -> int: ...

    @overload
    def __getitem__(self, index: slice) -> list[int]: ...

    def __getitem__(self, index: int | slice) -> int | list[int]:
        if isinstance(index, slice):
            start, stop, step = index.indices(len(self))
            low, high = min(start, self._num_tokens), min(stop, self._num_tokens)
            joined = [*self._tokens[low:high], *self._drafts[start - low : max(0, stop - self._num_tokens)]]
            return joined if step == 1 else [self[place] for place in range(start, stop, step)]
        place = range(len(self))[index]
        return self._tokens[place] if place < self._num_tokens else self._drafts[place - self._num_tokens]


@dataclass(frozen=True, slots=True)
class ScoreSpec:
    """Prompt tokens to score, with the `k` best beside each: those after a row's tokens, perhaps without the last."""

    k: int
    targets: Sequence[int]

    @classmethod
    def of(cls, request: EngineRequest, start: int, end: int) -> ScoreSpec | None:
        """Scoring of a row with the tokens [start, end) of `request`; None if there is nothing to score.

        The token after the prompt is sampled, or of an earlier attempt: it is no prompt token.
        """
        if request.prompt_logprobs is None:
            return None
        targets = request.tokens[start + 1 : min(end + 1, request.num_prompt_tokens)]
        return cls(request.prompt_logprobs, targets) if targets else None


@dataclass(frozen=True, slots=True)
class WantedDrafts:
    """Drafts behind a row of `request` that the runner makes itself, from layers in the row's pages.

    `parents`: of a tree; empty: a chain.
    """

    request: EngineRequest
    count: int
    parents: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class Row:
    """New tokens of one request: positions [start, start + len(tokens)).

    `pages` is the request's page table. It covers at least `start + len(tokens)` token slots; slots below `start` are
    filled. `sample` is None for a chunk that does not end the prompt. Otherwise it samples after the last token that is
    known, and `drafted` after each of the tokens behind it: the last `len(drafted)` tokens are proposals of a drafter.
    `score`: of positions from `start` + 1 on. `media`: spans of the request; the runner has their embeddings. `wanted`:
    drafts to be made; the page table covers them as well. Such a row has a `sample` and no drafts yet. `future`: where
    the row's only token comes from, if a step in flight samples it; `tokens` is (`UNREAD_TOKEN`,) then. `parents`: the
    drafts are a tree (`Proposal`), in adjacent slots; the runner returns the row with one path of it (`drafts.trees`).
    `path`: the nodes of that tree that the drafts were.
    """

    id: AttemptId
    tokens: Sequence[int]
    start: int
    pages: Sequence[PageId]
    sample: SampleSpec | None
    score: ScoreSpec | None = None
    drafted: tuple[SampleSpec, ...] = ()
    media: tuple[MediaSpan, ...] = ()
    wanted: WantedDrafts | None = None
    future: FutureToken | None = None
    parents: tuple[int, ...] = ()
    path: tuple[int, ...] = ()

    def with_drafts(self, request: EngineRequest, drafts: Sequence[int], parents: tuple[int, ...] = ()) -> Row:
        """This row with `drafts` behind its tokens, or still to be made. Raises `ValueError` without a `sample`."""
        if self.sample is None:
            raise ValueError(f"{self.id}: a row that is not sampled has no drafts")
        if drafts and drafts[0] == DRAFT_PLACEHOLDER:
            return replace(self, wanted=WantedDrafts(request, len(drafts), parents))
        drafted = SampleSpec.after_drafts(request, self.sample.history, drafts, parents)
        return replace(self, tokens=[*self.tokens, *drafts], drafted=drafted, wanted=None, parents=parents)

    def with_path(self, nodes: Sequence[int]) -> Row:
        """This row with some drafts of its tree, in order, as its chain."""
        known = self.num_known_tokens
        tokens = [*self.tokens[:known], *(self.tokens[known + node] for node in nodes)]
        drafted = tuple([self.drafted[node] for node in nodes])
        return replace(self, tokens=tokens, drafted=drafted, parents=(), path=tuple(nodes))

    @property
    def token_parents(self) -> tuple[int, ...]:
        """For each token the index of the one before it, of a row with a tree; () for any other row."""
        if not self.parents:
            return ()
        known = self.num_known_tokens
        return *range(-1, known - 1), *(parent + known for parent in self.parents)

    def positions(self) -> list[int]:
        """The position of each token: in a tree, siblings have the same one."""
        if not self.parents:
            return list(range(self.start, self.start + len(self.tokens)))
        last = self.start + self.num_known_tokens - 1
        return [*range(self.start, last + 1), *(last + depth for depth in draft_depths(self.parents))]

    @property
    def num_step_tokens(self) -> int:
        """New tokens, drafts that are not made yet included."""
        return len(self.tokens) + (0 if self.wanted is None else self.wanted.count)

    @property
    def num_known_tokens(self) -> int:
        """New tokens that are not drafts."""
        return len(self.tokens) - len(self.drafted)

    def filled_end(self, num_emitted: int) -> int:
        """One past the last position whose KV counts after a step that emitted so many tokens: no rejected draft's."""
        return self.start + len(self.tokens) - len(self.drafted) + max(0, num_emitted - 1)

    @property
    def num_prompt_tokens(self) -> int:
        """New tokens that belong to the prompt."""
        end = self.start + len(self.tokens)
        return len(self.tokens) if self.sample is None else max(0, min(end, self.sample.num_prompt_tokens) - self.start)


@dataclass(frozen=True, slots=True)
class HostCopy:
    """Pages to copy to host slots (preemption) or back, before the step's forward pass.

    `window_slots`: of the pages' window parts, where they are kept apart, as they were when the copy was decided.
    """

    pages: tuple[PageId, ...]
    slots: tuple[int, ...]
    to_host: bool
    window_slots: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class Batch:
    """One step. Copies run in order, before any row writes a page. `rows` may be empty if there are copies."""

    rows: tuple[Row, ...]
    copies: tuple[HostCopy, ...] = ()

    def with_made(self, made: Mapping[int, Sequence[int]]) -> Batch:
        """This batch with the drafts that a runner has `made`, by the index of their rows.

        Raises `ValueError` if they are not as many as a row wants.
        """
        rows = list(self.rows)
        for index, row in enumerate(self.rows):
            if row.wanted is not None:
                drafts = made.get(index, ())
                if len(drafts) != row.wanted.count:
                    raise ValueError(f"{row.id}: {len(drafts)} drafts were made of {row.wanted.count}")
                rows[index] = row.with_drafts(row.wanted.request, drafts, row.wanted.parents)
        return replace(self, rows=tuple(rows))

    @property
    def num_tokens(self) -> int:
        return sum(row.num_step_tokens for row in self.rows)

    @property
    def num_prompt_tokens(self) -> int:
        """Tokens of this step that belong to a prompt; 0 on a decode worker that computes no prompts."""
        return sum(row.num_prompt_tokens for row in self.rows)


@dataclass(frozen=True, slots=True)
class StepOutput:
    """`sampled[i]` belongs to `batch.rows[i]`: a token for `sample` and for each of `drafted`, in order.

    It is empty for a row without `sample`, and for one that failed. The scheduler decides which of them count.
    `failures`: by index, rows whose constraint could not be kept. Their chunk is computed, their sequence ends.
    `scores`: by index, of the rows with a `score`. `batch`: the step's, with the drafts that the runner has made, and
    with one path of each tree; None if there were neither.
    """

    sampled: tuple[tuple[SampledToken, ...], ...]
    failures: Mapping[int, ConstraintFailed] = field(default_factory=dict)
    scores: Mapping[int, PromptScores] = field(default_factory=dict)
    batch: Batch | None = None


class StepInFlight(Protocol):
    """A started step."""

    def result(self) -> StepOutput:
        """Waits until the step is done. The bytes of its pages are final then."""
        ...


class Runner(Protocol):
    """Runs a batch: copies, forward pass, sampling. Owned by the engine thread."""

    def run(self, batch: Batch) -> StepOutput:
        """Runs one step to its end. The bytes of its pages are final on return."""
        ...
