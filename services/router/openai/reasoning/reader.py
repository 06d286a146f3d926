"""Reads the fields of reasoning. Notes errors instead of raising them.

`reasoning_effort` and `reasoning` become variables of the chat template, before it is rendered. The rest is read from
the rendered prompt and the fields: how the output begins, whether reasoning is shown, and how long it may be.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from baton.services.router.openai.bounds import EFFORTS, FLAG, REASONING_FORMATS
from baton.services.router.openai.fields import Fields
from baton.services.router.text.parsers.reasoning import ReasoningFormat, ReasoningStart
from baton.services.router.text.text_model import TextModel

EFFORT, BUDGET, SEPARATE = "reasoning_effort", "thinking_token_budget", "separate_reasoning"
HARMONY_EFFORTS = ("low", "medium", "high")
SWITCHES = ("enable_thinking", "thinking")
"""Variables of templates that turn reasoning on and off."""


@dataclass(frozen=True, slots=True)
class RequestedReasoning:
    """How the output of a chat is read. `is_shown` False: reasoning is counted, and left out of the answer.

    `keep_space`: the answer has a form, so that whitespace before it is part of it.
    """

    format: ReasoningFormat
    start: ReasoningStart
    is_shown: bool = True
    keep_space: bool = False
    budget: int | None = None


def read_effort(fields: Fields, text: TextModel) -> dict[str, object]:
    """Variables of the template that ask for reasoning, or for none."""
    effort = _requested_effort(fields)
    if effort is None:
        return {}
    if text.formats.is_harmony and effort not in HARMONY_EFFORTS:
        fields.add_error(_effort_field(fields), f"must be one of {', '.join(HARMONY_EFFORTS)} for this model")
        return {}
    variables: dict[str, object] = {name: effort != "none" for name in SWITCHES if text.reads(name)}
    if text.reads(EFFORT):
        variables[EFFORT] = effort
    if not variables and effort != "none":
        fields.add_error(_effort_field(fields), "is not supported by this model: its chat template does not read it")
    return variables


def read_reasoning(
    fields: Fields, scalars: Mapping[str, Any], text: TextModel, prompt: str, continued: str | None
) -> RequestedReasoning | None:
    """How to read the output after `prompt`; None if all of it is text. `continued`: the message that it continues."""
    given = fields.values.get("reasoning_format")
    if given is not None and given not in REASONING_FORMATS:
        fields.add_mismatch("reasoning_format", f"one of {', '.join(REASONING_FORMATS)}")
    format = text.formats.reasoning
    budget = scalars.get(BUDGET, -1)
    budget = None if budget < 0 else budget
    if format is None:
        if budget is not None:
            fields.add_error(BUDGET, "is not supported by this model: no form of its reasoning is known")
        return None
    if not scalars.get(SEPARATE, True) or given == "none":
        if budget is not None:
            fields.add_error(BUDGET, f"cannot be combined with {SEPARATE}: false")
        if text.formats.is_harmony:
            fields.add_error("reasoning_format" if given == "none" else SEPARATE, "is not supported by this model")
        return None
    start = format.start_after(prompt, continued)
    return RequestedReasoning(format, start, scalars.get("include_reasoning", True), budget=budget)


def _requested_effort(fields: Fields) -> str | None:
    value = fields.values.get(EFFORT)
    if value is not None and value not in EFFORTS:
        fields.add_mismatch(EFFORT, f"one of {', '.join(EFFORTS)}")
        return None
    nested = fields.mapping("reasoning") if "reasoning" in fields.values else None
    if nested is None:
        return None if value is None else str(value)
    for name in nested.values.keys() - {"effort", "enabled"}:
        if nested.values[name] is not None:
            nested.add_error(name, "is not supported")
    inner, enabled = nested.values.get("effort"), nested.read({"enabled": FLAG}).get("enabled")
    if inner is not None and inner not in EFFORTS:
        nested.add_mismatch("effort", f"one of {', '.join(EFFORTS)}")
        return None
    found = {each for each in (value, inner) if isinstance(each, str)} | ({"none"} if enabled is False else set())
    if len(found) > 1 or (enabled and "none" in found):
        fields.add_error("reasoning", f"contradicts itself or {EFFORT}")
        return None
    return found.pop() if found else "medium" if enabled else None


def _effort_field(fields: Fields) -> str:
    return "reasoning" if fields.values.get(EFFORT) is None else EFFORT
