"""Masks of a step's constrained rows, from the tokens that each has emitted. Used by runners, on the engine thread.

A row's state is a fold over its output, so one rule serves new, imported, preempted and replayed rows: consume what
is new in the history. States are kept for the rows that were masked last; one that was dropped is made again.
`prepare` compiles in another thread, before the engine has the request.

Drafts are consumed one by one by a copy of the state, which is then dropped: they are no output yet. What a constraint
does not allow there ends what the row may emit in this step.
"""

from __future__ import annotations

import threading
import time
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from baton.domain.constraint import Constraint
from baton.domain.errors import Broken, ConstraintFailed, FailedConstraint
from baton.domain.ids import AttemptId
from baton.domain.request import EngineRequest, SampledToken, SamplingParams
from baton.engine.batch import Batch, Row, SampleSpec, StepOutput
from baton.grammar.compiler import GrammarCompiler
from baton.grammar.matcher import ConstraintMatcher, MaskRow, is_allowed
from baton.grammar.tokenizer import WORD_BITS
from baton.telemetry import metrics

MAX_STATES = 1024

MASK_BUDGET_S, MASK_BUDGET_S_PER_TOKEN = 0.5, 0.002
"""CPU time of all masks of a row: at first, and more for each of its tokens. Other rows wait for it."""


@dataclass(frozen=True, slots=True)
class StepMasks:
    """By index among the step's samples: `rows` has the mask of each constrained one, None if every token is allowed.
    `failures`: those whose constraint cannot be kept. Nobody may see what is drawn there, nor behind it in its row.
    """

    rows: dict[int, MaskRow | None] = field(default_factory=dict)
    failures: dict[int, ConstraintFailed] = field(default_factory=dict)

    def output(self, batch: Batch, sampled: Sequence[SampledToken]) -> StepOutput:
        """The output of a step whose samples are `sampled`, in order.

        A row ends before the first sample that failed. It has failed itself if that is the one behind its own tokens,
        not behind a draft.
        """
        tokens, failures = list[tuple[SampledToken, ...]](), dict[int, ConstraintFailed]()
        num_sampled = 0
        for index, row in enumerate(batch.rows):
            if row.sample is None:
                tokens.append(())
                continue
            first, num_sampled = num_sampled, num_sampled + 1 + len(row.drafted)
            end = next((place for place in range(first, num_sampled) if place in self.failures), num_sampled)
            if end == first:
                failures[index] = self.failures[first]
                metrics.CONSTRAINT_FAILURES_TOTAL.labels(failures[index].reason.value).inc()
            tokens.append(tuple(sampled[first:end]))
        return StepOutput(tuple(tokens), failures)


def check_rows(specs: Sequence[SampleSpec], masks: StepMasks, vocab_size: int) -> list[SampleSpec]:
    """The specs to sample with: a row whose bans, allowed tokens and mask together leave no token fails.

    Its token would be one that is forbidden. It is sampled greedily, without bans, and dropped.
    """
    checked = list(specs)
    for index, spec in enumerate(specs):
        if index in masks.failures or not _may_be_empty(spec, masks.rows.get(index)):
            continue
        if not _leaves_a_token(spec, masks.rows.get(index), vocab_size):
            why = "bad_words, allowed_token_ids, min_tokens and what the output keeps to leave no token"
            masks.failures[index] = ConstraintFailed(why, FailedConstraint.DEAD_END)
            masks.rows.pop(index, None)
            checked[index] = SampleSpec(SamplingParams(temperature=0.0), spec.history, spec.num_prompt_tokens)
    return checked


def _may_be_empty(spec: SampleSpec, mask: MaskRow | None) -> bool:
    """True if the check is needed: of what a mask allows something is banned, or few tokens are allowed anyway."""
    return bool(spec.sampling.allowed_token_ids or spec.sampling.bad_words or (spec.banned and mask is not None))


def _leaves_a_token(spec: SampleSpec, mask: MaskRow | None, vocab_size: int) -> bool:
    tokens = spec.sampling.allowed_token_ids
    if tokens:
        return any(token not in spec.banned and (mask is None or is_allowed(mask, token)) for token in tokens)
    if mask is None:
        return len(spec.banned) < vocab_size
    left = mask.copy()
    for token in spec.banned:
        left[token // WORD_BITS] &= ~np.uint32(1 << token % WORD_BITS)
    return bool(left.any())


@dataclass(slots=True)
class _State:
    matcher: ConstraintMatcher
    num_masks: int = 0
    spent_s: float = 0.0


class MaskFiller:
    """States of constrained rows. Only `prepare` may be called from other threads."""

    def __init__(self, compiler: GrammarCompiler, max_states: int = MAX_STATES) -> None:
        """`max_states`: of rows, the last used ones."""
        self._compiler = compiler
        self._max_states = max_states
        self._lock = threading.Lock()
        self._states: OrderedDict[AttemptId, _State] = OrderedDict()

    def prepare(self, request: EngineRequest) -> None:
        """Compiles the constraint of a request, and consumes what earlier attempts emitted. Takes milliseconds.

        Raises `ConstraintFailed`.
        """
        if request.constraint is not None:
            began = time.thread_time()
            self._keep(request.id, self._new_state(request.constraint, request.tokens[request.num_prompt_tokens :]))
            metrics.GRAMMAR_COMPILE_SECONDS.observe(time.thread_time() - began)

    def fill(self, rows: Sequence[Row]) -> StepMasks:
        """The masks of those of `rows` that are sampled and constrained."""
        masks, index, began, at = StepMasks(), 0, 0.0, 0.0
        for row in rows:
            if (spec := row.sample) is None:
                continue
            if spec.mask is not None:
                at = at or (began := time.thread_time())
                at = self._fill_row(index, row, spec, masks, at)
            index += 1 + len(row.drafted)
        if masks.rows:
            metrics.MASK_SECONDS.observe(at - began)
        return masks

    def num_allowed(self, request: EngineRequest, tokens: Sequence[int], drafts: Sequence[int]) -> int:
        """How many of `drafts` may follow `tokens`, prompt and output of `request`. A hint: `fill` decides."""
        began = time.thread_time()
        try:
            state = self._take(request.id, SampleSpec.of(request, tokens))
        except ConstraintFailed:
            return 0
        num = state.matcher.num_allowed(drafts)
        state.spent_s += time.thread_time() - began
        self._keep(request.id, state)
        return num

    def _fill_row(self, index: int, row: Row, spec: SampleSpec, masks: StepMasks, began: float) -> float:
        """Fills a row's masks, from `began` on this thread's clock; returns when that was done."""
        done, num_places = began, 1 + len(row.drafted)
        masks.rows.update(dict.fromkeys(range(index, index + num_places)))
        try:
            state = self._take(row.id, spec)
            masks.rows[index] = self._mask(state.matcher, spec)
            self._fill_drafts(index + 1, row, state.matcher, masks)
            done = time.thread_time()
            state.num_masks += num_places
            state.spent_s += done - began
            if state.spent_s > MASK_BUDGET_S + MASK_BUDGET_S_PER_TOKEN * state.num_masks:
                why = f"its masks took {state.spent_s:.1f} s for {state.num_masks} tokens"
                raise ConstraintFailed(f"the constraint is too complex: {why}", FailedConstraint.TOO_COMPLEX)
            self._keep(row.id, state)
        except ConstraintFailed as error:
            masks.failures[index] = error
            done = time.thread_time()
        return done

    def _fill_drafts(self, first: int, row: Row, matcher: ConstraintMatcher, masks: StepMasks) -> None:
        """Fills the masks behind a row's drafts, up to one that the constraint does not allow. `matcher` stays."""
        if not row.drafted:
            return
        ahead = matcher.copy()
        for place, (draft, spec) in enumerate(zip(row.tokens[row.num_known_tokens :], row.drafted, strict=True), first):
            try:
                ahead.advance(draft)
                masks.rows[place] = self._mask(ahead, spec)
            except ConstraintFailed as error:
                masks.failures[place] = error
                return

    def _mask(self, matcher: ConstraintMatcher, spec: SampleSpec) -> MaskRow | None:
        """The bits of the tokens that may follow; None if every one may."""
        if spec.mask is None:
            raise Broken("a row without a constraint has no mask")
        bits = np.zeros(self._compiler.tokenizer.num_words, np.uint32)
        return bits if matcher.fill(bits, spec.mask.stop_token_ids) else None

    def _take(self, id: AttemptId, spec: SampleSpec) -> _State:
        """The row's state after its output, out of the kept ones: one that fails is not used again."""
        if spec.mask is None:
            raise Broken("a row without a constraint has no state")
        with self._lock:
            state = self._states.pop(id, None)
        if state is None or state.matcher.num_tokens > len(spec.history) - spec.num_prompt_tokens:
            state = self._new_state(spec.mask.constraint, ())
        for token in spec.history[spec.num_prompt_tokens + state.matcher.num_tokens :]:
            state.matcher.advance(token)
        return state

    def _new_state(self, constraint: Constraint, output: Sequence[int]) -> _State:
        return _State(ConstraintMatcher.of(self._compiler.compile(constraint), output))

    def _keep(self, id: AttemptId, state: _State) -> None:
        with self._lock:
            self._states[id] = state
            self._states.move_to_end(id)
            while len(self._states) > self._max_states:
                self._states.popitem(last=False)
