"""Puts reasoning before the constraint of an answer, and a budget around it.

A block that the prompt has opened is free text up to the closing token. One that the model may open is part of the
grammar: an optional block, then the form. The closing marker must be one token: text that looks like it ends nothing.
"""

from __future__ import annotations

from dataclasses import replace

from baton.domain.constraint import Constraint, FreePhase, GrammarPhase
from baton.domain.errors import ConstraintFailed
from baton.grammar.sources import after_optional_block
from baton.services.router.openai.reasoning.reader import BUDGET, RequestedReasoning
from baton.services.router.text.parsers import harmony
from baton.services.router.text.parsers.reasoning import ReasoningStart
from baton.services.router.text.parsers.registry import HARMONY
from baton.services.router.text.text_model import TextModel


def with_reasoning(
    constraint: Constraint | None,
    reasoning: RequestedReasoning,
    text: TextModel,
    plain: Constraint,
    *,
    is_calls: bool,
) -> Constraint | None:
    """The constraint of the whole output. Raises `ConstraintFailed`, with `param` if it is about the budget.

    `plain`: one that allows everything, for an answer without a constraint. `is_calls`: it is of calls, not of text.
    """
    budget, format = reasoning.budget, reasoning.format
    if format.name == HARMONY:
        return _in_harmony(constraint, reasoning, text, is_calls=is_calls)
    if reasoning.start is ReasoningStart.CLOSED or (constraint is None and budget is None):
        return constraint
    opening, closing = text.added_token(format.opening), text.added_token(format.closing)
    if closing is None:
        raise _failed(budget, "the end of this model's reasoning is not one token")
    answer = plain if constraint is None else constraint
    first = answer.phases[0]
    is_free = isinstance(first, FreePhase)
    thought = FreePhase(((closing,),), budget, () if budget is None else (closing,), may_stop=is_free)
    if reasoning.start is ReasoningStart.OPEN:
        return _after(answer, thought)
    if opening is None:
        raise _failed(budget, "the beginning of this model's reasoning is not one token")
    if budget is None:
        if isinstance(first, FreePhase):
            return answer  # free text holds a thought, too
        grammar = after_optional_block(first.text, format.opening, format.closing)
        return replace(answer, phases=(GrammarPhase(grammar), *answer.phases[1:]))
    if constraint is not None:
        raise _failed(budget, "this model may think or not, which a constraint on the answer cannot count")
    return _after(answer, FreePhase(((opening,),)), thought)


def _in_harmony(
    constraint: Constraint | None, reasoning: RequestedReasoning, text: TextModel, *, is_calls: bool
) -> Constraint | None:
    """A form follows the header of the final message. Calls follow a message of analysis, which is asked for."""
    if reasoning.budget is not None:
        raise _failed(reasoning.budget, "messages of this model have no fixed end of reasoning")
    if constraint is None or reasoning.start is ReasoningStart.CLOSED:
        return constraint
    tokens = text.added_tokens(harmony.MARKERS)
    if len(tokens) < len(harmony.MARKERS):
        raise _failed(None, "the markers of this model are no tokens")
    if is_calls:
        header = f'start: <[{tokens[harmony.CHANNEL]}]> "analysis" <[{tokens[harmony.MESSAGE]}]>'
        banned = frozenset(tokens.values()) - {tokens[harmony.END]}
        thought = FreePhase(((tokens[harmony.END],),), may_stop=False, banned=banned)
        return replace(constraint, phases=(GrammarPhase(header), thought, *constraint.phases))
    final = (tokens[harmony.CHANNEL], *text.encode("final", add_special_tokens=False), tokens[harmony.MESSAGE])
    return _after(constraint, FreePhase((final,), may_stop=False))


def _after(answer: Constraint, *phases: FreePhase) -> Constraint:
    loop_to = None if answer.loop_to is None else answer.loop_to + len(phases)
    return replace(answer, phases=(*phases, *answer.phases), loop_to=loop_to)


def _failed(budget: int | None, why: str) -> ConstraintFailed:
    return ConstraintFailed(f"is not supported: {why}", param=None if budget is None else BUDGET)
