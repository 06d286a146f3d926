"""Grammars of tool calls in the markup of a model, and of structural tags. Called by routers.

Markers that are tokens of the vocabulary are written as those tokens, everything else as text.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Protocol

from llguidance import LLMatcher

from baton.domain.errors import ConstraintFailed
from baton.grammar.markers import NAME, sequence
from baton.grammar.sources import Json, json_rule


class ArgumentsWriter(Protocol):
    """How a format writes the arguments of a call."""

    def rules(self, name: str, schema: Json, tokens: Mapping[str, int]) -> list[str]:
        """Rules of the arguments of `schema`; the first is `name`. `tokens`: markers that are tokens, with their ids.

        Raises `ConstraintFailed` for what cannot be written so.
        """
        ...

    def check_tool(self, name: str) -> None:
        """Raises `ConstraintFailed` if a tool of this name cannot be called."""
        ...


class JsonWriter:
    """Arguments that are a JSON object."""

    def rules(self, name: str, schema: Json, tokens: Mapping[str, int]) -> list[str]:
        """See `ArgumentsWriter.rules`."""
        return [f"{name}: %json {json_rule(schema, additional_properties=False)}"]

    def check_tool(self, name: str) -> None:
        """See `ArgumentsWriter.check_tool`."""


JSON_ARGUMENTS = JsonWriter()


@dataclass(frozen=True, slots=True)
class CallMarkup:
    """Texts around the arguments of a call. `head` has `{name}`, and may have `{index}`, a number.

    `begin` and `end` are around all calls, `between` is between two. `most`: calls of an answer.
    """

    head: str
    tail: str
    begin: str = ""
    between: str = ""
    end: str = ""
    most: int | None = None
    arguments: ArgumentsWriter = JSON_ARGUMENTS

    def after(self, trigger: str) -> CallMarkup:
        """What is left of it once `trigger` is written. With an empty `begin` for one call only."""
        if self.begin:
            return replace(self, begin=self.begin.removeprefix(trigger), most=None)
        return CallMarkup(self.head.removeprefix(trigger), self.tail, arguments=self.arguments)


def tool_calls_grammar(schemas: Mapping[str, Json], markup: CallMarkup, tokens: Mapping[str, int], *, most: int) -> str:
    """One to `most` calls. `schemas`: of the arguments, by name. `tokens`: markers that are tokens, with their ids.

    Objects that declare properties have no others, unless their schema says so: a model would invent arguments that no
    function takes. Raises `ConstraintFailed` for parameters that are no schema.
    """
    most = most if markup.most is None else min(most, markup.most)
    more = f" ({sequence(markup.between, tokens)} call){{0,{most - 1}}}" if most > 1 else ""
    names = " | ".join(f"tool{index}" for index in range(len(schemas)))
    rules = [
        f"start: {sequence(markup.begin, tokens)} call{more} {sequence(markup.end, tokens)}",
        f"call: ({names}) {sequence(markup.tail, tokens)}",
    ]
    for index, (name, schema) in enumerate(schemas.items()):
        if not isinstance(schema, dict):
            raise ConstraintFailed(f"the parameters of {name} are no JSON Schema")
        markup.arguments.check_tool(name)
        head = sequence(markup.head.replace(NAME, name), tokens)
        rules.append(f"tool{index}: {head} arguments{index}")
        try:
            rules += markup.arguments.rules(f"arguments{index}", schema, tokens)
        except ConstraintFailed as error:
            raise ConstraintFailed(f"the parameters of {name}: {error}") from None
        except RecursionError:
            raise ConstraintFailed(f"the parameters of {name} are nested too deeply") from None
    return LLMatcher.grammar_from_lark("\n".join(rules))


def text_grammar(head: str, openings: Sequence[str]) -> str:
    """Any text that does not begin with one of the characters of `head`, spaces aside, and has none of `openings`."""
    spaces, others = r" \t\r\n", re.escape(head)
    without = "".join(f" & ~/(?s:.*){re.escape(opening)}(?s:.*)/" for opening in openings)
    return LLMatcher.grammar_from_lark(f"start: TEXT?\nTEXT: /[{spaces}]*(?:[^{spaces}{others}](?s:.*))?/{without}")


def structural_tag_grammar(
    structures: Sequence[Mapping[str, Json]],
    triggers: Sequence[str],
    tokens: Mapping[str, int],
    *,
    additional_properties: bool = True,
) -> str:
    """Any text, in which a trigger begins a tag: `begin`, JSON of `schema`, `end`. `begin` starts with its trigger.

    `tokens`: added tokens in these texts. `additional_properties`: see `json_schema_grammar`. Raises
    `ConstraintFailed`.
    """
    rules, tags = ["TEXT: /(.|\\n)*/"], [f"tag{index}" for index in range(len(structures))]
    for index, structure in enumerate(structures):
        begin, end, schema = structure.get("begin"), structure.get("end", ""), structure.get("schema", {})
        if not isinstance(begin, str) or not isinstance(end, str) or not isinstance(schema, dict):
            raise ConstraintFailed("a structure has begin, schema and end: a text, a JSON Schema and a text")
        trigger = next((each for each in triggers if begin.startswith(each)), None)
        if trigger is None:
            raise ConstraintFailed(f"no trigger begins {begin[:100]!r}")
        if trigger not in tokens and any(token in trigger for token in tokens):
            raise ConstraintFailed(f"the trigger {trigger[:100]!r} is a token and more: make it the token")
        if trigger in tokens:
            rules.append(f"trigger{index}: TEXT {sequence(trigger, tokens)}")
        else:
            rules.append(f"trigger{index}[lazy]: TEXT {json.dumps(trigger)}")
        rest = sequence(begin.removeprefix(trigger), tokens)
        rules.append(f"tag{index}: trigger{index} {rest} value{index} {sequence(end, tokens)}")
        rules.append(f"value{index}: %json {json_rule(schema, additional_properties)}")
    return LLMatcher.grammar_from_lark("\n".join((f"start: ({' | '.join(tags)})* ending", "ending: TEXT", *rules)))
