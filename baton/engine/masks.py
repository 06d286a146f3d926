"""Masks of a step's constrained rows, from the tokens that each has emitted. Used by runners, on the engine thread.

A row's state is a fold over its output, so one rule serves new, imported, preempted and replayed rows: consume what
is new in the history. States are kept for the rows that were masked last; one that was dropped is made again.
`prepare` compiles in another thread, before the engine has the request.
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
    `failures`: those whose constraint cannot be kept; their masks allow one token, which nobody may see. A constrained
    row has no drafts.
    """

    rows: dict[int, MaskRow | None] = field(default_factory=dict)
    failures: dict[int, ConstraintFailed] = field(default_factory=dict)

    def output(self, batch: Batch, sampled: Sequence[SampledToken]) -> StepOutput:
        """The output of a step whose samples are `sampled`, in order; the tokens of failed rows are dropped."""
        tokens, failures = list[tuple[SampledToken, ...]](), dict[int, ConstraintFailed]()
        num_sampled = 0
        for index, row in enumerate(batch.rows):
            if row.sample is None:
                tokens.append(())
                continue
            first, num_sampled = num_sampled, num_sampled + 1 + len(row.drafted)
            if first in self.failures:
                failures[index] = self.failures[first]
            tokens.append(() if first in self.failures else tuple(sampled[first:num_sampled]))
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
            metrics.CONSTRAINT_FAILURES_TOTAL.labels(FailedConstraint.DEAD_END.value).inc()
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
                at = self._fill_row(index, row.id, spec, masks, at)
            index += 1 + len(row.drafted)
        if masks.rows:
            metrics.MASK_SECONDS.observe(at - began)
        return masks

    def _fill_row(self, index: int, id: AttemptId, spec: SampleSpec, masks: StepMasks, began: float) -> float:
        """Fills a row's mask, from `began` on this thread's clock; returns when it was done."""
        bits, done = np.zeros(self._compiler.tokenizer.num_words, np.uint32), began
        try:
            state = self._take(id, spec)
            masks.rows[index] = bits if self._compute(state, spec, bits) else None
            done = time.thread_time()
            state.num_masks += 1
            state.spent_s += done - began
            if state.spent_s > MASK_BUDGET_S + MASK_BUDGET_S_PER_TOKEN * state.num_masks:
                why = f"its masks took {state.spent_s:.1f} s for {state.num_masks} tokens"
                raise ConstraintFailed(f"the constraint is too complex: {why}", FailedConstraint.TOO_COMPLEX)
            self._keep(id, state)
        except ConstraintFailed as error:
            bits[:] = 0
            bits[0] = 1
            masks.rows[index], masks.failures[index] = bits, error
            metrics.CONSTRAINT_FAILURES_TOTAL.labels(error.reason.value).inc()
            done = time.thread_time()
        return done

    @staticmethod
    def _compute(state: _State, spec: SampleSpec, bits: MaskRow) -> bool:
        """Consumes the new tokens and sets the bits; False if every token is allowed."""
        if spec.mask is None:
            raise Broken("a row without a constraint has no mask")
        output = spec.history[spec.num_prompt_tokens + state.matcher.num_tokens :]
        for token in output:
            state.matcher.advance(token)
        return state.matcher.fill(bits, spec.mask.stop_token_ids)

    def _take(self, id: AttemptId, spec: SampleSpec) -> _State:
        """The row's state, out of the kept ones: one that fails is not used again."""
        with self._lock:
            state = self._states.pop(id, None)
        if state is not None and state.matcher.num_tokens <= len(spec.history) - spec.num_prompt_tokens:
            return state
        if spec.mask is None:
            raise Broken("a row without a constraint has no state")
        return self._new_state(spec.mask.constraint, ())

    def _new_state(self, constraint: Constraint, output: Sequence[int]) -> _State:
        return _State(ConstraintMatcher.of(self._compiler.compile(constraint), output))

    def _keep(self, id: AttemptId, state: _State) -> None:
        with self._lock:
            self._states[id] = state
            self._states.move_to_end(id)
            while len(self._states) > self._max_states:
                self._states.popitem(last=False)
