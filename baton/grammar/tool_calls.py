"""Grammars of tool calls in the markup of a model. Called by routers.

Markers that are tokens of the vocabulary are written as those tokens, everything else as text.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
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

    Raises `ConstraintFailed` for parameters that are no schema.
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
        guidance = {"whitespace_pattern": WHITESPACE, "lenient": False, "coerce_one_of": False}
        arguments = json.dumps({**prepared_schema(schema, additional_properties=True), "x-guidance": guidance})
        head = _sequence(markup.head.replace(NAME, name), tokens)
        rules += [f"tool{index}: {head} arguments{index}", f"arguments{index}: %json {arguments}"]
    return LLMatcher.grammar_from_lark("\n".join(rules))


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
