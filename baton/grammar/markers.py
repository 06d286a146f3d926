"""Texts of a markup as parts of a rule: tokens by their ids, everything else as text."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping

NAME, INDEX, KEY, NEWLINE = "{name}", "{index}", "{key}", "{newline}"
"""In a markup: the tool, the number of a call, the name of a parameter, and a line end that may be missing."""

_PARTS = {INDEX: "/[0-9]{1,4}/", NEWLINE: '"\\n"?'}


def sequence(text: str, tokens: Mapping[str, int]) -> str:
    """`text` as a rule has it. `tokens`: markers that are tokens, with their ids."""
    return " ".join(_part(part, tokens) for part in split(text, tokens) if part)


def split(text: str, tokens: Mapping[str, int]) -> list[str]:
    """`text` cut before and behind each marker, so that every other part is one; the first part is none."""
    markers = sorted((*tokens, *_PARTS), key=len, reverse=True)
    return re.split("(" + "|".join(map(re.escape, markers)) + ")", text)


def _part(part: str, tokens: Mapping[str, int]) -> str:
    if part in tokens:
        return f"<[{tokens[part]}]>"
    return _PARTS.get(part) or json.dumps(part, ensure_ascii=False)
