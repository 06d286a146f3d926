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
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from baton.domain.constraint import Constraint
from baton.domain.errors import Broken, ConstraintFailed, FailedConstraint
from baton.domain.ids import AttemptId
from baton.domain.request import EngineRequest, SampledToken, SamplingParams
from baton.engine.batch import Batch, Row, SampleSpec, StepOutput
from baton.engine.drafts.base import ROOT
from baton.grammar.compiler import GrammarCompiler
from baton.grammar.deep_stack import cpu_s
from baton.grammar.matcher import ConstraintMatcher, MaskRow, MaskTable, is_allowed
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
            end = num_sampled
            if self.failures:
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
    last_step: int
    num_masks: int = 0
    spent_s: float = 0.0


@dataclass(frozen=True, slots=True)
class _Step:
    """Rows of `table` are samples of the step."""

    masks: StepMasks
    table: MaskTable


class MaskFiller:
    """States of constrained rows. Only `prepare` may be called from other threads."""

    def __init__(self, compiler: GrammarCompiler, max_states: int = MAX_STATES) -> None:
        """`max_states`: of rows, the last used ones."""
        self._compiler = compiler
        self._max_states = max_states
        self._lock = threading.Lock()
        self._states: dict[AttemptId, _State] = {}
        self._num_steps = 0

    def prepare(self, request: EngineRequest) -> None:
        """Compiles the constraint of a request, and consumes what earlier attempts emitted. Takes milliseconds.

        Raises `ConstraintFailed`.
        """
        if request.constraint is not None:
            began = cpu_s()
            self._keep(request.id, self._new_state(request.constraint, request.tokens[request.num_prompt_tokens :]))
            metrics.GRAMMAR_COMPILE_SECONDS.observe(cpu_s() - began)

    def fill(self, rows: Sequence[Row]) -> StepMasks:
        """The masks of those of `rows` that are sampled and constrained."""
        masks, index = StepMasks(), 0
        constrained = list[tuple[int, Row, SampleSpec]]()
        for row in rows:
            if (spec := row.sample) is None:
                continue
            if spec.mask is not None:
                constrained.append((index, row, spec))
            index += 1 + len(row.drafted)
        if constrained:
            step = _Step(masks, MaskTable(index, self._compiler.tokenizer.num_words))
            self._num_steps += 1
            began = at = time.thread_time()
            for index, row, spec in constrained:
                at = self._fill_row(index, row, spec, step, at)
            metrics.MASK_SECONDS.observe(at - began)
        return masks

    def num_allowed(self, request: EngineRequest, tokens: Sequence[int], drafts: Sequence[int]) -> int:
        """How many of `drafts` may follow `tokens`, prompt and output of `request`. A hint: `fill` decides."""
        began = time.thread_time()
        try:
            state = self._state(request.id, SampleSpec.of(request, tokens))
        except ConstraintFailed:
            with self._lock:
                self._states.pop(request.id, None)
            return 0
        num = state.matcher.num_allowed(drafts)
        state.spent_s += time.thread_time() - began
        return num

    def _fill_row(self, index: int, row: Row, spec: SampleSpec, step: _Step, began: float) -> float:
        """Fills a row's masks, from `began` on this thread's clock; returns when that was done."""
        masks, done = step.masks, began
        masks.rows.update(dict.fromkeys(range(index, index + 1 + len(row.drafted))))  # also if the row fails
        try:
            state = self._state(row.id, spec)
            masks.rows[index] = _fill(state.matcher, spec, step.table, index)
            if row.drafted:
                _fill_drafts(index + 1, row, state.matcher, step)
            done = time.thread_time()
            state.num_masks += 1 + len(row.drafted)
            state.spent_s += done - began
            if state.spent_s > MASK_BUDGET_S + MASK_BUDGET_S_PER_TOKEN * state.num_masks:
                why = f"its masks took {state.spent_s:.1f} s for {state.num_masks} tokens"
                raise ConstraintFailed(f"the constraint is too complex: {why}", FailedConstraint.TOO_COMPLEX)
        except ConstraintFailed as error:
            masks.failures[index] = error
            with self._lock:
                self._states.pop(row.id, None)
            done = time.thread_time()
        return done

    def _state(self, id: AttemptId, spec: SampleSpec) -> _State:
        """The row's state after its output. Raises `ConstraintFailed`; a state that fails must not be used again."""
        if spec.mask is None:
            raise Broken("a row without a constraint has no state")
        state, num_tokens = self._states.get(id), len(spec.history) - spec.num_prompt_tokens
        if state is None or state.matcher.num_tokens > num_tokens:
            state = self._new_state(spec.mask.constraint, ())
            self._keep(id, state)
        state.last_step = self._num_steps
        if state.matcher.num_tokens < num_tokens:
            for token in spec.history[spec.num_prompt_tokens + state.matcher.num_tokens :]:
                state.matcher.advance(token)
        return state

    def _new_state(self, constraint: Constraint, output: Sequence[int]) -> _State:
        return _State(ConstraintMatcher.of(self._compiler.compile(constraint), output), self._num_steps)

    def _keep(self, id: AttemptId, state: _State) -> None:
        with self._lock:
            if len(self._states) >= self._max_states and id not in self._states:
                del self._states[min(self._states, key=lambda each: self._states[each].last_step)]
            self._states[id] = state


def _fill(matcher: ConstraintMatcher, spec: SampleSpec, table: MaskTable, place: int) -> MaskRow | None:
    """The bits of the tokens that may follow; None if every one may."""
    if spec.mask is None:
        raise Broken("a row without a constraint has no mask")
    return matcher.fill(table, place, spec.mask.stop_token_ids)


def _fill_tree(first: int, row: Row, matcher: ConstraintMatcher, step: _Step) -> None:
    """Fills the masks behind the nodes of a row's tree, each after its path. `matcher` stays.

    Behind a node that the constraint does not allow nothing is filled: no draw leads there.
    """
    states: dict[int, ConstraintMatcher] = {ROOT: matcher}
    for node, (draft, spec) in enumerate(zip(row.tokens[row.num_known_tokens :], row.drafted, strict=True)):
        place = first + node
        before = states.get(row.parents[node])
        try:
            if before is None:
                raise ConstraintFailed("behind a draft that is not allowed", FailedConstraint.DEAD_END)
            ahead = before.copy()
            ahead.advance(draft)
            step.masks.rows[place] = _fill(ahead, spec, step.table, place)
            states[node] = ahead
        except ConstraintFailed as error:
            step.masks.failures[place] = error


def _fill_drafts(first: int, row: Row, matcher: ConstraintMatcher, step: _Step) -> None:
    """Fills the masks behind a row's drafts, up to one that the constraint does not allow. `matcher` stays."""
    if row.parents:
        return _fill_tree(first, row, matcher, step)
    ahead = matcher.copy()
    for place, (draft, spec) in enumerate(zip(row.tokens[row.num_known_tokens :], row.drafted, strict=True), first):
        try:
            ahead.advance(draft)
            step.masks.rows[place] = _fill(ahead, spec, step.table, place)
        except ConstraintFailed as error:
            step.masks.failures[place] = error
            return
