"""Grammars of tool calls in the markup of a model, and of structural tags. Called by routers.

Markers that are tokens of the vocabulary are written as those tokens, everything else as text.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from llguidance import LLMatcher

from baton.domain.errors import ConstraintFailed
from baton.grammar.sources import WHITESPACE, Json, prepared_schema

NAME, INDEX = "{name}", "{index}"


@dataclass(frozen=True, slots=True)
class CallMarkup:
    """Texts around the arguments of a call, which are JSON. `head` has `{name}`, and may have `{index}`, a number.

    `begin` and `end` are around all calls, `between` is between two. `most`: calls of an answer.
    """

    head: str
    tail: str
    begin: str = ""
    between: str = ""
    end: str = ""
    most: int | None = None

    def after(self, trigger: str) -> CallMarkup:
        """What is left of it once `trigger` is written. With an empty `begin` for one call only."""
        if self.begin:
            return CallMarkup(self.head, self.tail, self.begin.removeprefix(trigger), self.between, self.end)
        return CallMarkup(self.head.removeprefix(trigger), self.tail)


def tool_calls_grammar(schemas: Mapping[str, Json], markup: CallMarkup, tokens: Mapping[str, int], *, most: int) -> str:
    """One to `most` calls. `schemas`: of the arguments, by name. `tokens`: markers that are tokens, with their ids.

    Objects that declare properties have no others, unless their schema says so: a model would invent arguments that no
    function takes. Raises `ConstraintFailed` for parameters that are no schema.
    """
    most = most if markup.most is None else min(most, markup.most)
    more = f" ({_sequence(markup.between, tokens)} call){{0,{most - 1}}}" if most > 1 else ""
    names = " | ".join(f"tool{index}" for index in range(len(schemas)))
    rules = [
        f"start: {_sequence(markup.begin, tokens)} call{more} {_sequence(markup.end, tokens)}",
        f"call: ({names}) {_sequence(markup.tail, tokens)}",
    ]
    for index, (name, schema) in enumerate(schemas.items()):
        if not isinstance(schema, dict):
            raise ConstraintFailed(f"the parameters of {name} are no JSON Schema")
        head = _sequence(markup.head.replace(NAME, name), tokens)
        rules += [
            f"tool{index}: {head} arguments{index}",
            f"arguments{index}: %json {_json_of(schema, additional_properties=False)}",
        ]
    return LLMatcher.grammar_from_lark("\n".join(rules))


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
            rules.append(f"trigger{index}: TEXT {_sequence(trigger, tokens)}")
        else:
            rules.append(f"trigger{index}[lazy]: TEXT {json.dumps(trigger)}")
        rest = _sequence(begin.removeprefix(trigger), tokens)
        rules.append(f"tag{index}: trigger{index} {rest} value{index} {_sequence(end, tokens)}")
        rules.append(f"value{index}: %json {_json_of(schema, additional_properties)}")
    return LLMatcher.grammar_from_lark("\n".join((f"start: ({' | '.join(tags)})* ending", "ending: TEXT", *rules)))


def _json_of(schema: Json, additional_properties: bool) -> str:
    """The schema as a rule of JSON has it, with the whitespace of all JSON."""
    guidance = {"whitespace_pattern": WHITESPACE, "lenient": False, "coerce_one_of": False}
    return json.dumps({**prepared_schema(schema, additional_properties), "x-guidance": guidance})


def _sequence(text: str, tokens: Mapping[str, int]) -> str:
    """The text as parts of a rule: tokens by their ids, numbers, and texts."""
    markers = sorted((*tokens, INDEX), key=len, reverse=True)
    parts = re.split("(" + "|".join(map(re.escape, markers)) + ")", text)
    found = (
        f"<[{tokens[part]}]>"
        if part in tokens
        else "/[0-9]{1,4}/"
        if part == INDEX
        else json.dumps(part, ensure_ascii=False)
        for part in parts
        if part
    )
    return " ".join(found)
