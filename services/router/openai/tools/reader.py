"""Reads `tools`, `tool_choice` and `parallel_tool_calls`. Notes errors instead of raising them.

`required` and a named tool constrain the whole output to calls. With `auto` the model decides; where the marker of a
call is one token, what follows it is constrained: a declared name, and an object, which keeps to the schema with
`strict`. Where there is no such token, `strict` constrains the whole output: any text, in which the marker begins a
call, or, in formats without a marker, a text that begins like no call. Formats that can do neither keep `strict` with
`required` or a name only.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from baton.domain.constraint import Constraint, FreePhase, GrammarPhase
from baton.domain.errors import ConstraintFailed
from baton.grammar.markers import NAME
from baton.grammar.sources import either_grammar
from baton.grammar.tool_calls import (
    JSON_ARGUMENTS,
    structural_tag_grammar,
    text_grammar,
    tool_calls_grammar,
)
from baton.services.router.openai.bounds import FLAG, MAX_TOOL_CALLS, MAX_TOOLS
from baton.services.router.openai.constraint.reader import RequestedConstraint
from baton.services.router.openai.fields import Fields, short_repr
from baton.services.router.text.parsers.argument_stream import ConstrainedCalls
from baton.services.router.text.parsers.registry import ToolFormat
from baton.services.router.text.text_model import TextModel

TOOLS, CHOICE, PARALLEL = "tools", "tool_choice", "parallel_tool_calls"
TOOL_FIELDS = frozenset({TOOLS, CHOICE, PARALLEL})
ANY_OBJECT: Mapping[str, Any] = {"type": "object"}
NO_OBJECT = "must be a schema of an object: the arguments of a call are one"
_NAME = re.compile(r"[A-Za-z0-9_.-]{1,64}")


@dataclass(frozen=True, slots=True)
class RequestedTools:
    """Tools that the model may call, as the template gets them. `schemas`: of the arguments, by name.

    `format`: how the model calls. `single`: at most one call; `is_named`: the client has chosen it; `calls_only`: the
    answer has no text; `as_function_call`: a call has the older form.
    """

    definitions: tuple[Mapping[str, Any], ...]
    schemas: Mapping[str, Mapping[str, Any]]
    format: ToolFormat
    single: bool = False
    is_named: bool = False
    calls_only: bool = False
    constraint: RequestedConstraint | None = None
    as_function_call: bool = False

    @property
    def strict(self) -> frozenset[str]:
        """The names of the tools with `strict`."""
        functions = [tool["function"] for tool in self.definitions]
        return frozenset(function["name"] for function in functions if function.get("strict"))

    @property
    def constrained(self) -> ConstrainedCalls:
        """Which calls cannot turn out to be none."""
        if self.constraint is None:
            return ConstrainedCalls.NONE
        is_free = isinstance(self.constraint.value.phases[0], FreePhase)
        return ConstrainedCalls.AFTER_MARKER if is_free else ConstrainedCalls.ALL


def read_tools(
    fields: Fields, text: TextModel, *, ignore_eos: bool = False, min_tokens: int = 0
) -> RequestedTools | None:
    """The tools of a chat; None without any, and with `tool_choice: "none"`: then the prompt has none either."""
    definitions = _read_definitions(fields)
    flags = fields.read({PARALLEL: FLAG})
    names = [definition["function"]["name"] for definition in definitions]
    if len(set(names)) < len(names):
        fields.add_error(TOOLS, "must have different names")
    choice = _read_choice(fields, names)
    if not definitions or choice == "none":
        return None
    format = text.formats.tools
    if format is None:
        fields.add_error(TOOLS, "cannot be called: the chat template of this model has no known format of calls")
        return None
    is_named = choice not in ("auto", "required")
    called = [each for each in definitions if not is_named or each["function"]["name"] == choice]
    single = is_named or not flags.get(PARALLEL, True)
    try:
        value = _constraint(text, format, called, str(choice), single=single)
    except ConstraintFailed as error:
        fields.add_error(TOOLS, str(error))
        return None
    if value is not None:
        value = Constraint(value.phases, value.loop_to, text.eos_token_ids, ignore_eos, min_tokens)
    requested = None if value is None else RequestedConstraint(value, fields.errors.name_of(TOOLS), is_calls=True)
    schemas = {tool["function"]["name"]: tool["function"].get("parameters") or {} for tool in definitions}
    return RequestedTools(tuple(definitions), schemas, format, single, is_named, choice != "auto", requested)


def _read_definitions(fields: Fields) -> list[dict[str, Any]]:
    value = fields.values.get(TOOLS)
    if value is None:
        return []
    if not isinstance(value, list) or not 0 < len(value) <= MAX_TOOLS:
        fields.add_mismatch(TOOLS, f"a list of 1 to {MAX_TOOLS} tools")
        return []
    wrong = [index for index, tool in enumerate(value) if not is_definition(tool)]
    for index in wrong:
        shape = '{"type": "function", "function": {"name": ..., "parameters": {...}}}'
        fields.add_error(f"{TOOLS}[{index}]", f"must be a tool such as {shape}, not {short_repr(value[index])}")
    if wrong:
        return []
    others = [index for index, tool in enumerate(value) if not takes_object(tool["function"])]
    for index in others:
        fields.add_error(f"{TOOLS}[{index}].function.parameters", NO_OBJECT)
    return [] if others else value


def takes_object(function: Mapping[str, Any]) -> bool:
    """True if the schema of a function's parameters, so far as its type says, allows an object."""
    kind = (function.get("parameters") or {}).get("type")
    return kind is None or kind == "object" or (isinstance(kind, list) and "object" in kind)


def is_definition(value: object) -> bool:
    """True for an entry of `tools`."""
    function = value.get("function") if isinstance(value, dict) and value.get("type") == "function" else None
    if not isinstance(function, dict) or not isinstance(function.get("name"), str):
        return False
    return (
        _NAME.fullmatch(function["name"]) is not None
        and isinstance(function.get("description"), str | None)
        and isinstance(function.get("parameters"), dict | None)
        and isinstance(function.get("strict"), bool | None)
    )


def _read_choice(fields: Fields, names: Sequence[str]) -> str:
    """`none`, `auto`, `required`, or the name of a tool."""
    value = fields.values.get(CHOICE)
    if value is None:
        return "auto"
    if value in ("none", "auto", "required"):
        if value == "required" and not names:
            fields.add_error(CHOICE, "needs tools")
        return str(value)
    function = value.get("function") if isinstance(value, dict) and value.get("type") == "function" else None
    name = function.get("name") if isinstance(function, dict) else None
    if not isinstance(name, str):
        shape = '{"type": "function", "function": {"name": ...}}'
        fields.add_mismatch(CHOICE, f"none, auto, required or {shape}")
    elif name not in names:
        fields.add_error(CHOICE, f"names no tool of the request: {short_repr(name)}")
    else:
        return name
    return "none"


def with_form(tools: RequestedTools, form: RequestedConstraint, text: TextModel) -> RequestedConstraint:
    """The constraint of an answer that is calls, or a text of a form. Raises `ConstraintFailed`.

    The markup of calls must begin with a marker: without one a text of the form could be a call.
    """
    if tools.constraint is not None and tools.calls_only:
        return tools.constraint
    markup, tokens = tools.format.markup, text.added_tokens(tools.format.markers)
    if not tools.format.trigger:
        raise ConstraintFailed(f"cannot be combined with {form.param} for calls of the format {tools.format.name}")
    functions = [tool["function"] for tool in tools.definitions]
    schemas = {
        each["name"]: (each.get("parameters") if each.get("strict") else None) or ANY_OBJECT for each in functions
    }
    calls = tool_calls_grammar(schemas, markup, tokens, most=1 if tools.single else MAX_TOOL_CALLS)
    phases = (GrammarPhase(either_grammar(calls, form.value.grammars[0])),)
    return replace(form, value=replace(form.value, phases=phases))


def _constraint(
    text: TextModel, format: ToolFormat, called: Sequence[Mapping[str, Any]], choice: str, *, single: bool
) -> Constraint | None:
    """The constraint of the calls; None where the model may write anything. Raises `ConstraintFailed`."""
    functions = [tool["function"] for tool in called]
    tokens, markup = text.added_tokens(format.markers), format.markup
    if choice != "auto":
        schemas = {function["name"]: function.get("parameters") or ANY_OBJECT for function in functions}
        grammar = tool_calls_grammar(schemas, markup, tokens, most=1 if single else MAX_TOOL_CALLS)
        return Constraint((GrammarPhase(grammar),))
    strict = [function["name"] for function in functions if function.get("strict")]
    if format.trigger not in tokens and not strict:
        return None
    schemas = {
        function["name"]: (function.get("parameters") if function.get("strict") else None) or ANY_OBJECT
        for function in functions
    }
    if format.trigger not in tokens:
        return Constraint((GrammarPhase(_text_with_calls(schemas, format, tokens, strict[0], single=single)),))
    most = MAX_TOOL_CALLS if markup.begin and not single else 1
    grammar = tool_calls_grammar(schemas, markup.after(format.trigger), tokens, most=most)
    phases = (FreePhase(ends=((tokens[format.trigger],),)), GrammarPhase(grammar))
    return Constraint(phases, loop_to=None if single else 0)


def _text_with_calls(
    schemas: Mapping[str, Any], format: ToolFormat, tokens: Mapping[str, int], strict: str, *, single: bool
) -> str:
    """The grammar of a text in which the marker of calls begins one, or of calls, or a text that begins like none.

    Raises `ConstraintFailed`, also for formats that have neither such a marker nor such a beginning.
    """
    markup, syntax = format.markup, format.syntax
    if syntax.head:
        calls = tool_calls_grammar(schemas, markup, tokens, most=1 if single else MAX_TOOL_CALLS)
        return either_grammar(calls, text_grammar(syntax.head, syntax.openings))
    if not format.trigger or markup.begin or markup.arguments is not JSON_ARGUMENTS:
        raise ConstraintFailed(f"strict of {strict} needs tool_choice required or named with this model")
    structures = [
        {"begin": markup.head.replace(NAME, name), "schema": schema, "end": markup.tail}
        for name, schema in schemas.items()
    ]
    return structural_tag_grammar(structures, (format.trigger,), tokens, additional_properties=False)
